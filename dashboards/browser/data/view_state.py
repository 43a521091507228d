"""The state of the pages Timeline and Workers, as address text and as checked values.

In: the parameters of a URL, which are untrusted, and what the job has. Out: a `TimelineState` or a `WorkerView` whose
parts exist in the job, and one sentence for each invalid parameter: a page shows it with the nearest valid state; a
data request is rejected with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import polars as pl

from tracekit.analysis.numeric.arrays import Ints
from tracekit.base.text import short
from tracekit.dashboards.figures.lanes import LANE_OP
from tracekit.dashboards.figures.spans import Line, Replay, StepOps, Window
from tracekit.dashboards.figures.worker_map import WorkerMap, blocks_that_fit
from tracekit.trace.model import OpKind, Worker

if TYPE_CHECKING:
    from tracekit.dashboards.browser.data.queries import Results

#: Up to this many workers, all streams are drawn; above it only computes, unless the address names the streams.
FEW_WORKERS = 4
_RANGES = re.compile(r"\d{1,9}(-\d{1,9})?([ ,]+\d{1,9}(-\d{1,9})?)*")
_WORKERS = re.compile(r"\d{1,9},\d{1,9}( +\d{1,9},\d{1,9})*")
#: Most rows that stay on top while the others scroll.
MOST_PINNED = 8
_MOST_TEXT, _LONGEST_FIND = 2000, 100
_Value = TypeVar("_Value")
_Choice = TypeVar("_Choice", bound=StrEnum)

_WORKER = re.compile(r"(?:worker\s*)?\(?\s*([0-9]{1,7})\s*,\s*([0-9]{1,7})\s*\)?", re.IGNORECASE)
_RANK = re.compile(r"(?:rank\s*)?([0-9]{1,9})", re.IGNORECASE)
_RANGE = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7}))?")
_NUMBER = re.compile(r"-?[0-9]{1,15}")


class DrawnReplays(StrEnum):
    """The replays to draw."""

    RECORDED = "recorded"
    ORIGINAL = "original"
    IDEAL = "ideal"
    BOTH = "both"

    @property
    def replays(self) -> tuple[Replay, ...]:
        """The replays from top to bottom."""
        return (Replay.RECORDED, Replay.IDEAL) if self is DrawnReplays.BOTH else (Replay(self.value),)


class Streams(StrEnum):
    """The streams of a worker to draw."""

    COMPUTE = "compute"
    ALL = "all"


class Order(StrEnum):
    """The order of workers: by DP rank and stage, or the slowest worker first."""

    RANK = "rank"
    SLOWEST = "slowest"


class Grouping(StrEnum):
    """The content of a row: a worker, or the pooled workers of a host or of a stage."""

    WORKER = "worker"
    HOST = "host"
    STAGE = "stage"


@dataclass(frozen=True, slots=True)
class OpName:
    """Identity of an op within a step; `str()` gives its form in an address."""

    worker: Worker
    kind: str
    seq: int

    def __str__(self) -> str:
        return f"{self.worker.dp_rank},{self.worker.pp_rank},{self.kind},{self.seq}"


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a timeline, top to bottom: pinned workers, then groups, each followed by its workers if it is open.

    `row`, ascending, and `worker`, an index in `StepOps`: a row of a group has several workers. `group`: the name of
    the group by row, empty for a worker of its own.
    """

    row: Ints
    worker: Ints
    group: list[str]
    pinned: int

    def of_workers(self, workers: int) -> Ints:
        """The row of each worker of the step; -1 if it is not shown. Its own row counts before that of its group."""
        row_of = np.full(workers, -1)
        row_of[self.worker] = self.row
        return row_of

    def leaders(self) -> Ints:
        """The first worker of each row."""
        return self.worker[np.searchsorted(self.row, np.arange(len(self.group)))]

    def part(self, first: int, last: int) -> tuple[Ints, Ints]:
        """The pinned rows and those from `first` to before `last`: their workers, and the row of each from 0 on."""
        visible = (self.row < self.pinned) | (self.row >= first) & (self.row < last)
        return self.worker[visible], np.unique(self.row[visible], return_inverse=True)[1]


