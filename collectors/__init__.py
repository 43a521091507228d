"""Every way a trace gets in: importers of files other tools wrote."""
