"""Why a job is slow: `find_causes` and the types of its answer.

A rule (a class in one of the `rules_*` modules, see `rule`) reads what `analysis/evidence` gathered and yields
candidates; `find` prices them by replaying their changes.
"""

from tracekit.analysis.causes.find import RULES, causes_of, find_causes
from tracekit.analysis.causes.model import Cause, CauseKind, Figure, Link, Unit, Where

__all__ = ["RULES", "Cause", "CauseKind", "Figure", "Link", "Unit", "Where", "causes_of", "find_causes"]
