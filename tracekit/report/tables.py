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
from tracekit.base.quantities import Amount, AtMostOne, Count, Finite, Number, Ordinal, Seconds, Slowdown
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
    """A table with a heading. The first column names things, the others are figures; `note`: a remark below."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every row has a cell for each head."""
        return all(len(row) == len(self.heads) for row in self.rows)


class ShareGrid(Struct, frozen=True, tag="grid"):
    """How much more than the mean each of many has, as shares: `values`, [down, across]. `down`, `across`: what rows
    and columns are; `rows`, `columns`: their names. `unit`: what the values are shares of.
    """

    title: str
    down: str
    across: str
    rows: list[str]
    columns: list[str]
    values: list[list[Finite]]
    unit: str

    @property
    def is_whole(self) -> bool:
        """Whether there is a value for each row and column."""
        return len(self.values) == len(self.rows) and all(len(row) == len(self.columns) for row in self.values)


class SeriesLine(Struct, frozen=True):
    """The values of one line, or of one part of bars; None where there is none."""

    name: str
    tone: Count
    values: list[Number]


class UsualBand(Struct, frozen=True):
    """The low and the high end of what is usual at each place, and what it is."""

    name: str
    low: list[Number]
    high: list[Number]


class Series(Struct, frozen=True, tag="series"):
    """Values over `places` on an axis, in `unit`: the `lines`, or with `stacked` bars of these parts. `usual`: the band
    below them. `marks`: places that are marked, explained by the `note` below.
    """

    title: str
    axis: str
    unit: str
    places: list[Finite]
    lines: list[SeriesLine]
    stacked: bool = False
    usual: UsualBand | None = None
    marks: list[Finite] = []
    note: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every line has a value, or none, for each place, and a tone."""
        rows = [line.values for line in self.lines] + ([self.usual.low, self.usual.high] if self.usual else [])
        fit = bool(self.places) and all(len(row) == len(self.places) for row in rows)
        return fit and all(line.tone in TONES for line in self.lines)


class TimelineBar(Struct, frozen=True):
    """A bar in a row of a timeline, seconds; `what`: its place in the legend; `words`: for people who point at it."""

    row: Count
    what: Count
    start_s: Finite
    end_s: Finite
    words: str


class LegendEntry(Struct, frozen=True):
    """What bars of one colour are."""

    name: str
    tone: Count


class BarTimeline(Struct, frozen=True, tag="timeline"):
    """Bars in rows over time, which is `axis` in words. `rows`: their names, "" for none; a row with a name and no bars
    is a heading. `legend`: what bars can be; `notes`: remarks below.
    """

    title: str
    axis: str
    rows: list[str]
    legend: list[LegendEntry]
    bars: list[TimelineBar]
    notes: list[str]

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

    labels: str
    value: str
    ops: Count
    slowdown: Slowdown | None
    slowdown_error: Seconds | None
    added_s: Finite
    saved_s: Finite


class OnPath(Struct, frozen=True, kw_only=True):
    """Time of ops of one kind, of comparable ops, of a rank or of a worker on the critical path."""

    kind: Maybe[str | None] = UNSET
    peer: Maybe[str | None] = UNSET
    rank: Maybe[Ordinal] = UNSET
    dp_rank: Maybe[Ordinal] = UNSET
    pp_rank: Maybe[Ordinal] = UNSET
    recorded_s: Finite
    original_s: Maybe[Finite] = UNSET
    ideal_s: Maybe[Finite] = UNSET


class Contribution(Struct, frozen=True, kw_only=True):
    """What ops of one kind, a pipeline stage or a data-parallel rank cost."""

    kind: Maybe[str] = UNSET
    pp_rank: Maybe[Ordinal] = UNSET
    dp_rank: Maybe[Ordinal] = UNSET
    ops: Maybe[Count] = UNSET
    slowdown: Slowdown | None
    slowdown_error: Seconds | None
    waste: Maybe[AtMostOne | None] = UNSET
    launch_delay_slowdown: Maybe[Slowdown | None] = UNSET
    fixed_step_time_s: Maybe[Seconds | None] = UNSET
    saved_s: Number


class OfWorker(Struct, frozen=True):
    """What a worker costs."""

    dp_rank: Ordinal
    pp_rank: Ordinal
    rank: Ordinal | None
    host: str | None
    slowdown: Slowdown
    slowdown_error: Seconds | None
    slowdown_approx: Slowdown

    @property
    def worker(self) -> Worker:
        """The worker."""
        return Worker(self.dp_rank, self.pp_rank)


class OfStep(Struct, frozen=True):
    """One step."""

    step: Ordinal
    slowdown: Amount | None
    recorded_s: Seconds
    original_s: Seconds
    ideal_s: Seconds
    lost_s: Number
    tokens: Maybe[Amount | None] = UNSET
    loss: Maybe[float | None] = UNSET


class MarkedStep(Struct, frozen=True):
    """A step that the profiler marked: from the end of the one before to its own, on all ranks."""

    step: Ordinal
    recorded_s: Seconds


class Correlation(Struct, frozen=True):
    """How forwards and backwards of a stage go together."""

    pp_rank: Ordinal
    r: AtMostOne | None


class OfRank(Struct, frozen=True):
    """One rank, and what it costs."""

    rank: Ordinal
    slowdown: Slowdown | None
    slowdown_error: Seconds | None
    host: Maybe[str | None] = UNSET
    span_s: Maybe[Seconds] = UNSET
    compute_s: Maybe[Seconds] = UNSET
    communication_s: Maybe[Seconds] = UNSET
    exposed_communication_s: Maybe[Seconds] = UNSET
    memory_s: Maybe[Seconds] = UNSET
    idle_s: Maybe[Seconds] = UNSET
    wait_s: Maybe[Seconds] = UNSET
    sole_delay_s: Maybe[Seconds] = UNSET


class GroupMatches(Struct, frozen=True):
    """One process group: number of `matched` instances, `unmatched` kernels by rank, shifts by rank.

    `inside`: of the unmatched kernels, those between matched ones. `transfers`: whether these are transfers from one
    rank to another.
    """

    group: str
    ranks: tuple[Ordinal, ...]
    matched: Count
    unmatched: Mapping[Ordinal, Count]
    shifts: Mapping[int, int]
    inside: Count = 0
    transfers: bool = False


class Collectives(Struct, frozen=True):
    """Which kernels belong to the same collective."""

    matched: Count
    unmatched: Count
    groups: list[GroupMatches] = msgspec.field(name="by_group")


class WaitFor(Struct, frozen=True):
    """How long a rank waited for another one."""

    group: str
    rank: Ordinal
    for_rank: Ordinal
    wait_s: Seconds


class Kernels(Struct, frozen=True):
    """The kernels of one class or of one name."""

    ops: Count
    seconds: Seconds
    kernel_class: Maybe[str] = UNSET
    name: Maybe[str] = UNSET


class Outline(Struct, frozen=True):
    """Which job. `format`, `trajectories`, `engines`, `basis`: of a run of post-training."""

    name: str
    source: Literal["pipeline", "ops", "recording", "rl"]
    whole: Literal["step", "recording"]
    sizes: str
    gpus: Count | None
    steps: Count
    layout: Maybe[Layout] = UNSET
    ops: Maybe[Count] = UNSET
    evidence_steps: Maybe[Count] = UNSET
    ranks: Maybe[Count] = UNSET
    world_size: Maybe[Count | None] = UNSET
    gpu: Maybe[str | None] = UNSET
    gpu_ops: Maybe[Count] = UNSET
    gpu_ops_without_launch: Maybe[Count] = UNSET
    host_calls: Maybe[Count] = UNSET
    format: Maybe[str] = UNSET
    trajectories: Maybe[Count] = UNSET
    engines: Maybe[Count] = UNSET
    basis: Maybe[Literal["trajectories", "phases"]] = UNSET


class Times(Struct, frozen=True):
    """Seconds of the mean step."""

    recorded: Seconds
    original: Seconds
    ideal: Seconds
    with_delays: Maybe[Seconds] = UNSET


class MethodUsed(Struct, frozen=True):
    """The rules of the analysis."""

    name: Method
    published_slowdown: Slowdown | None
    differs_because: list[str]


class ClockOfRank(Struct, frozen=True):
    """The clock of a rank in a recording."""

    rank: Ordinal
    ahead_s: Finite
    uncertainty_s: Seconds | None
    collectives: Count


class CoverageGap(Struct, frozen=True):
    """Ops of collectives that a worker lacks although its peers recorded them."""

    kind: OpKind
    dp_rank: Ordinal
    pp_rank: Ordinal
    ops: Count
    steps: list[Ordinal]


class Coverage(Struct, frozen=True):
    """How much of the job was traced."""

    workers_expected: Count
    workers_traced: Count
    worker_steps_expected: Count
    worker_steps_traced: Count
    missing_workers: list[Worker]
    gaps: list[CoverageGap]
    slowdown_as_recorded: Slowdown | None
    hidden_slowdown: Slowdown | None
    left_out_steps: list[Ordinal]
    dropped: list[dict[str, int]]
    inferred_transfers: bool


class WorkerClock(Struct, frozen=True):
    """How far a worker's clock was ahead on average, seconds, with its standard error and its drift per second.

    `jump_s`, `jump_step`: by how much it was set ahead in mid-trace, and the first step after that, None if it was not.
    """

    dp_rank: Ordinal
    pp_rank: Ordinal
    offset_s: Finite
    error_s: Seconds
    drift: Finite
    jump_s: Finite
    jump_step: Ordinal | None

    @property
    def worker(self) -> Worker:
        """The worker."""
        return Worker(self.dp_rank, self.pp_rank)


class ClockReport(Struct, frozen=True):
    """Which clocks were off. `untied`: whose clocks could not be compared, None if all could be."""

    offsets: tuple[WorkerClock, ...]
    untied: str | None


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
