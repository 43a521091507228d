"""Why a job is slow: `find_causes`, and the words it answers with.

`facts` gathers what the rules look at: the table of computes taken apart into factors (`compute_table`,
`compute_profile`), transfers and collectives (`op_grid`), clocks (`clocks`), slow workers (`workers`). A rule (`rule`,
`rules_compute`, `rules_host`, `rules_outside`) yields candidates, `find` prices them by replaying `changes`.
"""

from tracekit.analysis.causes.find import RULES, causes_of, find_causes
from tracekit.analysis.causes.model import Cause, CauseKind, Evidence, Link, Where

__all__ = ["RULES", "Cause", "CauseKind", "Evidence", "Link", "Where", "causes_of", "find_causes"]
