"""Hardware in a report: what one GPU did, what a job would take on others, what metrics say about a culprit.

In: what `analysis/gpu/`, `analysis/hardware/` and `analysis/metrics/` found. Out: plain data, and tables for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.numeric.statistics import Estimate
from tracekit.base.quantities import Amount, Count, Finite, Number, Ordinal, Proportion, Seconds
from tracekit.base.text import code_name, printable, seconds, short
from tracekit.report.conclusions import Finding
from tracekit.report.finding import Spent
from tracekit.report.tables import Series, SeriesLine, Table, UsualBand
from tracekit.trace.gpu_activity import IdleReason

Limit = Literal["compute", "communication", "host"]


class NamedTime(Struct, frozen=True):
    """Time of what a name says. `where`: the innermost line of Python outside of torch, "" if unknown."""

    name: str
    seconds: Seconds
    where: str = ""


class IdleTime(Struct, frozen=True):
    """Idle time of one reason (`IdleReason`), in so many gaps between GPU ops. `names`: longest first."""

    reason: str
    seconds: Seconds
    gaps: Count
    names: tuple[NamedTime, ...]


class BeforeFirst(Struct, frozen=True):
    """The time before the first GPU op, by what the thread did that launched it."""

    seconds: Seconds
    by_reason: dict[str, Seconds]
    names: tuple[NamedTime, ...]


class KernelTime(Struct, frozen=True):
    """GPU ops of one name. `occupancy`: mean share of the threads of the card, by time, None if not recorded."""

    name: str
    count: Count
    seconds: Seconds
    of_class: str = msgspec.field(name="class")
    occupancy: Proportion | None = None


class ShapeTime(Struct, frozen=True):
    """GPU time of an operator with inputs of these sizes; what it computes and moves a second, None if unknown.

    `roofline_s`: how long it takes at the peak of the card.
    """

    dims: str
    dtype: str
    count: Count
    seconds: Seconds
    flops_s: Amount | None = None
    bytes_s: Amount | None = None
    roofline_s: Seconds | None = None


class OpTime(Struct, frozen=True):
    """GPU time of what an innermost operator launched. `module`: the nn.Module with most of it, None if unknown."""

    name: str
    gpu_ops: Count
    seconds: Seconds
    module: str | None
    shapes: tuple[ShapeTime, ...]


class Synchronisation(Struct, frozen=True):
    """Calls that wait for the GPU. `idle_after_s`: of gaps that begin inside them; `saves_s`: without them."""

    call: str
    op: str | None
    where: str
    count: Count
    blocked_s: Seconds
    idle_after_s: Seconds
    saves_s: Number = None


class Transfer(Struct, frozen=True):
    """Copies of one kind. `exposed_s`: while no kernel ran."""

    kind: str
    pageable: bool
    count: Count
    bytes: Count
    seconds: Seconds
    exposed_s: Seconds


class Launches(Struct, frozen=True):
    """Calls that launched GPU ops, and kernels shorter than 10 microseconds."""

    calls: Count
    call_s: Seconds
    short_kernels: Count
    short_s: Seconds
    kernels: Count
    kernel_s: Seconds


class MarkedSteps(Struct, frozen=True):
    """Steps that the profiler marked; `mean_s` None if there are none."""

    count: Count
    mean_s: Seconds | None


class MemoryPoint(Struct, frozen=True):
    """Bytes that torch's allocator has given out, seconds after the recording began."""

    seconds: Seconds
    bytes: Count


class MemoryTimes(Struct, frozen=True):
    """Memory of the GPU, in bytes: most of it given out (`peak_bytes`) and kept (`reserved_bytes`) at a time. `points`:
    most of each interval of the recording in which it changed.
    """

    peak_bytes: Count
    reserved_bytes: Count
    points: tuple[MemoryPoint, ...]


class GpuTimes(Struct, frozen=True):
    """One rank: from its first event to its last (`recording_s`); from its first GPU op to the end of its last
    (`span_s`), of which it is busy or idle; and what is before and after.
    """

    rank: Ordinal
    recording_s: Seconds
    span_s: Seconds
    busy_s: Seconds
    idle_s: Seconds
    after_last_s: Seconds
    before_first: BeforeFirst
    idle_by_reason: tuple[IdleTime, ...]
    idle_opened_by: dict[str, Seconds]
    kernels: tuple[KernelTime, ...]
    ops: tuple[OpTime, ...]
    synchronisations: tuple[Synchronisation, ...]
    transfers: tuple[Transfer, ...]
    launch: Launches
    steps: MarkedSteps
    stacks: bool
    shapes: bool
    memory: MemoryTimes | None


