"""The pages of a recording of GPUs: why the GPU is idle, what it runs, its timeline, comparisons and questions."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import polars as pl
import pytest
from playwright.sync_api import Page, expect

import tracekit
from tests.cases import case
from tests.dashboards.clicks import state
from tests.dashboards.conftest import Serving
from tests.dashboards.page_text import Pages, found, lines, sent
from tests.dashboards.pages.test_timeline import painted, unpacked
from tests.dashboards.tabs import HEIGHT
from tests.kineto_files import GEMM, document, event, kernel, launch, write
from tests.test_gpu_traces import SAMPLE
from tracekit.analysis.job.graph import GraphJob
from tracekit.base.text import code_name, cost
from tracekit.dashboards.browser.data.replays import QueryAction, WhatifAnswer, WhatifQuery, answered, gpu_questions
from tracekit.dashboards.browser.ui.figures import memory_over_time
from tracekit.dashboards.figures.charts import picture
from tracekit.dashboards.figures.lanes import LEVEL_STEP, LEVELS
from tracekit.dashboards.theme import LIGHT
from tracekit.report.hardware import MemoryPoint, MemoryTimes
from tracekit.store import Incoming, Store, TraceKind

RELU = "void at::native::vectorized_elementwise_kernel<4, <script>alert(1)</script>>(int)"


def one_gpu(log_us: float = 1500) -> dict[str, Any]:
    """2 ms of Python before a copy and a product, and Python for `log_us` before the next kernel."""
    end = 2150 + log_us
    return document(
        [
            event("python_function", "train.py(7): prepare", 0, 2000),
            event("cpu_op", "aten::copy_", 2000, 40), launch(2010, 1, name="cudaMemcpyAsync"),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 2030, 100, pid=0, tid=7, device=0, stream=7,
                  correlation=1, bytes=4096),
            event("cpu_op", "aten::mm", 2100, 40), launch(2110, 2), kernel(GEMM, 2200, 400, correlation=2),
            event("python_function", "train.py(9): log", 2150, log_us),
            event("cpu_op", "aten::relu", end + 50, 40), launch(end + 60, 3),
            kernel(RELU, end + 100, 500, correlation=3),
            event("cpu_op", "aten::item", end + 110, 500),
            event("cuda_runtime", "cudaStreamSynchronize", end + 120, 485, tid=100, correlation=4),
        ],
        world=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A recording of one GPU, the same with slower Python, and one of several."""
    folder = tmp_path_factory.mktemp("gpu")
    write(folder / "one" / "trace.json", one_gpu())
    write(folder / "slower" / "trace.json", one_gpu(3500))
    made = Store(folder / "jobs.store")
    for name, path in (("one", folder / "one"), ("slower", folder / "slower"), ("four", SAMPLE)):
        job = tracekit.load(path)
        made.add([Incoming(job.trace, name, str(path), job.stored())])
    return made


@pytest.fixture(scope="module")
def pages(store: Store) -> Pages:
    return Pages(store.path)


def gpu_of(pages: Pages, name: str, rank: int | None = None) -> dict[str, Any]:
    report = pages.service.results.stored(name).report.to_dict()
    assert report is not None
    gpu: dict[str, Any] = report["gpu"] if rank is None else report["gpus"][rank]
    return gpu


def priced(pages: Pages, name: str) -> dict[str, float]:
    """What the page What-if asks by itself, and what each question saves."""
    stored = pages.service.results.stored(name)
    assert stored.report is not None
    job = pages.service.results.job_of(stored)
    return {one.subject: answered(job, stored.report, one.query).saved_s for one in gpu_questions(stored.report)}


def test_idleness_ranks_and_op_classes_have_the_prices_of_fixes(pages: Pages) -> None:
    """Rank 2 of four is late with its data alone; of one GPU, two functions of Python are on the way of launches."""
    four, one = (pages.service.results.stored(name).report for name in ("four", "one"))
    assert four is not None
    assert one is not None
    of_four, of_one = priced(pages, "four"), priced(pages, "one")
    assert list(of_four)[:2] == ["loader", "rank 2"]
    (fix,) = [fix for fix in four.fixes if fix.cause == "late-data-loading"]
    assert of_four["loader"] == pytest.approx(fix.saved_s)
    saved = [fix.saved_s or 0.0 for fix in one.fixes if fix.kind == "no-python-between"]
    assert len(saved) == 2
    assert of_one["python"] == pytest.approx(sum(saved))
    assert 0 < of_four["matrix-product"] < four.step_time_s.recorded / 2


def rows(page: Any, table: str) -> list[str]:
    """The rows of a table, each as words."""
    (frame,) = (one for one in found(page, "Div") if getattr(one, "aria-label", "") == table)
    return [" ".join(sent(row).split()) for row in found(frame, "Tr")][1:]


