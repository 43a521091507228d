"""The report on a GPU-recorded job, as data.

In: breakdown, matches, clocks, waits, and replay results. Out: `GpuReport`, and one JSON object of it (docs/kineto.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
from msgspec import structs

from tracekit.analysis.attribution.chance import Parts
from tracekit.analysis.diagnosis.verdict import SMALLEST_HEADLINE_SHARE
from tracekit.analysis.gpu.breakdown import Breakdown
from tracekit.analysis.gpu.clock_offsets import ClockOffsets
from tracekit.analysis.gpu.culprit import Culprit, GpuCause
from tracekit.analysis.gpu.late_rank import LateRanks, unexplained_waits
from tracekit.analysis.gpu.matching import Matches
from tracekit.analysis.gpu.remedy import ACTIONS, EFFECTS, OF_ALL
from tracekit.analysis.gpu.trust import Unexplained
from tracekit.analysis.gpu.waits import Waits
from tracekit.base.text import ranks_text, seconds, short, three_digits
from tracekit.report.op import OpReport
from tracekit.report.plain_data import without_nan
from tracekit.report.verdict import LossKind
from tracekit.trace.gpu_activity import KernelClass
from tracekit.trace.kineto import GpuRecording

#: The part of a rank that a cause slows down.
_PART = {
    GpuCause.SLOW_GPU: "compute",
    GpuCause.UNEVEN_WORK: "workload",
    GpuCause.HOST_BOUND: "host",
    GpuCause.LATE_INPUT: "data-loading",
    GpuCause.GC: "python-gc",
    GpuCause.SYNC_CALLS: "host",
    GpuCause.SLOW_LINK: "network",
    GpuCause.LATE_START: "host",
}
#: The number of unclassified kernels to list.
_MOST_UNKNOWN = 20


@dataclass(frozen=True)
class GpuReport:
    """The result of `GpuJob.whatif`.

    `replayed`: of the whole recording as one step. `culprit`: None if no rank stands out. `exposed_communication_s`:
    how much shorter the recording would be if transfers took no time once all ranks have arrived. `skew_s`: how far the
    clock of each rank's host was ahead of its GPU's, seconds. `left_out`, `not_comparable`: why ranks are not
    compared, and why what is compared cannot be trusted (`Comparable`); `late`: who is late to collectives.
    """

    recording: GpuRecording
    breakdowns: Sequence[Breakdown]
    matches: Matches
    clocks: ClockOffsets
    waits: Waits
    replayed: OpReport
    culprit: Culprit | None
    exposed_communication_s: float
    unexplained: Unexplained
    skew_s: Mapping[int, float]
    left_out: Mapping[int, str]
    not_comparable: Sequence[str]
    late: LateRanks

    @property
    def recorded_s(self) -> float:
        """From the first event of the recording to the end of the last, seconds."""
        return float(self.replayed.recorded.mean())

    @property
    def kind(self) -> LossKind:
        """What costs most: one rank, or what all ranks lose together."""
        shares = self._shares()
        kind = max(shares, key=lambda one: shares[one])
        if shares[kind] >= SMALLEST_HEADLINE_SHARE:
            return kind
        return LossKind.BALANCED if self.culprit is None else LossKind.MINOR

    @property
    def _named_s(self) -> float:
        """What the rank to blame costs, seconds; 0 if there is none."""
        return 0.0 if self.culprit is None else self.culprit.saved_s

    @property
    def parts(self) -> Parts:
        """What S consists of: the rank to blame, noise, and the rest. A rank alone is nobody's straggler."""
        parts = self.replayed.parts
        return structs.replace(parts, explained_s=self._named_s if len(self.recording.ranks) > 1 else parts.lost_s)

    def _shares(self) -> dict[LossKind, float]:
        """The share of the recording that each kind of loss costs. All ranks lose what the busiest GPU is idle."""
        recorded_s = self.recorded_s or 1.0
        return {
            LossKind.STRAGGLER: (self._named_s + self.parts.unexplained_s * self.parts.headline) / recorded_s,
            LossKind.HOST: min((one.idle_s for one in self.breakdowns), default=0.0) / recorded_s,
            LossKind.COMMUNICATION: max(self.exposed_communication_s, 0.0) / recorded_s,
        }

    @property
    def share(self) -> float:
        """The share of the recording that this kind of loss costs; 0 for `balanced`."""
        kind = LossKind.STRAGGLER if self.kind is LossKind.MINOR else self.kind
        return self._shares().get(kind, 0.0)

    @property
    def verdict(self) -> str:
        """What costs most, and what else nobody can explain, in a sentence without its kind."""
        costs, rest = self._costs_most, self.parts.words(self.recorded_s, "the recording")
        return "; ".join(dict.fromkeys(said for said in (costs, rest) if said))

    @property
    def _costs_most(self) -> str | None:
        """What costs most, None if nobody knows."""
        share, several = f"{self.share:.0%}", len(self.recording.ranks) > 1
        match self.kind:
            case LossKind.HOST:
                idle = f"every GPU is idle for at least {share}" if several else f"the GPU is idle for {share}"
                return f"{idle} of the recording, because its host launches nothing"
            case LossKind.COMMUNICATION:
                return f"transfers that no compute hides cost {share} of the recording, with all ranks there"
            case LossKind.BALANCED:
                return f"{'no rank stands out, and ' if several else ''}nothing costs 5% of the recording"
        if self.culprit is None:
            return None
        share = f"{self._named_s / self.recorded_s:.0%}"
        return f"{self.place(self.culprit.rank)} costs {share} of the recording: {self.effect}"

    @property
    def effect(self) -> str:
        """What the rank to blame does, after its name; empty if nobody is."""
        found = self.culprit
        if found is None:
            return ""
        if found.causes:
            return EFFECTS[found.causes[0].cause]
        return f"the others wait {seconds(found.waited_s)} for it"

    def place(self, rank: int) -> str:
        """Rank and host, as far as known: "rank 2 on node-7"."""
        host = self.recording.hosts.get(rank)
        return f"rank {rank}" if host is None else f"rank {rank} on {short(host)}"

    @property
    def lost(self) -> str | None:
        """What the costliest kind of loss costs: time, and GPU-hours per day at this rate; None if nothing does."""
        return None if self.kind is LossKind.BALANCED else self._rate(self.share)

    @property
    def who(self) -> str | None:
        """The ranks that lose the time; None where none is lost."""
        if self.kind in OF_ALL:
            return "all ranks" if len(self.recording.ranks) > 1 else self.place(self.recording.ranks[0])
        return None if self.culprit is None else self.place(self.culprit.rank)

    @property
    def first(self) -> tuple[str, str] | None:
        """What to do first, and what that saves if that is known; None if nothing is advised."""
        if self.kind in OF_ALL:
            return OF_ALL[self.kind], ""
        if self.culprit is None or not self.culprit.causes:
            return None
        leading = self.culprit.causes[0]
        return ACTIONS[leading.cause], f"{seconds(leading.saved_s)} of the {seconds(self.recorded_s)} recorded"

    @property
    def cost(self) -> str | None:
        """What the rank to blame costs: time, and GPU-hours per day at this rate; None if nobody is to blame."""
        return None if self.culprit is None else self._rate(self.culprit.saved_s / self.recorded_s)

    def _rate(self, share: float) -> str:
        a_day = (self.recording.world_size or len(self.recording.ranks)) * 24
        return (
            f"{seconds(share * self.recorded_s)} of the {seconds(self.recorded_s)} recorded,"
            f" {three_digits(share * a_day)} of {a_day:,} GPU-hours a day"
        )

    @property
    def culprits(self) -> list[dict[str, Any]]:
        """The rank to blame as a row of `culprits` in docs/report-schema.md, with the cost per mean step; [] if there
        is none.
        """
        found = self.culprit
        if found is None:
            return []
        steps = max(self.recording.step_spans["step"].n_unique(), 1)
        part = _PART[found.causes[0].cause] if found.causes else "compute"
        return [
            {
                "rank": found.rank,
                "dp_rank": None,
                "pp_rank": None,
                "host": self.recording.hosts.get(found.rank),
                "gpu_uuid": None,
                "part": part,
                "cost_s": found.saved_s / steps,
                "confidence": None,
                "first_step": None,
            }
        ]

    @property
    def distrust(self) -> list[str]:
        """Why the answer cannot be trusted; empty if it can."""
        named = None if self.culprit is None else self.culprit.rank
        waits = unexplained_waits(self.late, self.waits, named, self.recorded_s)
        unseen = [rank for rank in self.left_out if rank not in self.late.accounted]
        if self.kind is LossKind.COMMUNICATION:
            recorded = {*self.recording.ranks, *self.left_out}
            unseen += [rank for rank in range(self.recording.world_size or 0) if rank not in recorded]
        if unseen and self.exposed_communication_s >= SMALLEST_HEADLINE_SHARE * self.recorded_s:
            share = self.exposed_communication_s / self.recorded_s
            waits.append(
                f"transfers cost {share:.0%} of the recording, and part of that may be waiting for"
                f" {ranks_text(unseen)}, of which nothing is known"
            )
        return [*self.replayed.doubts, *self.not_comparable, *waits]

    @property
    def doubts(self) -> list[str]:
        """Why the numbers may be wrong: why they cannot be trusted, and what was lost or guessed while reading."""
        left_out = [f"rank {rank} is left out: {why}" for rank, why in self.left_out.items()]
        return [*self.distrust, *left_out, *self.recording.notes, *self._alone]

    @property
    def _alone(self) -> list[str]:
        """A note that several ranks have nothing in common, if that is the case."""
        if len(self.recording.ranks) < 2 or self.matches.matched:
            return []
        return ["no collective was found on several ranks: nobody is seen to wait; record ranks of one job together"]

    @property
    def slowdown_by_rank(self) -> Mapping[int, float]:
        """S of each rank alone, as recorded while all others are ideal."""
        shares = next((group.shares for group in self.replayed.labels_asked if group.labels == ("rank",)), ())
        return {int(share.values[0]): share.slowdown for share in shares}

    @property
    def kernel_time(self) -> pl.DataFrame:
        """`kernel_class`, `ops`, `seconds` over all ranks, most first."""
        return (
            self.recording.gpu_ops.group_by("kernel_class")
            .agg(ops=pl.len(), seconds=pl.col("duration").sum())
            .sort("seconds", "kernel_class", descending=[True, False])
        )

    @property
    def unknown_kernels(self) -> pl.DataFrame:
        """`name`, `ops`, `seconds` of kernels of no known class, most first."""
        other = self.recording.gpu_ops.filter(kernel_class=str(KernelClass.OTHER))
        return (
            other.group_by("name")
            .agg(ops=pl.len(), seconds=pl.col("duration").sum())
            .sort("seconds", "name", descending=[True, False])
        )

    @property
    def without_launch(self) -> int:
        """The number of GPU ops whose launch is outside the recording."""
        return self.recording.gpu_ops["launch"].null_count()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; nan becomes null."""
        content = {
            "job": self._job(),
            "verdict": {
                "kind": str(self.kind),
                "share": self.share,
                "sentence": self.verdict,
                "who": self.who,
                "cost": self.lost,
                "action": None if self.first is None else self.first[0],
                "culprit": self._culprit(),
                "exposed_communication_s": self.exposed_communication_s,
            },
            **self._replayed(),
            "by_rank": self._by_rank(),
            "collectives": {
                "matched": self.matches.matched,
                "unmatched": self.matches.unmatched,
                "by_group": [
                    {
                        "group": group.group,
                        "ranks": list(group.ranks),
                        "matched": group.matched,
                        "unmatched": {str(rank): count for rank, count in group.unmatched.items()},
                        "shifts": {str(rank): shift for rank, shift in group.shifts.items()},
                    }
                    for group in self.matches.groups
                ],
            },
            "clocks": [
                {"rank": rank, "ahead_s": ahead, "uncertainty_s": uncertainty, "collectives": count}
                for rank, ahead, uncertainty, count in zip(
                    self.clocks.ranks,
                    self.clocks.ahead.tolist(),
                    self.clocks.uncertainty.tolist(),
                    self.clocks.collectives.tolist(),
                    strict=True,
                )
            ],
            "wait_for": [
                {"group": of_group.group, "rank": rank, "for_rank": other, "wait_s": float(of_group.waited[at, by])}
                for of_group in self.waits.by_group
                for at, rank in enumerate(self.waits.ranks)
                for by, other in enumerate(self.waits.ranks)
                if of_group.waited[at, by] > 0
            ],
            "kernel_classes": self.kernel_time.to_dicts(),
            "unknown_kernels": self.unknown_kernels.head(_MOST_UNKNOWN).to_dicts(),
        }
        plain: dict[str, Any] = without_nan(content)
        return plain

    def to_json(self) -> str:
        """`to_dict` as one JSON object."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def _culprit(self) -> dict[str, Any] | None:
        found = self.culprit
        if found is None:
            return None
        return {
            "rank": found.rank,
            "host": self.recording.hosts.get(found.rank),
            "cost": self.cost,
            "saved_s": found.saved_s,
            "sole_delay_s": found.sole_delay_s,
            "waited_s": found.waited_s,
            "causes": [
                {
                    "cause": str(one.cause),
                    "saved_s": one.saved_s,
                    "evidence": one.evidence,
                    "effect": EFFECTS[one.cause],
                    "action": ACTIONS[one.cause],
                }
                for one in found.causes
            ],
        }

    def _replayed(self) -> dict[str, Any]:
        """The results of the replay; its one step is the recording."""
        content, left = self.replayed.to_dict(), self.unexplained
        del content["verdict"]  # here it has causes, too
        content["parts"] = {**self.parts.to_dict(), "sentence": self.parts.words(self.recorded_s, "the recording")}
        content["recording_time_s"] = content.pop("step_time_s")
        for question in content["questions"]:
            question["recording_time_s"] = question.pop("step_time_s")
        content["trust"] = {
            **content["trust"],
            "trustworthy": not self.distrust,
            "reasons": self.doubts,
            "start_gap_p99_s": {"communication": left.communication_gap_s, "compute": left.compute_gap_s},
            "edges": left.edges,
            "inferred_edges": left.inferred,
            "violations": left.violations,
            "host_ahead_of_gpu_s": {str(rank): skew for rank, skew in self.skew_s.items()},
        }
        del content["job"]
        return content

    def _job(self) -> dict[str, Any]:
        recording = self.recording
        return {
            "name": recording.name,
            "ranks": len(recording.ranks),
            "world_size": recording.world_size,
            "gpu": recording.device_name,
            "steps": recording.step_spans["step"].n_unique(),
            "gpu_ops": recording.gpu_ops.height,
            "gpu_ops_without_launch": self.without_launch,
            "host_calls": recording.calls.height,
        }

    def _by_rank(self) -> list[dict[str, Any]]:
        return [
            {
                "rank": one.rank,
                "host": self.recording.hosts.get(one.rank),
                "span_s": one.span_s,
                "compute_s": one.compute_s,
                "communication_s": one.communication_s,
                "exposed_communication_s": one.exposed_communication_s,
                "memory_s": one.memory_s,
                "idle_s": one.idle_s,
                "wait_s": wait,
                "sole_delay_s": sole_delay,
                "slowdown": self.slowdown_by_rank.get(one.rank),
            }
            for one, wait, sole_delay in zip(
                self.breakdowns, self.waits.wait.tolist(), self.waits.sole_delay.tolist(), strict=True
            )
        ]
