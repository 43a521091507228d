"""The report on a job of any shape: an op trace, and a recording of GPUs, which shows more than its ops.

In: `GraphSubject`, its diagnosis, who costs what, the critical path. Out: `Analysis`, with a `Report`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, ClassVar

import polars as pl
from msgspec import UNSET

from tracekit.analysis.attribution.by_label import Share, StepsSpent
from tracekit.analysis.attribution.critical_path import CriticalPath
from tracekit.analysis.attribution.patterns import StepTimes
from tracekit.analysis.evidence.gpu_losses import exposed_communication_s, gpu_alone
from tracekit.analysis.evidence.graph_subject import (
    GraphSubject,
    RecordingSubject,
    culprit_of,
    profiled_steps_s,
    recording_factors,
)
from tracekit.analysis.gpu.recorded import Recorded
from tracekit.analysis.job.build import Analysed, experts_of_job, is_asked
from tracekit.analysis.numeric.arrays import number
from tracekit.base.text import counted, of_whole, printable, seconds, short
from tracekit.report.conclusions import CauseOfCulprit, RankToBlame
from tracekit.report.hardware import GpuTimes, Unprofiled, gpu_tables, in_report
from tracekit.report.questions import ByLabel, Overlap, label_table
from tracekit.report.report import slowdown_with_error
from tracekit.report.tables import (
    ClockOfRank,
    Collectives,
    Contribution,
    Kernels,
    MarkedStep,
    Maybe,
    OfRank,
    OnPath,
    Outline,
    Table,
    WaitFor,
)
from tracekit.trace.facts import Fact

#: The most rows of ranks on a first screen, and in their own table.
_FEWEST_RANKS, _MOST_RANKS = 8, 16
#: The most rows of waits and of parts of the critical path, and of kernels of no class; the latter in JSON.
_MOST_WAITS, _MOST_KERNELS, _MOST_UNKNOWN = 8, 5, 20
_MOST_REASONS, _WIDEST_NAME = 4, 40
#: Smaller shares of a recording are not mentioned.
_SMALLEST_SHARE = 0.005
_OPS_ONLY = "of the recording, only the ops are kept: no kernels, clocks, collectives"
_NO_OVERHEAD = (
    "what recording cost the hosts shows between operators, and the recording has too few of them, or was not made with"
    " torch.profiler"
)
_NO_STACKS = "recorded without stacks; to see lines of code, record with torch.profiler and with_stack=True"


class AnalysedGraph(Analysed, frozen=True, kw_only=True, eq=False):
    """Everything that is known of an analysed job of any shape. `path`: the critical path of the recorded job."""

    #: What the critical path consists of where no op runs.
    between: ClassVar[str] = "launch delays"

    evidence: GraphSubject
    path: CriticalPath

    @property
    def times(self) -> StepTimes:
        """See `Analysed.times`."""
        return self.evidence.times

    @cached_property
    def shares_by_rank(self) -> Mapping[int, Share]:
        """What each rank costs alone, as recorded while all others are ideal."""
        return {int(share.values[0]): share for share in self._shares("rank")}

    def _shares(self, label: str) -> tuple[Share, ...]:
        """What each value of a label costs; empty if the job was not attributed to it."""
        return next((group.shares for group in self.labels if group.labels == (label,)), ())

    @cached_property
    def _critical_label(self) -> str:
        """What ops on the critical path are told apart by: comparable ops or, if these have numbers only, kinds."""
        ops = self.evidence.trace.ops
        numbers = ops["peer"].dtype.is_integer() if "peer" in ops.columns else False
        return "kind" if numbers and "kind" in self.evidence.graph.ops.labels else "peer"

    @cached_property
    def _critical_peers(self) -> Mapping[str, float]:
        """Seconds of the mean step that ops of each value of the label take on the critical path, largest first."""
        return {str(value): spent_s for (value,), spent_s in self.path.seconds_by([self._critical_label]).items()}

    @cached_property
    def _critical_ranks(self) -> Mapping[int, float]:
        return {int(rank or 0): spent_s for (rank,), spent_s in self.path.seconds_by(["rank"]).items()}

    def _overlap(self) -> Maybe[Overlap]:
        """What is hidden, exposed and waiting in a recording; no key if nobody asked, or for other op traces."""
        if not self.asked.overlap or self.evidence.recorded is None:
            return UNSET
        from tracekit.analysis.experts.overlap import find_overlap

        return find_overlap(self.evidence.recorded)

    def _outline(self) -> Outline:
        steps, ops = len(self.evidence.steps), self.evidence.ops.height
        return self._outline_of({"step": steps, "op": ops}, source="ops", steps=steps, ops=ops)

    def _outline_of(self, counts: Mapping[str, int], **fields: Any) -> Outline:
        """The outline, with the number of ranks and other `counts` in words."""
        evidence, device = self.evidence, fields.get("gpu")
        numbers = {"rank": len(evidence.ranks), **counts}
        sizes = ", ".join(counted(count, name) for name, count in numbers.items() if count)
        return Outline(
            name=evidence.trace.name,
            whole="recording" if evidence.whole == "recording" else "step",
            sizes=f"{sizes} on {short(device, _WIDEST_NAME)}" if device else sizes,
            gpus=evidence.gpus,
            ranks=len(evidence.ranks),
            **fields,
        )

    def _overview(self) -> list[Table]:
        return [self._critical_path()]

    def _sections(self) -> Iterator[Table]:
        if len(self.evidence.ranks) > 1:
            yield self._method()
        yield from self._tables_of_source()
        yield self._critical_path()
        yield from (label_table(group) for group in self._usual_labels() if not is_asked(group, self.asked))

    def _method(self) -> Table:
        """The times that S is made of, and what the worst ranks cost alone."""
        mean = self.mean
        times = {"recorded": mean.recorded, "launch delays removed": mean.original, "and all ranks alike": mean.ideal}
        slowdown = slowdown_with_error(self.evidence.slowdown, self.slowdown_error)
        rows = ((name, seconds(time_s)) for name, time_s in times.items())
        worst = sorted(self.shares_by_rank.items(), key=lambda item: -item[1].slowdown)[:_FEWEST_RANKS]
        alone = ((f"S, rank {rank} alone", f"{share.slowdown:.3f}") for rank, share in worst)
        return Table("Method", (f"Times of a {self.evidence.whole}", "mean"), (*rows, ("S", slowdown), *alone))

    def _tables_of_source(self) -> Iterator[Table]:
        """Yield the tables that only some sources have."""
        yield from ()

    def _usual_labels(self) -> Sequence[ByLabel]:
        """The labels whose tables are shown unasked."""
        return self.labels

    def _critical_path(self) -> Table:
        """The critical path of the recorded job, by op class and by rank."""
        recorded_s = self.evidence.recorded_s
        parts = [
            *((short(name), spent_s) for name, spent_s in list(self._critical_peers.items())[:_MOST_WAITS]),
            (self.between, self.path.mean_delay_s),
            *((f"rank {rank}", spent_s) for rank, spent_s in list(self._critical_ranks.items())[:_MOST_WAITS]),
        ]
        rows = tuple((name, seconds(spent_s), f"{spent_s / recorded_s * 100:.0f}%") for name, spent_s in parts)
        return Table("Critical path", ("On the critical path", of_whole(self.evidence.whole), "share"), rows)

    def _keys(self) -> dict[str, Any]:
        evidence, label = self.evidence, self._critical_label
        kinds = self.path.seconds_by(["kind"]) if "kind" in evidence.graph.ops.labels else {}
        peers: list[tuple[Any, float]] = [*self._critical_peers.items(), (None, self.path.mean_delay_s)]
        return {
            "trust": {"notes": []},
            "verdict": {"culprit": self._rank_to_blame()},
            "overlap": self._overlap(),
            "experts": experts_of_job(evidence, self.asked, self.diagnosis.causes),
            "gaps": list(evidence.graph.ops.gaps),
            "critical_path": [OnPath(**{label: value}, recorded_s=spent_s) for value, spent_s in peers],
            "critical_kinds": [OnPath(kind=str(kind), recorded_s=spent_s) for (kind,), spent_s in kinds.items()],
            "critical_ranks": [OnPath(rank=rank, recorded_s=spent_s) for rank, spent_s in self._critical_ranks.items()],
            "by_rank": [
                OfRank(rank, **self._cost_alone(rank), host=evidence.hosts.get(rank))
                for rank in sorted(self.shares_by_rank)
            ],
            "by_kind": [
                Contribution(
                    kind=str(share.values[0]),
                    ops=share.ops,
                    slowdown=number(share.slowdown),
                    slowdown_error=number(share.error),
                    saved_s=number(share.removed_s),
                )
                for share in self._shares("kind")
            ],
        }

    def _cost_alone(self, rank: int) -> dict[str, Any]:
        """S of a rank alone, and its error."""
        share = self.shares_by_rank.get(rank)
        costs = (None, None) if share is None else (number(share.slowdown), number(share.error))
        return dict(zip(("slowdown", "slowdown_error"), costs, strict=True))

    def _rank_to_blame(self) -> RankToBlame | None:
        """The rank that stands out, with the findings on it; None if there is none."""
        culprit = culprit_of(self.evidence)
        if culprit is None:
            return None
        causes = [
            CauseOfCulprit(
                cause.kind,
                cause.saved_s,
                "; ".join(figure.words for figure in cause.evidence),
                cause.effect,
                cause.suggested_fix,
            )
            for cause in self.diagnosis.causes
            if cause.where.ranks == (culprit.rank,)
        ]
        host = self.evidence.hosts.get(culprit.rank)
        waits = number(culprit.sole_delay_s), number(culprit.waited_s)
        return RankToBlame(culprit.rank, host, culprit.saved_s, *waits, causes)


class AnalysedRecording(AnalysedGraph, frozen=True, kw_only=True, eq=False):
    """Everything that is known of an analysed recording of GPUs."""

    between: ClassVar[str] = "between ops"

    evidence: RecordingSubject

    @property
    def _recorded(self) -> Recorded | None:
        """What the recording shows besides its ops; None if only these are left."""
        return self.evidence.recorded

    @property
    def _alone(self) -> GpuTimes | None:
        """What the GPU did, if it is the only one."""
        return gpu_alone(self.evidence)

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
            host_calls=UNSET if recorded is None else recorded.recording.calls.height,
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
        return [] if recorded is None or self._alone else [self._ranks(recorded, _FEWEST_RANKS)]

    def _tables_of_source(self) -> Iterator[Table]:
        recorded, gpu = self._recorded, self._alone
        if gpu is not None:
            yield from gpu_tables(gpu)
        if recorded is not None and gpu is None:
            yield self._ranks(recorded, _MOST_RANKS)
            yield _waits(recorded)
        if recorded is not None:
            yield _kernels(recorded)

    def _usual_labels(self) -> Sequence[ByLabel]:
        if self._alone is not None:
            return ()
        return [group for group in self.labels if self._recorded is None or group.labels != ("rank",)]

    def _ranks(self, recorded: Recorded, most: int) -> Table:
        """At most so many ranks, the one that the others wait for first; a single rank has no waits."""
        several = len(self.evidence.ranks) > 1
        ranked = list(
            zip(recorded.breakdowns, recorded.waits.wait.tolist(), recorded.waits.sole_delay.tolist(), strict=True)
        )
        ranked.sort(key=lambda row: -row[2])
        rows = []
        for rank, wait, sole_delay in ranked:
            parts = (rank.compute_s, rank.communication_s, rank.exposed_communication_s, rank.idle_s)
            shares = [f"{part / (rank.span_s or 1.0) * 100:.0f}%" for part in parts]
            waits = (seconds(sole_delay), seconds(wait)) if several else ()
            rows.append((str(rank.rank), *waits, *shares, seconds(rank.span_s)))
        waits = ("sole delay", "waits") if several else ()
        heads = ("rank", *waits, "compute", "comm", "exposed", "idle", "of")
        return _shortened("Ranks", heads, rows, most)

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
            "host_ahead_of_gpu_s": UNSET if recorded is None else recorded.skew_s,
        }

    def _keys(self) -> dict[str, Any]:
        evidence, recorded = self.evidence, self._recorded
        gpus = [
            in_report(times, self.diagnosis.causes, self._unprofiled(times.rank)) for times in evidence.summary.gpus
        ]
        spent = StepsSpent(evidence.replay)
        marked = zip(spent.steps, spent.step_s.tolist(), strict=True) if spent.marked else None
        keys = super()._keys()
        keys["verdict"]["exposed_communication_s"] = exposed_communication_s(evidence)
        keys |= {
            "trust": self._trust(),
            "recording_time_s": self.mean,
            "marked_steps": UNSET if marked is None else [MarkedStep(*step) for step in marked],
            **({"gpus": gpus} if self._alone is None else {"gpu": gpus[0]}),
        }
        return keys if recorded is None else keys | self._keys_of_recording(recorded)

    def _unprofiled(self, rank: int) -> Unprofiled | str:
        """The step without the profiler, or why it is not known."""
        job, step = self.evidence, self.evidence.unprofiled_step
        if step is None or rank not in job.summary.costs:
            return _NO_OVERHEAD
        cost, profiled_s = job.summary.costs[rank], float(profiled_steps_s(job).mean())
        operator_s = cost.operator * recording_factors(job)[0]
        how = cost.words if job.measured is None else job.measured.words
        return Unprofiled(profiled_s, step, profiled_s - step.value, operator_s, how)

    def _keys_of_recording(self, recorded: Recorded) -> dict[str, Any]:
        recording, matches, clocks, waits = recorded.recording, recorded.matches, recorded.clocks, recorded.waits
        by_rank = zip(recorded.breakdowns, waits.wait.tolist(), waits.sole_delay.tolist(), strict=True)
        columns = (clocks.ahead.tolist(), clocks.uncertainty.tolist(), clocks.collectives.tolist())
        return {
            "by_rank": [
                OfRank(
                    **asdict(parts),
                    **self._cost_alone(parts.rank),
                    host=recording.hosts.get(parts.rank),
                    wait_s=wait,
                    sole_delay_s=sole_delay,
                )
                for parts, wait, sole_delay in by_rank
            ],
            "collectives": Collectives(matches.matched, matches.unmatched, list(matches.groups)),
            "clocks": [
                ClockOfRank(rank, ahead_s, number(uncertainty_s), collectives)
                for rank, ahead_s, uncertainty_s, collectives in zip(clocks.ranks, *columns, strict=True)
            ],
            "wait_for": [WaitFor(group, rank, other, waited) for waited, rank, other, group in waits.each()],
            "kernel_classes": _kernel_rows(recorded.kernel_time),
            "unknown_kernels": _kernel_rows(recorded.unknown_kernels.head(_MOST_UNKNOWN)),
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


def _shortened(title: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], most: int) -> Table:
    """A table of the first `most` rows."""
    note = f"the costliest {most} of {len(rows)}; all with --json" if len(rows) > most else None
    return Table(title, heads, tuple(rows[:most]), note)


def _waits(recorded: Recorded) -> Table:
    """Which rank waits for which, longest first."""
    rows = [
        (f"rank {rank}", f"rank {other}", seconds(waited), short(group))
        for waited, rank, other, group in sorted(recorded.waits.each(), reverse=True)
    ]
    return _shortened("Waits", ("waits", "for", "in collectives", "group"), rows, _MOST_WAITS)


def _kernel_rows(kernels: pl.DataFrame) -> list[Kernels]:
    return [Kernels(**row) for row in kernels.iter_rows(named=True)]


def _kernels(recorded: Recorded) -> Table:
    """Time by class of kernels, and the longest kernels of no class."""
    times, unknown = recorded.kernel_time, recorded.unknown_kernels.head(_MOST_KERNELS)
    total = float(times["seconds"].sum()) or 1.0
    named = [
        *times.iter_rows(),
        *((f"  {short(name, _WIDEST_NAME)}", ops, spent) for name, ops, spent in unknown.iter_rows()),
    ]
    rows = tuple((name, f"{ops:,}", seconds(spent), f"{spent / total * 100:.0f}%") for name, ops, spent in named)
    return Table("Kernels", ("Kernels", "ops", "time", "share"), rows)
