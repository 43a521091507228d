"""Merge the records of all ranks into one trace: place the ranks, align their clocks, turn records into ops."""