class Unprofiled(Struct, frozen=True):
    """The step as it runs without the profiler that recorded the job, seconds.

    `profiled_step_s`: the mean recorded step; `overhead_s`: their difference; `per_operator_s`: what it costs to record
    one operator. `how`: how that was found out.
    """

    profiled_step_s: Seconds
    step_s: Estimate
    overhead_s: Finite
    per_operator_s: Seconds
    how: str


class GpuFinding(Struct, frozen=True):
    """A finding of one GPU. `reason`: an `IdleReason`, or transfer, kernel, launch-bound. `share`: of the recording.

    `saves_s`: of the recording; None if that cannot be told, because of `cannot_tell`. `saves_step_s`: of a step
    without the profiler; None if that is not known.
    """

    reason: str
    name: str
    where: str
    names: tuple[str, ...]
    count: Count
    seconds: Seconds
    share: Amount
    saves_s: Number
    saves_step_s: Estimate | None
    action: str
    cannot_tell: str | None


class GpuInReport(GpuTimes, frozen=True, kw_only=True, tag="rank", tag_field="about"):
    """One rank in a report: its times, and the findings, those first that save most without the profiler.

    `unprofiled`: None because of `unprofiled_reason`.
    """

    findings: tuple[GpuFinding, ...]
    unprofiled: Unprofiled | None
    unprofiled_reason: str | None


def in_report(times: GpuTimes, findings: Sequence[Finding], unprofiled: Unprofiled | str) -> GpuInReport:
    """Return the times of a rank with the findings of its recording.

    `unprofiled`: the step without the profiler, or why it is not known.
    """
    findings_of_gpu = [
        GpuFinding(
            **{name: getattr(finding.spent, name) for name in Spent.__struct_fields__},
            share=finding.spent.seconds / (times.recording_s or 1.0),
            saves_s=finding.saved_s if finding.priced else None,
            saves_step_s=finding.saves_step_s,
            action=finding.suggested_fix,
        )
        for finding in findings
        if finding.spent is not None
    ]
    saves = {finding.names: finding.saves_s for finding in findings_of_gpu if finding.reason == IdleReason.SYNCHRONISE}
    synchronisations = tuple(
        replace(row, saves_s=saves.get(tuple(name for name in (row.op, row.call) if name)))
        for row in times.synchronisations
    )
    fields = {name: getattr(times, name) for name in GpuTimes.__struct_fields__}
    step = None if isinstance(unprofiled, str) else unprofiled
    return GpuInReport(
        **fields | {"synchronisations": synchronisations},
        findings=tuple(findings_of_gpu),
        unprofiled=step,
        unprofiled_reason=unprofiled if isinstance(unprofiled, str) else None,
    )


def gpu_tables(times: GpuTimes) -> Iterator[Table]:
    """Yield what the GPU of a rank did as tables of words; shares are of the recording."""
    whole_s = times.recording_s or 1.0

    def row(name: str, spent_s: float, *more: str) -> tuple[str, ...]:
        return (short(name, _WIDEST), seconds(spent_s), f"{spent_s / whole_s * 100:.1f}%", *more)

    def longest(names: Sequence[NamedTime], most: int, indent: str = "") -> list[tuple[str, ...]]:
        with_name = [entry for entry in names if entry.name][:most]
        return [row(indent + code_name(entry.name).strip("`"), entry.seconds) for entry in with_name]

    idle = []
    for reason in times.idle_by_reason:
        idle.append(row(reason.reason, reason.seconds, f"{reason.gaps:,}"))
        idle += [(*entry, "") for entry in longest(reason.names, _MOST_OF_REASON, "  ")]
    first = times.before_first
    before = [row(reason, spent_s) for reason, spent_s in first.by_reason.items()]
    unseen_s = first.seconds - sum(first.by_reason.values())
    if before and unseen_s > 0:
        before.append(row("launched, but not begun", unseen_s))
    ops = [row(op.name, op.seconds, f"{op.gpu_ops:,}") for op in times.ops[:_MOST_ROWS]]
    waits = [
        row(
            f"{call.call} in {call.op}" if call.op else call.call,
            call.blocked_s,
            f"{call.count:,}",
            seconds(call.idle_after_s),
        )
        for call in times.synchronisations[:_MOST_ROWS]
    ]
    copies = [
        row(copy.kind + ", pageable" * copy.pageable, copy.seconds, f"{copy.count:,}", f"{copy.bytes:,}")
        for copy in times.transfers
    ]
    for title, heads, rows in (
        ("GPU idle", ("Idle between GPU ops", "time", "share", "gaps"), idle),
        ("GPU before", ("Before the first op", "time", "share"), before),
        ("GPU before, names", ("Longest before the first op", "time", "share"), longest(first.names, _MOST_ROWS)),
        ("GPU operators", ("Operator", "GPU time", "share", "GPU ops"), ops),
        ("GPU waits", ("Calls that wait", "time", "share", "calls", "idle after"), waits),
        ("GPU copies", ("Copies", "time", "share", "copies", "bytes"), copies),
    ):
        if rows:
            yield Table(title, heads, tuple(rows), None)


