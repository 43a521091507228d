"""Post-training with reinforcement learning: where a step went, and what alternatives would take (docs/rl.md).

`decoding.py` replays requests on inference engines, `latency.py` fits how fast those decode, `loop.py` has the steps of
generation and training, `scenario.py` reads what-ifs, `phases.py` and `trajectories.py` analyse the two kinds of logs,
and `account.py` is their result.
"""
