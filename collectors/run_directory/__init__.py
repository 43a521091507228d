"""The folder of one run: the files of ranks and launchers, also as arrays."""
