"""What the pages show, before it is drawn: stored results, comparisons, replays and spans as tables and arrays."""
