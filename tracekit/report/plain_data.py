"""The JSON object of a report: its shape, from which the JSON Schema is generated, and its content.

In: a `Report`. Out: plain data without nan. A key that a source lacks is absent (`Maybe`); an undefined figure is null
(`Number`). docs/report-schema.md explains the keys.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import polars as pl
from msgspec import UNSET, Struct, UnsetType

from tracekit.analysis.attribution import patterns
from tracekit.analysis.attribution.stalls import Stall
from tracekit.analysis.gpu.matching import GroupMatches
from tracekit.analysis.graph.op_graph import MissingMembers
from tracekit.analysis.graph.rules.posting import PostingRule
from tracekit.analysis.numeric.estimate import Estimate
from tracekit.analysis.replay.method import Method
from tracekit.analysis.rl.account import RlAccount
from tracekit.report.answer import Answer
from tracekit.report.bubbles import Bubbles
from tracekit.report.clocks import ClockReport
from tracekit.report.experts import Experts, Overlap
from tracekit.report.finding import Place, SeenOnce, Spent, Unit
from tracekit.report.gpu import GpuInReport
from tracekit.report.question import Question
from tracekit.report.report import REPORT_VERSION, Report
from tracekit.report.section import Table
from tracekit.report.verdict import LossKind
from tracekit.trace.facts import Lack
from tracekit.trace.model import Layout, OpKind, Worker

T = TypeVar("T")
S = TypeVar("S", bound=Struct)
Maybe = Union[T, UnsetType]  # noqa: UP007
Number = float | None
#: Types of JSON that are columns of a table.
_COLUMNS: dict[Any, Any] = {str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean}


class Job(Struct, frozen=True):
    """Which job."""

    name: str
    source: Literal["pipeline", "ops", "recording", "rl"]
    whole: Literal["step", "recording"]
    sizes: str
    gpus: int
    steps: int
    layout: Maybe[Layout] = UNSET
    ops: Maybe[int] = UNSET
    evidence_steps: Maybe[int] = UNSET
    ranks: Maybe[int] = UNSET
    world_size: Maybe[int | None] = UNSET
    gpu: Maybe[str | None] = UNSET
    gpu_ops: Maybe[int] = UNSET
    gpu_ops_without_launch: Maybe[int] = UNSET
    host_calls: Maybe[int] = UNSET


class Trust(Struct, frozen=True):
    """Whether to believe the report."""

    replay_error: Number
    discrepancy: Number
    unexplained: Number
    trustworthy: bool
    reasons: list[str]
    clamped_transfers: Maybe[int] = UNSET
    clamped_delays: Maybe[int] = UNSET
    notes: Maybe[list[str]] = UNSET
    start_gap_p99_s: Maybe[dict[str, Number]] = UNSET
    edges: Maybe[int] = UNSET
    inferred_edges: Maybe[int] = UNSET
    violations: Maybe[int] = UNSET
    host_ahead_of_gpu_s: Maybe[dict[int, float]] = UNSET


class Times(Struct, frozen=True):
    """Seconds of the mean step."""

    recorded: float
    original: float
    ideal: float


class Loss(Struct, frozen=True):
    """What one kind of loss costs."""

    kind: LossKind
    lost_s: float


class Parts(Struct, frozen=True):
    """What the loss that S measures consists of."""

    lost_s: float
    explained_s: float
    noise_s: float
    unexplained_s: float
    error_s: float


class CauseOfCulprit(Struct, frozen=True):
    """One cause on the rank that the others wait for."""

    cause: str
    saved_s: float
    evidence: str
    effect: str
    action: str


class RankToBlame(Struct, frozen=True):
    """The rank that the others wait for."""

    rank: int
    host: str | None
    saved_s: float
    sole_delay_s: Number
    waited_s: Number
    causes: list[CauseOfCulprit]


class Verdict(Struct, frozen=True):
    """What kind of loss the job has, and how much."""

    kind: LossKind
    label: str
    headline_s: float
    lost_s: float
    share: float
    lost_gpu_hours: float
    lost_gpu_hours_per_day: float
    sentence: str
    confidence: float | None
    losses: list[Loss]
    parts: Parts
    who: str | None
    cost: str | None
    action: str | None
    exposed_communication_s: Maybe[float] = UNSET
    culprit: Maybe[RankToBlame | None] = UNSET


class TimePattern(Struct, frozen=True):
    """How a slowdown runs over the steps."""

    shape: patterns.TimeShape
    statistic: Number
    needed: float
    since_step: int | None
    period: int | None
    slow_steps: list[int]


class SpacePattern(Struct, frozen=True):
    """How the slowdown is spread over the workers."""

    shape: patterns.SpaceShape
    workers: list[Worker]
    host: str | None
    stays: Number


class Patterns(Struct, frozen=True):
    """How the slowdown runs over steps and workers; null for jobs that are no pipelines."""

    time: TimePattern | None
    space: SpacePattern | None


class Figure(Struct, frozen=True):
    """A figure that supports a cause."""

    name: str
    value: Number
    needed: float
    unit: Unit
    words: str


class Finding(Struct, frozen=True):
    """Why the job is slow."""

    kind: str
    title: str
    where: Place
    where_text: str
    since_step: int | None
    when: str
    time: TimePattern | None
    signature: str
    effect: str
    evidence: list[Figure]
    confidence: float
    saved_s: float
    alone_s: float
    bound: bool
    saved_when_acting_s: float | None
    refuted_by: str
    next_check: str
    suggested_fix: str
    spent: Spent | None
    saves_step_s: Estimate | None
    once: SeenOnce | None


class Fix(Struct):
    """What to do, and what that saves."""

    kind: str
    title: str
    where: Place
    where_text: str
    new_step_s: float | None
    saved_s: float | None
    saved_gpu_hours_per_day: float | None
    error_s: float
    bound: bool
    withheld: str | None
    assumes: str | None
    cause: str | None
    confidence: float | None
    edit: str | None
    details: dict[str, Any]
    saves_step_s: Estimate | None


class OfLabel(Struct, frozen=True):
    """What the ops of one value of a label cost."""

    labels: str
    value: str
    ops: int
    slowdown: Number
    slowdown_error: Number
    added_s: float
    saved_s: float


class OnPath(Struct, frozen=True):
    """Time of ops of one kind, of comparable ops, of a rank or of a worker on the critical path."""

    recorded_s: float
    original_s: Maybe[float] = UNSET
    ideal_s: Maybe[float] = UNSET
    kind: Maybe[str | None] = UNSET
    peer: Maybe[str | None] = UNSET
    rank: Maybe[int] = UNSET
    dp_rank: Maybe[int] = UNSET
    pp_rank: Maybe[int] = UNSET


class Contribution(Struct, frozen=True):
    """What ops of one kind, a pipeline stage or a data-parallel rank cost."""

    slowdown: Number
    slowdown_error: Number
    saved_s: Number
    kind: Maybe[str] = UNSET
    pp_rank: Maybe[int] = UNSET
    dp_rank: Maybe[int] = UNSET
    ops: Maybe[int] = UNSET
    waste: Maybe[float] = UNSET
    launch_delay_slowdown: Maybe[Number] = UNSET
    fixed_step_time_s: Maybe[Number] = UNSET


class OfWorker(Struct, frozen=True):
    """What a worker costs."""

    dp_rank: int
    pp_rank: int
    rank: int | None
    host: str | None
    slowdown: float
    slowdown_error: Number
    slowdown_approx: float


class OfStep(Struct, frozen=True):
    """One step."""

    step: int
    slowdown: Number
    recorded_s: float
    original_s: float
    ideal_s: float
    lost_s: Number
    tokens: Maybe[Number] = UNSET
    loss: Maybe[Number] = UNSET


class Correlation(Struct, frozen=True):
    """How forwards and backwards of a stage go together."""

    pp_rank: int
    r: Number


class MethodUsed(Struct, frozen=True):
    """The rules of the analysis."""

    name: Method
    published_slowdown: Number
    differs_because: list[str]


class ClockOfRank(Struct, frozen=True):
    """The clock of a rank in a recording."""

    rank: int
    ahead_s: float
    uncertainty_s: Number
    collectives: int


class MissingOps(Struct, frozen=True):
    """Ops of collectives that a worker lacks although its peers recorded them."""

    kind: OpKind
    dp_rank: int
    pp_rank: int
    ops: int
    steps: list[int]


class Coverage(Struct, frozen=True):
    """How much of the job was traced."""

    workers_expected: int
    workers_traced: int
    worker_steps_expected: int
    worker_steps_traced: int
    missing_workers: list[Worker]
    gaps: list[MissingOps]
    slowdown_as_recorded: Number
    hidden_slowdown: Number
    left_out_steps: list[int]
    dropped: list[dict[str, int]]
    inferred_transfers: bool


class OfRank(Struct, frozen=True):
    """One rank, and what it costs."""

    rank: int
    slowdown: Number
    slowdown_error: Number
    host: Maybe[str | None] = UNSET
    span_s: Maybe[float] = UNSET
    compute_s: Maybe[float] = UNSET
    communication_s: Maybe[float] = UNSET
    exposed_communication_s: Maybe[float] = UNSET
    memory_s: Maybe[float] = UNSET
    idle_s: Maybe[float] = UNSET
    wait_s: Maybe[float] = UNSET
    sole_delay_s: Maybe[float] = UNSET


class Collectives(Struct, frozen=True):
    """Which kernels belong to the same collective."""

    matched: int
    unmatched: int
    groups: list[GroupMatches] = msgspec.field(name="by_group")


class WaitFor(Struct, frozen=True):
    """How long a rank waited for another one."""

    group: str
    rank: int
    for_rank: int
    wait_s: float


class Kernels(Struct, frozen=True):
    """The kernels of one class or of one name."""

    ops: int
    seconds: float
    kernel_class: Maybe[str] = UNSET
    name: Maybe[str] = UNSET


class Content(Struct, frozen=True, kw_only=True):
    """The report of `tracekit whatif --json`."""

    report_version: int
    job: Job
    answer: Answer
    verdict: Verdict
    trust: Trust
    step_time_s: Times
    slowdown: Number
    slowdown_error: Number
    waste: Number
    straggling: bool
    wasted_gpu_hours: Number
    wasted_gpu_hours_per_day: Number
    assumptions: list[str]
    causes: list[Finding]
    fixes: list[Fix]
    patterns: Patterns
    stalls: list[Stall]
    problems: list[str]
    lacks: list[Lack]
    questions: list[Question]
    by_label: list[OfLabel]
    by_kind: list[Contribution]
    by_step: list[OfStep]
    critical_path: list[OnPath]
    remarks: list[dict[str, str]]
    sections: list[Table]
    method: Maybe[MethodUsed] = UNSET
    clocks: Maybe[ClockReport | list[ClockOfRank]] = UNSET
    posting: Maybe[PostingRule] = UNSET
    coverage: Maybe[Coverage] = UNSET
    bubbles: Maybe[Bubbles | None] = UNSET
    overlap: Maybe[Overlap] = UNSET
    experts: Maybe[Experts] = UNSET
    m_w: Maybe[Number] = UNSET
    m_s: Maybe[Number] = UNSET
    slowest_workers: Maybe[list[Worker]] = UNSET
    by_pp_rank: Maybe[list[Contribution]] = UNSET
    by_dp_rank: Maybe[list[Contribution]] = UNSET
    by_worker: Maybe[list[OfWorker]] = UNSET
    critical_workers: Maybe[list[OnPath]] = UNSET
    forward_backward_correlation: Maybe[list[Correlation]] = UNSET
    by_rank: Maybe[list[OfRank]] = UNSET
    critical_kinds: Maybe[list[OnPath]] = UNSET
    critical_ranks: Maybe[list[OnPath]] = UNSET
    gaps: Maybe[list[MissingMembers]] = UNSET
    recording_time_s: Maybe[Times] = UNSET
    collectives: Maybe[Collectives] = UNSET
    wait_for: Maybe[list[WaitFor]] = UNSET
    kernel_classes: Maybe[list[Kernels]] = UNSET
    unknown_kernels: Maybe[list[Kernels]] = UNSET
    gpu: Maybe[GpuInReport] = UNSET
    gpus: Maybe[list[GpuInReport]] = UNSET
    rl: Maybe[RlAccount] = UNSET


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the report, which is shipped as report.schema.json."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Content)}


def report_as_dict(report: Report) -> dict[str, Any]:
    """Return everything in the report as JSON data."""
    own, found = report.details(), report.diagnosis
    answer, wasted = found.answer, own.pop("wasted_gpu_hours")
    return plain(
        Content(
            report_version=REPORT_VERSION,
            job=shaped(Job, report, **own.pop("job")),
            answer=answer,
            verdict=shaped(
                Verdict, found.verdict, who=answer.who, cost=answer.cost, action=answer.action, **own.pop("verdict", {})
            ),
            trust=shaped(Trust, report.trust, **own.pop("trust")),
            step_time_s=Times(**report.times_s),
            slowdown=report.slowdown,
            slowdown_error=report.slowdown_error,
            waste=report.waste,
            straggling=report.straggling,
            wasted_gpu_hours=max(wasted, 0.0),
            wasted_gpu_hours_per_day=max(report.waste * report.gpus * 24, 0.0),
            assumptions=report.assumptions,
            causes=[shaped(Finding, one) for one in found.causes],
            fixes=[fix_as_data(one) for one in found.fixes],
            patterns=shaped(Patterns, found),
            stalls=list(found.stalls),
            problems=list(found.problems),
            lacks=list(found.lacks),
            questions=list(report.questions_asked),
            by_label=[OfLabel(**row) for row in report.by_label.to_dicts()],
            by_step=[OfStep(**row) for row in report.by_step.to_dicts()],
            remarks=[{"name": name, "words": words} for name, words in report.remarks()],
            sections=list(report.sections(full=True)),
            overlap=UNSET if report.overlap is None else report.overlap,
            experts=UNSET if report.experts is None else report.experts,
            **own,
        )
    )


def fix_as_data(fix: Any) -> Fix:
    """Return a fix in the form of the JSON object, without figures if they are withheld."""
    found = shaped(Fix, fix)
    if found.withheld is not None:
        found.new_step_s = found.saved_s = found.saved_gpu_hours_per_day = None
    return found


def frame_of(things: Iterable[object], shape: type[Struct], but: Collection[str] = ()) -> pl.DataFrame:
    """One row for each thing, with the columns of `shape` that are text, numbers or truth values, `but` for these."""
    types = {field.name: _without_none(field.type) for field in msgspec.structs.fields(shape)}
    schema = {name: _COLUMNS[one] for name, one in types.items() if one in _COLUMNS and name not in but}
    return pl.DataFrame([{name: getattr(thing, name) for name in schema} for thing in things], schema)


def shaped(shape: type[S], thing: Any, **more: Any) -> S:
    """Return `thing` in the form of `shape`: its attributes of these names, all the way down; `more` has the others."""
    own = {
        field.name: _in_form(field.type, getattr(thing, field.name))
        for field in msgspec.structs.fields(shape)
        if field.required and field.name not in more
    }
    return shape(**own, **more)


def _without_none(form: Any) -> Any:
    """The type of a value that is there."""
    there = get_args(form)[0] if get_origin(form) in {Union, UnionType} else form
    return str if get_origin(there) is Literal else there


def _in_form(form: Any, value: Any) -> Any:
    if value is None or value is UNSET:
        return value
    form = _without_none(form)
    if get_origin(form) is list:
        return [_in_form(get_args(form)[0], one) for one in value]
    apart = isinstance(form, type) and issubclass(form, Struct) and not isinstance(value, form)
    return shaped(form, value) if apart else value


def plain(content: Any) -> dict[str, Any]:
    """Return structs, and what is in them, as JSON data; nan and infinities become None, because JSON has neither."""
    found: dict[str, Any] = json.loads(msgspec.json.encode(content, enc_hook=_rows_or_number))
    return found


def _rows_or_number(thing: Any) -> Any:
    return thing.to_dicts() if isinstance(thing, pl.DataFrame) else thing.item()
