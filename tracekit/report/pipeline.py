"""The report on a pipeline.

In: an `Attribution` and a `Diagnosis` with the identity and the coverage of the trace. Out: `PipelineReport`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from msgspec import Struct

from tracekit.analysis.graph.rules.posting import PostingRule
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.method import Method
from tracekit.report import words
from tracekit.report.report import StepTimes
from tracekit.report.section import Table
from tracekit.report.tables import ReportTables
from tracekit.trace.canonical import Coverage
from tracekit.trace.model import Layout, Worker

if TYPE_CHECKING:
    from tracekit.report.findings import WorkerSlowdowns
    from tracekit.report.plots import Plots

#: Two methods agree if their S differ by at most this share.
LARGEST_DIFFERENCE = 0.01


class ClockOffset(Struct, frozen=True):
    """How far a worker's clock was ahead on average, seconds, with its standard error and its drift per second.

    `jump_s`, `jump_step`: by how much it was set ahead in mid-trace, and the first step after that, None if it was not.
    """

    worker: Worker
    offset_s: float
    error_s: float
    drift: float
    jump_s: float
    jump_step: int | None


class ClockReport(Struct, frozen=True):
    """Which clocks were off. `untied`: whose clocks could not be compared, None if all could be."""

    offsets: tuple[ClockOffset, ...]
    untied: str | None


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
    lacks; `dropped_lanes`: (step, dp_rank) that lack a stage, `left_out_steps`: steps that some DP ranks lack; both are
    left out. `method`: the rules of the analysis. `clocks`: which clocks were corrected. `posting`: when receives are
    posted, as inferred from the recording. `published`: S by the published method, None if it cannot differ. `replay`:
    the source of the figures of single steps. The other fields are those of `ReportTables` and `Report`.
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

    @property
    def plot(self) -> Plots:
        """The report as Plotly figures: `worker_map()`, `steps()`, `timeline()`, `critical_path()`."""
        from tracekit.report.plots import Plots

        return Plots(self)

    @property
    def pipeline(self) -> PipelineReport:
        """See `Report.pipeline`."""
        return self

    @property
    def sizes(self) -> str:
        """See `Report.sizes`."""
        return words.pipeline_sizes(self)

    @property
    def gpus(self) -> int:
        """See `Report.gpus`."""
        return self.layout.world_size

    @property
    def whole(self) -> str:
        """See `Report.whole`."""
        return "step"

    @property
    def times_s(self) -> dict[str, float]:
        """See `Report.times_s`."""
        found = self.attribution
        return {"recorded": found.recorded_s, "original": found.original_s, "ideal": found.ideal_s}

    @property
    def slowdown(self) -> float:
        """S = T(original) / T(ideal): how much longer a step takes than if every op took its ideal time."""
        return self.attribution.slowdown

    @property
    def steps_traced(self) -> int:
        """See `Report.steps_traced`."""
        return len(self.attribution.steps)

    def step_times(self) -> StepTimes:
        """See `Report.step_times`."""
        found = self.attribution
        return StepTimes(np.asarray(found.steps, np.int32), found.recorded, found.original, found.ideal)

    @property
    def workers(self) -> pl.DataFrame:
        """See `Report.workers`."""
        return self.by_worker.select("dp_rank", "pp_rank", "rank", "host", "slowdown").sort("dp_rank", "pp_rank")

    def remarks_of_source(self) -> Iterator[tuple[str, str]]:
        """See `Report.remarks_of_source`."""
        return words.pipeline_remarks(self)

    def sections(self, *, full: bool = False) -> Iterator[Table]:  # noqa: ARG002
        """See `Report.sections`; pipelines are drawn as maps of workers and steps instead."""
        return iter(())

    def details(self) -> dict[str, Any]:
        """See `Report.details`."""
        from tracekit.report.plain_data import pipeline_details

        return pipeline_details(self)

    def worker_slowdowns(self) -> WorkerSlowdowns:
        """See `Report.worker_slowdowns`."""
        from tracekit.report.findings import WorkerSlowdowns

        found = self.attribution
        return WorkerSlowdowns(
            steps=[int(step) for step in found.steps],
            dp_ranks=[int(dp_rank) for dp_rank in found.dp_ranks],
            slowdown=found.by_worker / found.ideal[:, None, None],
        )
