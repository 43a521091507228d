"""Pictures of a job in characters: the map of workers, and S over the steps.

In: a `Report`. Out: what rich prints.
"""

from __future__ import annotations

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from tracekit.analysis.numeric.arrays import Floats
from tracekit.report import Report

#: The largest map, DP ranks x stages; larger jobs are pooled.
LARGEST_MAP = (24, 32)
#: Colour-blind safe, light to dark as the slowdown grows (ColorBrewer YlOrBr order).
_HEAT = ("grey35", "#fee391", "#fec44f", "#fe9929", "#ec7014", "#cc4c02")
_GLYPHS = "·░▒▓▆█"
_SPARKS = "▁▂▃▄▅▆▇█"


def worker_map(report: Report, largest: tuple[int, int] = LARGEST_MAP) -> RenderableType:
    """S of every worker, DP ranks down, stages across; large maps keep the maximum of each patch."""
    slowdown = report.attribution.worker_slowdown
    pooled, patch = _pooled(slowdown, largest)
    if slowdown.size == 1:
        return Text()
    scale = _heat_scale(slowdown)
    lines: list[RenderableType] = [Text("S alone: DP rank down, stage across", style="bold underline")]
    if patch != (1, 1):
        lines.append(Text(f"a cell is the worst of {patch[0]} x {patch[1]} workers", style="dim"))
    for row, values in enumerate(pooled):
        first = report.attribution.dp_ranks[row * patch[0]]
        line = Text(f"  {first:>5} ", style="dim")
        for value in values:
            level = int(np.searchsorted(scale, value, side="right"))
            line.append(_GLYPHS[level] * 2, style=_HEAT[level])
        lines.append(line)
    legend = Text("        ")
    for level, glyph in enumerate(_GLYPHS):
        bound = f"<{scale[0]:.2f}" if level == 0 else f"{scale[level - 1]:.2f}"
        legend.append(glyph * 2, style=_HEAT[level]).append(f" {bound} ", style="dim")
    lines.append(legend)
    return Group(*lines)


def _heat_scale(slowdown: Floats) -> list[float]:
    """Five thresholds from just above 1 to the largest slowdown; a map of healthy workers stays blank."""
    top = max(float(slowdown.max()), 1.1)
    return [1.0 + (top - 1.0) * share for share in (0.1, 0.25, 0.45, 0.65, 0.85)]


def _pooled(values: Floats, largest: tuple[int, int]) -> tuple[Floats, tuple[int, int]]:
    """The map reduced to at most `largest` cells by maximum, and how many workers a cell covers."""
    patch = tuple(-(-size // limit) for size, limit in zip(values.shape, largest, strict=True))
    rows, columns = (-(-size // step) for size, step in zip(values.shape, patch, strict=True))
    padded = np.full((rows * patch[0], columns * patch[1]), -np.inf)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded.reshape(rows, patch[0], columns, patch[1]).max(axis=(1, 3)), (patch[0], patch[1])


def step_bars(report: Report, width: int) -> RenderableType:
    """Slowdown over the steps as a line of bars, with its extremes in words."""
    found = report.attribution
    slowdown = found.step_slowdown
    if len(slowdown) == 1:
        return Text(f"One step traced: {found.steps[0]}; variation over steps is unknown", style="dim")
    worst = int(slowdown.argmax())
    line = Text("Steps: ", style="bold")
    line.append(
        f"S {slowdown.min():.3f} to {slowdown.max():.3f}, median {float(np.median(slowdown)):.3f}; worst step"
        f" {found.steps[worst]}",
        style="not bold",
    )
    size = -(-len(slowdown) // max(width - 10, 10))
    peaks = [float(slowdown[at : at + size].max()) for at in range(0, len(slowdown), size)]
    low = min(peaks)
    high = max(*peaks, low + 0.05)  # so that noise stays flat
    bars = "".join(_SPARKS[round((peak - low) / (high - low) * (len(_SPARKS) - 1))] for peak in peaks)
    return Group(line, Text(f"        {bars}", style="#fe9929"))
