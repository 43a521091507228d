"""A pipeline as Plotly figures, for notebooks: `tracekit.plot(job).worker_map()`.

In: an analysed job; the figures of single steps come from its replay. Out: Plotly figures, the same ones that the
dashboard shows (`figures/`). Plotly is imported when a figure is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.analysis.job.job import Job
from tracekit.analysis.job.pipeline_report import WorkerLanes
from tracekit.analysis.numeric.arrays import Ints
from tracekit.base.errors import OutputError, SelectionError
from tracekit.base.text import seconds, short
from tracekit.dashboards.figures.spans import Replay, path_spans, step_ops
from tracekit.dashboards.figures.worker_map import WorkerMap, workers_that_matter
from tracekit.dashboards.words import worker_name
from tracekit.report.report import Report
from tracekit.trace.model import Worker

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from tracekit.dashboards.theme import Theme

#: Rows of the timeline, and the room above a figure for its title.
MOST_WORKERS, _TITLE_PX = 24, 64


def plot(job: Job) -> Plots:
    """The figures of a job: `worker_map()`, `steps()`, `timeline()`, `critical_path()`. Raises SelectionError if it is
    no pipeline.
    """
    analysis = job.analysis
    if analysis.lanes is None:
        raise SelectionError(f"{short(analysis.report.name)}: figures of workers and steps are for pipelines")
    return Plots(analysis.report, analysis.lanes)


@dataclass(frozen=True, slots=True)
class Plots:
    """Figures of one pipeline: of its `report`, and of the `lanes` behind it.

        plots = tracekit.plot(job)
        plots.worker_map()            # who is slow
        plots.steps()                 # when it is slow
        plots.timeline(105)           # what happened in step 105; without a number, in the slowest step
        plots.critical_path(105)      # which ops made it as long as it was
        plots.explore()               # the map, and the timeline of the worker that is clicked, in Jupyter
        plots.pipeline(105, "zb-h1")  # what each stage waits for, and the same step under another schedule

    Every method takes `theme`, "light" or "dark", and returns a `plotly.graph_objects.Figure`; a notebook shows it,
    `figure.write_html(path)` writes it. Raises OutputError if Plotly is not installed, SelectionError for a step that
    is not in the report.
    """

    report: Report
    lanes: WorkerLanes

    def worker_map(self, step: int | None = None, *, theme: str = "light") -> go.Figure:
        """What each worker alone costs of a step: one cell per worker.

        `step`: to that step; by default over all steps. Workers that a cause names are outlined.
        """
        colours = _theme(theme)
        from tracekit.dashboards.figures.charts import worker_heatmap

        workers = WorkerMap.of(self.report, self.lanes.worker_slowdowns())
        position = None if step is None else self._position(step)
        culprits = {culprit.worker for culprit in self.report.answer.culprits if culprit.worker is not None}
        cells = [cell for worker in sorted(culprits) if (cell := workers.cell(worker)) is not None]
        when = "" if step is None else f", step {step}"
        return self._with_title(
            worker_heatmap(workers, position, colours, marked=cells), f"what each worker alone costs of a step{when}"
        )

    def steps(self, *, theme: str = "light") -> go.Figure:
        """Recorded and ideal time of each step, seconds."""
        colours = _theme(theme)
        from tracekit.dashboards.figures.charts import step_times

        by_step = self.report.table("by_step")
        moments = ["" if lost_s is None else f"{seconds(lost_s)} lost" for lost_s in by_step["lost_s"]]
        return self._with_title(step_times(by_step, moments, colours), "time of each step")

    def timeline(self, step: int | None = None, *, theme: str = "light") -> go.Figure:
        """The ops of one step, recorded above ideal, of the workers that matter most; by default the slowest step.

        At most 24 workers, fewer if a step has very many ops: first those that causes name, then the slowest.
        """
        return self._timeline(step, workers_that_matter(self.report, MOST_WORKERS), _theme(theme))

    def explore(self, step: int | None = None, *, theme: str = "light") -> Any:
        """The worker map above a timeline, in Jupyter: a click on a worker shows its timeline and that of its pipeline.

        `step`: as of `worker_map` and `timeline`. Returns a widget. Raises OutputError without anywidget.
        """
        colours = _theme(theme)
        if find_spec("anywidget") is None:
            raise OutputError("clicks need anywidget, which is missing; pip install 'tracekit-analysis[notebook]'")
        import plotly.graph_objects as go

        cells = go.FigureWidget(self.worker_map(step, theme=theme))
        below = go.FigureWidget(self.timeline(step, theme=theme))

        def show(_trace: object, points: Any, _state: object) -> None:
            row, column = points.point_inds[0]
            dp_rank, pp_rank = (int(rank) for rank in cells.data[0].customdata[row][column][:2])
            pipeline = [Worker(dp_rank, stage) for stage in range(self.lanes.attribution.stages) if stage != pp_rank]
            fig = self._timeline(step, [Worker(dp_rank, pp_rank), *pipeline], colours)
            with below.batch_update():
                below.data = []
                below.add_traces(fig.data)
                below.layout = fig.layout

        cells.data[0].on_click(show)
        return import_module("ipywidgets").VBox([cells, below])

    def _timeline(self, step: int | None, workers: Sequence[Worker], colours: Theme) -> go.Figure:
        """The timeline of as many of these workers as fit."""
        from tracekit.dashboards.figures.step import timeline, workers_that_fit

        ops = step_ops(self.lanes.replay.only_steps([self._step(step)]))
        places = {
            Worker(int(dp), int(pp)): place for place, (dp, pp) in enumerate(zip(ops.dp_rank, ops.pp_rank, strict=True))
        }
        rows = [places[worker] for worker in workers if worker in places]
        visible = workers_that_fit(ops, np.array(rows, np.int64))
        names = [self._name(Worker(int(ops.dp_rank[place]), int(ops.pp_rank[place]))) for place in visible]
        return self._with_title(timeline(ops, visible, names, colours), f"step {ops.step}, recorded above ideal")

    def critical_path(self, step: int | None = None, *, theme: str = "light") -> go.Figure:
        """The chain of ops, across workers, that determines how long a recorded step takes; by default, the slowest.

        Gaps are launch delays: nothing on the path ran.
        """
        colours = _theme(theme)
        from tracekit.dashboards.figures.step import critical_path

        number = self._step(step)
        replay = self.lanes.replay.only_steps([number])
        ops = step_ops(replay)
        path = path_spans(replay, ops, Replay.RECORDED)
        workers, row = np.unique(path.worker, return_inverse=True)
        names = [self._name(Worker(int(ops.dp_rank[index]), int(ops.pp_rank[index]))) for index in workers]
        return self._with_title(critical_path(ops, path, row, names, colours), f"critical path of step {number}")

    def pipeline(self, step: int | None = None, *schedules: str, theme: str = "light") -> go.Figure:
        """The stages of one step, what each computes and waits for; below, the same work under other schedules.

        By default the slowest step, of the DP rank whose computes take longest. Raises SelectionError for a schedule
        that does not exist, LayoutError for one that cannot run in this pipeline.
        """
        colours = _theme(theme)
        from tracekit.analysis.bubbles.picture import draw_step, timeline_of
        from tracekit.dashboards.figures.charts import timeline

        number = self._step(step)
        fig = timeline_of("", draw_step(self.lanes.replay, number, schedules=schedules), ())
        return self._with_title(timeline(fig, colours), f"stages of step {number}")

    def _with_title(self, fig: go.Figure, title: str) -> go.Figure:
        """The figure under the name of the job and this title, with room for both above its legend."""
        text = escape(f"{short(self.report.name)}: {title}")
        top = {"text": text, "font_size": 15, "x": 0.01, "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 6}}
        room = {"margin_t": fig.layout.margin.t + _TITLE_PX, "height": fig.layout.height + _TITLE_PX}
        return fig.update_layout(title=top, **room)

    def _name(self, worker: Worker) -> str:
        """Rank and node; the worker's coordinates if the trace does not name them."""
        row = self.report.worker_grid().rows.get(worker)
        return worker.coordinates if row is None else worker_name(worker, row.rank, row.host)

    def _step(self, step: int | None) -> int:
        """That step, or the slowest one."""
        attribution = self.lanes.attribution
        return int(attribution.steps[attribution.recorded.argmax() if step is None else self._position(step)])

    def _position(self, step: int) -> int:
        """The index of a step among those of the report."""
        steps: Ints = np.asarray(self.lanes.attribution.steps, np.int64)
        (positions,) = np.nonzero(steps == step)
        if not len(positions):
            raise SelectionError(
                f"step {step} is not in the report; it has {len(steps)} steps from {steps[0]} to {steps[-1]}"
            )
        return int(positions[0])


def _theme(name: str) -> Theme:
    """The colours of that name. Raises OutputError if Plotly is missing, ValueError for another name."""
    if find_spec("plotly") is None:
        raise OutputError("figures need Plotly, which is not installed; pip install 'tracekit-analysis[notebook]'")
    from tracekit.dashboards.theme import THEMES

    if name not in THEMES:
        raise ValueError(f"no theme {name!r}; there are {', '.join(THEMES)}")
    return THEMES[name]
