"""The tables and pictures of a report, and their rows: structs as plain data, JSON without nan, polars frames.

In: figures of an attribution, a critical path or a recording. Out: plain data that every renderer draws in its own
way. A key that a source lacks is absent (`Maybe`); an undefined figure is null (`Number`). A picture says what is
drawn; colours and places on paper are the renderer's. Colours have a number, the `tone`: 0 to 2 for work, 3 to 6 for
time that is lost, the more the worse but for 6, which lies between 4 and 5.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import polars as pl
from msgspec import UNSET, Struct, UnsetType

from tracekit.analysis.replay import Method
from tracekit.base.limits import Amount, AtMostOne, Count, Finite, Number, Ordinal, Seconds, Slowdown
from tracekit.trace.facts import TraceCoverage
from tracekit.trace.model import Layout, OpKind, Worker

if TYPE_CHECKING:
    from tracekit.base.atomic_write import Kind

#: The numbers of colours.
TONES = range(7)

T = TypeVar("T")
Maybe = Union[T, UnsetType]  # noqa: UP007
#: Types of JSON that are columns of a table.
_COLUMNS: dict[Any, Any] = {str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean}
#: A cell that begins with one of these is a formula to a spreadsheet (OWASP, CSV injection).
_FORMULAS = r"^[=+\-@\t\r]"


class Table(Struct, frozen=True, tag="table"):
    """A table with a heading. The first column names things, the others are figures."""

    title: str  #: heading
    heads: tuple[str, ...]  #: names of the columns
    rows: tuple[tuple[str, ...], ...]  #: the cells of each row
    note: str | None = None  #: a remark below the table

    @property
    def is_whole(self) -> bool:
        """Whether every row has a cell for each head."""
        return all(len(row) == len(self.heads) for row in self.rows)


class ShareGrid(Struct, frozen=True, tag="grid"):
    """How much more than the mean each of many has."""

    title: str  #: of the picture
    down: str  #: what a row is
    across: str  #: what a column is
    rows: list[str]  #: their names
    columns: list[str]  #: their names
    values: list[list[Finite]]  #: by row and column, a share of the mean: 0.2 is 20 % more
    unit: str  #: what the shares are of

    @property
    def is_whole(self) -> bool:
        """Whether there is a value for each row and column."""
        return len(self.values) == len(self.rows) and all(len(row) == len(self.columns) for row in self.values)


class SeriesLine(Struct, frozen=True):
    """The values of one line, or of one part of bars; None where there is none."""

    name: str  #: of the line
    tone: Count  #: its colour: 0 to 2 for work, 3 to 6 for lost time
    values: list[Number]  #: at each place, null where there is none


class UsualBand(Struct, frozen=True):
    """The low and the high end of what is usual at each place, and what it is."""

    name: str  #: what it is
    low: list[Number]  #: its low end at each place
    high: list[Number]  #: its high end


class Series(Struct, frozen=True, tag="series"):
    """Values over an axis, as lines or as bars of parts."""

    title: str  #: of the picture
    axis: str  #: what the places are, with their unit
    unit: str  #: of the values
    places: list[Finite]  #: on the axis
    lines: list[SeriesLine]  #: a line each, or the parts of bars
    stacked: bool = False  #: whether they are parts of bars
    usual: UsualBand | None = None  #: what is usual at each place
    marks: list[Finite] = []  #: places that are marked
    note: str | None = None  #: a remark below

    @property
    def is_whole(self) -> bool:
        """Whether every line has a value, or none, for each place, and a tone."""
        rows = [line.values for line in self.lines] + ([self.usual.low, self.usual.high] if self.usual else [])
        fit = bool(self.places) and all(len(row) == len(self.places) for row in rows)
        return fit and all(line.tone in TONES for line in self.lines)


class TimelineBar(Struct, frozen=True):
    """A bar in a row of a timeline, seconds."""

    row: Count  #: its row, from 0
    what: Count  #: its place in the legend, from 0
    start_s: Finite  #: its beginning
    end_s: Finite  #: its end
    words: str  #: what it is and how long it takes


class LegendEntry(Struct, frozen=True):
    """What bars of one colour are."""

    name: str  #: what it is
    tone: Count  #: its colour, as of a `SeriesLine`


class BarTimeline(Struct, frozen=True, tag="timeline"):
    """Bars in rows over time."""

    title: str  #: of the picture
    axis: str  #: since when, in words
    rows: list[str]  #: their names, empty for none; a row with a name and no bars is a heading
    legend: list[LegendEntry]  #: what bars can be
    bars: list[TimelineBar]  #: in any order
    notes: list[str]  #: remarks below

    @property
    def is_whole(self) -> bool:
        """Whether every bar has a row and an entry of the legend, and these a tone."""
        rows, entries = range(len(self.rows)), range(len(self.legend))
        fit = all(bar.row in rows and bar.what in entries for bar in self.bars)
        return fit and all(entry.tone in TONES for entry in self.legend)


Picture = ShareGrid | Series | BarTimeline
Section = Table | Picture


class OfLabel(Struct, frozen=True):
    """What the ops of one value of a label cost."""

    labels: str  #: the label that was asked for, or several joined by commas
    value: str  #: its value, or theirs joined by commas
    ops: Count  #: how many ops have it
    slowdown: Slowdown | None  #: S with these ops alone as recorded
    slowdown_error: Amount | None  #: half the width of its 95 % interval
    added_s: Finite  #: T(ideal, these ops as recorded) - T(ideal)
    saved_s: Finite  #: T(original) minus T(original with these ops idealised)


class OnPath(Struct, frozen=True, kw_only=True):
    """Time of ops of one kind, of comparable ops, of a rank or of a worker on the critical path."""

    #: in `critical_path`: op kind as in `by_kind`; null: launch delays, while nothing on the path ran
    kind: Maybe[str | None] = UNSET
    #: in `critical_path` of op traces and recordings, in place of `kind`: class of comparable ops
    peer: Maybe[str | None] = UNSET
    rank: Maybe[Ordinal] = UNSET  #: in `critical_ranks`
    dp_rank: Maybe[Ordinal] = UNSET  #: in `critical_workers`
    pp_rank: Maybe[Ordinal] = UNSET  #: in `critical_workers`
    recorded_s: Finite  #: mean seconds a step on the path of the job as recorded
    original_s: Maybe[Finite] = UNSET  #: pipelines: the same without launch delays
    #: pipelines: the same if every op takes its ideal duration; not in `critical_workers`
    ideal_s: Maybe[Finite] = UNSET


class Contribution(Struct, frozen=True, kw_only=True):
    """What ops of one kind, a pipeline stage or a data-parallel rank cost."""

    #: op kind, in `by_kind`; in pipelines, send and recv of a direction count as `forward-pp-comm`, `backward-pp-comm`
    kind: Maybe[str] = UNSET
    pp_rank: Maybe[Ordinal] = UNSET  #: pipeline stage, in `by_pp_rank`
    dp_rank: Maybe[Ordinal] = UNSET  #: data-parallel rank, in `by_dp_rank`
    ops: Maybe[Count] = UNSET  #: op traces and recordings: number of ops
    slowdown: Slowdown | None  #: S with these ops alone as recorded
    slowdown_error: Amount | None  #: half the width of its 95 % interval
    waste: Maybe[AtMostOne | None] = UNSET  #: pipelines: 1 - 1/S of that
    #: pipelines: T(original with the launch delays of these ops) / T(original); null if that takes too many replays
    launch_delay_slowdown: Maybe[Slowdown | None] = UNSET
    #: pipelines: T(original with these ops ideal); null if that takes too many replays
    fixed_step_time_s: Maybe[Seconds | None] = UNSET
    saved_s: Number  #: T(original) minus T(original with these ops ideal); null if that takes too many replays


class OfWorker(Struct, frozen=True):
    """What a worker costs."""

    dp_rank: Ordinal  #: data-parallel rank
    pp_rank: Ordinal  #: pipeline stage
    rank: Ordinal | None  #: global rank that recorded the worker; null if none did
    host: str | None  #: its host, where the trace says so
    slowdown: Slowdown  #: exact S with this worker alone as recorded
    slowdown_error: Amount | None  #: half the width of its 95 % interval
    slowdown_approx: Slowdown  #: the approximation min(S of its DP rank, S of its stage) of the paper

    @property
    def worker(self) -> Worker:
        """The worker."""
        return Worker(self.dp_rank, self.pp_rank)


class OfStep(Struct, frozen=True):
    """One step."""

    step: Ordinal  #: step number
    slowdown: Amount | None  #: original / ideal of this step
    recorded_s: Seconds  #: as recorded
    original_s: Seconds  #: replayed without launch delays
    ideal_s: Seconds  #: replayed with every op at its ideal duration
    #: of the verdict's loss, in this step; `verdict.lost_s` in the mean; null for a step from which no causes follow
    lost_s: Number
    tokens: Maybe[Amount | None] = UNSET  #: of all data-parallel replicas, if the loop logs any; null in a step without
    loss: Maybe[float | None] = UNSET  #: the same of the loss: the mean over the ranks that log one

    @property
    def lost_share(self) -> float:
        """The share of its time that it loses; 0 if that is unknown."""
        return (self.lost_s or 0.0) / self.recorded_s if self.recorded_s else 0.0


class MarkedStep(Struct, frozen=True):
    """A step that the profiler marked: from the end of the one before to its own, on all ranks."""

    step: Ordinal  #: step number
    recorded_s: Seconds  #: from the end of the step before to its own, on all ranks


class Correlation(Struct, frozen=True):
    """How forwards and backwards of a stage go together."""

    pp_rank: Ordinal  #: pipeline stage
    #: correlation of forward and backward durations of the same microbatch; null where they do not vary
    r: AtMostOne | None


class OfRank(Struct, frozen=True):
    """One rank, and what it costs."""

    rank: Ordinal  #: the rank
    slowdown: Slowdown | None  #: S with this rank alone as recorded; null if unknown
    slowdown_error: Amount | None  #: half the width of its 95 % interval
    host: Maybe[str | None] = UNSET  #: recordings, like all that follow: its node, null if unknown
    span_s: Maybe[Seconds] = UNSET  #: from its first GPU op to the end of its last
    compute_s: Maybe[Seconds] = UNSET  #: while a kernel computed
    communication_s: Maybe[Seconds] = UNSET  #: while a kernel communicated or waited to
    exposed_communication_s: Maybe[Seconds] = UNSET  #: of that, while none computed
    memory_s: Maybe[Seconds] = UNSET  #: copies and fills
    idle_s: Maybe[Seconds] = UNSET  #: while nothing ran
    wait_s: Maybe[Seconds] = UNSET  #: waiting for the last rank of its collectives
    sole_delay_s: Maybe[Seconds] = UNSET  #: how much later than the last but one it arrived when it was the last


class GroupMatches(Struct, frozen=True):
    """One process group."""

    group: str  #: its name
    ranks: tuple[Ordinal, ...]  #: its ranks
    matched: Count  #: instances
    unmatched: Mapping[Ordinal, Count]  #: kernels without partners, by rank
    shifts: Mapping[int, int]  #: by how many kernels a rank was shifted, by rank
    inside: Count = 0  #: of the kernels without partners, those between matched ones
    transfers: bool = False  #: whether these are transfers from one rank to another


class Collectives(Struct, frozen=True):
    """Which kernels belong to the same collective."""

    matched: Count  #: instances found on every recorded rank of their group
    unmatched: Count  #: kernels without partners
    groups: list[GroupMatches] = msgspec.field(name="by_group")  #: process groups


class WaitFor(Struct, frozen=True):
    """How long a rank waited for another one."""

    group: str  #: process group
    rank: Ordinal  #: the rank that waited
    for_rank: Ordinal  #: the rank it waited for
    wait_s: Seconds  #: seconds in all


class Kernels(Struct, frozen=True):
    """The kernels of one class or of one name."""

    ops: Count  #: number of kernels
    seconds: Seconds  #: their time
    kernel_class: Maybe[str] = UNSET  #: in `kernel_classes`
    name: Maybe[str] = UNSET  #: in `unknown_kernels`


class Outline(Struct, frozen=True):
    """Which job."""

    name: str  #: name of the job
    #: `pipeline`, `ops` (an op trace), `recording` (of GPUs) or `rl` (post-training)
    source: Literal["pipeline", "ops", "recording", "rl"]
    whole: Literal["step", "recording"]  #: what times are of: the mean `step`, or the whole `recording`
    sizes: str  #: layout or ranks, steps and ops, in words
    gpus: Count | None  #: of the job; null for post-training without `rl --gpus`, and with it all GPU-hours
    #: steps replayed; of a recording, marked steps; of post-training, all steps, of which the first two of recorded
    #: times warm up
    steps: Count
    layout: Maybe[Layout] = UNSET  #: pipelines: parallel sizes
    ops: Maybe[Count] = UNSET  #: pipelines and op traces: ops in the trace
    #: pipelines analysed in batches of steps: causes, fixes and answers follow from so many steps, if not from all
    evidence_steps: Maybe[Count] = UNSET
    ranks: Maybe[Count] = UNSET  #: op traces and recordings: ranks compared
    world_size: Maybe[Count | None] = UNSET  #: recordings: GPUs of the job, null if unknown
    gpu: Maybe[str | None] = UNSET  #: recordings: model of the GPUs, null if unknown
    gpu_ops: Maybe[Count] = UNSET  #: recordings: number of GPU ops
    gpu_ops_without_launch: Maybe[Count] = UNSET  #: recordings: GPU ops launched outside the recording
    host_calls: Maybe[Count] = UNSET  #: recordings: number of calls of the runtime
    #: post-training: who wrote the log: `verl`, `openrlhf`, `slime`, `nemo-rl`, `skyrl`, `open-instruct`, or
    #: `trajectories`
    format: Maybe[str] = UNSET
    trajectories: Maybe[Count] = UNSET  #: post-training: their number
    engines: Maybe[Count] = UNSET  #: post-training: their number
    #: post-training: `trajectories`, or `phases` if only those have times
    basis: Maybe[Literal["trajectories", "phases"]] = UNSET


class Times(Struct, frozen=True):
    """Seconds of the mean step."""

    recorded: Seconds  #: as recorded
    original: Seconds  #: replayed without launch delays
    ideal: Seconds  #: replayed with every op at its ideal duration
    with_delays: Maybe[Seconds] = UNSET  #: pipelines: replayed with launch delays


class MethodUsed(Struct, frozen=True):
    """The rules of the analysis."""

    name: Method  #: `tracekit`, or `published` with `--method published`
    published_slowdown: Slowdown | None  #: S by the published method, null where it cannot differ
    differs_because: list[str]  #: why it can differ


class ClockOfRank(Struct, frozen=True):
    """The clock of a rank in a recording."""

    rank: Ordinal  #: the rank
    ahead_s: Finite  #: seconds its clock was ahead of the common time
    uncertainty_s: Seconds | None  #: one standard error
    collectives: Count  #: collectives behind the figure; 0: none, so the clock is trusted


class CoverageGap(Struct, frozen=True):
    """Ops of collectives that a worker lacks although its peers recorded them."""

    kind: OpKind  #: op kind
    dp_rank: Ordinal  #: data-parallel rank
    pp_rank: Ordinal  #: pipeline stage
    ops: Count  #: how many ops are missing
    steps: list[Ordinal]  #: in which steps


class Coverage(TraceCoverage, frozen=True):
    """How much of the job was traced."""

    #: ops of collectives that a worker lacks although its peers recorded them; reconstructed but for the published
    #: method
    gaps: list[CoverageGap]
    slowdown_as_recorded: Slowdown | None  #: S without reconstructing them, null where nothing was reconstructed
    #: S if collectives only waited for the DP ranks that are not in the trace, null where none is missing
    hidden_slowdown: Slowdown | None
    #: steps that DP ranks of the job lack, or whose recording was cut; all figures are those of the other steps
    left_out_steps: list[Ordinal]
    dropped: list[dict[str, int]]  #: DP ranks left out of a step because they lack a stage there
    inferred_transfers: bool  #: no transfer was recorded; each was inferred from the computes at its two ends


class WorkerClock(Struct, frozen=True):
    """How far a worker's clock was ahead."""

    dp_rank: Ordinal  #: data-parallel rank
    pp_rank: Ordinal  #: pipeline stage
    offset_s: Finite  #: seconds the clock was ahead, the mean over the trace
    error_s: Seconds  #: standard error of the offset
    drift: Finite  #: seconds the offset grew in a second
    jump_s: Finite  #: seconds the clock was set ahead in mid-trace, 0 where it was not
    jump_step: Ordinal | None  #: the first step after that

    @property
    def worker(self) -> Worker:
        """The worker."""
        return Worker(self.dp_rank, self.pp_rank)


