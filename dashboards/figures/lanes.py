"""The ops of an op trace as spans on tracks: a worker is a rank, and its lines are the streams and threads of the rank.

In: an `OpTrace`. Out: `StreamOps`, which `spans.py` draws as it draws a step of a pipeline: as recorded, each op in the
colour of its kind, because it has no peers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.base.text import cut, printable, seconds
from tracekit.dashboards.figures.spans import Replay, StepOps
from tracekit.trace.gpu_activity import KernelClass
from tracekit.trace.op import OpTrace
from tracekit.trace.post_training import POST_TRAINING

#: Kinds of ops, each with a colour of its own; the GPU's come first. Other kinds take turns with the first four.
LEVELS: Final = (
    *(KernelClass.MATRIX_PRODUCT, KernelClass.ATTENTION, KernelClass.ELEMENT_WISE, KernelClass.OPTIMIZER),
    *(KernelClass.COMMUNICATION, KernelClass.MEMORY, KernelClass.OTHER, "host", "waiting"),
)
#: ... and those of post-training.
LEVELS_OF_RL: Final = (
    *("generate", "train", "sync", "reward", "request", "old-log-prob", "ref-log-prob", "advantage"),
    "other phases",
)
#: Between levels that stand in for ratios: an overview has a byte for ratios up to 5.1.
LEVEL_STEP: Final = 0.6
#: The kind of every op in an address.
LANE_OP: Final = "op"
_WAITING = ("synchronise", "input", "gc", "window")
#: Longest name that is sent, and the number of things that a host op is said to do.
_LONGEST, _MOST_DONE = 200, 8


@dataclass(frozen=True, slots=True)
class StreamOps(StepOps):
    """The ops of one step of an op trace. `lane`, `name`, `level`: per op, indices into `lanes`, `names`, `LEVELS`, of
    post-training into `LEVELS_OF_RL`. `roles`: what its ranks are called; empty for other traces.

    `frame`: a row of the trace per op; `seq` numbers them. `whats`: what the host did, as the column `did` numbers it.
    """

    lane: Ints
    lanes: tuple[str, ...]
    name: npt.NDArray[np.int32]
    names: tuple[str, ...]
    level: Ints
    frame: pl.DataFrame
    whats: tuple[str, ...]
    roles: tuple[str, ...]

    def who(self, rank: int) -> str:
        """A rank in words."""
        return self.roles[rank] if rank < len(self.roles) else f"rank {rank}"

    @property
    def stream_names(self) -> tuple[str, ...]:
        return self.lanes

    def stream(self, ops: Ints) -> Ints:
        return self.lane[ops]

    def streams(self) -> tuple[str, ...]:
        return self.lanes

    def computes(self, ops: Ints) -> npt.NDArray[np.bool_]:
        """See `StepOps.computes`: the GPU's ops, if there are any."""
        gpu = self.level < LEVELS.index("host")
        return gpu[ops] if gpu.any() else np.ones(len(ops), np.bool_)

    def ratios(self, ops: Ints, replay: Replay) -> Floats:  # noqa: ARG002 - all are as recorded
        """The level of each op, which its colour shows."""
        return np.asarray(self.level[ops] * LEVEL_STEP)

    @property
    def op_names(self) -> tuple[str, ...]:
        return self.names

    def op_name(self, ops: Ints) -> npt.NDArray[np.int32]:
        return self.name[ops]

    def kinds(self, ops: Ints) -> pl.Series:
        return self.frame["kind"].gather(ops)

    def arrows(self, op: int, replay: Replay) -> tuple[Ints, Floats]:
        """From the last op to reach the collective of an op to each that waited, at that time: see `StepOps.arrows`."""
        together = np.flatnonzero((self.meeting == self.meeting[op]) & (self.meeting >= 0))
        last = together[np.argsort(self.start[replay][together])[-1:]]
        waited = np.setdiff1d(together, last)
        ends = np.column_stack([np.repeat(last, len(waited)), waited])
        return ends, self.start[replay][ends[:, [0, 0]]]

    def find(self, dp_rank: int, pp_rank: int, kind: str, seq: int) -> int | None:
        """See `StepOps.find`: ops are numbered over all ranks."""
        exists = (kind, pp_rank) == (LANE_OP, 0) and seq < self.frame.height
        return seq if exists and self.frame["rank"][seq] == dp_rank else None

    def described(self, table: pl.DataFrame) -> pl.DataFrame:
        """Ops of a table of `spans.slowest`: rank, stream or thread, kind, name and times in seconds."""
        ops = table["seq"].to_numpy()
        return table.select(
            rank="dp_rank",
            on=pl.Series([self.lanes[lane] for lane in self.lane[ops]], dtype=pl.String),
            kind=self.frame["kind"].gather(ops),
            op=pl.Series([self.names[number] for number in self.name[ops]], dtype=pl.String),
            seq="seq",
            start_s="start_s",
            duration_s="duration_s",
        )

    def facts(self, op: int) -> list[list[str]]:
        """The facts about an op: label and value."""
        row = self.frame.row(op, named=True)
        rows = [
            ["role", self.who(row["rank"])] if self.roles else ["rank", str(row["rank"])],
            ["on", self.lanes[self.lane[op]]],
            ["kind", str(row["kind"])],
            ["start", f"{row['start'] * 1e3:,.3f} ms"],
            ["duration", seconds(row["duration"])],
        ]
        for name, key in (("operator", "operator"), ("line", "own"), ("inputs", "inputs"), ("bytes", "bytes")):
            if row.get(key) is not None:
                rows.append([name, cut(printable(f"{row[key]:,}" if key == "bytes" else row[key]), _LONGEST)])
        activities = sorted(zip(row.get("did_s") or (), row.get("did") or (), strict=True), reverse=True)[:_MOST_DONE]
        return [*rows, *([seconds(spent), self.whats[what]] for spent, what in activities if what < len(self.whats))]


