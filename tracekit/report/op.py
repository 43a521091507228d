"""The report on a job of any shape, as data.

In: step times, attribution and critical path of an op graph. Out: `OpReport`, and one JSON object of it
(docs/op-trace.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from tracekit.analysis.attribution.attribution import LARGEST_DISCREPANCY, SMALLEST_SLOWDOWN, STRAGGLING_SLOWDOWN, waste
from tracekit.analysis.attribution.chance import Parts
from tracekit.analysis.graph.op_graph import MissingMembers
from tracekit.analysis.numeric.arrays import Floats, Int32s
from tracekit.report.findings import Findings
from tracekit.report.plain_data import without_nan
from tracekit.report.questions import ByLabel, Question

_MOST_GAPS = 3


@dataclass(frozen=True, slots=True)
class OpReport:
    """The result of `OpJob.whatif`. `recorded`, `with_delays`, `original`, `ideal`: step times, seconds, [steps];
    `noisy`: those of the ideal job with the noise of the run.

    `critical_peers` (by the label `critical_label`, peer or kind), `critical_ranks`: mean seconds per step on the
    critical path of the recorded job, largest first; `critical_delay_s`: while nothing on it ran. `gaps`: rendezvous
    with missing members. `clamped`: number of transfers and delays far below zero. `of_recording`: whether the trace
    was made from a GPU recording, in which a rank can hold up the others at any S; `verdict`: which rank does, as found
    there.
    """

    name: str
    ranks: int
    ops: int
    steps: Int32s
    recorded: Floats
    with_delays: Floats
    original: Floats
    ideal: Floats
    noisy: Floats
    labels_asked: tuple[ByLabel, ...]
    critical_label: str
    critical_peers: Mapping[str, float]
    critical_ranks: Mapping[int, float]
    critical_delay_s: float
    gaps: tuple[MissingMembers, ...]
    clamped: int
    questions_asked: tuple[Question, ...]
    of_recording: bool = False
    verdict: str | None = None

    @property
    def slowdown(self) -> float:
        """S = T(original) / T(ideal), nan if the ideal job takes no time."""
        return _ratio(float(self.original.mean()), float(self.ideal.mean()))

    @property
    def straggling(self) -> bool:
        """S >= 1.1."""
        return self.slowdown >= STRAGGLING_SLOWDOWN

    @property
    def parts(self) -> Parts:
        """What S consists of; nobody looked for causes."""
        return Parts.of(self.original, self.ideal, self.noisy)

    @property
    def replay_error(self) -> float:
        """How far the replay with launch delays misses the recording, as a share of it."""
        recorded = float(self.recorded.mean())
        return abs(_ratio(float(self.with_delays.mean()) - recorded, recorded))

    @property
    def discrepancy(self) -> float:
        """The share of time that launch delays add, T(recorded) / T(original) - 1."""
        return _ratio(float(self.recorded.mean()), float(self.original.mean())) - 1

    @property
    def doubts(self) -> list[str]:
        """Why the numbers may be wrong; empty if there is no reason."""
        doubts = []
        if math.isnan(self.slowdown):
            doubts.append("the job without stragglers takes no time, so S is not known")
        elif self.slowdown < SMALLEST_SLOWDOWN:
            doubts.append(
                f"S is {self.slowdown:.2f}: the job without stragglers is slower than the job itself, so these ideal"
                " durations do not fit it"
            )
        if not self.replay_error <= LARGEST_DISCREPANCY:
            doubts.append(f"the replay with launch delays misses the recording by {self.replay_error:.1%}")
        if not abs(self.discrepancy) <= LARGEST_DISCREPANCY:
            doubts.append(
                f"launch delays add {self.discrepancy:.1%} to the step: time that the stated dependencies leave"
                " unexplained"
            )
        if self.gaps:
            named = "; ".join(
                f"rendezvous {gap.rendezvous} of {gap.group} lacks rank {', '.join(map(str, gap.missing[:8]))}"
                + (" ..." if len(gap.missing) > 8 else "")
                for gap in self.gaps[:_MOST_GAPS]
            )
            more = f" and {len(self.gaps) - _MOST_GAPS} more" if len(self.gaps) > _MOST_GAPS else ""
            doubts.append(f"members were not recorded, so that nobody waits for them in the replay: {named}{more}")
        if doubts and self.clamped:
            doubts.append(f"{self.clamped} transfers or launch delays lie more than 10 ms below zero (taken as 0)")
        return doubts

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; nan becomes null."""
        content = {
            "job": {"name": self.name, "ranks": self.ranks, "steps": len(self.steps), "ops": self.ops},
            "slowdown": self.slowdown,
            "waste": waste(self.slowdown) if self.slowdown else math.nan,
            "straggling": self.straggling,
            "verdict": self.verdict,
            "parts": {**self.parts.to_dict(), "sentence": self.parts.words(float(self.original.mean()))},
            "wasted_gpu_hours": float((self.original - self.ideal).sum()) * self.ranks / 3600,
            "wasted_gpu_hours_per_day": waste(self.slowdown) * self.ranks * 24 if self.slowdown else math.nan,
            "step_time_s": {
                name: float(times.mean())
                for name, times in (("recorded", self.recorded), ("original", self.original), ("ideal", self.ideal))
            },
            "trust": {
                "replay_error": self.replay_error,
                "discrepancy": self.discrepancy,
                "trustworthy": not self.doubts,
                "reasons": self.doubts,
            },
            "gaps": [
                {"rendezvous": gap.rendezvous, "group": gap.group, "missing": list(gap.missing)} for gap in self.gaps
            ],
            "by_label": {
                ",".join(group.labels): [
                    {
                        "value": list(share.values) if len(share.values) > 1 else share.values[0],
                        "ops": share.ops,
                        "slowdown": share.slowdown,
                        "added_s": share.added_s,
                        "saved_s": share.removed_s,
                    }
                    for share in group.shares
                ]
                for group in self.labels_asked
            },
            "critical_path": {
                f"by_{self.critical_label}": [
                    {self.critical_label: name, "recorded_s": seconds} for name, seconds in self.critical_peers.items()
                ],
                "by_rank": [{"rank": rank, "recorded_s": seconds} for rank, seconds in self.critical_ranks.items()],
                "delay_s": self.critical_delay_s,
            },
            "questions": [structs.asdict(asked) for asked in self.questions_asked],
        }
        plain: dict[str, Any] = without_nan(content)
        return plain

    def to_json(self) -> str:
        """`to_dict` as one JSON object."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def findings(self) -> Findings:
        """What the store keeps of this report."""
        return Findings(self.to_json())


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.nan
