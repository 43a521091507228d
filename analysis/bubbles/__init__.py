"""Bubbles: where the stages of a pipeline are idle, why, and what other schedules would cost (docs/plans.md).

`schedules.py` says what each stage computes and in which order, as recorded or as a named schedule has it, and replays
it. `bubbles.py` names every idle interval, divides the idle time among causes and prices schedules. `picture.py` makes
bars of one step.
"""
