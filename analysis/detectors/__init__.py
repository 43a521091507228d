"""Detectors: kinds of findings, in files of what they look at.

The thresholds of a file stand in one struct at its top, which says of each what fixed it: a benchmark, a statistic, a
definition, or nobody ("Chosen"). `benchmarks causes` and `eventsim` validate those for pipelines, `benchmarks gpu` and
`one-gpu` those for recordings, `benchmarks rl` those for post-training: they inject causes, and count which are found
and who is accused wrongly (benchmarks/RESULTS.md).
"""