@dataclass(frozen=True, slots=True)
class TimelineState:
    """State of a timeline. `workers`, `stages`, `dp_ranks`: filters as typed, empty for all. `from_ms`, `to_ms`: window
    from the start of the step, None for all of it. `top`: the worker at the top. `op`: the op in the side panel.
    `find`: words in the names of ops. `pinned`, `opened`: workers whose rows stay on top, and whose groups are open.
    `critical`: with the critical path. `range_ms`: the range whose sums are shown.
    """

    step: int
    view: DrawnReplays
    streams: Streams
    order: Order
    workers: str = ""
    stages: str = ""
    dp_ranks: str = ""
    from_ms: float | None = None
    to_ms: float | None = None
    top: Worker | None = None
    op: OpName | None = None
    critical: bool = False
    group: Grouping = Grouping.WORKER
    find: str = ""
    pinned: str = ""
    opened: str = ""
    range_ms: tuple[float, float] | None = None

    def lines(self, ops: StepOps) -> tuple[Line, ...]:
        """The tracks of every worker."""
        streams = [name for name in ops.streams() if self.streams is Streams.ALL or name == "compute"]
        return tuple(Line(replay, stream) for stream in streams for replay in self.view.replays)

    def matching(self, dp_rank: Ints, pp_rank: Ints) -> Ints:
        """Positions of the workers that pass the filters, among those of these ranks."""
        passed = np.ones(len(dp_rank), np.bool_)
        for text, values in ((self.dp_ranks, dp_rank), (self.stages, pp_rank)):
            if text:
                passed &= np.any([(values >= low) & (values <= high) for low, high in _ranges(text)], axis=0)
        if self.workers:
            passed &= np.any([(dp_rank == dp) & (pp_rank == pp) for dp, pp in _cells(self.workers)], axis=0)
        return np.flatnonzero(passed)

    def rows(self, ops: StepOps, workers: Ints, hosts: list[str]) -> Rows:
        """The rows of these workers, in their order. `hosts`: the host of each, empty where unknown."""
        cell = {(int(ops.dp_rank[number]), int(ops.pp_rank[number])): int(number) for number in workers}
        entries = [("", [cell[place]]) for place in _cells(self.pinned) if place in cell]
        pinned = len(entries)
        open_rows = {cell[place] for place in _cells(self.opened) if place in cell}
        groups: dict[str, list[int]] = {}
        for number, host in zip(workers.tolist(), hosts, strict=True):
            name = f"stage {ops.pp_rank[number]}" if self.group is Grouping.STAGE else host or "host unknown"
            groups.setdefault(name if self.group is not Grouping.WORKER else "", []).append(number)
        for name, members in groups.items():
            entries += [(name, members)] if name else []
            entries += [("", [number]) for number in members] if not name or open_rows.intersection(members) else []
        sizes = [len(members) for _, members in entries]
        worker = np.array([number for _, members in entries for number in members], np.int64)
        return Rows(np.repeat(np.arange(len(entries)), sizes), worker, [name for name, _ in entries], pinned)

    def ordered(self, ops: StepOps, by_worker: pl.DataFrame) -> Ints:
        """Positions in `ops` of the workers to show, top to bottom. `by_worker`: the table of the report."""
        chosen = self.matching(ops.dp_rank, ops.pp_rank)
        if self.order is Order.RANK or not len(chosen):
            return chosen
        ranks, stages = by_worker["dp_rank"].to_numpy(), by_worker["pp_rank"].to_numpy()
        slowdown = np.ones((max(ops.dp_rank.max(), ranks.max()) + 1, max(ops.pp_rank.max(), stages.max()) + 1))
        slowdown[ranks, stages] = by_worker["slowdown"].to_numpy()
        slowdowns = slowdown[ops.dp_rank[chosen], ops.pp_rank[chosen]]
        return chosen[np.lexsort((ops.pp_rank[chosen], ops.dp_rank[chosen], -slowdowns))]

    def window(self, columns: int) -> Window | None:
        """The shown part of the step; None for all of it."""
        if self.from_ms is None or self.to_ms is None:
            return None
        return Window(self.from_ms / 1e3, self.to_ms / 1e3, columns)


