"""Studies of many jobs: time, memory, processors, processes that are killed, reports on 100,000 jobs.

`python -m benchmarks fleet` runs all of it, some hours; `python -m benchmarks fleet_runs` and so on one part. Simulated
jobs and the study of them stay in build/fleet for the next part.
"""
