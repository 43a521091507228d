"""Benchmarks of speed, memory and accuracy. `make bench` runs all of them and writes RESULTS.md."""
