"""The report on a job of any shape: an op trace, or a recording of GPUs.

In: `GraphSubject`, its diagnosis, who costs what, the critical path. Out: `GraphReport`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from tracekit.analysis.attribution.by_label import Share
from tracekit.analysis.evidence.culprit import culprit_of
from tracekit.analysis.evidence.gpu_losses import exposed_communication_s
from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.evidence.unprofiled_steps import profiled_steps_s, unprofiled_step
from tracekit.analysis.gpu.gpu_times import GpuTimes
from tracekit.analysis.gpu.recorded import Kept, Recorded
from tracekit.base.text import counted, of_whole, printable, seconds, short
from tracekit.job import experts
from tracekit.report.gpu import Unprofiled, gpu_tables, in_report
from tracekit.report.question import label_table
from tracekit.report.report import Report, StepTimes
from tracekit.report.section import Table
from tracekit.trace.facts import Fact

if TYPE_CHECKING:
    from tracekit.report.question import ByLabel

#: Limits of rows: ranks, waits, and classes on the critical path, on a first screen and in all.
_FEWEST_RANKS, _MOST_RANKS = 8, 16
_MOST_WAITS = 8
_MOST_KERNELS = 5
_MOST_REASONS = 4
#: Smaller shares of a recording are not mentioned.
_SMALLEST_SHARE = 0.005
#: The number of unclassified kernels in JSON.
_MOST_UNKNOWN = 20
_WIDEST_NAME = 40
_OPS_ONLY = "of the recording, only the ops are kept: no kernels, clocks, collectives"
_NO_OVERHEAD = (
    "what recording cost the hosts shows between operators, and the recording has too few of them, or was not made with"
    " torch.profiler"
)
_NO_STACKS = "recorded without stacks; to see lines of code, record with_stack=True"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GraphReport(Report):
    """The report on a job of any shape. `evidence`: its graph and replay.

    `critical_peers` (by the label `critical_label`, peer or kind), `critical_kinds`, `critical_ranks`: mean seconds per
    step on the critical path of the recorded job, largest first; `critical_delay_s`: while nothing on it ran. `asked`:
    labels, or several joined by commas, that a reader asked for.
    """

    evidence: GraphSubject
    critical_label: str
    critical_peers: Mapping[str, float]
    critical_kinds: Mapping[str, float]
    critical_ranks: Mapping[int, float]
    critical_delay_s: float
    asked: tuple[str, ...] = ()

    @property
    def recorded(self) -> Recorded | None:
        """What a recording of GPUs shows beside its ops; None for other op traces."""
        return self.evidence.recorded

    @property
    def ops_evidence(self) -> GraphSubject:
        return self.evidence

    @property
    def sizes(self) -> str:
        kept = self.evidence.kept
        counts = {"rank": len(self.evidence.ranks), "step": self.steps_traced, "op": self.evidence.ops.height}
        if kept is not None:
            counts = {"rank": len(self.evidence.ranks), "step": kept.steps, "GPU op": kept.gpu_ops}
        sizes = ", ".join(counted(count, name) for name, count in counts.items() if count)
        device = None if kept is None else kept.gpu
        return f"{sizes} on {short(device, _WIDEST_NAME)}" if device else sizes

    @property
    def gpus(self) -> int:
        return self.evidence.gpus

    @property
    def daily(self) -> bool:
        return self.evidence.daily

    @property
    def has_peers(self) -> bool:
        return not self.evidence.alone

    @property
    def labels_wanted(self) -> Sequence[ByLabel]:
        """See `Report.labels_wanted`: without the usual ones."""
        return [group for group in self.labels_asked if ",".join(group.labels) in self.asked]

    @property
    def whole(self) -> str:
        return self.evidence.whole

    @property
    def times_s(self) -> dict[str, float]:
        times = self.evidence.times
        return {name: float(getattr(times, name).mean()) for name in ("recorded", "original", "ideal")}

    @property
    def slowdown(self) -> float:
        """S = T(original) / T(ideal), nan if the ideal job takes no time."""
        return self.evidence.slowdown

    @property
    def steps_traced(self) -> int:
        return len(self.evidence.steps) if self.evidence.kept is None else self.evidence.kept.steps

    @property
    def shares_by_rank(self) -> Mapping[int, Share]:
        """What each rank costs alone, as recorded while all others are ideal."""
        shares = next((group.shares for group in self.labels_asked if group.labels == ("rank",)), ())
        return {int(share.values[0]): share for share in shares}

    def step_times(self) -> StepTimes:
        times = self.evidence.times
        return StepTimes(self.evidence.steps, times.recorded, times.original, times.ideal)

    @property
    def workers(self) -> pl.DataFrame:
        by_rank, hosts = sorted(self.shares_by_rank.items()), self.evidence.hosts
        schema = {"dp_rank": pl.Int64, "pp_rank": pl.Int64, "rank": pl.Int64, "host": pl.String, "slowdown": pl.Float64}
        rows = [(None, None, rank, hosts.get(rank), share.slowdown) for rank, share in by_rank]
        return pl.DataFrame(rows, schema, orient="row")

    def remarks_of_source(self) -> Iterator[tuple[str, str]]:
        kept = self.evidence.kept
        gpu = self.evidence.gpu
        if self.evidence.alone and gpu is not None and self.evidence.shows(Fact.COMPUTE):
            yield "GPU", _gpu_in_words(gpu)
        unnamed = any(one.change is not None and one.spent and not one.spent.where for one in self.findings)
        if gpu is not None and not gpu.stacks and unnamed and "with_stack" not in (self.answer.action or ""):
            yield "Names", _NO_STACKS
        notes = () if kept is None else kept.notes if self.recorded else (*kept.notes, _OPS_ONLY)
        yield from (("" if number else "Notes", printable(note)) for number, note in enumerate(notes))
        yield from experts.remarks(self)

    def sections(self, *, full: bool = False) -> Iterator[Table]:
        found, gpu = self.recorded, self.evidence.gpu if self.evidence.alone else None
        if full and len(self.evidence.ranks) > 1:
            names = {"recorded": "recorded", "original": "launch delays removed", "ideal": "and all ranks alike"}
            rows = ((name, seconds(self.times_s[key])) for key, name in names.items())
            yield Table("Method", (f"Times of a {self.whole}", "mean"), (*rows, ("S", self.slowdown_text)))
        if full and gpu is not None:
            yield from gpu_tables(gpu)
        if found is not None and gpu is None:
            yield self._ranks(found, full=full)
            if full:
                yield _waits(found)
        if found is not None and full:
            yield _kernels(found)
        if full or self.evidence.kept is None:
            yield self._critical_path()
        if full and gpu is None:
            usual = [group for group in self.labels_asked if found is None or group.labels != ("rank",)]
            yield from (label_table(group) for group in usual if group not in self.labels_wanted)
        if full and not self.experts_asked:
            yield from experts.loads(self.experts)

    def asked_tables(self) -> Iterator[Table]:
        yield from super().asked_tables()
        yield from experts.asked_tables(self)

    def _ranks(self, found: Recorded, *, full: bool) -> Table:
        """A row for each rank, the one that the others wait for first; a rank alone waits for nobody.

        `full`: with S of each rank, which the prices of findings are not compared with.
        """
        known, several = self.shares_by_rank, len(self.evidence.ranks) > 1
        each = list(zip(found.breakdowns, found.waits.wait.tolist(), found.waits.sole_delay.tolist(), strict=True))
        each.sort(key=lambda row: -row[2])
        rows = []
        for one, wait, sole_delay in each:
            alone = (f"{known[one.rank].slowdown:.3f}" if one.rank in known else "",) if full else ()
            parts = (one.compute_s, one.communication_s, one.exposed_communication_s, one.idle_s)
            shares = [f"{part / (one.span_s or 1.0) * 100:.0f}%" for part in parts]
            waits = (*alone, seconds(sole_delay), seconds(wait)) if several else ()
            rows.append((str(one.rank), *waits, *shares, seconds(one.span_s)))
        waits = (*(("slowdown",) if full else ()), "sole delay", "waits") if several else ()
        heads = ("rank", *waits, "compute", "comm", "exposed", "idle", "of")
        return _shortened("Ranks", heads, rows, _MOST_RANKS if full else _FEWEST_RANKS)

    def _critical_path(self) -> Table:
        """The critical path of the recorded job, by op class and by rank."""
        recorded_s = self.times_s["recorded"]
        parts = [
            *((short(name), found) for name, found in list(self.critical_peers.items())[:_MOST_WAITS]),
            ("between ops" if self.evidence.kept else "launch delays", self.critical_delay_s),
            *((f"rank {rank}", found) for rank, found in list(self.critical_ranks.items())[:_MOST_WAITS]),
        ]
        rows = tuple((name, seconds(found), f"{found / recorded_s * 100:.0f}%") for name, found in parts)
        return Table("Critical path", ("On the critical path", of_whole(self.whole), "share"), rows)

    def details(self) -> dict[str, Any]:
        evidence, found = self.evidence, self.recorded
        content: dict[str, Any] = {
            "job": {
                "source": "ops",
                "ranks": len(evidence.ranks),
                "steps": self.steps_traced,
                "ops": evidence.ops.height,
            },
            "trust": {"notes": []},
            "verdict": {"culprit": self._rank_to_blame()},
            "wasted_gpu_hours": float((evidence.times.original - evidence.times.ideal).sum()) * self.gpus / 3600,
            "gaps": evidence.graph.ops.gaps,
            "critical_path": [
                *({self.critical_label: name, "recorded_s": spent} for name, spent in self.critical_peers.items()),
                {self.critical_label: None, "recorded_s": self.critical_delay_s},
            ],
            "critical_kinds": [{"kind": kind, "recorded_s": spent} for kind, spent in self.critical_kinds.items()],
            "critical_ranks": [{"rank": rank, "recorded_s": spent} for rank, spent in self.critical_ranks.items()],
            "by_rank": [
                {"rank": rank, "host": evidence.hosts.get(rank), **self._alone(rank)}
                for rank in sorted(self.shares_by_rank)
            ],
            "by_kind": [
                {
                    "kind": share.values[0],
                    "ops": share.ops,
                    "slowdown": share.slowdown,
                    "slowdown_error": share.error,
                    "saved_s": share.removed_s,
                }
                for group in self.labels_asked
                if group.labels == ("kind",)
                for share in group.shares
            ],
        }
        if evidence.kept is not None:
            content |= self._of_kept(evidence.kept, content["verdict"])
        if found is not None:
            content["job"]["host_calls"] = found.recording.calls.height
            content["trust"]["host_ahead_of_gpu_s"] = found.skew_s
            content |= self._of_recording(found)
        return content

    def _of_kept(self, kept: Kept, verdict: dict[str, Any]) -> dict[str, Any]:
        left = self.evidence.unexplained
        gpus = [in_report(times, self.findings, self._unprofiled(times.rank)) for times in kept.gpus]
        return {
            "job": {
                "source": "recording",
                "ranks": len(self.evidence.ranks),
                "world_size": kept.world_size,
                "gpu": kept.gpu,
                "steps": kept.steps,
                "gpu_ops": kept.gpu_ops,
                "gpu_ops_without_launch": kept.without_launch,
            },
            "trust": {
                "notes": list(kept.notes),
                "start_gap_p99_s": {"communication": left.communication_gap_s, "compute": left.compute_gap_s},
                "edges": left.edges,
                "inferred_edges": left.inferred,
                "violations": left.violations,
            },
            "verdict": verdict | {"exposed_communication_s": exposed_communication_s(self.evidence)},
            "recording_time_s": self.times_s,
            **({"gpu": gpus[0]} if self.evidence.alone and gpus else {"gpus": gpus}),
        }

    def _unprofiled(self, rank: int) -> Unprofiled | str:
        """The step without the profiler, or why it is not known."""
        step, cost = unprofiled_step(self.evidence), self.evidence.kept.costs.get(rank) if self.evidence.kept else None
        if step is None or cost is None:
            return _NO_OVERHEAD
        profiled_s = float(profiled_steps_s(self.evidence).mean())
        return Unprofiled(profiled_s, step, profiled_s - step.value, cost.operator, cost.words)

    def _of_recording(self, found: Recorded) -> dict[str, Any]:
        from tracekit.report import plain_data as shapes

        recording, clocks, waits = found.recording, found.clocks, found.waits
        columns = (clocks.ahead, clocks.uncertainty, clocks.collectives)
        by_rank = zip(found.breakdowns, waits.wait.tolist(), waits.sole_delay.tolist(), strict=True)
        return {
            "by_rank": [
                asdict(one)
                | {
                    "host": recording.hosts.get(one.rank),
                    "wait_s": wait,
                    "sole_delay_s": sole_delay,
                    **self._alone(one.rank),
                }
                for one, wait, sole_delay in by_rank
            ],
            "collectives": shapes.shaped(shapes.Collectives, found.matches),
            "clocks": [
                shapes.ClockOfRank(*row)
                for row in zip(clocks.ranks, *(column.tolist() for column in columns), strict=True)
            ],
            "wait_for": [shapes.WaitFor(group, rank, other, waited) for waited, rank, other, group in waits.each()],
            "kernel_classes": found.kernel_time.to_dicts(),
            "unknown_kernels": found.unknown_kernels.head(_MOST_UNKNOWN).to_dicts(),
        }

    def _alone(self, rank: int) -> dict[str, float]:
        """S of a rank alone, and its error."""
        share = self.shares_by_rank.get(rank)
        both = (math.nan, math.nan) if share is None else (share.slowdown, share.error)
        return dict(zip(("slowdown", "slowdown_error"), both, strict=True))

    def _rank_to_blame(self) -> Any:
        """The rank that stands out, in the form of the JSON object, with the findings on it; None if there is none."""
        from tracekit.report import plain_data as shapes

        found = culprit_of(self.evidence)
        if found is None:
            return None
        causes = [
            shapes.CauseOfCulprit(
                cause.kind,
                cause.saved_s,
                "; ".join(figure.words for figure in cause.evidence),
                cause.effect,
                cause.suggested_fix,
            )
            for cause in self.findings
            if cause.where.ranks == (found.rank,)
        ]
        host = self.evidence.hosts.get(found.rank)
        return shapes.shaped(shapes.RankToBlame, found, host=host, causes=causes)


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
    note = f"the costliest {most} of {len(rows)}; all with --json" if len(rows) > most else None
    return Table(title, heads, tuple(rows[:most]), note)


def _waits(found: Recorded) -> Table:
    """Which rank waits for which, longest first."""
    rows = [
        (f"rank {rank}", f"rank {other}", seconds(waited), short(group))
        for waited, rank, other, group in sorted(found.waits.each(), reverse=True)
    ]
    return _shortened("Waits", ("waits", "for", "in collectives", "group"), rows, _MOST_WAITS)


def _kernels(found: Recorded) -> Table:
    """Time by class of kernels, and the longest kernels of no class."""
    times, unknown = found.kernel_time, found.unknown_kernels.head(_MOST_KERNELS)
    total = float(times["seconds"].sum()) or 1.0
    named = [
        *times.iter_rows(),
        *((f"  {short(name, _WIDEST_NAME)}", ops, spent) for name, ops, spent in unknown.iter_rows()),
    ]
    rows = tuple((name, f"{ops:,}", seconds(spent), f"{spent / total * 100:.0f}%") for name, ops, spent in named)
    return Table("Kernels", ("Kernels", "ops", "time", "share"), rows)
