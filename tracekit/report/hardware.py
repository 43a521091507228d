"""Hardware in a report: what one GPU did, what a job would take on others, what metrics say about a culprit.

In: what `analysis/gpu/`, `analysis/hardware/` and `analysis/metrics/` found. Out: plain data, and tables for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from tracekit.analysis.numeric.statistics import Estimate
from tracekit.base.limits import Amount, Count, Finite, Number, Ordinal, Proportion, Seconds
from tracekit.base.text import code_name, printable, seconds, short
from tracekit.report.conclusions import Finding
from tracekit.report.tables import Series, SeriesLine, Table, UsualBand
from tracekit.trace.gpu_activity import IdleReason

Limit = Literal["compute", "communication", "host"]


class NamedTime(Struct, frozen=True):
    """Time of what a name says."""

    name: str  #: operator, "call in operator", Python function or annotation; "" if nothing was recorded
    seconds: Seconds  #: how long
    where: str = ""  #: the innermost line of Python outside of torch, "" if unknown


class IdleTime(Struct, frozen=True):
    """Idle time of one reason (`IdleReason`)."""

    #: `loader`, `gc`, `synchronise`, `allocation`, `runtime-call`, `operator`, `python`, `launch-call`,
    #: `launch-latency`, `queued`, `unknown` or `checkpoint`
    reason: str
    seconds: Seconds  #: how long
    gaps: Count  #: number of gaps with a part of this reason
    names: tuple[NamedTime, ...]  #: what took longest


class BeforeFirst(Struct, frozen=True):
    """The time before the first GPU op, by what the thread did that launched it."""

    seconds: Seconds  #: from the start of the recording to the first GPU op
    by_reason: dict[str, Seconds]  #: seconds of each reason, until the op was launched
    names: tuple[NamedTime, ...]  #: what took longest


class KernelTime(Struct, frozen=True):
    """GPU ops of one name."""

    name: str  #: full name
    count: Count  #: how many
    seconds: Seconds  #: in all
    of_class: str = msgspec.field(name="class")  #: kernel class
    #: share of the card's threads that they keep busy, as the profiler estimates it, mean by time
    occupancy: Proportion | None = None


class ShapeTime(Struct, frozen=True):
    """GPU time of an operator with inputs of these sizes, and what it computes and moves a second."""

    dims: str  #: sizes of the inputs
    dtype: str  #: type of the first input
    count: Count  #: how many
    seconds: Seconds  #: in all
    flops_s: Amount | None = None  #: floating-point operations a second; null but for matrix products
    bytes_s: Amount | None = None  #: bytes a second, each input and the output once; null if unknown
    roofline_s: Seconds | None = None  #: how long the card's peaks need; null if card or sizes are unknown


class OpTime(Struct, frozen=True):
    """GPU time of what an innermost operator launched."""

    name: str  #: the operator
    gpu_ops: Count  #: GPU ops that it launched
    seconds: Seconds  #: their time
    module: str | None  #: the `nn.Module` with most of it, null if unknown
    shapes: tuple[ShapeTime, ...]  #: by sizes of inputs, the 4 longest


class Synchronisation(Struct, frozen=True):
    """Calls that wait for the GPU."""

    call: str  #: the call
    op: str | None  #: innermost operator around it, null for none
    where: str  #: the innermost line of Python outside of torch, "" if unknown
    count: Count  #: how many
    blocked_s: Seconds  #: sum of their durations
    idle_after_s: Seconds  #: idle time of gaps that begin inside them
    saves_s: Number = None  #: without them, by replay; null if that is no finding


class Transfer(Struct, frozen=True):
    """Copies of one kind."""

    kind: str  #: `HtoD`, `DtoH`, `DtoD`, `PtoP`, ... or `other`
    pageable: bool  #: from or to pageable memory
    count: Count  #: how many
    bytes: Count  #: in all
    seconds: Seconds  #: in all
    exposed_s: Seconds  #: while no kernel ran


class Launches(Struct, frozen=True):
    """Calls that launched GPU ops, and kernels shorter than 10 microseconds."""

    calls: Count  #: distinct calls that launched
    call_s: Seconds  #: their time
    short_kernels: Count  #: kernels shorter than 10 us
    short_s: Seconds  #: their time
    kernels: Count  #: all kernels
    kernel_s: Seconds  #: their time


class MarkedSteps(Struct, frozen=True):
    """Steps that the profiler marked."""

    count: Count  #: how many
    mean_s: Seconds | None  #: mean duration, null if there are none


class MemoryPoint(Struct, frozen=True):
    """Bytes that torch's allocator has given out, seconds after the recording began."""

    seconds: Seconds  #: after the start of the recording
    bytes: Count  #: given out