class ClockReport(Struct, frozen=True):
    """Which clocks were off."""

    offsets: tuple[WorkerClock, ...]  #: workers whose clocks were off; all figures are without the offsets
    untied: str | None  #: whose clocks cannot be compared, because no op ends on several of them at the same time


def frame_of(records: Sequence[object], shape: type[Struct], but: Collection[str] = ()) -> pl.DataFrame:
    """One row for each thing, with the columns of `shape` that are text, numbers or truth values, `but` for these.

    A column that the first thing lacks is left out.
    """
    first = records[0] if records else None
    types = {field.name: _without_none(field.type) for field in msgspec.structs.fields(shape)}
    schema = {
        name: _COLUMNS[kind]
        for name, kind in types.items()
        if kind in _COLUMNS and name not in but and getattr(first, name, None) is not UNSET
    }
    return pl.DataFrame([{name: getattr(record, name) for name in schema} for record in records], schema)


def row_type(report: type[Struct], table: str) -> type[Struct]:
    """The type of the rows in a field of a report that is a list, if it is there."""
    form = next(field.type for field in msgspec.structs.fields(report) if field.name == table)
    rows = next(kind for kind in (form, *get_args(form)) if get_origin(kind) is list)
    row: type[Struct] = get_args(rows)[0]
    return row


