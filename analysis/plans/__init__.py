"""Plans: the best split, schedule, microbatches, recomputation and buckets, proven by a bound (docs/plans.md).

`model.py` is what a search knows of a job: a file, or made by `from_recording.py`, with what reductions cost from
`reductions.py`. `stages.py` says what a stage with certain layers takes and holds, with its best buckets (`buckets.py`:
those of one size); `replay.py` what whole plans take; `bounds.py` what no plan can undercut; `best_plans.py` finds the
best plan, `front.py` the best at every size of memory, `optimize.py` the report of all. `runs.py` draws the line
through step times of whole runs.
"""
