"""One screen of a running job."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from io import StringIO
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from msgspec import structs
from rich.console import Console

from tests.handmade import run
from tests.test_incidents import STANDS
from tests.test_store_windows import window
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.dashboards.terminal.tables import merged_map
from tracekit.dashboards.terminal.top import TopState, frame
from tracekit.report.findings import Unanalysed
from tracekit.store import Incoming, Store
from tracekit.store.incidents import IncidentChange
from tracekit.trace.facts import STEP_VALUES


def with_values(item: Incoming, **values: dict[str, float]) -> Incoming:
    """The same window, analysed with what its steps logged."""
    trace = replace(item.trace, metadata={**item.trace.metadata, STEP_VALUES: values})
    return replace(item, trace=trace, findings=PipelineJob(trace).stored())


def test_a_screen_of_80_columns_says_what_who_and_since_when(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    for number in range(3):
        store.append(window(number, analysed=True))
    ran = run("store", "top", "--store", store.path, "--once", env={"COLUMNS": "80"})
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    assert lines[0].startswith("live   window 2, steps 4 to 5, ")
    assert lines[1].startswith("STRAGGLER: rank 1 costs 27% of each step")
    text = " ".join(ran.out.split())
    assert "now before lowest highest 3 windows, oldest first Step time 15.50 s 15.50 s 15.50 s 15.50 s ▁▁▁" in text
    assert "Lost 27% 27% 27% 27%" in text
    assert "Incident open for costs owner what 1 2 h 0 min" in text
    assert "27% none rank 1 (dp 1, stage 0), in every step, 89% sure" in text
    assert text.count("computes 100% slower than its peers") == 1
    assert "Who" not in text
    assert "More to check DCGM on its GPUs" in text
    assert "how much each slows the job, stages 0 to 1 across: ·· hardly" in text
    store.handle(1, IncidentChange(1.0, "bob", owner="ann"))
    assert "27% ann rank 1" in " ".join(run("store", "top", "--store", store.path, "--once").out.split())


def test_the_screen_is_drawn_anew_until_a_signal_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window arrives after the first look; the signal, after the second."""
    store = Store(tmp_path / "jobs.store")
    store.append(window(0, analysed=True))
    stop = mock.Mock()
    stop.is_set.side_effect = [False, False, True]
    stop.wait.side_effect = lambda _: store.append(window(stop.wait.call_count, analysed=True))
    monkeypatch.setattr("tracekit.live.watch.stopped_by_signals", lambda: nullcontext(stop))
    ran = run("store", "top", "--store", store.path, "--every", "0.5")
    assert (ran.code, [call.args for call in stop.wait.mock_calls]) == (0, [(0.5,), (0.5,)])
    assert ran.out.startswith("live   window 1, steps 2 to 3, ")


def test_rows_of_the_map_name_their_ranks_and_say_what_they_pool() -> None:
    """Alike neighbours share a row; of more rows than there is room for, each is the worst of its ranks."""

    def drawn(*slowdown: float) -> list[str]:
        console = Console(width=120, file=StringIO())
        console.print(merged_map(np.array(slowdown)[:, None], range(len(slowdown)), 2))
        file = console.file
        assert isinstance(file, StringIO)
        return [line.rstrip() for line in file.getvalue().splitlines()]

    title, *rows = drawn(1.0, 1.0, 1.0, 1.5)
    assert title.startswith("Workers  how much each slows the job, one stage: ")
    assert rows == ["  dp 0-2 ··", "  dp 3   ██"]
    title, *rows = drawn(1.0, 1.5, 1.0, 1.3)
    assert title.startswith("Workers  how much each slows the job, one stage, each row the worst of its DP ranks: ")
    assert rows == ["  dp 0-1 ██", "  dp 2-3 ▆▆"]
    assert merged_map(np.ones((4, 1)), range(4), 2) is None


