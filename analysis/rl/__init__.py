"""Post-training with reinforcement learning: where a step went, and what alternatives would take (docs/rl.md).

`latency.py` fits how fast inference engines decode and replays requests on them, `rl_run.py` has the loop of generation
and training, the what-ifs and the runs of which only phases are known, `timed.py` those with times of requests, and
`account.py` is their result.
"""