#: So many operators and calls, names of an idle reason, and characters of a name.
_MOST_ROWS, _MOST_OF_REASON, _WIDEST = 8, 2, 50


class OtherStep(Struct, frozen=True):
    """A step, seconds: as it is `now`, and as it would be, with a 90 % interval."""

    now: Seconds
    value: Seconds
    low: Seconds
    high: Seconds


class OtherStepTime(OtherStep, frozen=True):
    """`unprofiled`: the same without the profiler that recorded the job; None if its cost is not known."""

    unprofiled: OtherStep | None

    @property
    def in_production(self) -> OtherStep:
        """Without the profiler, as far as that is known."""
        return self.unprofiled or self


class ScaledKind(Struct, frozen=True):
    """Ops of one kind, by how their time was found: the nearest measured `shapes`, the `class` of such kernels, the
    `roofline` of both cards, or `unchanged`. `share`: of the time of all ops; `factor`: times as long.
    """

    kind: str
    tier: Literal["shapes", "class", "roofline", "unchanged"]
    share: Proportion
    factor: Amount


class MemoryOfGpu(Struct, frozen=True):
    """GB that the job reserves, and that the card has; None if unknown."""

    needed: Amount | None
    has: Amount | None


class Balanced(Struct, frozen=True):
    """The same GPUs with the batch shared out by speed. `shares`: of each replica, 1 for an equal share."""

    step_time_s: Seconds
    shares: dict[str, Amount]


class OnGpu(Struct, frozen=True, kw_only=True, tag="card", tag_field="about"):
    """One answer to `--gpu`. `selection`: the ops that run on that GPU, None for all. `speedup`: now / value, without
    the profiler as far as that is known. `bottleneck`: what most of the step then waits for. `ties`: other answers, by
    the position in `gpus`, -1 for the job as it is, whose intervals overlap with this one.
    """

    gpu: str
    selection: str | None
    precision: str | None
    step_time_s: OtherStepTime
    speedup: Amount
    tiers: list[ScaledKind]
    fits: bool | None
    memory_gb: MemoryOfGpu
    bottleneck: Limit
    balanced: Balanced | None
    ties: list[int]
    warnings: list[str]


def hardware_table(answers: Sequence[OnGpu]) -> Table:
    """A row for each GPU, in the order asked."""
    rows = tuple(
        (
            _name(answer),
            seconds(answer.step_time_s.in_production.value),
            _interval(answer.step_time_s.in_production),
            "tie" if _NOW in answer.ties else f"{answer.speedup:.2f}x",
            _tier(answer),
            answer.bottleneck,
        )
        for answer in answers
    )
    return Table("Other GPUs", ("GPU", "step", "90% interval", "speedup", "tier", "limit"), rows, _notes(answers))


_NOW = -1
_WIDEST_NAME = 20


def _name(answer: OnGpu) -> str:
    precision = f" in {answer.precision}" if answer.precision else ""
    place = f" on {printable(answer.selection)}" if answer.selection else ""
    return f"{short(answer.gpu.removeprefix('NVIDIA '), _WIDEST_NAME)}{precision}{place}"


def _interval(step: OtherStep) -> str:
    low, high = seconds(step.low), seconds(step.high)
    same_unit = low.split()[1] == high.split()[1]
    return f"{low.split()[0] if same_unit else low} to {high}"


def _tier(answer: OnGpu) -> str:
    """The tier of most of the time that is scaled, and its share of that."""
    shares: dict[str, float] = {}
    for kind in answer.tiers:
        if kind.tier != "unchanged":
            shares[kind.tier] = shares.get(kind.tier, 0.0) + kind.share
    if not shares:
        return "unchanged"
    tier = max(shares, key=lambda name: shares[name])
    return f"{tier} {shares[tier] / sum(shares.values()):.0%}"