@pytest.mark.slow
def test_each_finding_is_told_once_with_its_line_of_python_and_its_price(pages: Pages) -> None:
    page, report = pages.page("/job", job="one"), pages.service.results.stored("one").report.to_dict()
    assert report is not None
    first, *others = (" ".join(lines(item)) for item in found(page, "Li") if "Evidence" in lines(item))
    assert len(others) + 1 == len(report["causes"]) == len(gpu_of(pages, "one")["findings"]) > 1
    for cause, shown in zip(report["causes"], (first, *others), strict=True):
        where = cause["spent"]["where"]
        price = cost(cause["saved_s"], cause["alone_s"], "recording", bound=cause["bound"])
        assert all(part in shown for part in (cause["effect"], code_name(where) if where else "", price))
    assert "What to do" not in first  # the answer above says it
    assert report["answer"]["action"] in sent(page)
    for cause, shown in zip(report["causes"][1:], others, strict=True):
        assert f"What to do: {cause['suggested_fix']}" in shown


def test_idle_time_is_told_by_reason_in_words_with_the_longest_names(pages: Pages) -> None:
    page, gpu = pages.page("/job", job="one"), gpu_of(pages, "one")
    idle = rows(page, "Why the GPU is idle") + rows(page, "Why the GPU is idle, further reasons")
    assert len(idle) == sum(one["seconds"] >= 5e-7 for one in gpu["idle_by_reason"])
    assert "Python runs between operators" in idle[0]
    assert "train.py(9): log" in idle[0]
    before = rows(page, "Before the first op of the GPU")
    assert "Python runs between operators" in before[0]
    assert "train.py(7): prepare" in sent(page)
    assert any("cudaStreamSynchronize in aten::item" in row for row in rows(page, "Calls that wait for the GPU"))
    assert any("HtoD, pageable" in row and "4,096" in row for row in rows(page, "Copies"))


def test_memory_over_time_is_drawn_where_it_was_recorded() -> None:
    memory = MemoryTimes(2_500_000_000, 3_000_000_000, (MemoryPoint(0.1, 2_500_000_000),))
    (line,) = picture(memory_over_time(memory), LIGHT).data
    assert (list(line.x), list(line.y)) == ([0.1], [2.5])


def test_times_are_of_the_recording_and_tables_that_compare_ranks_are_left_out(pages: Pages) -> None:
    page = pages.page("/job", job="one")
    assert "a step" not in sent(page)
    assert not {"Waits", "Ranks"} & {title.children for title in found(page, "H2")}


def test_of_several_ranks_that_of_the_culprit_is_shown_until_another_is_chosen(pages: Pages) -> None:
    culprit = pages.service.results.stored("four").report.answer.culprits[0].rank
    shown = {
        rank: pages.page("/job", job="four", **({} if rank is None else {"rank": str(rank)})) for rank in (None, 2)
    }
    for rank, page in shown.items():
        chosen = culprit if rank is None else rank
        assert f"recorded on rank {chosen}:" in sent(page)
        assert f"rank={(chosen + 1) % 4}" in sent(page)
    assert "the data loader has no batch ready" in rows(shown[2], "Why the GPU is idle")[0]


def test_a_rank_that_was_not_recorded_and_one_that_is_no_number_show_the_page(pages: Pages) -> None:
    for rank in ("99", "<b>", ""):
        assert "Why the GPU is idle" in pages.text("/job", job="four", rank=rank)


def test_kernels_and_operators_are_found_by_a_part_of_their_name(
    visit: Callable[..., Page], show: Callable[..., Serving], store: Store
) -> None:
    page = visit("/job?job=one&q=relu", base=show(store.path).url)
    shown = page.locator("#names tbody tr:visible")
    expect(shown).to_have_count(1)
    page.fill("#names-q", "<SCRIPT>")
    expect(page.locator("#names-said")).to_have_text("1 of 6 rows")
    expect(shown).to_contain_text("<script>alert(1)</script>")
    assert state(page)["q"] == "<SCRIPT>"
    page.fill("#names-q", "")
    expect(shown).to_have_count(6)


def test_the_page_of_a_recording_is_two_screens_long_and_folds_the_rest(
    visit: Callable[..., Page], show: Callable[..., Serving], store: Store
) -> None:
    page = visit("/job?job=four", base=show(store.path).url, width=1440)
    assert page.evaluate("document.documentElement.scrollHeight") <= 2 * HEIGHT
    expect(page.locator("#names")).to_have_count(0)  # hundreds of rows take the browser longer than all that it shows
    page.click("text=8 kernels and 3 operators")
    expect(page.locator("#names")).to_be_visible()


def test_a_long_name_is_shown_whole_while_it_has_the_focus(
    visit: Callable[..., Page], show: Callable[..., Serving], store: Store
) -> None:
    page = visit("/job?job=one", base=show(store.path).url, width=390)
    page.click("text=3 kernels and 3 operators")
    name = page.locator("#names .name", has_text="alert(1)").first
    height = "(element) => element.clientHeight"
    folded = name.evaluate(height)
    name.focus()
    assert name.evaluate(height) > folded


# --- the timeline: a track per stream and thread of each rank


