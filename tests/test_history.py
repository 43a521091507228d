"""A host against its own history: named where it became slower, alone or with all its peers, and priced."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from tests.handmade import LAYOUT, healthy_frame, run
from tests.test_one_world import op_trace
from tracekit.analysis.job.history import FEWEST_WINDOWS, History, Slower, _shift, history_of
from tracekit.base.errors import ExitCode, SelectionError
from tracekit.dashboards.terminal.details import print_history
from tracekit.store import Incoming, Store
from tracekit.synth import SynthSpec, synthesize
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout

#: A host for each stage of a handmade job.
HOSTS = {"0": "node-a", "1": "node-a", "2": "node-b", "3": "node-b"}


def window(number: int, slower: float = 1.0, **more: Any) -> Trace:
    """Three healthy steps, all times of which are `slower` times as long, and 0.1 % more in odd windows."""
    factor = slower * (1 + 0.001 * (number % 2))
    ops = healthy_frame(range(3)).with_columns(pl.col("start", "duration") * factor)
    starts = {step: 1e9 + 1000.0 * number + step * 12 * factor for step in range(3)}
    facts = {"hosts": HOSTS, "model": "one", **more}
    return Trace.from_frame(ops, LAYOUT, name="job", step_starts=starts, metadata=facts)


def stored(folder: Path, make: Callable[[int], Trace], windows: int = 10, job: str = "job") -> Store:
    store = Store(folder / "jobs.store")
    for number in range(windows):
        store.append(Incoming(make(number), job, "handmade"))
    return store


def test_a_job_that_is_no_pipeline_has_no_history_of_hosts(tmp_path: Path) -> None:
    store = stored(tmp_path, window, windows=1)
    store.append(Incoming(op_trace(0.1, "ops"), "ops", "handmade"))
    with pytest.raises(SelectionError, match="--history: job 'ops' is no pipeline, whose computes could be compared"):
        history_of(store, "ops")


def test_hosts_that_are_all_slower_are_named_with_the_window_since_when_and_the_price(tmp_path: Path) -> None:
    """A fifth longer from window 7 on: 6 s of compute a step become 7.2 s. At their old pace they would save 0.2 x 9 s
    of a step of 1.2 x 11.25 s: the critical path has a forward and a backward of stage 0 and two of each of stage 1.
    """
    found = history_of(stored(tmp_path, lambda number: window(number, 1.2 if number >= 7 else 1.0)))
    assert (found.hosts, found.windows) == (2, 10)
    assert {one.host for one in found.slower} == {"node-a", "node-b"}
    for one in found.slower:
        assert one.change == pytest.approx(0.2, abs=0.001)
        assert one.before_s == pytest.approx(6.0, rel=0.001)
        assert (one.since_window, one.windows) == (7, (7, 3))
        assert one.chance < 1e-6
    assert found.all_slower
    saved_s = found.saved_gpu_hours_per_day / (4 * 24) * 11.25 * 1.2
    assert saved_s == pytest.approx(0.2 * 9, rel=0.01)


@pytest.mark.slow
def test_what_a_script_gets(tmp_path: Path) -> None:
    """A table, or JSON; none for Slurm, since nothing shows their hardware at fault."""
    store = stored(tmp_path, lambda number: window(number, 1.2 if number >= 7 else 1.0))
    asked = ("culprits", "--store", store.path, "--job", "job", "--history")
    shown = run(*asked)
    assert shown.code == ExitCode.DONE
    assert "would save" in shown.out
    assert "All became slower at once" in shown.out
    assert "window 7" in shown.out
    content = json.loads(run(*asked, "--format", "json").out)
    assert {row["host"] for row in content["slower"]} == {"node-a", "node-b"}
    assert content["slower"][0]["change"] == pytest.approx(0.2, abs=0.001)


@pytest.mark.slow
def test_one_host_alone_and_a_window_before_it_slowed_down(tmp_path: Path) -> None:
    """Stage 1 of both DP ranks, which is node-b; of window 6, nothing can be said yet."""

    def make(number: int) -> Trace:
        healthy = window(number)
        slow = (pl.col("pp_rank") == 1) & pl.col("kind").cast(pl.String).str.ends_with("compute")
        longer = pl.when(slow & (number >= 7)).then(1.1).otherwise(1.0)
        ops = healthy.ops.with_columns(pl.col("duration") * longer)
        return Trace.from_frame(
            ops, LAYOUT, name="job", step_starts=healthy.step_starts, metadata=dict(healthy.metadata)
        )

    store = stored(tmp_path, make)
    found = history_of(store, "job")
    assert [(one.host, one.ranks, one.since_window) for one in found.slower] == [("node-b", (2, 3), 7)]
    assert not found.all_slower
    assert history_of(store, "job", 6).slower == ()


def test_only_equal_work_is_compared(tmp_path: Path) -> None:
    """Half the windows are of another model, and so, of the last window, only four others can be compared."""
    store = stored(tmp_path, lambda number: window(number, 1.2 if number % 2 else 1.0, model=f"model {number % 2}"))
    found = history_of(store)
    assert (found.windows, found.slower) == (5, ())


@pytest.mark.slow
def test_the_history_goes_on_in_a_job_of_another_name(tmp_path: Path) -> None:
    store = stored(tmp_path, window, 6, "monday")
    for number in range(6, 9):
        store.append(Incoming(window(number, 1.2), "tuesday", "handmade"))
    found = history_of(store, "tuesday")
    assert {(one.since_job, one.since_window) for one in found.slower} == {("tuesday", 0)}


def test_too_short_a_history_names_nobody(tmp_path: Path) -> None:
    store = stored(tmp_path, lambda number: window(number, 1.5 if number else 1.0), 2)
    ran = run("culprits", "--store", store.path, "--history")
    assert ran.code == ExitCode.NO_ANSWER
    assert ran.out == "There is no node with the same work in 3 windows, so none could be compared.\n"


@pytest.mark.parametrize("arguments", [["trace.parquet"], ["--part", "compute"], ["--format", "slurm"]])
def test_options_that_do_not_fit_are_one_clear_line(arguments: list[str]) -> None:
    ran = run("culprits", *arguments, "--history")
    assert (ran.code, ran.out) == (2, "")
    assert "--history is for the computes of a job in a store" in ran.err


@pytest.mark.slow
def test_a_rise_has_the_chance_of_students_test_times_the_places_where_it_could_begin() -> None:
    """So noise alone names a host in one store of a hundred at most (Bonferroni)."""
    from scipy.stats import linregress

    for level in 1 + 0.01 * np.random.default_rng(7).standard_normal((50, 20)):
        places = range(2, 20)
        chances = [linregress(np.arange(20) >= at, level, alternative="greater").pvalue for at in places]
        at, chance = _shift(level)
        assert chance == pytest.approx(min(1.0, len(places) * min(chances)))
        assert at == places[np.argmin(chances)] or chance == 1.0


@pytest.mark.slow
def test_simulated_hosts_that_become_slower_by_a_twentieth_are_found(tmp_path: Path) -> None:
    """Steps with 2 % of noise: window means differ by 0.1 %."""

    def make(number: int) -> Trace:
        from tracekit.synth import BaseCosts

        factor = 1.05 if number >= 5 else 1.0
        costs = BaseCosts(forward_s=0.02 * factor, backward_s=0.04 * factor)
        trace = synthesize(SynthSpec(Layout(dp=4, pp=2, world_size=8), steps=5, seed=number, costs=costs))
        facts: Mapping[str, Any] = {"hosts": trace.metadata["hosts"]}
        starts = {step: start + 1000.0 * number for step, start in trace.step_starts.items()}
        return Trace.from_frame(trace.ops, trace.layout, name="job", step_starts=starts, metadata=facts)

    found = history_of(stored(tmp_path, make, 8))
    assert found.hosts == len(found.slower) > 0
    assert all(one.change == pytest.approx(0.05, abs=0.01) and one.since_window == 5 for one in found.slower)


def test_the_terminal_says_of_each_slower_host_how_much_and_since_when() -> None:
    def printed(history: History) -> list[str]:
        console = Console(file=io.StringIO(), width=100)
        print_history(history, console)
        assert isinstance(console.file, io.StringIO)
        return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]

    here = Slower("node-a", (0, 1), 0.25, 0.3, 0.2, "job", 7, (7, 3), 1e-9)
    before = Slower("node-b", (2, 3), 0.2, 0.25, 0.25, "job-of-yesterday", 12, (12, 3), 1e-9)
    since = History("job", 10, 3, 10, (before, here), 12.345)
    assert printed(since) == [
        "Host computes before change since",
        "node-b 250.0 ms 200.0 ms +25.0% window 12 of job-of-y...",
        "node-a 300.0 ms 250.0 ms +20.0% window 7",
        "As fast as they used to be, the job would save 12.3 GPU-hours a day.",
    ]
    together = printed(History("job", 10, 2, 10, (here, here), 1.0))
    assert together[-1].startswith("All became slower at once: compare their work first")
    assert printed(History("job", 10, 3, 10)) == [
        f"Of 3 nodes with the same work in {FEWEST_WINDOWS} windows, none is slower than it was."
    ]
    assert printed(History("job", 10, 0, 10)) == [
        f"There is no node with the same work in {FEWEST_WINDOWS} windows, so none could be compared."
    ]


def test_hosts_are_slower_at_once_if_all_of_several_are_since_one_window() -> None:
    first, later = (Slower(f"node-{since}", (), 1.0, 2.0, 1.0, "job", since, (9, 3), 0.0) for since in (7, 8))
    cases = {(2, first, first): True, (2, first, later): False, (3, first, first): False, (1, first): False}
    for (hosts, *slower), together in cases.items():
        assert History("job", 10, hosts, 10, tuple(slower)).all_slower == together
