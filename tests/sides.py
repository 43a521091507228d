"""Hand-made sides of a comparison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.handmade import LAYOUT
from tracekit.report.compare import Side


def side(recorded: list[float], *, ideal: list[float] | None = None, **more: Any) -> Side:
    """A side whose original steps are the recorded ones."""
    given_ideal = [1.0] * len(recorded) if ideal is None else ideal
    made = Side(
        job="made",
        title="made",
        layout=LAYOUT.to_dict(),
        ops_per_step=48.0,
        trustworthy=True,
        steps=np.arange(len(recorded)),
        recorded_s=np.array(recorded),
        original_s=np.array(recorded),
        ideal_s=np.array(given_ideal),
        lost_s=np.array(recorded) - np.array(given_ideal),
        lost_share=1 - sum(given_ideal) / sum(recorded),
        lost_gpu_hours_per_day=24 * LAYOUT.world_size * (1 - sum(given_ideal) / sum(recorded)),
        dp_ranks=np.arange(2),
        workers=np.ones((2, 2)),
    )
    return replace(made, **more)


def cause(kind: str, where: str, since: int | None = None, steps: tuple[int, ...] = ()) -> dict[str, Any]:
    """A cause for `report_with`."""
    return {"kind": kind, "where_text": where, "since_step": since, "where": {"steps": list(steps)}}
