"""The report on a pipeline.

In: an `Attribution` and a `Diagnosis` with the identity and the coverage of the trace. Out: `PipelineReport`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.graph.rules.posting import PostingRule
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.method import Method
from tracekit.job import experts
from tracekit.job import pipeline_words as words
from tracekit.job.tables import JSON_TABLES, ReportTables, bubble_frames
from tracekit.report.bubbles import Bubbles
from tracekit.report.clocks import ClockReport
from tracekit.report.report import StepTimes
from tracekit.report.section import Table
from tracekit.trace.canonical import Coverage
from tracekit.trace.model import Layout

if TYPE_CHECKING:
    from tracekit.analysis.evidence.graph_subject import GraphSubject
    from tracekit.report.findings import WorkerSlowdowns
    from tracekit.show.plots import Plots

#: Two methods agree if their S differ by at most this share.
LARGEST_DIFFERENCE = 0.01


class PublishedView(Struct, frozen=True):
    """S by the published method, and why it can differ from tracekit's."""

    slowdown: float
    reasons: tuple[str, ...]

    def differs(self, slowdown: float) -> bool:
        """Whether the two S are more than 1 % apart."""
        return abs(slowdown / self.slowdown - 1) > LARGEST_DIFFERENCE


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PipelineReport(ReportTables):
    """The report on a pipeline.

        report.by_worker                      # a polars frame; report.pandas("by_worker")
        report.plot.worker_map()              # a Plotly figure
        report.write_csv("tables")            # every table as a file

    `layout`, `ops`: its parallel sizes, how many ops were analysed. `coverage`: what the trace
    lacks; `dropped_lanes`: (step, dp_rank) that lack a stage, `left_out_steps`: steps that some DP ranks lack, or that
    were cut; both are left out.
    `method`: the rules of the analysis. `clocks`: which clocks were corrected. `posting`: when receives are
    posted, as inferred from the recording. `published`: S by the published method, None if it cannot differ. `replay`:
    the source of the figures of single steps. `exchanges`: the all-to-alls and the work between them, None without
    any. `bubbles`: where stages are idle, None if nobody asked. `evidence_steps`: causes, fixes
    and answers follow from so many steps, None for all; `replay` has only these. The other fields
    are those of `ReportTables` and `Report`.
    """

    layout: Layout
    ops: int
    coverage: Coverage
    dropped_lanes: tuple[tuple[int, int], ...]
    left_out_steps: tuple[int, ...]
    method: Method
    clocks: ClockReport
    posting: PostingRule
    replay: JobReplay
    published: PublishedView | None = None
    exchanges: GraphSubject | None = None
    bubbles: Bubbles | None = None
    evidence_steps: int | None = None

    def with_bubbles(self, schedules: Sequence[str] = ()) -> PipelineReport:
        """The same report, with the idle time of the stages and the prices of these schedules.

        A schedule reads like "1f1b", "interleaved:chunks=2" or "zb-h1,weight=0.4". Raises SelectionError for another.
        """
        from tracekit.analysis.bubbles.bubbles import find_bubbles

        return replace(self, bubbles=find_bubbles(self.replay, schedules))

    @property
    def ops_evidence(self) -> GraphSubject | None:
        return self.exchanges

    @property
    def plot(self) -> Plots:
        """The report as Plotly figures: `worker_map()`, `steps()`, `timeline()`, `critical_path()`."""
        from tracekit.show.plots import Plots

        return Plots(self)

    @property
    def pipeline(self) -> PipelineReport:
        return self

    @property
    def sizes(self) -> str:
        return words.pipeline_sizes(self)

    @property
    def gpus(self) -> int:
        return self.layout.world_size

    @property
    def whole(self) -> str:
        return "step"

    @property
    def times_s(self) -> dict[str, float]:
        found = self.attribution
        return {"recorded": found.recorded_s, "original": found.original_s, "ideal": found.ideal_s}

    @property
    def slowdown(self) -> float:
        """S = T(original) / T(ideal): how much longer a step takes than if every op took its ideal time."""
        return self.attribution.slowdown

    @property
    def steps_traced(self) -> int:
        return len(self.attribution.steps)

    def step_times(self) -> StepTimes:
        found = self.attribution
        return StepTimes(np.asarray(found.steps, np.int32), found.recorded, found.original, found.ideal)

    @property
    def workers(self) -> pl.DataFrame:
        return self.by_worker.select("dp_rank", "pp_rank", "rank", "host", "slowdown").sort("dp_rank", "pp_rank")

    def remarks_of_source(self) -> Iterator[tuple[str, str]]:
        yield from words.pipeline_remarks(self)
        if self.bubbles is not None:
            from tracekit.job import bubbles_words

            yield "Bubbles", bubbles_words.sentence(self.bubbles)
        yield from experts.remarks(self)

    def sections(self, *, full: bool = False) -> Iterator[Table]:
        """See `Report.sections`; else, pipelines are drawn as maps of workers and steps."""
        if self.bubbles is not None:
            from tracekit.job import bubbles_words

            yield from bubbles_words.tables(self.bubbles)
        if full and not self.experts_asked:
            yield from experts.loads(self.experts)

    def frames(self) -> dict[str, pl.DataFrame]:
        return super().frames() | ({} if self.bubbles is None else bubble_frames(self.bubbles))

    def asked_tables(self) -> Iterator[Table]:
        yield from super().asked_tables()
        yield from experts.asked_tables(self)

    def details(self) -> dict[str, Any]:
        from tracekit.report import plain_data as shapes

        found = self.attribution
        some = {} if self.evidence_steps is None else {"evidence_steps": self.evidence_steps}
        gaps = [
            shapes.MissingOps(gap.kind, gap.worker.dp_rank, gap.worker.pp_rank, gap.ops, sorted(set(gap.steps)))
            for gap in found.gaps
        ]
        return {
            "job": {"source": "pipeline", "steps": self.steps_traced, "layout": self.layout, "ops": self.ops} | some,
            "trust": {"clamped_transfers": found.clamped_transfers, "clamped_delays": found.clamped_delays},
            "wasted_gpu_hours": found.wasted_gpu_hours,
            "method": shapes.MethodUsed(
                self.method,
                None if self.published is None else self.published.slowdown,
                [] if self.published is None else list(self.published.reasons),
            ),
            "clocks": self.clocks,
            "posting": self.posting,
            "coverage": shapes.shaped(
                shapes.Coverage,
                self.coverage,
                gaps=gaps,
                slowdown_as_recorded=found.slowdown_as_recorded,
                hidden_slowdown=found.hidden_slowdown,
                left_out_steps=self.left_out_steps,
                dropped=[{"step": step, "dp_rank": dp_rank} for step, dp_rank in self.dropped_lanes],
                inferred_transfers=self.replay.graph.inferred_transfers,
            ),
            "bubbles": self.bubbles,
            "m_w": found.m_w.removal,
            "m_s": found.m_s.removal,
            "slowest_workers": found.slowest_workers,
            **{name: self.table(name).to_dicts() for name in JSON_TABLES},
        }

    def worker_slowdowns(self) -> WorkerSlowdowns:
        from tracekit.report.findings import WorkerSlowdowns

        found = self.attribution
        return WorkerSlowdowns(
            steps=[int(step) for step in found.steps],
            dp_ranks=[int(dp_rank) for dp_rank in found.dp_ranks],
            slowdown=found.by_worker / found.ideal[:, None, None],
        )
