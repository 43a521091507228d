"""Plans: the best split, schedule, microbatches, recomputation and buckets, proven by a bound (docs/plans.md).

`model.py` is what a search knows of a job: a file, made by `from_recording.py`, or the line through step times of whole
runs. `stages.py` says what a stage with certain layers takes and holds, with its best buckets; `best_plans.py` what
whole plans take, what no plan can undercut, and which is the best; `optimize.py` makes the report of all, with the best
at every size of memory.
"""
