"""What a notebook shows of a job: the card of the HTML report, and figures with the hand-computed times."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import plotly.graph_objects as go
import pytest
from msgspec import Struct
from plotly.callbacks import InputDeviceState, Points

import tracekit
from tests.cases import case
from tests.documents.evil import EVIL, write_evil
from tests.handmade import IDEAL_STEP_S, KEPT_STEP_S, SLOW_STEP_S, healthy_frame, slow_trace
from tests.handmade import LAYOUT as HANDMADE
from tracekit.analysis.job.job import Job
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import OutputError, SelectionError
from tracekit.dashboards.documents.card import answer_of
from tracekit.dashboards.documents.page import page
from tracekit.dashboards.figures import plots as report_plot
from tracekit.dashboards.figures.plots import Plots
from tracekit.dashboards.theme import LIGHT
from tracekit.report.report import Report
from tracekit.sources.load import load
from tracekit.trace.canonical import Trace

SAMPLES = Path(__file__).parents[1] / "sample_traces"


@pytest.fixture(scope="module")
def slow() -> PipelineJob:
    """Worker (1,0) takes twice as long: the handmade job, its ranks 0 to 3 on two nodes."""
    return PipelineJob(slow_trace((3, 8), metadata={"hosts": {"0": "a", "1": "b", "2": "a", "3": "b"}}))


@pytest.fixture(scope="module")
def sample_job() -> Job:
    return load(SAMPLES / "slow_worker.parquet")


@pytest.fixture(scope="module")
def sample(sample_job: Job) -> Report:
    return sample_job.report


@pytest.fixture(scope="module")
def plots(sample_job: Job) -> Plots:
    return tracekit.plot(sample_job)


def test_a_job_shows_its_report_and_the_card_is_that_of_the_page(sample: Report) -> None:
    shown = load(SAMPLES / "slow_worker.parquet")._repr_html_()
    assert shown == sample._repr_html_()
    assert answer_of(sample) in shown
    assert answer_of(sample) in page(sample)
    assert all(place in shown for place in sample.answer.places)
    assert all(fix.title in shown for fix in sample.fixes)
    assert shown.count('<rect class="level') == 16
    assert "<script" not in shown


def test_a_healthy_job_shows_only_the_answer() -> None:
    shown = PipelineJob(Trace.from_frame(healthy_frame((0, 1)), HANDMADE, name="job"))._repr_html_()
    assert "BALANCED" in shown
    assert "<table" not in shown


def test_names_stay_text(tmp_path: Path) -> None:
    job = load(write_evil(tmp_path))
    assert "<img" not in job.report._repr_html_()
    assert EVIL not in str(tracekit.plot(job).timeline().layout.yaxis.ticktext)


def test_a_trace_that_cannot_be_replayed_says_why() -> None:
    trace = slow_trace((3,))
    without = trace.ops.filter(~((trace.ops["pp_rank"] == 1) & (trace.ops["kind"] == "backward-send")))
    shown = PipelineJob(Trace.from_frame(without, HANDMADE, name="<b>job"))._repr_html_()
    assert "&lt;b&gt;job" in shown
    assert "0 backward-send ops for 2" in shown


def test_a_job_and_a_report_are_one_line_in_a_prompt(slow: PipelineJob) -> None:
    assert repr(slow) == "<Job slow job: 4 GPUs, 96 ops>"
    assert repr(slow.report).startswith("<Report on slow job: straggler, rank 1 on b ")
    assert "\n" not in repr(slow.report)


def test_the_map_has_exact_s_of_every_worker_and_outlines_the_culprit(slow: PipelineJob) -> None:
    drawn = tracekit.plot(slow).worker_map()
    heat = drawn.data[0]
    values = {
        (dp, pp): z
        for who, zs in zip(heat.customdata, heat.z, strict=True)
        for (dp, pp, _), z in zip(who, zs, strict=True)
    }
    assert values[1, 0] == pytest.approx(1 - IDEAL_STEP_S / KEPT_STEP_S)
    assert max(values, key=lambda worker: values[worker]) == (1, 0)
    assert len(drawn.layout.shapes) == 1


def test_the_steps_are_those_of_the_report(slow: PipelineJob) -> None:
    recorded, ideal = tracekit.plot(slow).steps().data
    assert list(recorded.y) == [SLOW_STEP_S] * 2
    assert list(ideal.y) == pytest.approx([IDEAL_STEP_S] * 2)


def test_the_timeline_has_every_op_twice_at_its_time_in_the_colour_of_its_slowness(slow: PipelineJob) -> None:
    """24 ops a DP rank, recorded and ideal; the first forward of rank 1 runs from 0.5 to 2.5 s, its peers take 1 s."""
    drawn = tracekit.plot(slow).timeline(8)
    assert [re.sub(r"&#x27;", "'", name) for name in drawn.layout.yaxis.ticktext] == [
        "rank 0 on a", "rank 2 on a", "rank 1 on b", "rank 3 on b",
    ]  # fmt: skip
    bars = {trace.name: trace for trace in drawn.data}
    of_ops = sum(len(trace.x) for name, trace in bars.items() if name != "waiting for peers")
    assert of_ops == 2 * 2 * 24
    twice = bars["2-3 x"]
    forward = [
        (base, x, y)
        for base, x, y, text in zip(twice.base, twice.x, twice.y, twice.text, strict=True)
        if "forward-c" in text
    ]
    assert (500.0, 2000.0, 2) in forward
    assert {round(shape.x0) for shape in drawn.layout.shapes} == {SLOW_STEP_S * 1e3, IDEAL_STEP_S * 1e3}
    own = sum(trace.x.sum() for name, trace in bars.items() if name == "2-3 x")
    assert own == pytest.approx(12_000.0)  # two forwards of 2 s, two backwards of 4 s


def test_the_critical_path_takes_all_of_the_step(slow: PipelineJob) -> None:
    """Ops only, for the job has no launch delays; a forward of 2 s and two backwards of 4 s on rank 1, the slow one."""
    drawn = tracekit.plot(slow).critical_path(3)
    bars = [(base, x, y) for trace in drawn.data[1:] for base, x, y in zip(trace.base, trace.x, trace.y, strict=True)]
    bars.sort()
    assert sum(x for _, x, _ in bars) == pytest.approx(SLOW_STEP_S * 1e3)
    ends = [base + x for base, x, _ in bars]
    np.testing.assert_allclose(ends[:-1], [base for base, _, _ in bars[1:]])
    (slow_row,) = (at for at, name in enumerate(drawn.layout.yaxis.ticktext) if name == "rank 1 on b")
    assert sum(x for _, x, y in bars if y == slow_row) >= 10_000.0


def test_bars_of_a_step_lie_in_their_lanes_with_what_they_are_and_how_slow(slow: PipelineJob) -> None:
    """Computes above communication, recorded above ideal; rank 0 sends its second microbatch from 2.5 to 3 s, of which
    it waits 0.25 s for the recv.
    """
    timeline, path = tracekit.plot(slow).timeline(8), tracekit.plot(slow).critical_path(3)
    bars = {
        text.replace("<br>", ", "): (trace.name, *numbers)
        for trace in timeline.data[:-1]
        for text, *numbers in zip(trace.text, trace.base, trace.x, trace.y, trace.offset, trace.width, strict=True)
        if numbers[2] == 0
    }
    assert bars["recorded: forward-compute, 500.00 ms + 1,000.00 ms, 1.00 times what its peers take"] == (
        "up to 1.1 x", 500, 1000, 0, -0.3, 0.26)  # fmt: skip
    send = "recorded: forward-send, 2,500.00 ms + 500.00 ms, 250.00 ms of it waiting, 1.00 times what its peers take"
    assert bars[send] == ("up to 1.1 x", 2750, 250, 0, -0.1, 0.1)
    assert {name: bar[4:] for name, bar in bars.items() if name.startswith("ideal: params")} == {
        "ideal: params-all-gather, 0.00 ms + 500.00 ms, 1.00 times what its peers take": (0.34, 0.1)}  # fmt: skip
    assert {bar[4:] for name, bar in bars.items() if name.startswith("ideal: forward-compute")} == {(0.14, 0.26)}
    waiting = timeline.data[-1]
    waits = zip(waiting.base, waiting.x, waiting.y, waiting.offset, waiting.width, strict=True)
    assert (2500, 250, 0, -0.1, 0.1) in [*waits]
    layout = timeline.layout
    assert (layout.xaxis.title.text, layout.height) == (
        "milliseconds of step 8; recorded above ideal", 96 + 4 * 46 + report_plot._TITLE_PX)  # fmt: skip
    assert [(end.x0, end.line.width, end.line.color) for end in layout.shapes] == [
        (15_500, 1.5, LIGHT.recorded), (pytest.approx(13_500), 1.5, LIGHT.ideal)]  # fmt: skip
    line, usual, twice = path.data
    assert list(line.x) == pytest.approx(
        [0, *(at for at in (500, 2500, 2750, 3750, 5750, 6000, 10_000, 10_250, 14_250, 14_750, 15_000)
              for _ in range(2)), 15_500]
    )  # fmt: skip
    assert list(line.y[::2]) == [1, 1, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0]
    assert [(trace.name, len(trace.x)) for trace in (usual, twice)] == [("up to 1.1 x", 9), ("2-3 x", 3)]
    assert twice.text[0] == "forward-compute<br>500.00 ms + 2,000.00 ms<br>2.00 times what its peers take"
    assert ({*twice.offset}, {*twice.width}) == ({-0.3}, {0.6})
    assert path.layout.yaxis.range == (2.5, -0.5)


def test_a_figure_is_titled_with_its_job(slow: PipelineJob, plots: Plots, tmp_path: Path) -> None:
    plot = tracekit.plot(slow)
    assert [drawn.layout.title.text for drawn in (plot.worker_map(), plot.worker_map(8), plot.steps())] == [
        "slow job: what each worker alone costs of a step", "slow job: what each worker alone costs of a step, step 8",
        "slow job: time of each step",
    ]  # fmt: skip
    assert plots.timeline().layout.title.text == "slow-worker: step 105, recorded above ideal"
    assert plots.critical_path().layout.title.text == "slow-worker: critical path of step 105"
    assert plots.pipeline().layout.title.text == "slow-worker: stages of step 105"
    assert "<img" not in tracekit.plot(load(write_evil(tmp_path))).steps().layout.title.text


def test_a_click_on_the_map_shows_the_timeline_of_the_worker_and_its_pipeline(
    plots: Plots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_plot, "find_spec", lambda _: True)
    monkeypatch.setattr(report_plot, "import_module", lambda _: SimpleNamespace(VBox=list))  # of ipywidgets
    monkeypatch.setattr(go, "FigureWidget", go.Figure)  # whose clicks come from a browser
    cells, below = plots.explore(103)
    row, column = next(
        (row, column)
        for row, found in enumerate(cells.data[0].customdata)
        for column, (dp_rank, pp_rank, _) in enumerate(found)
        if (dp_rank, pp_rank) == (1, 2)
    )
    points = Points(point_inds=[(row, column)], xs=[column], ys=[row], trace_name="", trace_index=0)
    cells.data[0]._dispatch_on_click(points, InputDeviceState())
    assert sorted(below.layout.yaxis.ticktext) == [f"rank {rank} on host-000{rank // 8}" for rank in (1, 13, 5, 9)]
    assert below.layout.title.text == "slow-worker: step 103, recorded above ideal"
    monkeypatch.setattr(report_plot, "find_spec", lambda name: None if name == "anywidget" else name)
    with pytest.raises(OutputError, match="clicks need anywidget"):
        plots.explore()


def test_without_a_number_the_slowest_step_is_drawn(plots: Plots) -> None:
    assert "step 105" in plots.timeline().layout.xaxis.title.text
    assert "step 105" in plots.critical_path(theme="dark").layout.xaxis.title.text


def test_a_step_that_is_not_there_is_said(plots: Plots) -> None:
    message = "step 7 is not in the report; it has 12 steps from 100 to 201"
    for figure in ("worker_map", "timeline", "critical_path"):
        with case(figure), pytest.raises(SelectionError, match=message):
            getattr(plots, figure)(7)


def test_an_unknown_theme_is_said(plots: Plots) -> None:
    with pytest.raises(ValueError, match="no theme 'blue'; there are light, dark"):
        plots.steps(theme="blue")


def test_without_plotly_the_error_says_what_to_install(plots: Plots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_plot, "find_spec", lambda _: None)
    with pytest.raises(OutputError, match=r"pip install 'tracekit-analysis\[notebook\]'"):
        plots.steps()


def test_a_large_step_keeps_to_the_culprits(tmp_path: Path) -> None:
    """128 workers with 8 microbatches: the figure stays small and begins with those of the cause."""
    from tracekit.dashboards.figures.step import MOST_BARS
    from tracekit.synth import SynthSpec, parse_cause, synthesize
    from tracekit.trace.model import Layout

    spec = SynthSpec(layout=Layout(dp=16, pp=8), steps=3, causes=(parse_cause("slow-worker:dp=9,pp=5,factor=1.8"),))
    drawn = tracekit.plot(PipelineJob(synthesize(spec))).timeline()
    assert sum(len(trace.x) for trace in drawn.data if trace.name != "waiting for peers") <= MOST_BARS
    assert any("rank 89" in name for name in drawn.layout.yaxis.ticktext)


PUBLIC = [getattr(tracekit, name) for name in tracekit.__all__ if not name.startswith("__")]


def test_help_describes_everything_public() -> None:
    """Each class and function, each method and property, and each field by name, with annotations."""
    for thing in (*PUBLIC, Plots):
        with case(thing):
            check_help(thing)


def check_help(thing: object) -> None:
    text = inspect.getdoc(thing)
    assert text
    assert "(*" not in text  # the signature that dataclasses make up where nobody wrote a docstring
    if thing is Report:  # docs/report-schema.md explains its keys, which test_report.py compares
        return
    if not inspect.isclass(thing):
        assert "return" in inspect.get_annotations(thing)
        return
    for name, member in inspect.getmembers(thing):
        if not name.startswith("_") and (callable(member) or isinstance(member, property)) and name != "mro":
            assert inspect.getdoc(member), name
    described = "\n".join(inspect.getdoc(base) or "" for base in thing.__mro__[:-1])
    fields = thing.__struct_fields__ if issubclass(thing, Struct) else getattr(thing, "__dataclass_fields__", ())
    assert [name for name in fields if f"`{name}`" not in described] == []


def test_the_notebook_is_kept_with_what_it_shows() -> None:
    """Of `python docs/site/notebook.py`: the card as it is drawn now, and an image of each figure, under its title."""
    notebook = json.loads((SAMPLES.parent / "docs" / "notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells)
    shown = [output.get("data", {}) for cell in cells for output in cell["outputs"]]
    assert "".join(shown[0]["text/html"]) == load(SAMPLES / "slow_worker.parquet")._repr_html_()
    titles = ["".join(data["text/plain"]) for data in shown if "image/png" in data]
    assert titles == [f"slow-worker: {of}" for of in (
        "what each worker alone costs of a step", "time of each step", "step 105, recorded above ideal",
        "critical path of step 105",
    )]  # fmt: skip
    assert "error" not in {output["output_type"] for cell in cells for output in cell["outputs"]}