def lane_ops(trace: OpTrace, step: int) -> StreamOps:
    """The ops of one step of a trace."""
    from tracekit.analysis.gpu.recorded import Kept

    recorded, rl = Kept.read(trace.metadata), trace.metadata.get(POST_TRAINING)
    engines = rl.get("engines", ()) if isinstance(rl, dict) else ()
    reasons = [what.name or what.reason for what in recorded.whats] if recorded is not None else []
    frame = trace.ops.filter(step=step) if "step" in trace.ops.columns else trace.ops
    columns = {name: pl.lit(None, pl.String).alias(name) for name in ("kind", "stream", "name")}
    frame = frame.with_columns(values for name, values in columns.items() if name not in frame.columns)
    frame = frame.filter(pl.col("stream").is_not_null() | ~pl.col("stream").is_not_null().any())
    frame = frame.with_columns(pl.col("kind").cast(pl.String).fill_null("op")).sort("rank", "start")
    lane, lanes = _numbered(frame["stream"].cast(pl.String).fill_null(frame["kind"]))
    name, names = _numbered(_names(frame, reasons))
    kind, kinds = _numbered(frame["kind"])
    rank, first = np.unique(frame["rank"].to_numpy().astype(np.int64), return_index=True)
    none, duration = np.full(frame.height, -1, np.int32), frame["duration"].to_numpy().astype(np.float32)
    return StreamOps(
        step=step,
        dp_rank=rank,
        pp_rank=np.zeros(len(rank), np.int64),
        first=np.append(first, frame.height),
        kind=np.zeros(frame.height, np.uint8),
        seq=np.arange(frame.height, dtype=np.int32),
        microbatch=none,
        chunk=none.astype(np.int16),
        start={Replay.RECORDED: frame["start"].to_numpy()},
        duration={Replay.RECORDED: duration},
        cost={Replay.RECORDED: duration},
        launch_delay=np.zeros(frame.height, np.float32),
        median=np.zeros(1),  # no peers: all of an op is beyond them
        alone=np.zeros((1, 1), np.bool_),
        meeting=_meetings(frame),
        lane=lane,
        lanes=lanes,
        name=name.astype(np.int32),
        names=tuple(cut(printable(op_name), _LONGEST) for op_name in names),
        level=np.array([_level(kind_name, i, rl=bool(rl)) for i, kind_name in enumerate(kinds)], np.int64)[kind],
        frame=frame,
        whats=tuple(cut(printable(text), _LONGEST) for text in reasons),
        roles=("phases", *(cut(printable(engine), _LONGEST) for engine in engines)) if rl else (),
    )


def _numbered(values: pl.Series) -> tuple[Ints, tuple[str, ...]]:
    """A number for each value, and the values in the order of these: GPU streams before threads, 7 before 20."""
    texts = values.unique().to_list()
    texts.sort(key=lambda value: ("thread" in value, len(value), value))
    return values.replace_strict(texts, range(len(texts)), return_dtype=pl.Int64).to_numpy(), tuple(texts)


def _meetings(frame: pl.DataFrame) -> Ints:
    """The number of the collective of each op, -1 for none."""
    if "rendezvous" not in frame.columns:
        return np.full(frame.height, -1)
    return frame["rendezvous"].rank("dense").cast(pl.Int64).fill_null(-1).to_numpy()


def _names(frame: pl.DataFrame, reasons: list[str]) -> pl.Series:
    """The name of each op: for host work, its longest part."""
    names = frame["name"].cast(pl.String).fill_null(frame["kind"])
    if not {"did", "did_s"} <= set(frame.columns) or not reasons:
        return names
    longest = frame.select(pl.col("did").list.get(pl.col("did_s").list.arg_max(), null_on_oob=True)).to_series()
    return pl.Series(reasons).gather(longest.set(longest >= len(reasons), None)).fill_null(names)


def _level(kind: str, number: int, *, rl: bool) -> int:
    """The level of a kind; `number`: its place among the kinds of the trace; `rl`: of post-training."""
    if rl:
        return LEVELS_OF_RL.index(kind if kind in LEVELS_OF_RL else LEVELS_OF_RL[-1])
    if kind in _WAITING:
        return LEVELS.index("waiting")
    return LEVELS.index(kind) if kind in LEVELS else number % 4
