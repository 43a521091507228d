"""Data for the pages, before it is drawn: stored results, replays and spans as tables and arrays."""