@dataclass(frozen=True, slots=True)
class Read:
    """A state, and remarks on the invalid parts of the address."""

    state: TimelineState
    remarks: tuple[str, ...]


def state_of(results: Results, job: str, args: Mapping[str, str]) -> Read:
    """`read_state` for a stored job; one without workers has its ranks in their place."""
    args = {**args, **results.stored(job).kind.timeline.fixed}
    return read_state(args, results.table(job, "by_step"), results.by_worker(job))


def read_state(args: Mapping[str, str], steps: pl.DataFrame, by_worker: pl.DataFrame) -> Read:
    """Parse the state in `args`. `steps`, `by_worker`: the tables `by_step` and `by_worker` of the report."""
    reader = _AddressReader(args)
    dp_rank, pp_rank = by_worker["dp_rank"].to_numpy(), by_worker["pp_rank"].to_numpy()
    slowest_step = int(steps["step"][int(steps["recorded_s"].arg_max() or 0)])
    recorded = np.sort(steps["step"].to_numpy())
    step = reader.read("step", _integer, slowest_step, "a number")
    if step not in recorded:
        near = int(recorded[np.argmin(np.abs(recorded.astype(np.int64) - step))])
        reader.remark(
            f"step {step} is not in this job, which has {recorded[0]} to {recorded[-1]}; the nearest is {near}"
        )
        step = near
    state = TimelineState(
        step=step,
        view=reader.choice("view", DrawnReplays, DrawnReplays.BOTH),
        streams=reader.choice("streams", Streams, Streams.ALL),
        order=reader.choice("order", Order, Order.SLOWEST),
        workers=reader.read("worker", _matching(_WORKERS), "", "DP,PP such as 3,1"),
        stages=reader.read("stage", _matching(_RANGES), "", "numbers or ranges such as 0-3 7"),
        dp_ranks=reader.read("dp_rank", _matching(_RANGES), "", "numbers or ranges such as 0-3 7"),
        from_ms=reader.read("from", _milliseconds, None, "milliseconds"),
        to_ms=reader.read("to", _milliseconds, None, "milliseconds"),
        top=reader.read("at", _worker, None, "DP,PP such as 3,1"),
        critical=reader.read("critical", {"no": False, "yes": True}.get, False, "one of no, yes"),
        group=reader.choice("group", Grouping, Grouping.WORKER),
        find=reader.read("find", _short_text, "", "words in the name of an op"),
        pinned=reader.read("pin", _pins, "", f"DP,PP such as 3,1, {MOST_PINNED} at most"),
        opened=reader.read("open", _matching(_WORKERS), "", "DP,PP such as 3,1"),
        range_ms=reader.read("range", _range, None, "milliseconds such as 200-400"),
        op=reader.read("op", _op_name, None, "DP,PP,KIND,SEQ such as 3,1,forward-compute,0"),
    )
    return Read(*_validated(state, reader, dp_rank, pp_rank))


def _validated(
    state: TimelineState, reader: _AddressReader, dp_rank: Ints, pp_rank: Ints
) -> tuple[TimelineState, tuple[str, ...]]:
    """Drop an invalid window and filters that match no worker; choose the default streams."""
    changes: dict[str, Any] = {}
    if (state.from_ms is None) != (state.to_ms is None):
        reader.remark("the window needs both from= and to=; shown is the whole step")
        changes = {"from_ms": None, "to_ms": None}
    elif state.from_ms is not None and state.to_ms is not None and state.to_ms - state.from_ms < 1e-3:
        reader.remark("the window ends before it begins, or is below 1 us; shown is the whole step")
        changes = {"from_ms": None, "to_ms": None}
    if not len(state.matching(dp_rank, pp_rank)):
        reader.remark(
            f"no worker matches the filter; the job has DP ranks {dp_rank.min()}-{dp_rank.max()} and stages"
            f" {pp_rank.min()}-{pp_rank.max()}; shown are all workers"
        )
        changes |= {"workers": "", "stages": "", "dp_ranks": ""}
    workers = set(zip(dp_rank.tolist(), pp_rank.tolist(), strict=True))
    for name, field, text in (("pin", "pinned", state.pinned), ("open", "opened", state.opened)):
        for cell in (cell for cell in text.split() if not workers.issuperset(_cells(cell))):
            reader.remark(f"{name}={cell} is no worker of this job; it is left out")
        changes[field] = " ".join(cell for cell in text.split() if workers.issuperset(_cells(cell)))
    settled = replace(state, **changes)
    if "streams" not in reader.args and len(settled.matching(dp_rank, pp_rank)) > FEW_WORKERS:
        settled = replace(settled, streams=Streams.COMPUTE)
    return settled, tuple(reader.remarks)


