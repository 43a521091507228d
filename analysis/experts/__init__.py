"""Experts and overlap: what hiding communication costs, and what uneven loads of experts cost (docs/plans.md).

`overlap.py` measures compute and communication at once. `exchanges.py` finds the dispatches and combines of a job and
the tokens that they move, `loads.py` reads the tokens of each expert, `expert_placement.py` places experts on ranks,
`balance.py` fits times against tokens and replays a job with other loads, and `expert_loads.py` does it all.
"""
