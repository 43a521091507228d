"""Why a job is slow: `find_causes`, and the words it answers with.

A rule (`rule`, `rules_compute`, `rules_pauses`, `rules_host`, `rules_outside`) looks at what `analysis/evidence`
gathered and yields candidates; `find` prices them by replaying their changes.
"""

from tracekit.analysis.causes.find import RULES, causes_of, find_causes
from tracekit.analysis.causes.model import Cause, CauseKind, Figure, Link, Unit, Where

__all__ = ["RULES", "Cause", "CauseKind", "Figure", "Link", "Unit", "Where", "causes_of", "find_causes"]