class _AddressReader:
    """Reads values from an address and collects remarks on invalid ones."""

    def __init__(self, args: Mapping[str, str]) -> None:
        self.args = args
        self.remarks: list[str] = []

    def remark(self, text: str) -> None:
        self.remarks.append(text)

    def read(self, name: str, parse: Callable[[str], _Value | None], default: _Value, expected: str) -> _Value:
        """Return the parsed value of that name, or the default with a remark if it is invalid."""
        text = self.args.get(name, "").strip()
        if not text:
            return default
        value = parse(text) if len(text) <= _MOST_TEXT else None
        if value is None:
            self.remark(f"{name}={text!r:.40} is not {expected}; it is left out")
            return default
        return value

    def choice(self, name: str, choices: type[_Choice], default: _Choice) -> _Choice:
        """Parse a member of a closed set."""
        return self.read(
            name, lambda text: choices(text) if text in set(choices) else None, default, "one of " + ", ".join(choices)
        )


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


def _milliseconds(text: str) -> float | None:
    """Milliseconds within ten days of the start of the step."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and abs(value) < 1e9 else None


def _matching(pattern: re.Pattern[str]) -> Callable[[str], str | None]:
    return lambda text: text if pattern.fullmatch(text) and text.isascii() else None


def _short_text(text: str) -> str | None:
    return text if len(text) <= _LONGEST_FIND else None


def _pins(text: str) -> str | None:
    return text if _WORKERS.fullmatch(text) and text.isascii() and len(text.split()) <= MOST_PINNED else None


def _range(text: str) -> tuple[float, float] | None:
    """Two times in milliseconds, the second after the first."""
    match = re.fullmatch(r"(-?[0-9.]{1,20})-(-?[0-9.]{1,20})", text)
    first, last = map(_milliseconds, match.groups()) if match else (None, None)
    return None if first is None or last is None or first >= last else (first, last)


def _cells(text: str) -> list[tuple[int, int]]:
    """Parse `1,2 3,0` into DP ranks and stages."""
    return [(int(dp), int(pp)) for dp, pp in (cell.split(",") for cell in text.split())]


def _worker(text: str) -> Worker | None:
    match = re.fullmatch(r"([0-9]{1,9}),([0-9]{1,9})", text)
    return Worker(int(match[1]), int(match[2])) if match else None


def _op_name(text: str) -> OpName | None:
    match = re.fullmatch(r"([0-9]{1,9}),([0-9]{1,9}),([a-z-]{1,40}),([0-9]{1,9})", text)
    if not match or match[3] not in {LANE_OP, *OpKind}:
        return None
    return OpName(Worker(int(match[1]), int(match[2])), match[3], int(match[4]))


def _ranges(text: str) -> list[tuple[int, int]]:
    """Parse `0-3 7` into lowest and highest numbers."""
    parts = [part.partition("-") for part in re.split("[ ,]+", text)]
    return [(int(low), int(high) if dash else int(low)) for low, dash, high in parts]


@dataclass(frozen=True, slots=True)
class Box:
    """Several workers: those of some DP ranks and stages, the first and the last of each as text, such as `1-3`."""

    dp_ranks: str
    stages: str

    def cells(self, worker_map: WorkerMap) -> Ints:
        """The flat cell numbers of the workers of the map in it; none if the text is no range."""
        ranges = [_RANGE.fullmatch(text) for text in (self.dp_ranks, self.stages)]
        (rows, columns) = (
            np.zeros(len(values), np.bool_)
            if match is None
            else (values >= int(match[1])) & (values <= int(match[2] or match[1]))
            for match, values in zip(ranges, (worker_map.dp_ranks, np.arange(worker_map.stages)), strict=True)
        )
        return np.flatnonzero(rows[:, None] & columns)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The view of a job: the position of a step (None: all steps), the cell of a worker (None: none chosen), a host,
    several workers. `said`: remarks on invalid parts of the address.
    """

    position: int | None = None
    cell: int | None = None
    host: str | None = None
    box: Box | None = None
    said: tuple[str, ...] = ()