class MemoryTimes(Struct, frozen=True):
    """Memory of the GPU, in bytes."""

    peak_bytes: Count  #: most that torch's allocator had given out at a time
    reserved_bytes: Count  #: most that it kept
    points: tuple[MemoryPoint, ...]  #: most of each interval in which it changed, 200 intervals at most


class GpuTimes(Struct, frozen=True):
    """One rank: from its first event to its last; from its first GPU op to the end of its last, of which it is busy or
    idle; and what is before and after.
    """

    rank: Ordinal  #: the rank
    recording_s: Seconds  #: from the first event of host or GPU to the end of the last
    span_s: Seconds  #: from the start of the first GPU op to the end of the last
    busy_s: Seconds  #: while any GPU op ran
    idle_s: Seconds  #: `span_s` - `busy_s`
    after_last_s: Seconds  #: from the end of the last GPU op to that of the recording
    before_first: BeforeFirst  #: the time before the first GPU op
    #: what the thread did that launched the next op, longest first; sums to `idle_s`
    idle_by_reason: tuple[IdleTime, ...]
    #: idle seconds by how gaps began: `synchronise`, `host`, `queued`, `unknown` or `checkpoint`
    idle_opened_by: dict[str, Seconds]
    kernels: tuple[KernelTime, ...]  #: GPU ops by name, the 15 longest
    ops: tuple[OpTime, ...]  #: GPU time by the innermost operator around the launch, the 15 longest
    #: calls that wait for the GPU, by call and innermost operator, the 15 longest
    synchronisations: tuple[Synchronisation, ...]
    transfers: tuple[Transfer, ...]  #: copies by kind
    launch: Launches  #: launches, and kernels that are shorter than 10 us
    steps: MarkedSteps  #: steps that the profiler marked
    stacks: bool  #: whether Python functions were recorded
    shapes: bool  #: whether the sizes of inputs were recorded
    memory: MemoryTimes | None  #: memory of the GPU; null if it was not recorded (`profile_memory=True`)


class Unprofiled(Struct, frozen=True):
    """The step as it runs without the profiler that recorded the job, seconds."""

    profiled_step_s: Seconds  #: the mean recorded step
    step_s: Estimate  #: the step as it runs without the profiler
    overhead_s: Finite  #: their difference
    per_operator_s: Seconds  #: what it costs the host to record one operator
    how: str  #: how that was found out


class GpuFinding(Struct, frozen=True):
    """A finding of one GPU."""

    reason: str  #: a reason of idle time, or `launch-bound`, `kernel`, `recompute`, `transfer`
    name: str  #: what it is about: operator, call, function, loader or kernel
    where: str  #: the innermost line of Python outside of torch, "" if unknown
    names: tuple[str, ...]  #: all that belongs to it, longest first
    count: Count  #: how often
    seconds: Seconds  #: host or GPU time in all
    share: Amount  #: of the recording
    saves_s: Number  #: how much shorter the recording is without it, by replay; null if that is not known
    #: what a step saves without the profiler, 0 if something else then limits it; null if that is not known
    saves_step_s: Estimate | None
    action: str  #: what to do
    cannot_tell: str | None  #: why its price is not sure, and what to record; null if it is


class GpuInReport(GpuTimes, frozen=True, kw_only=True, tag="rank", tag_field="about"):
    """One rank of a recording, with its times and findings."""

    #: what to do, what saves most without the profiler first; of several ranks, those of all together
    findings: tuple[GpuFinding, ...]
    unprofiled: Unprofiled | None  #: the step as it runs without the profiler; null if that is not known
    unprofiled_reason: str | None  #: why it is not known


