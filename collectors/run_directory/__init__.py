"""The folder of one run: what ranks and launchers leave in it, as files and as arrays."""