def read_view(worker_map: WorkerMap, state: Mapping[str, Any]) -> WorkerView:
    """Parse the view in `state`, as of `address`; invalid parts are dropped or moved to the nearest valid value, with a
    remark.
    """
    view = WorkerView()
    step, worker, host, dp_rank, stage = (state.get(name) for name in ("step", "worker", "host", "dp_rank", "stage"))
    if step is not None and step != "":
        view = choose_step(worker_map, str(step), view)
    if worker:
        view = choose_worker(worker_map, worker, view)
    if host:
        is_host = host in worker_map.hosts
        view = replace(view, host=host) if is_host else _warned(view, f"No host {short(host)!r} in this job.")
    if dp_rank or stage:
        box = Box(dp_rank or "", stage or "")
        words = f"No worker has DP rank {short(box.dp_ranks)!r} and stage {short(box.stages)!r}."
        view = replace(view, box=box) if len(box.cells(worker_map)) else _warned(view, words)
    return view


def choose_box(worker_map: WorkerMap, columns: tuple[int, int], rows: tuple[int, int], view: WorkerView) -> WorkerView:
    """Return `view` with the workers between these blocks of the drawn map, both ends included."""
    down, across = blocks_that_fit(*worker_map.slowdown.shape)
    ends = [[low * size, (high + 1) * size - 1] for (low, high), size in ((rows, down), (columns, across))]
    (top, bottom), (low_stage, high_stage) = np.clip(
        ends, 0, [[len(worker_map.dp_ranks) - 1], [worker_map.stages - 1]]
    ).tolist()
    return replace(
        view, box=Box(f"{worker_map.dp_ranks[top]}-{worker_map.dp_ranks[bottom]}", f"{low_stage}-{high_stage}")
    )


def choose_step(worker_map: WorkerMap, step: str, view: WorkerView) -> WorkerView:
    """Return `view` at the analysed step next to `step`, with a remark if that is another one."""
    if not _NUMBER.fullmatch(step):
        return _warned(view, f"{short(step)!r} is not a step number: all steps are shown.")
    position = int(np.abs(worker_map.steps - int(step)).argmin())
    nearest = int(worker_map.steps[position])
    view = replace(view, position=position)
    return view if nearest == int(step) else _warned(view, f"Step {step} was not analysed: this is step {nearest}.")


def choose_worker(worker_map: WorkerMap, worker: str, view: WorkerView) -> WorkerView:
    """Return `view` with the worker that the user typed, or with a remark if it is invalid."""
    if rank := _RANK.fullmatch(worker.strip()):
        cell, missing = worker_map.cell_of_rank(int(rank[1])), f"No rank {rank[1]} was"
    elif place := _WORKER.fullmatch(worker.strip()):
        chosen = Worker(int(place[1]), int(place[2]))
        cell, missing = worker_map.cell(chosen), f"The worker at {chosen.coordinates} was not"
    else:
        return _warned(view, f"{short(worker)!r} is no rank: write its number, or DP rank and stage, such as 1,2.")
    return _warned(view, f"{missing} analysed in this job.") if cell is None else replace(view, cell=cell)


def _warned(view: WorkerView, text: str) -> WorkerView:
    return replace(view, said=(*view.said, text))


def comma(worker: Worker) -> str:
    """Format a worker as addresses and selections do: `1,2`."""
    return f"{worker.dp_rank},{worker.pp_rank}"


def address(worker_map: WorkerMap, view: WorkerView) -> dict[str, Any]:
    """Return the view as address text."""
    return {
        "step": None if view.position is None else int(worker_map.steps[view.position]),
        "worker": None if view.cell is None else comma(worker_map.worker(view.cell)),
        "host": view.host,
        "dp_rank": view.box and view.box.dp_ranks,
        "stage": view.box and view.box.stages,
    }
