"""Times of records: those that a GPU took, on the clock of its host; and of ops, from the start of their step.

In: records with flags, and ops on an absolute clock. Out: the same on one clock; ops cut into steps that start at 0,
with a number among those of their kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.collectors.record.wire_format import Flag
from tracekit.trace.model import KINDS, OpKind
from tracekit.trace.schema import POSTED, RECEIVED, RESUMED, SENT

ON_DEVICE = (pl.col("flags") & int(Flag.DEVICE_CLOCK)) != 0
#: Work of the host alone; nothing waits for it while the device still has work.
_HOST_WORK = pl.col("category").is_in(["data_load", "checkpoint", "gc", "span"]) & ~ON_DEVICE
#: Kinds of collectives that run one after another on a GPU.
_IN_TURN = [str(kind) for kind in (OpKind.ALL_REDUCE, OpKind.GRADS_REDUCE_SCATTER, OpKind.PARAMS_ALL_GATHER)]
#: Kinds of ops that run one after another on the host's clock, too: transfers to one neighbour share a connection, and
#: gathers of parameters that are issued at once finish one chunk after another.
_ALWAYS_IN_TURN = [str(kind) for kind in KINDS if kind.is_p2p or kind is OpKind.PARAMS_ALL_GATHER]
COLUMNS = ("step", "rank", "dp_rank", "pp_rank", "kind", "seq", "microbatch", "chunk", "start", "duration")
#: Name of the fused transfer -> the ops in it.
FUSED_TRANSFERS: dict[str, tuple[OpKind, ...]] = {
    "forward-send-backward-recv": (OpKind.FORWARD_SEND, OpKind.BACKWARD_RECV),
    "backward-send-forward-recv": (OpKind.BACKWARD_SEND, OpKind.FORWARD_RECV),
    "forward-send-forward-recv": (OpKind.FORWARD_SEND, OpKind.FORWARD_RECV),
    "backward-send-backward-recv": (OpKind.BACKWARD_SEND, OpKind.BACKWARD_RECV),
    "forward-backward-send-forward-backward-recv": (
        OpKind.FORWARD_SEND,
        OpKind.BACKWARD_SEND,
        OpKind.FORWARD_RECV,
        OpKind.BACKWARD_RECV,
    ),
}


def on_host_clock(records: pl.DataFrame, fit: DeviceClockFit) -> pl.DataFrame:
    """Convert the device times of one rank to times of its host; `extra` of p2p is the time at which the wait began."""

    def converted(column: str, rows: pl.Expr) -> pl.Expr:
        host = pl.Series(column, fit.to_host(records[column].to_numpy()))
        return pl.when(rows).then(host).otherwise(pl.col(column)).alias(column)

    return records.with_columns(
        converted("start_ns", ON_DEVICE),
        converted("end_ns", ON_DEVICE),
        converted("extra", ON_DEVICE & (pl.col("category") == "p2p")),
    )


def timed_alike(records: pl.DataFrame, steps: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """The (rank, step) pairs whose computes and optimizers were all timed by the GPU, if the GPU timed any of any rank;
    and how many others were left out.

    Workers with launch times would look fast among workers with kernel times.
    """
    timed = records.filter(pl.col("category").is_in(["compute", "optimizer"]))
    if not timed.select(ON_DEVICE.any()).item():
        return steps, 0
    on_host = timed.filter(~ON_DEVICE).select("rank", "step").unique()
    alike = steps.join(on_host, on=["rank", "step"], how="anti")
    return alike, steps.height - alike.height


def waited_for(records: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, int]]:
    """Start host work when the GPU finishes what it began before the host was done; drop host work that this hides.

    Returns the records, and name -> number of the records that the GPU never waited for.
    """
    device = records.filter(ON_DEVICE & (pl.col("category") != "step"))
    if device.is_empty():
        return records, {}
    busy = device.sort("start_ns").select(
        "rank", began_ns="start_ns", busy_until_ns=pl.col("end_ns").cum_max().over("rank")
    )
    ranks = device["rank"].unique().to_list()
    host = records.filter(_HOST_WORK & pl.col("rank").is_in(ranks)).sort("end_ns")
    placed = host.join_asof(busy, left_on="end_ns", right_on="began_ns", by="rank", check_sortedness=False)
    start = pl.max_horizontal("start_ns", pl.col("busy_until_ns").fill_null(0))
    hidden = placed.filter(start >= pl.col("end_ns"))
    seen = placed.filter(start < pl.col("end_ns")).with_columns(start_ns=start).select(records.columns)
    rest = records.filter(~(_HOST_WORK & pl.col("rank").is_in(ranks)))
    return pl.concat([rest, seen]), dict(hidden.group_by("name").len().sort("name").iter_rows())


def one_after_another(ops: pl.DataFrame, ranks: list[int]) -> pl.DataFrame:
    """Start ops that run one after another when the previous one of their kind ended: collectives on the GPUs of
    `ranks`, transfers and gathers of parameters on all ranks.

    An op is launched while the previous one still runs; waiting for that one is not part of its own transfer.
    """
    queued = pl.col("kind").is_in(_ALWAYS_IN_TURN)
    on_device = pl.col("rank").is_in(ranks) & pl.col("kind").is_in(_IN_TURN)
    in_turn = on_device | queued
    if not ops.select(in_turn.any()).item():
        return ops
    before_ns = pl.col("end_ns").cum_max().shift(1).over("rank", "step", "kind").fill_null(0)
    ordered = ops.sort("start_ns", "end_ns").with_columns(before_ns=before_ns)
    # Ops finish in the order in which they are issued: an end before the previous op's end was estimated or noticed
    # too early.
    ends = pl.when(queued).then(pl.max_horizontal("end_ns", "before_ns")).otherwise(pl.col("end_ns"))
    begins = pl.min_horizontal(pl.max_horizontal("start_ns", "before_ns"), ends)
    return ordered.with_columns(start_ns=pl.when(in_turn).then(begins).otherwise(pl.col("start_ns")), end_ns=ends).drop(
        "before_ns"
    )


#: Readings wider than this many times the narrowest one are not trusted: the GPU was busy,
WIDE = 4.0
#: unless they are from so much later that the clock may have drifted further than they are wide, seconds per second.
UNKNOWN_DRIFT = 5e-5


@dataclass(frozen=True, slots=True)
class DeviceClockFit:
    """host = device + an offset, interpolated between readings; beyond them it changes by `drift` (seconds per second).
    While another process has the GPU, a reading can be most of a second wide.

    `uncertainty_ns`: half the widest trusted reading, or the largest error of predicting a reading from its neighbours,
    whichever is larger. `readings`: how many of the `readings_taken` are trusted.
    """

    device_ns: npt.NDArray[np.int64]
    offset_ns: npt.NDArray[np.float64]
    drift: float
    uncertainty_ns: float
    readings_taken: int

    @property
    def readings(self) -> int:
        """The number of trusted readings."""
        return len(self.device_ns)

    def to_host(self, device_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Convert device times to the host's monotonic clock, ns."""
        knots = (self.device_ns - self.device_ns[0]).astype(np.float64)
        since = (device_ns - self.device_ns[0]).astype(np.float64)
        beyond = since - np.clip(since, knots[0], knots[-1])
        offset = np.interp(since, knots, self.offset_ns) + self.drift * beyond
        host_ns: npt.NDArray[np.int64] = device_ns + np.round(offset).astype(np.int64)
        return host_ns

    def to_dict(self) -> dict[str, float]:
        """Plain data, for metadata."""
        return {
            "offset_ns": float(self.offset_ns[0]),
            "drift": self.drift,
            "uncertainty_ns": self.uncertainty_ns,
            "readings": self.readings,
            "readings_taken": self.readings_taken,
        }