def _notes(answers: Sequence[OnGpu]) -> str:
    """What all rows have in common, and what to know of single ones."""
    step_s = answers[0].step_time_s
    about, clock = ("about ", " without the profiler") if step_s.unprofiled else ("", "")
    notes = [
        f"a step takes {about}{seconds(step_s.in_production.now)} now{clock}; overlapping intervals are a tie",
        "tier: how most of the scaled time was found (docs/hardware.md)",
    ]
    for answer in answers:
        if answer.balanced is not None:
            notes.append(
                f"with the batch shared out by speed, {seconds(answer.balanced.step_time_s)} on {_name(answer)}"
            )
        if answer.fits is False:
            needed, has = answer.memory_gb.needed or 0.0, answer.memory_gb.has or 0.0
            notes.append(f"it does not fit on {_name(answer)}: {needed:.1f} GB are reserved, the card has {has:.1f}")
    warnings = dict.fromkeys(printable(warning) for answer in answers for warning in answer.warnings)
    return "; ".join([*notes, *warnings])


class MetricVerdict(StrEnum):
    """Whether metrics show what the trace shows."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    NOT_TESTABLE = "not-testable"


class MechanismName(StrEnum):
    """How a machine slows down what runs on it."""

    CLOCK = "clock"
    LINK = "link"
    CPU_PRESSURE = "cpu-pressure"
    CPU_LIMIT = "cpu-limit"
    MEMORY_PRESSURE = "memory-pressure"
    IO_PRESSURE = "io-pressure"


class Band(Struct, frozen=True):
    """The suspect's series over its peers', for a figure: a few hundred points at most.

    `time`: seconds since 1970; `own`: of the slowest device; `low`, `high`: the middle 80 % of the peers' series; all
    in `unit`, None where nothing was sampled. The trace, or the suspicion, lasts `from_s` to `to_s`.
    """

    unit: str
    time: list[Finite]
    own: list[Number]
    low: list[Number]
    high: list[Number]
    from_s: Finite = msgspec.field(name="from")
    to_s: Finite = msgspec.field(name="to")


class MetricTest(Struct, frozen=True, kw_only=True):
    """The test of one suspicion. A verdict but not-testable has everything but `missing` and `reason`.

    `shows`, `predicts`: how much longer the work takes by the trace and by the metric, 0.4 = 40 %; `interval`: of
    `predicts`, 95 %. `device`: the slowest GPU or port, None if the metric is of the host. `samples`: of that series in
    the interval, every `sampling_s` seconds. `missing`: names of metrics. `basis`: what the host is compared with.
    """

    host: str
    part: str
    verdict: MetricVerdict
    shows: Finite
    sentence: str
    device: str | None = None
    mechanism: MechanismName | None = None
    metric: str | None = None
    predicts: Number = None
    interval: list[Finite] | None = None
    sampling_s: Seconds | None = None
    samples: Count | None = None
    basis: str | None = None
    missing: tuple[str, ...] = ()
    reason: str | None = None
    band: Band | None = None


class MetricsInReport(Struct, frozen=True):
    """The key `metrics` of a report. `source`: where the samples come from; `dropped`: samples that were no numbers or
    came twice; `problem`: why nothing could be read, None if something was.
    """

    source: str
    tests: list[MetricTest]
    dropped: Count = 0
    problem: str | None = None

    @property
    def pictures(self) -> list[Series]:
        """The metric of each culprit that was tested, over the band of its peers."""
        return [_picture(test, test.band) for test in self.tests if test.band is not None]


def _picture(test: MetricTest, band: Band) -> Series:
    return Series(
        title=f"{test.metric} of {short(test.host)}",
        axis="seconds from the beginning of the trace",
        unit=band.unit,
        places=[time - band.from_s for time in band.time],
        lines=[SeriesLine("the host", 5, band.own)],
        usual=UsualBand("its peers, the middle 80 %", band.low, band.high),
        marks=[0.0, band.to_s - band.from_s],
        note=f"{test.sentence}. Dotted: the beginning and the end of what the trace shows",
    )


class Alarm(Struct, frozen=True):
    """A host that departs from its peers for a while. `change`: of a gauge, relative; of a counter, of its rate."""

    host: str
    device: str | None
    metric: str
    from_s: float = msgspec.field(name="from")
    to_s: float = msgspec.field(name="to")
    change: float = 0.0


class MissingMetric(Struct, frozen=True):
    """A metric that the exporters lack. `line`: what to add; `why`: what cannot be told without it, and where."""

    metric: str
    exporter: str
    line: str
    why: str
