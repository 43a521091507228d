"""The result of `whatif`: what a job loses, who causes it, why, what to do, and whether to believe it.

In: an `Attribution` and a `Diagnosis` with the trace's identity and coverage. Out: tables (`report_tables.py`), one
JSON object (`report_json.py`, docs/report-schema.md), figures (`report_plot.py`), and the report as a notebook shows it
(`report_html.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from tracekit.analysis.attribution.attribution import Trust
from tracekit.analysis.graph.rules.posting import PostingRule
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.replay.method import Method
from tracekit.base.text import short
from tracekit.report.tables import ReportTables
from tracekit.trace.canonical import Coverage
from tracekit.trace.model import Layout, Worker

if TYPE_CHECKING:
    from tracekit.analysis.attribution.compare import WorkerSteps
    from tracekit.report.findings import Findings
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
class Report(ReportTables):
    """Everything that `Job.whatif` found out about one job.

        report = tracekit.load("job.parquet").whatif()
        report                                # in a notebook: answer, worker map, steps, causes, fixes
        report.diagnosis.answer.headline      # the same in words
        report.slowdown                       # S, 1.0 for a job without stragglers
        report.by_worker                      # a polars frame; report.pandas("by_worker")
        report.plot.worker_map()              # a Plotly figure
        report.to_dict()                      # plain data, as docs/report-schema.md documents it
        report.write_csv("tables")            # every table as a file

    `name`, `layout`, `ops`: which job, its parallel sizes, how many ops were analysed. `coverage`: what the trace
    lacks; `dropped_lanes`: (step, dp_rank) that lack a stage, `left_out_steps`: steps that some DP ranks lack; both are
    left out. `method`: the rules of the analysis. `clocks`: which clocks were corrected. `posting`: when receives are
    posted, as inferred from the recording. `published`: S by the published method, None if it cannot differ. `replay`:
    the source of the figures of single steps. The other fields are those of `ReportTables`: `attribution`, `diagnosis`,
    `ranks`, `hosts`, `questions_asked`, `labels_asked`.
    """

    name: str
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

    def __repr__(self) -> str:
        return f"<Report on {short(self.name)}: {self.diagnosis.verdict.kind}, {self.diagnosis.answer.headline}>"

    def _repr_html_(self) -> str:
        from tracekit.report.card import fragment

        return fragment(self)

    @property
    def plot(self) -> Plots:
        """The report as Plotly figures: `worker_map()`, `steps()`, `timeline()`, `critical_path()`."""
        from tracekit.report.plots import Plots

        return Plots(self)

    @property
    def slowdown(self) -> float:
        """S = T(original) / T(ideal): how much longer a step takes than if every op took its ideal time."""
        return self.attribution.slowdown

    @property
    def trust(self) -> Trust:
        """Whether to believe the report, and why not."""
        return self.diagnosis.trust

    @property
    def rate_assumption(self) -> str:
        """The assumption behind every figure of GPU-hours a day."""
        gpus, steps = self.layout.world_size, len(self.attribution.steps)
        return f"GPU-hours a day: {gpus:,} GPUs running all day as in the {steps:,} traced steps"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, as documented in docs/report-schema.md; nan becomes null."""
        from tracekit.report.plain_data import report_as_dict

        return report_as_dict(self)

    def to_json(self) -> str:
        """`to_dict` as one JSON object."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def worker_steps(self) -> WorkerSteps:
        """Exact S of each worker in each step, in the form that comparisons use."""
        from tracekit.analysis.attribution.compare import WorkerSteps

        found = self.attribution
        slowdown = (found.by_worker / found.ideal[:, None, None]).astype(np.float32)
        return WorkerSteps(np.asarray(found.steps, np.int64), np.asarray(found.dp_ranks, np.int64), slowdown)

    def findings(self) -> Findings:
        """The part of this report that the store keeps."""
        from tracekit.report.findings import Findings, WorkerSlowdowns

        found = self.attribution
        workers = WorkerSlowdowns(
            steps=[int(step) for step in found.steps],
            dp_ranks=[int(dp_rank) for dp_rank in found.dp_ranks],
            slowdown=found.by_worker / found.ideal[:, None, None],
        )
        return Findings(self.to_json(), workers)
