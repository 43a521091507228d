"""Colours of the Timeline page: those of the canvas, and the legend that explains them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tracekit.figures.theme import DARK, Theme

#: Bounds of the colour classes, as ratio to the peers.
CLASSES = (1.1, 1.25, 1.5, 2.0, 3.0)


@dataclass(frozen=True, slots=True)
class Palette:
    """`classes`: colours from normal to slowest, one more than there are bounds. `wait`: waiting for peers."""

    paper: str
    text: str
    dimmed: str
    grid: str
    wait: str
    classes: tuple[str, ...]
    on_classes: tuple[str, ...]
    outline: str
    recorded: str
    original: str
    ideal: str


def palette(theme: Theme) -> Palette:
    """Colours of the canvas: grey is normal, the slowdown scale is above it, and waiting is paler than both."""
    dark = theme is DARK
    black, white = "#111315", "#ffffff"
    return Palette(
        paper=theme.paper,
        text=theme.text,
        dimmed=theme.dimmed,
        grid=theme.grid,
        wait="#2b3138" if dark else "#e8ecf0",
        classes=("#55606b" if dark else "#c2cad3", *theme.slow[2:]),
        on_classes=(white, white, white, black, black, black) if dark else (black, black, black, white, white, white),
        outline=theme.outline,
        recorded=theme.recorded,
        original=theme.original,
        ideal=theme.ideal,
    )


def legend(colours: Palette, bounds: Sequence[float]) -> list[tuple[str, str]]:
    """Colour and meaning of each class, and of waiting."""
    between = [f"{low:g}-{high:g} x" for low, high in pairwise(bounds)]
    names = [f"up to {bounds[0]:g} x", *between, f"over {bounds[-1]:g} x"]
    return [*zip(colours.classes, names, strict=True), (colours.wait, "waiting for peers")]
