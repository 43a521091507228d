"""Detectors: one file for each kind of finding, or for a few that share what they look at.

The thresholds of a detector stand at the top of its file. `benchmarks causes` and `eventsim` validate those for
pipelines, `benchmarks gpu` and `one-gpu` those for recordings, `benchmarks rl` those for post-training: they inject
causes, and count which are found and who is accused wrongly (benchmarks/RESULTS.md). "No experiment" marks a choice.
"""