def asked(pages: Pages, path: str, **parameters: object) -> bytes:
    answer = pages.client().get(f"/timeline/{path}", query_string=parameters)
    assert answer.status_code == 200, answer.text
    return answer.data


def test_each_stream_and_thread_of_a_rank_is_a_track_with_the_ops_of_the_trace(pages: Pages, store: Store) -> None:
    for name, lanes in (("one", ["stream 7", "thread 0"]), ("four", ["stream 7", "stream 20", "thread 0", "thread 1"])):
        with case(name):
            layout, spans = unpacked(asked(pages, "layout", job=name)), unpacked(asked(pages, "spans", job=name))
            ops = store.load(name).ops.filter(pl.col("stream").is_not_null())
            assert [line[:2] for line in layout["lines"]] == [["recorded", lane] for lane in lanes]
            assert layout["rank"].tolist() == ops["rank"].unique().sort().to_list()
            for at, (rank, lane) in enumerate(product(layout["rank"].tolist(), lanes)):
                here = slice(*spans["first"][at : at + 2].tolist())
                own = ops.filter(rank=rank, stream=lane).select("start", pl.col("duration").cast(pl.Float32))
                drawn = zip(spans["start"][here].tolist(), spans["duration"][here].tolist(), strict=True)
                assert sorted(drawn) == sorted(own.iter_rows())


def test_a_span_has_the_colour_of_its_kind_and_host_work_the_name_of_what_took_longest(pages: Pages) -> None:
    layout, spans = unpacked(asked(pages, "layout", job="one")), unpacked(asked(pages, "spans", job="one"))
    levels = np.rint(spans["ratio"] / LEVEL_STEP).astype(int)
    shown = {(layout["names"][name], str(LEVELS[level])) for name, level in zip(spans["name"], levels, strict=True)}
    assert {(GEMM, "matrix-product"), (RELU, "element-wise"), ("train.py(9): log", "host")} <= shown
    assert ("Memcpy HtoD (Pageable -> Device)", "memory") in shown


def test_the_longest_ops_are_listed_and_an_op_is_told_in_words(pages: Pages) -> None:
    first, *_ = json.loads(asked(pages, "slowest", job="one"))["rows"]
    assert first["cells"][1:4] == ["thread 0", "host", "train.py(7): prepare"]
    told = json.loads(asked(pages, "op", job="one", op=first["name"]))
    assert told["title"] == "train.py(7): prepare"
    assert ["2.0 ms", "train.py(7): prepare"] in told["rows"]
    for op in ("0,0,op,999", "7,0,op,0", "0,0,gc,0"):
        with case(op):
            answer = pages.client().get("/timeline/op", query_string={"job": "one", "op": op})
            assert (answer.status_code, answer.text) == (400, f"op='{op}' names no op of step 0\n")


@pytest.mark.every_push
def test_the_canvas_draws_a_recording_and_keeps_the_op_that_is_chosen(
    visit: Callable[..., Page], show: Callable[..., Serving], store: Store
) -> None:
    page = visit("/timeline?job=four&dp_rank=2", base=show(store.path).url)
    painted(page)
    page.locator("#timeline-slowest button").first.click()
    expect(page.locator("#timeline-details h3")).to_contain_text("DataLoader")
    assert state(page)["op"].startswith("2,0,op,")
    page.fill("#timeline-dp_rank", "1-2")
    page.wait_for_function("() => (window.tracekitTimeline.current().scene || {}).workers === 2")
    expect(page.locator("#timeline-worker")).to_be_hidden()


# --- comparisons and questions


def test_two_recordings_are_compared_by_what_the_gpu_did(pages: Pages) -> None:
    page = pages.page("/compare", job="slower", **{"with": "one"})
    (changed, *_), (finding, *_) = rows(page, "What the GPU did"), rows(page, "Findings, and what each takes")
    assert "Python runs between operators" in changed
    assert "+2.0 ms" in changed
    assert "train.py(9): log" in finding
    mixed = pages.text("/compare", job="one", **{"with": "four"})
    assert "What the GPU did" not in mixed


def test_a_question_about_a_recording_is_answered_as_the_command_answers_it(pages: Pages, store: Store) -> None:
    trace = store.load("four")
    assert trace.kind is TraceKind.OPS
    for query in (WhatifQuery("rank=2"), WhatifQuery("kind=matrix-product", QueryAction.SCALE, 0.5)):
        with case(query.edit):
            answer = pages.service.replays.ask(pages.service.results.stored("four"), query, wait_s=60)
            assert isinstance(answer, WhatifAnswer)
            asked_by_hand = GraphJob(trace).answer(query.edit)
            assert answer.saved_s == pytest.approx(asked_by_hand.saved_s)
            assert answer.saved_gpu_hours_per_day == pytest.approx(asked_by_hand.saved_gpu_hours_per_day)
    text = pages.text("/whatif", job="four", select="rank=2")
    assert "With rank=2 as fast as peers, the recording takes" in text
    assert "Every input twice as fast" in text
