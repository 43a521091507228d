"""The page Pipeline, the figure of notebooks and the one in a page of HTML: one step with its bubbles."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from msgspec import convert
from playwright.sync_api import Page

import tracekit
from tests.analysis.bubbles.simulated import one_f_one_b, random_lanes, trace
from tests.analysis.plans.simulator import draw
from tests.dashboards.conftest import Serving
from tests.dashboards.page_text import Pages, found, lines
from tests.handmade import run
from tracekit.analysis.bubbles.picture import draw_step
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.plans.model import PlanModel
from tracekit.analysis.plans.optimize import optimize
from tracekit.base.text import seconds
from tracekit.dashboards.figures.charts import plan_front
from tracekit.dashboards.theme import LIGHT
from tracekit.store import Incoming, Store
from tracekit.synth import SlowWorker, SynthSpec, synthesize
from tracekit.trace.model import Layout

Visit = Callable[..., Page]
READ_BARS = """() => window.tracekitChart.marks(document.querySelector("#pipeline-step").figure).bars
    .map((bar) => [bar.point.text, bar.box.x, bar.box.y])"""


@pytest.fixture(scope="module")
def job() -> PipelineJob:
    return PipelineJob(trace(random_lanes(1, one_f_one_b(3, 6), ranks=2, steps=3)))


@pytest.fixture(scope="module")
def store(job: PipelineJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(tmp_path_factory.mktemp("pipeline") / "jobs.store")
    store.add([Incoming(job.trace, "pipes", "x", job.stored())])
    return store.path


def slowest(job: PipelineJob) -> int:
    return int(job.replay.graph.steps[job.replay.recorded_step_times().argmax()])


def test_the_slowest_step_is_shown_with_time_and_memory_of_a_schedule(store: Path, job: PipelineJob) -> None:
    pages = Pages(store)
    text = pages.text("/pipeline", job="pipes", schedule="gpipe")
    assert f"Pipeline in step {slowest(job)}" in text
    recorded, other = draw_step(job.replay, slowest(job), schedules=("gpipe",))
    assert re.search(r"recorded: \S+ m?s, at most 3 microbatches held", text)
    change = "less" if other.window_s <= recorded.window_s else "more"
    assert re.search(rf"gpipe: \S+ m?s, \S+ m?s {change}, at most 6 microbatches held", text)


def test_a_step_and_a_dp_rank_can_be_chosen(store: Path, job: PipelineJob) -> None:
    pages = Pages(store)
    text = pages.text("/pipeline", job="pipes", step="1", dp="1")
    assert "Pipeline in step 1" in text
    (bar, *_) = draw_step(job.replay, 1, 1)[0].bars
    assert bar.words in text


def test_a_sentence_and_a_table_say_how_long_stages_are_idle(store: Path, job: PipelineJob) -> None:
    """Idle is what is left of the time from the first to the last compute of the DP rank."""
    computes = job.trace.ops.filter(step=1, dp_rank=1).filter(pl.col("kind").cast(str).str.ends_with("compute"))
    ends = computes["start"] + computes["duration"]
    window_s = ends.max() - computes["start"].min()
    idle = 1 - computes.group_by("pp_rank").agg(pl.col("duration").sum()).sort("pp_rank")["duration"] / window_s
    text = Pages(store).text("/pipeline", job="pipes", step="1", dp="1")
    assert "Pipeline in step 1, DP rank 1" in text
    assert f"Stages are idle for {idle.mean():.0%} of the {seconds(window_s)}" in text
    assert f"most of all stage {idle.arg_max()}, {idle.max():.0%}, mostly waiting for" in text
    for stage, share in enumerate(idle):
        row = next(row for row in found(Pages(store).page("/pipeline", job="pipes", step="1", dp="1"), "Tr")
                   if f"stage {stage}" in lines(row))  # fmt: skip
        assert f"{share:.0%}" in lines(row)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"step": "99"}, "none of these steps is in the job"),
        ({"step": "first"}, "step=first: expected a number"),
        ({"dp": "7"}, "does not have every compute of DP rank 7"),
        ({"schedule": "dualpipe"}, "not a schedule"),
        ({"schedule": "interleaved:chunks=2"}, "Pipeline in step"),
    ],
)
def test_what_cannot_be_shown_is_said_in_its_place(store: Path, state: dict[str, str], message: str) -> None:
    assert message in Pages(store).text("/pipeline", job="pipes", **state)


@pytest.mark.every_push
def test_the_browser_draws_a_bar_for_each_compute_and_bubble(
    visit: Visit, show: Callable[[Path], Serving], store: Path, job: PipelineJob
) -> None:
    page = visit("/pipeline?job=pipes", base=show(store).url)
    page.wait_for_selector("#pipeline-step .area")
    (picture,) = draw_step(job.replay, slowest(job))
    drawn = {text: (x, y) for text, x, y in page.evaluate(READ_BARS)}
    assert len(page.evaluate(READ_BARS)) == len(picture.bars)
    for bar in picture.bars:
        if bar.microbatch is not None:  # words of bubbles repeat
            x, y = drawn[bar.words]
            assert x == pytest.approx([bar.start_s * 1e3, bar.end_s * 1e3])
            assert y == pytest.approx([bar.stage + 1 - 0.4, bar.stage + 1 + 0.4])  # below the row of the name
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_notebooks_draw_the_same_bars(job: PipelineJob) -> None:
    pictures = draw_step(job.replay, slowest(job), schedules=("zb-h1",))
    drawn = tracekit.plot(job).pipeline(None, "zb-h1")
    words = sorted(text for one in drawn.data for text in one.text)
    assert words == sorted(bar.words for one in pictures for bar in one.bars)
    assert drawn.layout.yaxis.ticktext[0] == "recorded"


def test_the_page_of_html_shows_it_if_bubbles_were_asked_for(job: PipelineJob, tmp_path: Path) -> None:
    path = tmp_path / "pipes.parquet"
    job.trace.write_parquet(path)
    for words, there in (((), False), (("--schedule", "gpipe"), True)):
        page = tmp_path / f"page{there}.html"
        assert run("whatif", path, *words, "--html", page).code == 0
        text = page.read_text(encoding="utf-8")
        assert ("<h2>Pipeline, step" in text) == there
    (drawn,) = re.findall(r'<svg class="timeline".*?</svg>', text)
    pictures = draw_step(job.replay, slowest(job), schedules=("gpipe",))
    assert drawn.count("<rect") == sum(len(one.bars) for one in pictures)
    assert "waits for stage" in drawn


def test_the_best_plans_are_drawn_on_request(tmp_path: Path) -> None:
    slow = SlowWorker(dp_rank=1, pp_rank=2, factor=1.5)
    spec = SynthSpec(Layout(dp=2, pp=4), layers=(8, 8, 8, 8), steps=4, causes=(slow,), name="uneven")
    job = PipelineJob(synthesize(spec))
    store = Store(tmp_path / "jobs.store")
    store.add([Incoming(job.trace, "uneven", "x", job.stored())])
    pages = Pages(store.path)
    assert "no plan of those searched is faster" not in pages.text("/pipeline", job="uneven")
    text = pages.text("/pipeline", job="uneven", plans="1")
    assert "The best plan takes" in text
    assert "no plan of those searched is faster" in text
    assert "Megatron: --pipeline-model-parallel-size 4" in text
    assert "Or: Take 1 of 8 microbatches a step from dp 1: saves" in text


def test_the_figure_of_plans_has_the_plan_in_use_and_the_bound() -> None:
    found = optimize(convert(draw(7, layers=8, stages=4, memory=1.0), PlanModel))
    fastest, now, bound = plan_front(found, LIGHT).data
    assert list(fastest.x) == [plan.memory_gb for plan in found.front]
    assert list(now.y) == [found.step_time_s.now * 1e3]
    assert set(bound.y) == {found.plans[0].bound_s * 1e3}
