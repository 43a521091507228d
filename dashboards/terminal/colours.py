"""The colours of the terminal: those of `tracekit.dashboards.figures.theme` that show on dark and light ground.

With 16 colours, both tones of orange become the terminal's yellow.
"""

from typing import Final

from tracekit.dashboards.figures.theme import LIGHT

#: Lost time.
LOST: Final = LIGHT.slow[3]
#: Verdicts: a cause costs time, no cause does, no verdict.
BAD: Final = f"bold white on {LIGHT.bad}"
GOOD: Final = "bold black on green"
UNSURE: Final = "bold black on grey70"
