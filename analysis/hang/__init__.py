"""Which rank never arrives: from the flight recorders of a hung job to the ranks that hold it up.

`states.py` finds out, for every unfinished operation, which members of its group wait in it, have passed it or never
came; `wait_graph.py` builds a graph of which rank waits for which and finds where waiting ends; `mismatch.py` finds
calls that do not belong together; `verdict.py` turns both (`case.py`) into culprits with evidence, `report.py` adds who
waits, and `sentences.py` words the result.
"""

from tracekit.analysis.hang.model import Culprit, HangReport, StackGroup, StallClass, StalledGroup, Undecided, Waiting
from tracekit.analysis.hang.sentences import first_step, headline, waiting_ranks
from tracekit.analysis.hang.verdict import find_hang

__all__ = [
    "Culprit",
    "HangReport",
    "StackGroup",
    "StallClass",
    "StalledGroup",
    "Undecided",
    "Waiting",
    "find_hang",
    "first_step",
    "headline",
    "waiting_ranks",
]
