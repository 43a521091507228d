"""Jobs of a few ops whose every time can be worked out in the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

#: (kind, seconds) in the order in which a worker runs them.
Program = Sequence[tuple[str, float]]


def data_parallel_job(programs: Sequence[Program], steps: int = 4, *, transfer_s: float = 0.01) -> Trace:
    """A job without a pipeline: in every step each DP rank runs its program, then all reduce gradients together."""
    return of_steps([programs] * steps, transfer_s=transfer_s)


def of_steps(steps: Sequence[Sequence[Program]], *, transfer_s: float = 0.01) -> Trace:
    """Like `data_parallel_job`, each step with programs of its own."""
    rows = []
    for step, programs in enumerate(steps):
        ready = [sum(lasts for _, lasts in program) for program in programs]
        for dp_rank, program in enumerate(programs):
            at, seen = 0.0, dict[str, int]()
            for kind, lasts in program:
                rows.append(_row(step, dp_rank, kind, seen.get(kind, 0), at, lasts))
                seen[kind] = seen.get(kind, 0) + 1
                at += lasts
            if len(programs) > 1:
                rows.append(_row(step, dp_rank, "all-reduce", 0, at, max(ready) + transfer_s - at))
    return Trace.from_frame(pl.DataFrame(rows), Layout(dp=len(steps[0])), name="small")


def _row(step: int, dp_rank: int, kind: str, seq: int, start: float, duration: float) -> Mapping[str, object]:
    return {
        "step": step,
        "rank": dp_rank,
        "dp_rank": dp_rank,
        "pp_rank": 0,
        "kind": kind,
        "seq": seq,
        "start": start,
        "duration": duration,
    }


FORWARD, BACKWARD = ("forward-compute", 0.1), ("backward-compute", 0.2)
