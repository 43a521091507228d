"""Threads change nothing but the time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.handmade import slow_trace
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.analysis.numeric import parallel
from tracekit.analysis.numeric.statistics import lower_median, lower_quantile, median


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the shortest array is worth threads, and there are three cores."""
    monkeypatch.setattr(parallel, "WORTH_THREADS", 0)
    monkeypatch.setattr("os.cpu_count", lambda: 3)


def test_slices_are_the_whole_axis_in_order(always: None) -> None:
    for length in (1, 2, 3, 4, 10, 100):
        parts = [range(length)[part] for part in parallel.slices(length, length)]
        assert [at for part in parts for at in part] == list(range(length))
        assert len(parts) == min(3, length)


def test_a_short_array_stays_whole() -> None:
    assert parallel.slices(10, 10) == [slice(0, 10)]


@pytest.mark.usefixtures("always")
def test_every_part_runs_and_the_first_error_is_raised() -> None:
    seen: list[int] = []
    parallel.each(seen.append, range(100))
    assert sorted(seen) == list(range(100))
    with pytest.raises(ZeroDivisionError):
        parallel.each(lambda part: 1 // part, (1, 0, 2))


@pytest.mark.usefixtures("always")
def test_parts_may_have_parts_themselves() -> None:
    """As many outer parts as threads: were the inner ones handed to the same threads, all would wait for ever."""
    together, seen = threading.Barrier(3), []

    def outer(part: int) -> None:
        together.wait(timeout=60)
        parallel.each(lambda inner: seen.append((part, inner)), range(4))

    parallel.each(outer, range(3))
    assert sorted(seen) == [(part, inner) for part in range(3) for inner in range(4)]


@pytest.mark.usefixtures("always")
def test_work_goes_on_where_no_thread_can_be_started_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a thread that outlives the main one."""
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    monkeypatch.setattr(parallel, "_pool", lambda _: pool)
    monkeypatch.setattr(parallel, "ThreadPoolExecutor", lambda *_, **__: pool)
    seen: list[int] = []
    parallel.each(seen.append, range(10))
    assert seen == list(range(10))
    assert parallel.both(lambda: 1, lambda: 2, numbers=1) == (1, 2)


@pytest.mark.usefixtures("always")
def test_two_functions_run_at_the_same_time() -> None:
    together = threading.Barrier(2)
    assert parallel.both(lambda: together.wait(60) < 2, lambda: together.wait(60) < 2, numbers=1) == (True, True)


@pytest.mark.usefixtures("always")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (7, 4), (3, 2, 6), (5, 1, 1)])
@pytest.mark.parametrize("with_nan", [False, True])
def test_medians_in_slices_are_those_of_numpy(shape: tuple[int, ...], with_nan: bool) -> None:
    values = np.random.default_rng(len(shape)).random(shape)
    if with_nan:
        values.reshape(-1)[::3] = np.nan
    before = values.copy()
    assert np.array_equal(median(values, (values.ndim - 1,)), np.nanmedian(values, axis=-1), equal_nan=True)
    assert np.array_equal(median(values, tuple(range(values.ndim))), np.nanmedian(values), equal_nan=True)
    assert np.array_equal(lower_quantile(values, values.ndim - 1, 0.5), lower_median(values, (-1,)), equal_nan=True)
    assert np.array_equal(values, before, equal_nan=True)


def test_a_report_is_the_same_with_threads_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = PipelineJob(slow_trace()).report.to_json()
    monkeypatch.setattr(parallel, "WORTH_THREADS", 0)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert PipelineJob(slow_trace()).report.to_json() == alone
