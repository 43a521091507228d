"""The colours of the terminal: those of `tracekit.dashboards.figures.theme` that show on dark and light ground.

With 16 colours, both tones of orange become the terminal's yellow.
"""

from typing import Final

from tracekit.dashboards.figures.theme import LIGHT
from tracekit.report.verdict import UNNAMED, LossKind

#: Lost time.
LOST: Final = LIGHT.slow[3]
#: Verdicts: a cause costs time, no cause does, no verdict.
BAD: Final = f"bold white on {LIGHT.bad}"
GOOD: Final = "bold black on green"
UNSURE: Final = "bold black on grey70"
#: By the kind of a loss; BAD for the others.
VERDICT_STYLE: Final[dict[str, str]] = {LossKind.BALANCED: GOOD, **dict.fromkeys(UNNAMED, UNSURE)}