def test_tokens_a_second_and_the_last_loss_that_is_known_are_rows(tmp_path: Path) -> None:
    """A step of 15.5 s has 31 or 62 million tokens: 2 and 4 million a second. The last window logged neither."""
    store = Store(tmp_path / "jobs.store")
    store.append(with_values(window(0), tokens={"0": 30e6, "1": 32e6}, loss={"1": 2.25, "0": 2.5}))
    store.append(with_values(window(1), tokens={"2": 62e6}, loss={"2": 0.01234}))
    store.append(window(2, analysed=True))
    for width in (80, 120):
        lines = run("store", "top", "--store", store.path, "--once", env={"COLUMNS": str(width)}).out.splitlines()
        assert max(map(len, lines)) <= width
        assert [line.split() for line in lines if line.startswith((" Tokens", " Loss"))] == [
            ["Tokens/s", "4M", "2M", "2M", "4M", "▁█"],
            ["Loss", "0.01234", "2.25", "0.01234", "2.25", "█▁"],
        ]


def test_the_costliest_incident_comes_first_and_the_end_of_a_job_is_said(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    store.begin_watch("live", "torchrun")
    store.append(window(0, analysed=True))
    with store.writing() as writer:
        (slow,) = writer.catalogue.live.incidents("live")
        small = replace(
            slow, incident_id=0, cause=structs.replace(slow.cause, what="a small one", share=0.06, ranks=(0,))
        )
        writer.catalogue.live.put_incident(writer.catalogue.ensured("live", ""), small)
    said = run("store", "top", "--store", store.path, "--once").out
    rows = [line.split()[:2] for line in said.splitlines()]
    assert 0 < rows.index(["1", "0"]) < rows.index(["2", "0"])
    assert "more open incidents" not in said
    assert "s ago" in said.splitlines()[0]
    with store.writing() as writer:
        for number in range(7):
            cause = structs.replace(small.cause, ranks=(10 + number,))
            writer.catalogue.live.put_incident(writer.catalogue.ensured("live", ""), replace(small, cause=cause))
    said = run("store", "top", "--store", store.path, "--once").out
    numbers = [str(number) for number in range(1, 10)]
    shown = [line for line in said.splitlines() if line.split()[:1] in ([number] for number in numbers)]
    assert 1 < len(shown) < 9
    assert f" and {9 - len(shown)} more open incidents" in said
    store.end_watch("live")
    (ended_at,) = {one.closed_at for one in store.incidents("live")}
    assert ended_at is not None
    title = run("store", "top", "--store", store.path, "--once").out.splitlines()[0]
    assert title.endswith(f"steps 0 to 1, ended at {ended_at.astimezone():%Y-%m-%d %H:%M:%S}")


def test_a_window_without_a_report_says_why(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    store.append(replace(window(0), findings=Unanalysed("the ranks disagree")))
    assert "\nthe ranks disagree\n" in run("store", "top", "--store", store.path, "--once").out
    store.append(window(1))
    assert "\nnot analysed\n" in run("store", "top", "--store", store.path, "--once").out


def test_a_job_without_a_window_is_said(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    store.begin_watch("live", "torchrun")
    ran = run("store", "top", "live", "--store", store.path, "--once")
    assert (ran.code, "no window of job 'live' yet" in ran.message) == (2, True)
    ran = run("whatif", "--store", store.path, "--job", "live")
    assert (ran.code, "no window of job 'live' yet" in ran.message) == (2, True)
    ran = run("store", "top", "lve", "--store", store.path, "--once")
    assert (ran.code, ran.message.endswith("no job 'lve'; did you mean 'live'?")) == (2, True), ran.err
    store.add_hang("live", ["HANG"], STANDS)
    said = run("store", "top", "live", "--store", store.path, "--once").out
    assert said.startswith("live   no window yet\n")
    assert "rank 5 on node-b" in said


def test_the_age_of_a_window_is_never_below_zero(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    store.append(window(0, analysed=True))
    state = TopState.of(store, "live")
    added_s = state.windows["added_at"][-1]
    for later_s, age in ((7.4, "7 s ago"), (0.0, "0 s ago"), (-100.0, "0 s ago")):
        console = Console(file=StringIO(), width=80)
        console.print(frame(state, added_s + later_s))
        assert console.file.getvalue().splitlines()[0].rstrip().endswith(age)
