"""Bubbles: where the stages of a pipeline are idle, why, and what other schedules would cost (docs/plans.md).

`order.py` says what each stage computes, in which order, and replays it; `asked.py` reads the names of schedules and
makes their orders; `recorded.py` takes the pipeline out of a job's graph. From there, `places.py` names every idle
interval, `causes_of_idle.py` divides the idle time among causes, `price.py` prices schedules, and `bubbles.py` does it
all. `picture.py` makes bars of one step.
"""