def _without_none(form: Any) -> Any:
    """The type of a value that is there, whatever its range."""
    while get_origin(form) in {Union, UnionType, Annotated}:
        form = get_args(form)[0]
    return str if get_origin(form) is Literal else form


def plain(content: Any) -> dict[str, Any]:
    """Return structs, and what is in them, as JSON data; nan and infinities become None, because JSON has neither."""
    data: dict[str, Any] = json.loads(encoded(content))
    return data


def encoded(content: Any) -> bytes:
    """Structs, and the frames and numbers of numpy in them, as JSON; nan and infinities become null."""
    return msgspec.json.encode(content, enc_hook=_rows_or_number)


def _rows_or_number(value: Any) -> Any:
    return value.to_dicts() if isinstance(value, pl.DataFrame) else value.item()


def csv_kind(name: str, columns: Iterable[str]) -> Kind:
    """CSV files with these columns. `name`: as of `Kind`."""
    from tracekit.base.atomic_write import Kind, starting_with  # most reports are not written as CSV

    return Kind(name, starting_with(f"{','.join(columns)}\n".encode()))


def safe_csv(table: pl.DataFrame) -> str:
    """The table as CSV; text that would be taken for a formula begins with an apostrophe. Numbers stay as they are."""
    safe = table.with_columns(pl.col(pl.String).str.replace(_FORMULAS, "'$0"))
    return safe.rename({name: f"'{name}" for name in table.columns if name[:1] in "=+-@\t\r"}).write_csv()
