"""Colours and the look of figures, in a dark and a light theme.

One meaning per colour, on every surface: the orange scale is slowdown and lost time; blue is the job as recorded, green
the ideal, purple a change, pink what is pointed at or chosen, grey normal; muted tones are kinds of work. All pairs are
distinguishable with red-green colour blindness (Okabe-Ito colours, and scales with monotonic lightness).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

from msgspec import Struct

#: The share of a step lost at which each level but the lowest begins. The same colour means the same loss in every job,
#: step and picture, and a map of healthy workers stays blank.
LOST_LEVELS = (0.02, 0.05, 0.1, 0.2, 0.3)
#: The end of the scale of lost shares for a picture that needs one; everything above the last level looks alike.
_END = 0.4
#: Bounds of the colour classes of ops, as ratio to the peers.
CLASSES = (1.1, 1.25, 1.5, 2.0, 3.0)


class Theme(Struct, frozen=True):
    """Colours of one theme. `slow`: colour scale from S = 1 (close to the paper) to the slowest. `bad`: bad news, one
    of them. `kinds`: of work, such as forward and backward.

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
    kinds: tuple[str, ...]
    bad: str
    recorded: str = "#0072b2"
    ideal: str = "#009e73"
    outline: str = "#cc79a7"
    changed: str = "#5e3c99"  # anything but the job as it ran: a scenario, the job after a change


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
    kinds=("#46535f", "#8796a5", "#bac4cd", "#a59c78", "#6f8f86", "#7d6a6a"),
    bad="#b35806",
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
    kinds=("#d0d8e0", "#94a2b0", "#5f6c79", "#a59c78", "#74a095", "#8d7878"),
    bad="#fdb863",
    recorded="#56b4e9",
    changed="#b2a1e0",
)
THEMES: Final = {theme.name: theme for theme in (LIGHT, DARK)}


def slowdown_scale(theme: Theme) -> dict[str, Any]:
    """The colours of a heat map of what workers alone cost of a step, in Plotly's terms: one for each level of
    `LOST_LEVELS`, the same in every picture.
    """
    edges = [bound / _END for bound in (0, *LOST_LEVELS, _END)]
    colours = theme.slow[: len(LOST_LEVELS) + 1]
    stops = [(edge, colour) for index, colour in enumerate(colours) for edge in edges[index : index + 2]]
    bar = {"thickness": 12, "tickformat": ".0%", "outlinewidth": 0, "tickvals": LOST_LEVELS}
    return {"zmin": 0, "zmax": _END, "colorscale": stops, "colorbar": bar}


def legend(theme: Theme) -> list[tuple[str, str]]:
    """Colour and meaning of each class of ops, and of waiting."""
    between = [f"{low:g}-{high:g} x" for low, high in pairwise(CLASSES)]
    names = [f"up to {CLASSES[0]:g} x", *between, f"over {CLASSES[-1]:g} x"]
    return [*zip(theme.classes, names, strict=True), (theme.wait, "waiting for peers")]


def ink_on(colour: str) -> str:
    """Return black or white, whichever contrasts more with a colour (`#rrggbb`) by WCAG."""
    luminance = _luminance(colour)

    def contrast(ink: str) -> float:
        dark, light = sorted((luminance, _luminance(ink)))
        return (light + 0.05) / (dark + 0.05)

    return max((LIGHT.text, _WHITE), key=contrast)


def _luminance(colour: str) -> float:
    parts = [int(colour[position : position + 2], 16) / 255 for position in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
