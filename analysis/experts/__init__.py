"""Experts and overlap: what hiding communication costs, and what uneven loads of experts cost (docs/plans.md).

`overlap.py` measures compute and communication at once. `loads.py` reads the tokens of each expert and places experts
on ranks, `balance.py` finds dispatches and combines, fits times against tokens and replays a job with other loads, and
`expert_loads.py` does it all.
"""
