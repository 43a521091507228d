"""What measures speed and memory. `make bench` runs all of it and writes RESULTS.md."""
