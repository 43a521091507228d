"""Import files of other tools as traces: one module per format, and a registry that recognises formats."""
