"""Colours and the look of figures, in a dark and a light theme.

One meaning per colour: the orange scale is slowdown and nothing else; blue is the job as recorded, green the ideal,
purple a change, grey normal. All pairs are distinguishable with red-green colour blindness (Okabe-Ito colours, and one
sequential scale with monotonic lightness).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from tracekit.show.figures.worker_map import LEVELS

#: The end of the scale of slowdowns for a picture that needs one; everything above the last level looks alike.
_END = 1.5
#: Bounds of the colour classes of ops, as ratio to the peers.
CLASSES = (1.1, 1.25, 1.5, 2.0, 3.0)


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one theme. `slow`: colour scale from S = 1 (close to the paper) to the slowest.

    On the Timeline page: `classes` of ops from normal to slowest, one more than there are bounds, text `on_classes`,
    and `wait`, waiting for peers; grey is normal, the scale is above it, and waiting is paler than both.
    """

    name: str
    paper: str
    text: str
    dimmed: str
    grid: str
    slow: tuple[str, ...]
    wait: str
    classes: tuple[str, ...]
    on_classes: tuple[str, ...]
    recorded: str = "#0072b2"
    original: str = "#56b4e9"
    ideal: str = "#009e73"
    accent: str = "#d55e00"
    outline: str = "#cc79a7"
    changed: str = "#5e3c99"  # anything but the job as it ran: a scenario, the job after a change
    on_original: str = "#1f2328"  # text on that colour
    on_changed: str = "#ffffff"


_BLACK, _WHITE = "#111315", "#ffffff"
_LIGHT_SLOW = ("#f3f4f6", "#fee3b5", "#fdb863", "#e08214", "#b35806", "#7f3b08", "#4a2105")
_DARK_SLOW = ("#24282d", "#4a2f12", "#7f3b08", "#b35806", "#e08214", "#fdb863", "#fff0d6")
LIGHT: Final = Theme(
    name="light",
    paper="#ffffff",
    text="#1f2328",
    dimmed="#59636e",
    grid="#dfe3e8",
    slow=_LIGHT_SLOW,
    wait="#e8ecf0",
    classes=("#c2cad3", *_LIGHT_SLOW[2:]),
    on_classes=(_BLACK,) * 3 + (_WHITE,) * 3,
)
DARK: Final = Theme(
    name="dark",
    paper="#1a1d21",
    text="#e6e8ea",
    dimmed="#9aa4ae",
    grid="#343a41",
    slow=_DARK_SLOW,
    wait="#2b3138",
    classes=("#55606b", *_DARK_SLOW[2:]),
    on_classes=(_WHITE,) * 3 + (_BLACK,) * 3,
    recorded="#56b4e9",
    original="#8fd0f5",
    changed="#b2a1e0",
    on_changed="#1f2328",
)
THEMES: Final = {theme.name: theme for theme in (LIGHT, DARK)}


def slowdown_scale(theme: Theme) -> dict[str, Any]:
    """The colours of a heat map of S_w in Plotly's terms: one for each level of `LEVELS`, the same in every picture."""
    edges = [(bound - 1) / (_END - 1) for bound in (1, *LEVELS, _END)]
    stops = [(edge, colour) for at, colour in enumerate(theme.slow[: len(LEVELS) + 1]) for edge in edges[at : at + 2]]
    bar = {"thickness": 12, "tickformat": ".2f", "outlinewidth": 0, "tickvals": list(LEVELS)}
    return {"zmin": 1, "zmax": _END, "colorscale": stops, "colorbar": bar}


def legend(theme: Theme) -> list[tuple[str, str]]:
    """Colour and meaning of each class of ops, and of waiting."""
    between = [f"{low:g}-{high:g} x" for low, high in pairwise(CLASSES)]
    names = [f"up to {CLASSES[0]:g} x", *between, f"over {CLASSES[-1]:g} x"]
    return [*zip(theme.classes, names, strict=True), (theme.wait, "waiting for peers")]
