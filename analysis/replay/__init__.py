"""Replay of a graph: corrected clocks, the own cost of each op, its ideal cost, and the kernel that runs them."""
