"""Logs of reinforcement-learning post-training.

`frameworks.py` knows what each framework times and prints, `trajectories.py` reads the generic format, and `reader.py`
opens files and finds out which of them they are.
"""
