"""The report on a recording of GPUs: that on its ops, and what GPUs and hosts did.

In: as for an op trace, with a `RecordingSubject`. Out: `Analysis`, with a `Report`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from tracekit.analysis.attribution.spent import StepsSpent
from tracekit.analysis.evidence.gpu_losses import exposed_communication_s
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.unprofiled_steps import profiled_steps_s, recording_factors, unprofiled_step
from tracekit.analysis.gpu.gpu_times import GpuTimes
from tracekit.analysis.gpu.recorded import Kept, Recorded
from tracekit.analysis.job.graph_report import FEWEST_RANKS, AnalysedGraph
from tracekit.analysis.job.recording_tables import kernel_rows, kernels_table, shortened, waits_table
from tracekit.analysis.numeric.arrays import number
from tracekit.base.text import printable, seconds
from tracekit.report.gpu import Unprofiled, gpu_tables, in_report
from tracekit.report.outline import ClockOfRank, Outline
from tracekit.report.question import ByLabel
from tracekit.report.rows import Collectives, MarkedStep, OfRank, WaitFor
from tracekit.report.section import Table
from tracekit.trace.facts import Fact

#: The most rows of ranks.
_MOST_RANKS = 16
_MOST_REASONS = 4
#: Smaller shares of a recording are not mentioned.
_SMALLEST_SHARE = 0.005
#: The number of unclassified kernels in JSON.
_MOST_UNKNOWN = 20
_OPS_ONLY = "of the recording, only the ops are kept: no kernels, clocks, collectives"
_NO_OVERHEAD = (
    "what recording cost the hosts shows between operators, and the recording has too few of them, or was not made with"
    " torch.profiler"
)
_NO_STACKS = "recorded without stacks; to see lines of code, record with_stack=True"


class AnalysedRecording(AnalysedGraph, frozen=True, kw_only=True, eq=False):
    """Everything that is known of an analysed recording of GPUs."""

    between: ClassVar[str] = "between ops"

    evidence: RecordingSubject

    @property
    def _recorded(self) -> Recorded | None:
        """What the recording shows beside its ops; None if only these are left."""
        return self.evidence.recorded

    @property
    def _alone(self) -> GpuTimes | None:
        """What the GPU did, if it is the only one."""
        return self.evidence.gpu if self.evidence.alone else None

    def _outline(self) -> Outline:
        summary, recorded = self.evidence.summary, self._recorded
        return self._outline_of(
            {"step": summary.steps, "GPU op": summary.gpu_ops},
            source="recording",
            steps=summary.steps,
            world_size=summary.world_size,
            gpu=summary.gpu,
            gpu_ops=summary.gpu_ops,
            gpu_ops_without_launch=summary.without_launch,
            **({} if recorded is None else {"host_calls": recorded.recording.calls.height}),
        )

    def _remarks(self) -> Iterator[tuple[str, str]]:
        gpu, causes, action = self.evidence.gpu, self.diagnosis.causes, self.diagnosis.answer.action or ""
        if self._alone is not None and self.evidence.shows(Fact.COMPUTE):
            yield "GPU", _gpu_in_words(self._alone)
        unnamed = any(cause.change is not None and cause.spent and not cause.spent.where for cause in causes)
        if gpu is not None and not gpu.stacks and unnamed and "with_stack" not in action:
            yield "Names", _NO_STACKS
        notes = [*self.evidence.summary.notes, *[_OPS_ONLY] * (self._recorded is None)]
        yield from (("" if number else "Notes", printable(note)) for number, note in enumerate(notes))

    def _overview(self) -> list[Table]:
        recorded = self._recorded
        return [] if recorded is None or self._alone else [self._ranks(recorded, FEWEST_RANKS)]

    def _tables_of_source(self) -> Iterator[Table]:
        recorded, gpu = self._recorded, self._alone
        if gpu is not None:
            yield from gpu_tables(gpu)
        if recorded is not None and gpu is None:
            yield self._ranks(recorded, _MOST_RANKS)
            yield waits_table(recorded)
        if recorded is not None:
            yield kernels_table(recorded)

    @property
    def _usual_labels(self) -> Sequence[ByLabel]:
        if self._alone is not None:
            return ()
        return [group for group in self.labels if self._recorded is None or group.labels != ("rank",)]

    def _ranks(self, recorded: Recorded, most: int) -> Table:
        """At most so many ranks, the one that the others wait for first; a rank alone waits for nobody."""
        several = len(self.evidence.ranks) > 1
        each = list(
            zip(recorded.breakdowns, recorded.waits.wait.tolist(), recorded.waits.sole_delay.tolist(), strict=True)
        )
        each.sort(key=lambda row: -row[2])
        rows = []
        for rank, wait, sole_delay in each:
            parts = (rank.compute_s, rank.communication_s, rank.exposed_communication_s, rank.idle_s)
            shares = [f"{part / (rank.span_s or 1.0) * 100:.0f}%" for part in parts]
            waits = (seconds(sole_delay), seconds(wait)) if several else ()
            rows.append((str(rank.rank), *waits, *shares, seconds(rank.span_s)))
        waits = ("sole delay", "waits") if several else ()
        heads = ("rank", *waits, "compute", "comm", "exposed", "idle", "of")
        return shortened("Ranks", heads, rows, most)

    def _trust(self) -> dict[str, Any]:
        unexplained, recorded = self.evidence.unexplained, self._recorded
        return {
            "notes": list(self.evidence.summary.notes),
            "start_gap_p99_s": {
                "communication": number(unexplained.communication_gap_s),
                "compute": number(unexplained.compute_gap_s),
            },
            "edges": unexplained.edges,
            "inferred_edges": unexplained.inferred,
            "violations": unexplained.violations,
            **({} if recorded is None else {"host_ahead_of_gpu_s": recorded.skew_s}),
        }

    def _verdict(self) -> dict[str, Any]:
        return {**super()._verdict(), "exposed_communication_s": exposed_communication_s(self.evidence)}

    def _keys_of_source(self) -> dict[str, Any]:
        recorded = self._recorded
        return self._of_kept(self.evidence.summary) | ({} if recorded is None else self._of_recording(recorded))

    def _of_kept(self, summary: Kept) -> dict[str, Any]:
        gpus = [in_report(times, self.diagnosis.causes, self._unprofiled(times.rank)) for times in summary.gpus]
        spent = StepsSpent(self.evidence.replay)
        marked = zip(spent.steps, spent.step_s.tolist(), strict=True) if spent.marked else ()
        return {
            "recording_time_s": self.mean,
            **({"marked_steps": [MarkedStep(*step) for step in marked]} if spent.marked else {}),
            **({"gpu": gpus[0]} if self.evidence.alone and gpus else {"gpus": gpus}),
        }

    def _unprofiled(self, rank: int) -> Unprofiled | str:
        """The step without the profiler, or why it is not known."""
        job, step = self.evidence, unprofiled_step(self.evidence)
        if step is None or rank not in job.summary.costs:
            return _NO_OVERHEAD
        cost, profiled_s = job.summary.costs[rank], float(profiled_steps_s(job).mean())
        operator_s = cost.operator * recording_factors(job)[0]
        how = cost.words if job.measured is None else job.measured.words
        return Unprofiled(profiled_s, step, profiled_s - step.value, operator_s, how)

    def _of_recording(self, recorded: Recorded) -> dict[str, Any]:
        recording, clocks, waits = recorded.recording, recorded.clocks, recorded.waits
        columns = (clocks.ahead, clocks.uncertainty, clocks.collectives)
        by_rank = zip(recorded.breakdowns, waits.wait.tolist(), waits.sole_delay.tolist(), strict=True)
        return {
            "by_rank": [
                OfRank(
                    parts.rank,
                    *self._cost_alone(parts.rank),
                    recording.hosts.get(parts.rank),
                    parts.span_s,
                    parts.compute_s,
                    parts.communication_s,
                    parts.exposed_communication_s,
                    parts.memory_s,
                    parts.idle_s,
                    wait,
                    sole_delay,
                )
                for parts, wait, sole_delay in by_rank
            ],
            "collectives": Collectives(
                recorded.matches.matched, recorded.matches.unmatched, list(recorded.matches.groups)
            ),
            "clocks": [
                ClockOfRank(rank, ahead_s, number(uncertainty_s), collectives)
                for rank, ahead_s, uncertainty_s, collectives in zip(
                    clocks.ranks, *(column.tolist() for column in columns), strict=True
                )
            ],
            "wait_for": [WaitFor(group, rank, other, waited) for waited, rank, other, group in waits.each()],
            "kernel_classes": kernel_rows(recorded.kernel_time),
            "unknown_kernels": kernel_rows(recorded.unknown_kernels.head(_MOST_UNKNOWN)),
        }


def _gpu_in_words(gpu: GpuTimes) -> str:
    """What the GPU did: how long it was busy, and idle for which reasons, as shares of the recording."""
    whole_s = gpu.recording_s or 1.0

    def share(name: str, spent_s: float) -> list[str]:
        return [f"{name} {spent_s / whole_s:.0%}"] if spent_s >= whole_s * _SMALLEST_SHARE else []

    reasons = [words for idle in gpu.idle_by_reason for words in share(idle.reason, idle.seconds)]
    why = f": {', '.join(reasons[:_MOST_REASONS])}" if reasons else ""
    parts = [f"busy {gpu.busy_s / whole_s:.0%}", *share("before its first op", gpu.before_first.seconds),
             *share("idle", gpu.idle_s)]  # fmt: skip
    return f"{', '.join(parts)}{why}"
