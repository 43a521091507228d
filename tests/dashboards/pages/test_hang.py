"""The page Hang: culprits first, who waits for whom by group, hangs of jobs with and without a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Page

from judges.hangsim import Fault, HangJob, dumps, run, write
from tests.cases import case
from tests.dashboards.conftest import Serving
from tests.dashboards.page_text import Pages, found, lines, sent
from tests.handmade import run as command
from tests.handmade import slow_trace
from tests.reports import hang_with
from tracekit.analysis.hang.hang_report import HangReport
from tracekit.dashboards.browser.data.hang_graph import fold, wait_graph
from tracekit.dashboards.theme import LIGHT
from tracekit.store import Incoming, Store

#: Names come from outside, and are text.
NAME = "<b>hung</b> job"


def report(folder: Path) -> HangReport:
    """Rank 6 of tensor 4 x pipeline 2 x data 2 stops issuing."""
    job, faults = HangJob(4, 2, 2), [Fault("host", 6, 31)]
    content = dumps(job, faults, run(job, faults))
    for rank, dump in content.items():
        stands = ["train.py:9 stuck"] if rank == 6 else ["c10d.py:7 wait", "train.py:5 step"]
        dump["tracekit"] = {"rank": rank, "host": "<i>node</i>", "stack": stands}
    write(folder, content)
    return msgspec.json.decode(command("hang", folder, "--json").out, type=HangReport)


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a job that hung and has a trace, and one that hung at once."""
    folder = tmp_path_factory.mktemp("hung")
    found, store = report(folder / "dumps"), Store(folder / "jobs.store")
    trace = slow_trace((0,), name=NAME)
    fine = replace(slow_trace((0,), name="fine"), metadata={"label_team": "llm"})
    store.add([Incoming(trace, NAME, "x.parquet"), Incoming(fine, "fine", "y.parquet")])
    store.add_hang("at once", [found.headline], found)
    store.add_hang(NAME, [found.headline], found)
    return store.path


@pytest.fixture(scope="module")
def pages(hung: Path) -> Pages:
    return Pages(hung)


def test_the_newest_hang_says_who_why_and_what_to_do_first(pages: Pages) -> None:
    text = pages.text("/hang")
    assert "HANG 1 rank holds up 15 others (16 of 16 ranks left a dump)" in text
    assert "rank 6 on <i>node</i>: interpreter locked, or idle in other code" in text
    assert "Do first: py-spy dump --pid PID" in text
    assert text.index("rank 6: train.py:9 stuck") < text.index("ranks 0-5, 7-15: c10d.py:7 wait")
    assert "It holds up 15 ranks in " in text
    assert "Wait-for graph: 1 culprit, " in sent(pages.page("/hang"))
    assert "Earlier hangs" in text
    assert "at once" in text


def test_a_job_that_hung_before_it_had_a_trace_has_a_page(pages: Pages) -> None:
    text = pages.text("/hang", job="at once")
    assert "This job has no trace in the store" in text
    assert "HANG 1 rank holds up 15 others" in text


def test_jobs_that_hang_lead_the_jobs_page_also_before_they_have_a_trace(pages: Pages) -> None:
    page = pages.page("/")
    rows = {row[0]: row[1:] for row in map(lines, found(page, "Tr"))}
    # all 16 GPUs wait, around the clock
    assert rows["at once"][:3] == ["hang", "100%", "384.0"]
    assert rows[NAME][:3] == ["hang", "100%", "384.0"]
    assert "rank 6" in rows["at once"]
    assert rows["fine"][0] == "not analysed"
    assert "llm" in rows["fine"]  # TRACEKIT_LABEL_TEAM
    links = [link.href for link in found(page, "Link", "job")]
    assert links == ["/hang?job=%3Cb%3Ehung%3C%2Fb%3E+job", "/hang?job=at+once", "/job?job=fine"]
    cards = [lines(card) for card in found(page, "Article")]
    assert {card[0] for card in cards} == {"at once", NAME}
    assert all("Do first" in card[-1] and "py-spy dump --pid PID" in card[-1] for card in cards)
    hanging = found(pages.page("/", status="hangs", q="once"), "Link", "job")
    assert [lines(link) for link in hanging] == [["at once"]]


def test_of_a_report_that_is_gone_or_unknown_its_incident_remains(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.store")
    stated = {"headline": "HANG  1 rank holds up 7 others", "first_step": "read its stack"}
    for job in ("pruned", "unreadable"):
        store.add_hang(job, ["HANG"], hang_with({"rank": 5, "host": "node-b"}, **stated))
    first, second = sorted((store.path / "hangs").iterdir())
    first.unlink()
    stored = json.loads(second.read_text())
    del stored["report"]["stacks"]
    second.write_text(json.dumps(stored))
    pages = Pages(store.path)
    for job in ("pruned", "unreadable"):
        text = pages.text("/hang", job=job)
        with case(job):
            assert "HANG 1 rank holds up 7 others" in text
            assert "Who: rank 5 on node-b" in text
            assert "More to check: read its stack" in text
            assert "Its report was removed, or is none that this tracekit reads" in text
    rows = {row[0]: row[1:3] for row in map(lines, found(pages.page("/"), "Tr"))}
    assert (rows["pruned"], rows["unreadable"]) == (["hang", "100%"], ["hang", "100%"])
    assert "rank 5 on node-b" in pages.text("/incidents")


def test_a_job_without_a_hang_says_so_and_how_to_watch_one(pages: Pages) -> None:
    text = pages.text("/hang", job="fine")
    assert "No hang of fine was recorded." in text
    assert "--hang-after" in text
    assert "/hang?job=" not in sent(pages.page("/job", job="fine"))
    assert "/hang?job=" in sent(pages.page("/job", job=NAME))


def test_the_graph_has_every_rank_once_and_leads_to_the_culprits(tmp_path: Path) -> None:
    nodes = fold(report(tmp_path))
    assert (nodes[0].column, nodes[0].ranks) == (0, (6,))
    assert sorted(rank for node in nodes for rank in node.ranks) == list(range(16))
    for node in nodes[1:]:
        assert any(nodes[held].column < node.column for held in node.held_by)
    peers = {4, 5, 7}  # of its tensor-parallel group
    assert peers <= {rank for node in nodes if 0 in node.held_by for rank in node.ranks}
    arrows = [one for one in wait_graph(nodes, LIGHT).layout.annotations if one.showarrow]
    assert arrows
    for arrow in arrows:  # from the left edge of a box to the right edge of another, less than half a column away
        assert 0 < arrow.x % 1 < 0.5 < arrow.ax % 1


def test_ranks_that_nobody_can_tell_apart_stand_where_culprits_do() -> None:
    waits = {"operation": "x", "group": "g"}
    nodes = fold(
        hang_with(
            undecided=[{"ranks": [0, 1], "operation": "x", "missing": "times"}],
            waiting=[{"rank": rank, "for": [held], **waits} for rank, held in ((0, 1), (1, 0), (2, 1), (3, 2))],
        )
    )
    assert [(node.column, node.ranks, node.held_by) for node in nodes] == [
        (0, (0, 1), ()),
        (1, (2,), (0,)),
        (2, (3,), (1,)),
    ]


@pytest.mark.every_push
def test_the_page_is_drawn_and_names_are_text(
    visit: Callable[..., Page], show: Callable[[Path], Serving], hung: Path
) -> None:
    page = visit("/hang", base=show(hung).url)
    page.wait_for_selector("#hang-graph text:has-text('rank 6')")
    assert page.locator("#page .panel .note").first.inner_text().startswith(NAME)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
