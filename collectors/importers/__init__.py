"""Import files of other tools as traces: one module per format, and `sniff.py`, which recognises them."""
