"""Did the change help? The statistics by hand, and the page with the numbers of `whatif --json`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Page, expect

from tests.dashboards.conftest import Serving
from tests.dashboards.page_text import Pages, found, lines
from tests.handmade import HEALTHY_STEP_S, LAYOUT, SLOW_STEP_S, healthy_frame, run, slow_frame
from tracekit.dashboards.data.comparisons import (
    Outcome,
    Side,
    causes_of_jobs,
    causes_of_parts,
    change_of_means,
    cost_changes,
    independent_steps,
    parts,
    t_quantile,
    verdict,
    whole,
)
from tracekit.dashboards.data.queries import Results
from tracekit.dashboards.figures.compare import worker_map
from tracekit.dashboards.ui.theme import LIGHT
from tracekit.errors import SelectionError
from tracekit.text import seconds
from tracekit.trace import Trace

Visit = Callable[..., Page]


def side(recorded: list[float], *, ideal: list[float] | None = None, **more: Any) -> Side:
    """A side whose original steps are the recorded ones."""
    given_ideal = [1.0] * len(recorded) if ideal is None else ideal
    made = Side(
        job="made",
        title="made",
        layout=LAYOUT.to_dict(),
        ops_per_step=48.0,
        trustworthy=True,
        steps=np.arange(len(recorded)),
        recorded_s=np.array(recorded),
        original_s=np.array(recorded),
        ideal_s=np.array(given_ideal),
        dp_ranks=np.arange(2),
        workers=np.ones((2, 2)),
    )
    return replace(made, **more)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (10, 2.22814), (30, 2.04227), (1e9, 1.95996)]
)
def test_the_quantile_of_students_t_is_that_of_the_tables(freedom: float, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, rel=2e-4)


def test_the_interval_of_a_change_is_welchs() -> None:
    # means 2 and 5, variances 1 and 4 over 3 steps each: squared errors 1/3 and 4/3, their sum 5/3,
    # degrees of freedom (5/3)^2 / ((1/9 + 16/9) / 2) = 50/17
    change = change_of_means(np.array([1.0, 2, 3]), np.array([3.0, 5, 7]))
    reach = t_quantile(50 / 17) * (5 / 3) ** 0.5
    assert (change.before, change.after, change.difference) == (2, 5, 3)
    assert change.low == pytest.approx(3 - reach)
    assert change.high == pytest.approx(3 + reach)
    assert change.share == 1.5
    assert not change.clear  # 3 +- 4.2


def test_steps_that_do_not_vary_leave_no_doubt() -> None:
    change = change_of_means(np.full(4, 2.0), np.full(3, 1.5))
    assert (change.low, change.high) == (-0.5, -0.5)
    assert change.clear
    assert not change_of_means(np.full(4, 2.0), np.full(4, 2.0)).clear


def test_one_step_has_no_interval() -> None:
    change = change_of_means(np.array([1.0]), np.array([1.0, 2.0]))
    assert change.low is None
    assert not change.clear


def test_steps_that_resemble_their_neighbours_count_for_less() -> None:
    # deviations -1, -1, 1, 1: the correlation with the next is (1 - 1 + 1) / 4 = 1/4; 4 x 0.75 / 1.25 = 2.4
    assert independent_steps(np.array([1.0, 1, 3, 3])) == pytest.approx(2.4)
    assert independent_steps(np.array([1.0, 3, 1, 3])) == 4  # turning back each time is no reason to count more
    assert independent_steps(np.array([7.0, 7, 7])) == 3
    assert independent_steps(np.repeat([1.0, 2.0], 50)) < 10


@given(st.lists(st.floats(0.5, 2), min_size=2, max_size=30), st.lists(st.floats(0.5, 2), min_size=2, max_size=30))
def test_swapping_the_sides_turns_the_interval_round(before: list[float], after: list[float]) -> None:
    there, back = (change_of_means(np.array(one), np.array(two)) for one, two in ((before, after), (after, before)))
    assert there.low is not None
    assert back.high is not None
    assert there.low == pytest.approx(-back.high)
    assert there.low <= there.difference + 1e-12


def test_what_the_steps_contribute_to_s_averages_to_s() -> None:
    # S = (3 + 5) / (2 + 2) = 2; contributions 2 + (3 - 4) / 2 and 2 + (5 - 4) / 2
    made = side([3, 5], ideal=[2, 2])
    assert made.slowdown == 2
    assert made.slowdown_by_step() == pytest.approx([1.5, 2.5])
    assert made.waste == 0.5
    assert made.lost_gpu_hours_per_day == 0.5 * 4 * 24


def test_a_change_that_helps_is_told_with_its_size_and_interval() -> None:
    found = verdict(side([2.0, 2.01, 1.99, 2.0]), side([1.0, 1.01, 0.99, 1.0]))
    assert found.outcome is Outcome.BETTER
    assert found.sentence.startswith(
        "Yes, it helped: a recorded step takes 1.00 s instead of 2.00 s, 1.00 s (50.0%) less (95 % interval of the"
    )
    assert "Welch's t over 4 and 4 steps" in found.sentence
    assert found.notes == ()


def test_a_change_for_the_worse_and_one_within_the_scatter_are_told_apart() -> None:
    steady, scattered = side([1.0, 1.01, 0.99]), side([0.5, 1.6, 1.0])
    assert verdict(steady, side([2.0, 2.01, 1.99])).outcome is Outcome.WORSE
    assert verdict(steady, scattered).outcome is Outcome.NO_DIFFERENCE
    assert verdict(side([1.0]), steady).outcome is Outcome.UNKNOWN


def test_other_layouts_are_compared_by_s_and_that_is_said() -> None:
    before = side([3.0, 3.1, 2.9], ideal=[2, 2, 2])
    after = side([2.4, 2.42, 2.38], ideal=[2, 2, 2], layout={**LAYOUT.to_dict(), "dp": 4, "world_size": 8})
    found = verdict(before, after)
    assert found.sentence.startswith(
        "The layouts differ, so step times do not compare. By S: Yes, it helped: S is 1.200"
    )
    assert found.notes == ("Layouts: dp 2 x pp 2 on 4 GPUs before, dp 4 x pp 2 on 8 GPUs after.",)


def test_other_work_and_distrusted_sides_are_said() -> None:
    found = verdict(side([1.0, 1.1]), side([1.0, 1.1], ops_per_step=96.0, trustworthy=False))
    assert "A step has 48 ops before and 96 after" in found.notes[0]
    assert "not to be trusted on the side after" in found.notes[1]


def cause(kind: str, where: str, since: int | None = None, steps: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"kind": kind, "where_text": where, "since_step": since, "where": {"steps": list(steps)}}


def test_causes_are_the_same_where_kind_and_place_are() -> None:
    healthy = {"causes": [cause("healthy", "whole job")]}
    old = {"causes": [cause("bad-worker", "worker (1,2)"), cause("python-gc", "whole job")]}
    new = {"causes": [cause("python-gc", "whole job"), cause("bad-worker", "worker (0,0)")]}
    change = causes_of_jobs(old, new)
    assert [each["where_text"] for each in change.gone] == ["worker (1,2)"]
    assert [each["where_text"] for each in change.new] == ["worker (0,0)"]
    assert [was["kind"] for was, _ in change.staying] == ["python-gc"]
    assert len(causes_of_jobs(old, healthy).gone) == 2
    assert causes_of_jobs(healthy, old).staying == ()


def test_causes_of_one_job_are_parted_by_when_they_held() -> None:
    report = {
        "causes": [
            cause("slow-steps", "early", since=3, steps=(3, 4)),
            cause("slow-steps", "late", since=12, steps=(12,)),
            cause("slow-steps", "both", since=3, steps=(3, 12)),
            cause("bad-worker", "changed", since=10),
            cause("python-gc", "whole job"),
        ]
    }
    slower = causes_of_parts(report, side([1.0]), side([2.0]), 10)
    assert [each["where_text"] for each in slower.gone] == ["early"]
    assert [each["where_text"] for each in slower.new] == ["late", "changed"]
    assert [was["where_text"] for was, _ in slower.staying] == ["both", "whole job"]
    faster = causes_of_parts(report, side([2.0]), side([1.0]), 10)
    assert [each["where_text"] for each in faster.gone] == ["early", "changed"]


def test_what_kinds_and_stages_cost_alone_is_their_s_above_1_times_the_ideal_step() -> None:
    before = {
        "step_time_s": {"ideal": 2.0},
        "by_kind": [{"kind": "gc", "slowdown": 1.5}, {"kind": "optimizer", "slowdown": 1.0}],
        "by_pp_rank": [{"pp_rank": 0, "slowdown": 1.25}],
    }
    after = {
        "step_time_s": {"ideal": 4.0},
        "by_kind": [{"kind": "optimizer", "slowdown": 1.125}],
        "by_pp_rank": [{"pp_rank": 0, "slowdown": 1.0}, {"pp_rank": 1, "slowdown": 1.5}],
    }
    kinds = [(each.name, each.before_s, each.after_s) for each in cost_changes(before, after, "by_kind", "kind")]
    assert kinds == [("gc", 1.0, None), ("optimizer", 0.0, 0.5)]
    stages = cost_changes(before, after, "by_pp_rank", "pp_rank")
    assert [(each.name, each.difference_s) for each in stages] == [("0", -0.5), ("1", 2.0)]


def test_a_map_larger_than_a_screen_keeps_the_slowest_worker_and_its_name() -> None:
    workers = np.ones((1024, 64))
    workers[514, 1] = 3.0
    each = side([1.0], workers=workers, dp_ranks=np.arange(1024))
    drawn = worker_map(each, 3.0, LIGHT).data[0]
    assert drawn.z.shape == (64, 256)
    assert drawn.z.max() == drawn.z[1, 128] == 3.0
    assert drawn.customdata[1, 128].tolist() == [514, 1]


# --- the page -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, sample_store: Path) -> Iterator[Path]:
    """The sample store with hand-made jobs: a slow one, a healthy one, and one that is repaired from step 10 on.

    At the end the store is as it was.
    """
    folder = tmp_path_factory.mktemp("pairs")
    samples_alone = shutil.copy(sample_store, sample_store.with_suffix(".samples"))
    first, later = range(10), range(10, 20)
    made = {
        "slow <i>one</i>": slow_frame(first),
        "healthy-one": healthy_frame(first),
        "repaired": pl.concat([slow_frame(first), healthy_frame(later)]),
    }
    files = []
    for name, ops in made.items():
        files.append(folder / f"{len(files)}.parquet")
        Trace.from_frame(ops, LAYOUT, name=name).write_parquet(files[-1])
    ran = run("import", *files, "--store", sample_store)
    assert ran.code == 0, ran.err
    yield sample_store
    samples_alone.replace(sample_store)


def address(job: str, **state: str) -> str:
    return f"/compare?{urlencode({'job': job, **state})}"


def whatif(store: Path, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("whatif", "--store", store, "--job", job, "--json").out)
    return found


def test_both_parts_of_a_job_have_the_hand_made_step_times(pairs: Path) -> None:
    results = Results(pairs)
    stored, workers = results.stored("repaired"), results.worker_steps("repaired")
    before, after = parts(stored, workers, 10)
    assert before.recorded_s == pytest.approx(np.full(10, SLOW_STEP_S))
    assert after.recorded_s == pytest.approx(np.full(10, HEALTHY_STEP_S))
    assert (before.title, after.title) == ("steps 0 to 9", "steps 10 to 19")
    everything = whole(stored, workers)
    assert everything.slowdown == pytest.approx(stored.report["slowdown"])
    by_worker = {(row["dp_rank"], row["pp_rank"]): row["slowdown"] for row in stored.report["by_worker"]}
    assert everything.workers.ravel() == pytest.approx([by_worker[at] for at in sorted(by_worker)], rel=1e-6)
    assert everything.workers == pytest.approx((before.workers + after.workers) / 2)  # equal ideals, equal lengths


@pytest.mark.parametrize("step", [-5, 0, 20, 10**30])
def test_a_step_that_does_not_part_the_job_is_refused(pairs: Path, step: int) -> None:
    results = Results(pairs)
    with pytest.raises(SelectionError, match="expected a step from 1 to 19"):
        parts(results.stored("repaired"), results.worker_steps("repaired"), step)


def test_two_jobs_show_the_numbers_of_their_reports(visit: Visit, pairs: Path) -> None:
    before, after = whatif(pairs, "slow <i>one</i>"), whatif(pairs, "healthy-one")
    page = visit(address("healthy-one", **{"with": "slow <i>one</i>"}), theme="dark")
    text = page.inner_text("#page")
    assert "Yes, it helped: a recorded step takes 11.25 s instead of 15.50 s, 4.25 s (27.4%) less" in text
    assert "Before: slow <i>one</i>" in text
    cells = page.locator("#compare-content table.plain").first.locator("td").all_inner_texts()
    for report, at in ((before, 0), (after, 1)):
        times = report["step_time_s"]
        assert cells[at] == seconds(times["recorded"])
        assert cells[4 + at] == seconds(times["original"])
        assert cells[8 + at] == seconds(times["ideal"])
        assert cells[12 + at] == f"{report['slowdown']:.3f}"
        assert cells[16 + at] == f"{report['waste']:.1%}"
        assert cells[20 + at] == f"{report['wasted_gpu_hours_per_day']:,.1f}"
    page.wait_for_selector(".heatmaplayer image >> nth=1", state="attached")
    assert page.locator(".js-plotly-plot").count() == 6


def test_a_job_is_parted_at_its_change_point_unless_the_address_says_otherwise(visit: Visit, pairs: Path) -> None:
    page = visit(address("repaired"))
    text = page.inner_text("#page")
    assert page.input_value("#compare-split") == "10"
    assert "Yes, it helped: a recorded step takes 11.25 s instead of 15.50 s" in text
    assert "Before: steps 0 to 9" in text
    assert "measured against the ideal of the whole job" in text
    assert "(1,0)" in page.locator("table.plain").last.inner_text()
    page.fill("#compare-split", "5")
    page.locator("#compare-content", has_text="Before: steps 0 to 4").wait_for()
    assert parse_qs(urlsplit(page.url).query)["split"] == ["5"]
    other = visit(page.url.removeprefix(page.evaluate("location.origin")), theme="dark", width=1920)
    assert other.inner_text("#compare-content table.plain >> nth=0") == page.inner_text(
        "#compare-content table.plain >> nth=0"
    )


def test_another_job_is_chosen_in_the_page_and_stays_in_the_address(visit: Visit, pairs: Path) -> None:
    page = visit(address("slow-worker"))
    page.locator("#compare-content", has_text="No change point was found").wait_for()
    page.click("#compare-with")
    page.get_by_role("option", name="healthy", exact=True).click()
    page.locator("#compare-content", has_text="No, it got worse").wait_for()
    assert parse_qs(urlsplit(page.url).query) == {"job": ["slow-worker"], "with": ["healthy"]}
    page.click("text=Swap before and after")
    page.locator("#compare-content", has_text="Yes, it helped").wait_for()
    assert parse_qs(urlsplit(page.url).query) == {"job": ["healthy"], "with": ["slow-worker"]}
    expect(page.locator("h1")).to_have_text("healthy")


def test_the_causes_that_went_away_are_named(sample_store: Path) -> None:
    (thirds,) = found(Pages(sample_store).page("/compare", job="healthy", **{"with": "slow-worker"}), "Div", "thirds")
    gone, new, _ = map("\n".join, map(lines, thirds.children))
    assert "Worker computes slower than its peers, worker (1,2)" in gone
    assert "No cause is new." in new


def test_jobs_of_other_layouts_are_compared_by_s(sample_store: Path) -> None:
    text = Pages(sample_store).text("/compare", job="slow-worker", **{"with": "collected"})
    assert "The layouts differ, so step times do not compare. By S:" in text
    assert "The two jobs have different workers" in text


def test_a_job_compared_with_itself_shows_no_difference(sample_store: Path) -> None:
    text = Pages(sample_store).text("/compare", job="slow-worker", **{"with": "slow-worker"})
    assert "No difference: this is the job compared with itself." in text


def test_a_store_that_disappears_under_an_open_page_is_said_in_words(visit: Visit, serving: Serving) -> None:
    page = visit(address("slow-worker", split="105"))
    away = serving.store.rename(serving.store.with_suffix(".away"))
    try:
        page.fill("#compare-split", "104")
        page.locator("#compare-content", has_text="is the store still there?").wait_for()
    finally:
        away.rename(serving.store)