def fit_device_clock(readings: Sequence[Sequence[int]]) -> DeviceClockFit:
    """Fit at least one (device ns, host ns before, host ns after), which gives the offset only."""
    table = np.array(readings, np.int64)
    table = table[np.argsort(table[:, 0])]
    width = (table[:, 2] - table[:, 1]).astype(np.float64)
    narrowest = int(np.argmin(width))
    since = np.abs(table[:, 0] - table[narrowest, 0])
    trusted = table[width <= np.maximum(WIDE * width[narrowest], UNKNOWN_DRIFT * since)]
    device_ns = trusted[:, 0]
    half_width = (trusted[:, 2] - trusted[:, 1]) / 2
    offset = (trusted[:, 1] - device_ns) + half_width
    span = (device_ns - device_ns[0]).astype(np.float64)
    drift = float(np.polyfit(span, offset - offset[0], 1)[0]) if len(trusted) > 1 else 0.0
    missed = UNKNOWN_DRIFT * float(since.max()) if len(trusted) == 1 else 0.0
    if len(trusted) > 2:
        share = (span[1:-1] - span[:-2]) / (span[2:] - span[:-2])
        predicted = offset[:-2] + share * (offset[2:] - offset[:-2])
        missed = float(np.abs(predicted - offset[1:-1]).max())
    return DeviceClockFit(device_ns, offset, drift, max(float(half_width.max()), missed), len(table))


def cut_steps(ops: pl.DataFrame) -> tuple[pl.DataFrame, dict[int, int]]:
    """Express starts in seconds from the start of the step, and number `seq` in order of start. Returns the ops in
    canonical columns, and the start of each step on the clock of the ops, ns.

    A step starts when the last rank begins it. Ranks of a late stage begin while an early stage still finishes the
    previous step, and that time belongs to the previous step; such ops have a negative start.
    """
    firsts = ops.group_by("step", "rank").agg(first_ns=pl.col("start_ns").min())
    starts = firsts.group_by("step").agg(step_ns=pl.col("first_ns").max()).sort("step")
    waits = {}
    if "posted_ns" in ops.columns:
        waits[POSTED] = pl.col("start_ns") - pl.col("posted_ns")
    if "resumed_ns" in ops.columns:
        waits[RESUMED] = pl.col("resumed_ns") - pl.col("start_ns")
    ordered = (
        ops.join(starts, on="step")
        .with_columns(
            start=(pl.col("start_ns") - pl.col("step_ns")) / 1e9,
            duration=(pl.col("end_ns") - pl.col("start_ns")) / 1e9,
            **{name: lasted.clip(0) / 1e9 for name, lasted in waits.items()},
        )
        .sort("step", "rank", "kind", "start_ns", "end_ns")
        .with_columns(seq=place_in_run("step", "rank", "kind"))
    )
    waited = [name for name in waits if ordered[name].count()]
    waited += [name for name in (SENT, RECEIVED) if name in ordered.columns]
    return ordered.select(*COLUMNS, *waited), {int(step): int(start) for step, start in starts.iter_rows()}


def place_in_run(*columns: str) -> pl.Expr:
    """The position of each row, from 0, among the adjacent rows that are equal in `columns`."""
    row = pl.int_range(pl.len())
    begins = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift()) for name in columns) | (row == 0)
    return row - pl.when(begins).then(row).forward_fill()