def in_report(times: GpuTimes, findings: Sequence[Finding], unprofiled: Unprofiled | str) -> GpuInReport:
    """Return the times of a rank with the findings of its recording.

    `unprofiled`: the step without the profiler, or why it is not known.
    """
    findings_of_gpu = [
        GpuFinding(
            **asdict(finding.spent),
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
    step = None if isinstance(unprofiled, str) else unprofiled
    return GpuInReport(
        **asdict(times) | {"synchronisations": synchronisations},
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
    """A step, seconds, as it is and as it would be."""

    now: Seconds  #: as it is
    value: Seconds  #: on the other GPU
    low: Seconds  #: lower end of the 90 % interval
    high: Seconds  #: upper end of the 90 % interval


class OtherStepTime(OtherStep, frozen=True):
    """The mean step on another GPU, with and without the profiler."""

    unprofiled: OtherStep | None  #: the same without the profiler; null if its cost is not known

    @property
    def in_production(self) -> OtherStep:
        """Without the profiler, as far as that is known."""
        return self.unprofiled or self


class ScaledKind(Struct, frozen=True):
    """Ops of one kind, by how their time was found: the nearest measured `shapes`, the `class` of such kernels, the
    `roofline` of both cards, or `unchanged`.
    """

    #: kind of op: `matmul`, `attention`, `elementwise`, `norm`, `softmax`, `copy`, `optimizer`, `compute`,
    #: `collective`, `host`, `host copy`, `other ops`
    kind: str
    tier: Literal["shapes", "class", "roofline", "unchanged"]  #: `shapes`, `class`, `roofline` or `unchanged`
    share: Proportion  #: of the time of all ops; adds up to 1
    factor: Amount  #: times as long


class MemoryOfGpu(Struct, frozen=True):
    """GB that the job reserves, and that the card has; None if unknown."""

    needed: Amount | None  #: GB that the job reserves on its fullest GPU
    has: Amount | None  #: GB of the card, as its passport states it


class Balanced(Struct, frozen=True):
    """The same GPUs with the batch shared out by speed."""

    step_time_s: Seconds  #: the mean step
    shares: dict[str, Amount]  #: of each replica of the model: its part of the batch, 1 for an equal one


class OnGpu(Struct, frozen=True, kw_only=True, tag="card", tag_field="about"):
    """The job on another GPU or in another precision, an answer to `--gpu`."""

    gpu: str  #: the GPU, as its passport names it
    selection: str | None  #: the ops that run on it; null for all
    precision: str | None  #: as asked; null for that of the trace
    step_time_s: OtherStepTime  #: the mean step
    speedup: Amount  #: now / then, without the profiler as far as that is known
    tiers: list[ScaledKind]  #: how the time of each kind of op was found, most time first
    fits: bool | None  #: whether the card has the memory that the job reserves; null if one of them is unknown
    memory_gb: MemoryOfGpu  #: both
    bottleneck: Limit  #: what most of the critical path is then: `compute`, `communication` or `host`
    balanced: Balanced | None  #: with `selection`: the same GPUs with the batch shared out by speed, if that is faster
    ties: list[int]  #: positions in `gpus` of answers with an overlapping interval; -1 for the job as it is
    warnings: list[str]  #: what makes the answer less certain


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
    """The suspect's series over its peers', a few hundred points at most; None where nothing was sampled."""

    unit: str  #: of all values
    time: list[Finite]  #: seconds since 1970
    own: list[Number]  #: of the suspect's slowest device
    low: list[Number]  #: a tenth of the peers' series is below
    high: list[Number]  #: a tenth is above
    from_s: Finite = msgspec.field(name="from")  #: when the trace begins to show it
    to_s: Finite = msgspec.field(name="to")  #: when it ends


class MetricTest(Struct, frozen=True, kw_only=True):
    """The test of one suspicion. A verdict but not-testable has everything but `missing` and `reason`."""

    host: str  #: the suspected host
    part: str  #: the slow part of a rank: `compute`, `network` or `process`
    verdict: MetricVerdict  #: `confirmed`, `refuted` or `not-testable`
    shows: Finite  #: how much longer the work takes by the trace, 0.4 = 40 %
    sentence: str  #: all of it in words
    device: str | None = None  #: the slowest GPU or port; null if the metric is of the host
    #: `clock`, `link`, `cpu-pressure`, `cpu-limit`, `memory-pressure` or `io-pressure`
    mechanism: MechanismName | None = None
    metric: str | None = None  #: as the exporter names it
    predicts: Number = None  #: how much longer the work takes by the metric
    interval: list[Finite] | None = None  #: of `predicts`, 95 %: low and high
    sampling_s: Seconds | None = None  #: seconds between samples
    samples: Count | None = None  #: how many lie in the interval
    basis: str | None = None  #: what the host is compared with
    missing: tuple[str, ...] = ()  #: metrics that the exporters lack
    reason: str | None = None  #: why it is not testable
    band: Band | None = None  #: what a figure needs


class MetricsInReport(Struct, frozen=True):
    """The key `metrics` of a report."""

    source: str  #: where the samples come from
    tests: list[MetricTest]  #: one for each host of each cause whose part metrics can show
    dropped: Count = 0  #: samples that were no numbers or came twice
    problem: str | None = None  #: why nothing could be read

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
