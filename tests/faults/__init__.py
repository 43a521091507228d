"""Failing file operations: `shim.c` in a preloaded library, and what a store is after each of them."""
