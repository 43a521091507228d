"""What one GPU did and what is wrong with that, as plain data: `gpu` and `gpus` of a report.

In: its times, and the findings of its recording. Out: `GpuInReport`, and tables for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.gpu.gpu_times import GpuTimes, NamedTime
from tracekit.analysis.numeric.estimate import Estimate
from tracekit.base.text import code_name, seconds, short
from tracekit.report.conclusions import Finding
from tracekit.report.finding import Spent
from tracekit.report.section import Table
from tracekit.trace.gpu_activity import IdleReason


class Unprofiled(Struct, frozen=True):
    """The step as it runs without the profiler that recorded the job, seconds.

    `profiled_step_s`: the mean recorded step; `overhead_s`: their difference; `per_operator_s`: what it costs to record
    one operator. `how`: how that was found out.
    """

    profiled_step_s: float
    step_s: Estimate
    overhead_s: float
    per_operator_s: float
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
    count: int
    seconds: float
    share: float
    saves_s: float | None
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
            **{name: getattr(one.spent, name) for name in Spent.__struct_fields__},
            share=one.spent.seconds / (times.recording_s or 1.0),
            saves_s=one.saved_s if one.priced else None,
            saves_step_s=one.saves_step_s,
            action=one.suggested_fix,
        )
        for one in findings
        if one.spent is not None
    ]
    saves = {one.names: one.saves_s for one in findings_of_gpu if one.reason == IdleReason.SYNCHRONISE}
    synchronisations = tuple(
        replace(row, saves_s=saves.get(tuple(name for name in (row.op, row.call) if name)))
        for row in times.synchronisations
    )
    own = {name: getattr(times, name) for name in GpuTimes.__struct_fields__}
    step = None if isinstance(unprofiled, str) else unprofiled
    return GpuInReport(
        **own | {"synchronisations": synchronisations},
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
        named = [one for one in names if one.name][:most]
        return [row(indent + code_name(one.name).strip("`"), one.seconds) for one in named]

    idle = []
    for reason in times.idle_by_reason:
        idle.append(row(reason.reason, reason.seconds, f"{reason.gaps:,}"))
        idle += [(*each, "") for each in longest(reason.names, _MOST_OF_REASON, "  ")]
    first = times.before_first
    before = [row(reason, spent_s) for reason, spent_s in first.by_reason.items()]
    unseen_s = first.seconds - sum(first.by_reason.values())
    if before and unseen_s > 0:
        before.append(row("launched, but not begun", unseen_s))
    ops = [row(one.name, one.seconds, f"{one.gpu_ops:,}") for one in times.ops[:_MOST_ROWS]]
    waits = [
        row(
            f"{one.call} in {one.op}" if one.op else one.call,
            one.blocked_s,
            f"{one.count:,}",
            seconds(one.idle_after_s),
        )
        for one in times.synchronisations[:_MOST_ROWS]
    ]
    copies = [
        row(one.kind + ", pageable" * one.pageable, one.seconds, f"{one.count:,}", f"{one.bytes:,}")
        for one in times.transfers
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
