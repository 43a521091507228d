"""Compute and communication at the same time: what is hidden, what is exposed, what is waiting, what hiding costs.

In: the GPU ops of a recording, its matches and clocks. Out: `Overlap`. Times are lengths of unions of intervals.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from tracekit.analysis.gpu.recorded import Recorded
from tracekit.analysis.gpu.times import both, grid_blocks, length, union
from tracekit.analysis.numeric.arrays import Floats
from tracekit.report.questions import Overlap, OverlapOfCollective, OverlapOfRank, PhaseOps, PhasePair, WaitBasis
from tracekit.trace.gpu_activity import KernelClass
from tracekit.trace.op import GpuRecording

#: Overlaps shorter than this are noise of the clock, seconds.
_NOISE_S = 1e-9
_COMMUNICATES = pl.col("kernel_class").eq_missing(str(KernelClass.COMMUNICATION))


def find_overlap(recorded: Recorded) -> Overlap:
    """Measure what each rank hides, and what that costs."""
    recording = recorded.recording
    basis, wait_s = _waits(recorded)
    ops = recording.gpu_ops.with_columns(
        communicates=_COMMUNICATES,
        computes=~_COMMUNICATES,  # with copies and fills, which hide communication as well
        phase=recording.calls["annotated"].gather(recording.gpu_ops["launch"]),
        short=_short_name(),
        blocks=grid_blocks(),
        wait=pl.Series(wait_s),
    )
    by_rank = {rank: ops.filter(rank=rank) for rank in recording.ranks}
    phases = ops.drop_nulls("phase").group_by("phase").agg(ops=pl.len(), seconds=pl.col("duration").sum())
    return Overlap(
        ranks=[_of_rank(rank, of_rank, basis, _tax_s(recording, of_rank)) for rank, of_rank in by_rank.items()],
        collectives=list(_collectives(by_rank)),
        phases=[PhaseOps(*row) for row in phases.sort("seconds", "phase", descending=[True, False]).iter_rows()],
        pairs=_pairs(by_rank),
        gpu_ops=ops.height,
        assigned_ops=ops["phase"].count(),
    )


def _short_name() -> pl.Expr:
    """The name of a kernel without its return type, template arguments and parameters."""
    return (
        pl.col("name")
        .cast(pl.String)
        .str.replace(r"^void ", "")
        .str.split("(")
        .list.first()
        .str.split("<")
        .list.first()
    )


def _waits(recorded: Recorded) -> tuple[WaitBasis, Floats]:
    """How long each GPU op waited, seconds, [ops]: of all ranks for the last member, else beyond the shortest alike."""
    ops, matches, recording = recorded.recording.gpu_ops, recorded.matches, recorded.recording
    wait_s = np.zeros(ops.height)
    if len(recording.ranks) == (recording.world_size or len(recording.ranks)) and matches.matched:
        start, last = matches.begun(recorded.clocks)
        wait_s[matches.row] = last - start
        return "peers", wait_s
    beyond = pl.when(_COMMUNICATES).then(pl.col("duration") - pl.col("duration").min().over("rank", "name"))
    return "minimum", ops.select(beyond.fill_null(0.0)).to_series().to_numpy()


def _of_rank(rank: int, ops: pl.DataFrame, basis: WaitBasis, tax_s: float | None) -> OverlapOfRank:
    compute, communication = union(ops.filter("computes")), union(ops.filter("communicates"))
    compute_s, communication_s, both_s = length(compute), length(communication), both(compute, communication)
    return OverlapOfRank(
        rank=rank,
        compute_s=compute_s,
        communication_s=communication_s,
        both_s=both_s,
        exposed_s=communication_s - both_s,
        hidden_share=both_s / communication_s if communication_s else 0.0,
        efficiency=both_s / shorter if (shorter := min(compute_s, communication_s)) else 0.0,
        wait_s=float(ops["wait"].sum()),
        wait_basis=basis,
        sm_tax_at_most_s=tax_s,
    )


def _tax_s(recording: GpuRecording, ops: pl.DataFrame) -> float | None:
    """How much longer compute kernels may have taken that were sized for the SMs which communication leaves free.

    Those have as many blocks as the GPU has SMs without those of the commonest grid of communication.
    """
    communication = ops.filter("communicates")["blocks"].drop_nulls()
    if recording.multiprocessors is None or communication.is_empty():
        return None
    occupied = int(communication.mode().sort()[0])
    sized = ops.filter("computes", pl.col("blocks") == recording.multiprocessors - occupied)
    return float(sized["duration"].sum()) * occupied / recording.multiprocessors


def _collectives(by_rank: dict[int, pl.DataFrame]) -> Iterator[OverlapOfCollective]:
    """Yield the communication kernels of each name, longest first."""
    exposed: dict[str, float] = {}
    for ops in by_rank.values():
        compute = union(ops.filter("computes"))
        for (name,), ops_of_name in ops.filter("communicates").group_by("short"):
            alone = union(ops_of_name)
            exposed[str(name)] = exposed.get(str(name), 0.0) + length(alone) - both(alone, compute)
    by_name = pl.concat(by_rank.values()).filter("communicates").group_by("short")
    rows = by_name.agg(pl.len(), pl.col("duration").sum(), pl.col("wait").sum())
    for name, ops, seconds, waited in rows.sort("duration", "short", descending=[True, False]).iter_rows():
        yield OverlapOfCollective(name, ops, seconds, exposed[name], waited)


def _pairs(by_rank: dict[int, pl.DataFrame]) -> list[PhasePair]:
    """How long each phase of communication ran under each phase of compute, longest first."""
    overlap_s: dict[tuple[str, str], float] = {}
    for ops in by_rank.values():
        hidden, hiding = (
            {str(phase): union(rows) for (phase,), rows in ops.filter(kind).drop_nulls("phase").group_by("phase")}
            for kind in ("communicates", "computes")
        )
        for under, communication in hidden.items():
            for over, compute in hiding.items():
                overlap_s[under, over] = overlap_s.get((under, over), 0.0) + both(communication, compute)
    ordered = sorted(overlap_s.items(), key=lambda item: (-item[1], item[0]))
    return [PhasePair(*phases, seconds) for phases, seconds in ordered if seconds > _NOISE_S]
