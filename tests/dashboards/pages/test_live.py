"""The pages of running jobs: the page of one window, the windows of a job, incidents, and the history of hosts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qsl, urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.dashboards.conftest import SAMPLES, Serving
from tests.dashboards.page_text import Pages, found, lines
from tests.dashboards.pages.test_hang import report
from tests.dashboards.watched import HOSTS, analysed, trace, write_watched
from tests.live.test_notify import PATIENCE_S, receiving
from tests.test_store_windows import window
from tracekit.dashboards.browser.ui.sentences import Tone
from tracekit.live.incident_words import page_of
from tracekit.live.receivers import Notifier
from tracekit.live.watch import StoreChanges
from tracekit.sources.load import load
from tracekit.store import Incoming, Store
from tracekit.store.incidents import IncidentChange


@pytest.fixture(scope="module")
def live_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A watched job whose worker is slow in windows 0 and 1, and not in window 2."""
    store = Store(tmp_path_factory.mktemp("live") / "live.store")
    store.begin_watch("live", "torchrun")
    for number in (0, 1):
        store.append(window(number, analysed=True))
    store.append(analysed(trace(slow=False)))
    return store.path


@pytest.fixture(scope="module")
def pages(live_store: Path) -> Pages:
    return Pages(live_store)


def test_the_link_of_an_alert_opens_the_page_of_that_window(live_store: Path, pages: Pages) -> None:
    (incident,) = [one for one in Store(live_store).incidents() if one.seen_window == 1]
    assert page_of(incident, "https://dash") == "https://dash/job?job=live&window=1"
    shown = pages.text("/job", job="live", window="1")
    assert "Window 1 of 0 to 2, steps 2 to 3" in shown
    assert Store(live_store).report("live", 1).answer.who in shown
    assert shown.splitlines()[1].startswith("straggler, ")
    newest = pages.text("/job", job="live")
    assert "Window 2 of 0 to 2, steps 0 to 3" in newest
    # An hour lies between windows 0 and 1.
    assert newest.splitlines()[1].startswith("straggler, 0.2% of the run (14.3% of its recorded steps) lost")


@pytest.mark.slow
def test_the_link_that_an_alert_carries_opens_a_page_that_names_the_culprit(tmp_path: Path) -> None:
    """Of jobs with different causes: a pipeline, a folder of GPU recordings, one that hung before it had a trace."""
    store = Store(tmp_path / "s.store")
    changes = StoreChanges(store)
    changes.look()
    store.append(window(0, analysed=True))
    recorded = load(SAMPLES / "gpu_slow_input")
    store.append(Incoming(recorded.trace, "gpus & more", "folder", recorded.stored()))
    stands = report(tmp_path / "dumps")
    store.add_hang("stuck at once", [stands.headline], stands)
    with receiving() as receiver:
        notifier = Notifier(receiver.url, "https://dash/tracekit/")
        notifier.send(changes.look().opened, [])
        receiver.wait_for(1)
        notifier.close(PATIENCE_S)
    pages = Pages(store.path)
    told = {one["job"]: one for one in receiver.got[0]["incidents"]}
    places = {"live": "rank 1", "gpus & more": "rank 2 on node-0", "stuck at once": "rank 6 on <i>node</i>"}
    assert told.keys() == places.keys()
    for job, one in told.items():
        assert one["who"].startswith(places[job])
        link = urlsplit(one["page"].removeprefix("https://dash/tracekit"))
        assert places[job] in pages.text(link.path, **dict(parse_qsl(link.query)))


@pytest.mark.slow
def test_a_window_of_long_ago_is_shown_among_those_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link of an alert leads there, and from there to the windows before and after it."""
    store = Store(tmp_path / "live.store")
    for number in range(12):
        store.append(window(number, analysed=number == 1))
    with store.reading() as catalogue:
        for shown, first, last in ((0, 0, 5), (5, 2, 7), (1, 0, 5), (11, 6, 11)):
            drawn = catalogue.live.history("live", 6, shown)["number"].to_list()
            assert (drawn[0], drawn[-1], len(drawn)) == (first, last, 6)
    pages = Pages(store.path)
    monkeypatch.setattr("tracekit.dashboards.browser.pages.job.MOST_AROUND", 6)
    page = pages.text("/job", job="live", window="1")
    assert "Window 1 of 0 to 5; the newest is 11, steps 2 to 3" in page


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("7", "has no window 7; it has 0 to 2"),
        ("x", "is not a window number"),
        ("-1", "is not a window number"),
        ("9" * 40, "is not a window number"),
    ],
)
def test_a_window_that_is_not_there_is_one_clear_line(pages: Pages, asked: str, said: str) -> None:
    assert said in pages.text("/job", job="live", window=asked)


def test_files_are_those_of_the_window_shown(pages: Pages) -> None:
    (link,) = [one for one in found(pages.page("/job", job="live", window="0"), "A") if one.children == "by_step.csv"]
    assert "window=0" in link.href
    steps = pages.client().get(link.href).text.splitlines()[1:]
    assert [line.split(",")[0] for line in steps] == ["0", "1"]
    assert pages.client().get("/download/by_step.csv?job=live&window=7").status_code == 404


def test_the_page_of_a_job_has_its_history(pages: Pages) -> None:
    tables = found(pages.page("/job", job="live"), "Div", "table-wide")
    (table,) = [one for one in tables if getattr(one, "aria-label") == "Windows of this job"]
    assert [link.href for link in found(table, "Link")] == [f"/job?job=live&window={number}" for number in (2, 1, 0)]


@pytest.mark.parametrize(
    ("year", "said"),
    [(2124, "stale: newest window "), (2024, "live: newest window 0 s ago")],
    ids=["long ago", "by a clock that is ahead"],
)
def test_the_page_of_a_job_says_how_old_it_is(
    year: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stale after five windows, an hour each, and a minute."""
    store = Store(tmp_path / "s.store")
    store.begin_watch("live", "torchrun")
    store.append(window(0, analysed=True))
    now = SimpleNamespace(time=datetime(year, 1, 1, tzinfo=UTC).timestamp)
    monkeypatch.setattr("tracekit.dashboards.browser.pages.job.time", now)
    assert any(said in line for line in Pages(store.path).lines("/job", job="live"))


def test_incidents_are_listed_open_ones_with_advice_closed_ones_with_how_long(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.store")
    assert "No cause costs any watched job" in Pages(_with(store)).text("/incidents")
    store.append(window(0, analysed=True))
    (incident,) = store.incidents()
    listed = Pages(store.path).page("/incidents")
    text = Pages(store.path).text("/incidents")
    assert "1 open" in text
    assert f"Do: {incident.cause.fix}" in text
    assert "Do: " not in "\n".join(lines(next(found(listed, "Folded", "folded"))))
    assert f"{incident.cause.share:.0%}" in lines(listed)
    assert "/job?job=live&window=0" in [link.href for link in found(listed, "Link")]
    store.end_watch("live", "ended with exit code 137 (SIGKILL)")
    text = Pages(store.path).text("/incidents")
    assert "0 open" in text
    assert "1 closed" in text
    assert re.search(r"\d+ min \d+ s", text)
    assert "the job ended with exit code 137 (SIGKILL)" in text
    assert "ended with exit code 137 (SIGKILL); the last window came" in Pages(store.path).text("/job", job="live")


def test_the_costliest_incident_comes_first_and_headings_sort(tmp_path: Path) -> None:
    """Of 4 GPUs each, those of job b wait for the slower rank; the owner of an incident is whoever was named last."""
    store = Store(tmp_path / "s.store")
    for name, slow in (("a", False), ("b", True)):
        store.append(replace(window(0, analysed=True), name=name) if not slow else analysed(trace(slow=True, name="b")))
    a, b = sorted(store.incidents(), key=lambda one: one.job)
    store.handle(a.incident_id, IncidentChange(1.0, "ann"))
    store.handle(a.incident_id, IncidentChange(2.0, "ann", owner="bob"))
    store.handle(a.incident_id, IncidentChange(3.0, "carl", note="seen"))
    pages = Pages(store.path)

    def rows(**state: str) -> list[list[str]]:
        return [lines(row) for row in found(pages.page("/incidents", **state), "Tr")][1:]

    assert b.cause.share > a.cause.share
    assert [row[1] for row in rows()] == ["b", "a"]
    assert f"{24 * 4 * b.cause.share:,.1f}" in rows()[0]
    assert "none" in rows()[0]
    assert [row[1] for row in rows(sort="Job")] == ["a", "b"]
    assert [row[1] for row in rows(sort="Owner")] == ["b", "a"]
    assert [row[1] for row in rows(sort="<b>What")] == ["b", "a"]
    (head,) = [one for one in found(pages.page("/incidents"), "Link") if one.children == "Owner"]
    assert head.href == "/incidents?sort=Owner"
    text = pages.text("/incidents")
    assert "bob\nChange" in text
    assert "Earlier: 2" in text


@pytest.mark.every_push
def test_an_incident_is_acknowledged_with_the_keys_and_others_see_who_took_it(
    tmp_path: Path, show: Callable[[Path], Serving], visit: Callable[..., Page], browser_noise: list[str]
) -> None:
    store = Store(tmp_path / "s.store")
    store.append(window(0, analysed=True))
    base = show(store.path).url
    mine, theirs = visit("/incidents", base=base), visit("/incidents", base=base)
    expect(theirs.get_by_text("none", exact=True)).to_be_visible()
    mine.keyboard.press("j")
    mine.keyboard.press("a")
    expect(mine.get_by_role("heading", name="Incident 1 of live")).to_be_visible()
    mine.keyboard.type("dora")
    mine.keyboard.press("Enter")
    for page in (mine, theirs):
        expect(page.get_by_role("button", name="Change incident 1")).to_be_visible()
        expect(page.get_by_text("dora", exact=True)).to_be_visible()
    mine.get_by_role("button", name="Change incident 1").click()
    with store.writing() as writer:
        writer.catalogue.connection.execute("DELETE FROM incidents")
    mine.get_by_label("Note").fill("node is back")
    mine.get_by_role("button", name="Acknowledge", exact=True).click()
    expect(mine.get_by_role("alert").filter(has_text="Not stored: ")).to_contain_text("no incident 1")
    expect(mine.get_by_label("Note")).to_have_value("node is back")
    mine.keyboard.press("Escape")
    assert ["404" in one for one in browser_noise] == [True]
    browser_noise.clear()


def _with(store: Store) -> Path:
    """A store that has a job, and no incident."""
    store.append(analysed(trace(slow=False, name="calm")))
    return store.path


@pytest.mark.slow
def test_a_host_is_told_in_how_many_of_its_last_jobs_it_was_the_culprit(tmp_path: Path) -> None:
    """A host of eleven jobs, in four of which it is slow: of its last nine in three."""
    store = Store(tmp_path / "s.store")
    for number in range(11):
        store.append(analysed(trace(slow=number in (0, 4, 6, 9), name=f"job-{number}")))
    culprits = Store(store.path).incidents()
    assert {host for one in culprits for host in one.cause.hosts} == {"node-d"}
    lines = Pages(store.path).lines("/hosts")
    assert "culprit in 3 of its last 9 jobs" in lines[lines.index("node-d") + 1]
    assert "node-a" not in lines
    assert any(line.startswith("3 more are not listed: they were the culprit less often, or never.") for line in lines)
    lines = Pages(store.path).lines("/hosts", q="node-a")
    assert "never the culprit in its last 9 jobs" in lines[lines.index("node-a") + 1]


@pytest.mark.slow
def test_a_gpu_is_told_in_how_many_of_its_last_jobs_it_was_the_culprit(tmp_path: Path) -> None:
    """A GPU of eleven jobs that moved to another host in the last; those beside it were never the culprit."""
    store = Store(tmp_path / "s.store")
    for number in range(11):
        ran = trace(slow=number in (0, 4, 6, 9), name=f"job-{number}")
        gpus = {rank: {"uuid": f"GPU-{rank}"} for rank in HOSTS}
        hosts = HOSTS if number < 10 else HOSTS | {"3": "node-e"}
        store.append(analysed(replace(ran, metadata={"hosts": hosts, "gpus": gpus})))
    lines = Pages(store.path).lines("/hosts")
    assert "culprit in 3 of its last 9 jobs" in lines[lines.index("GPU-3 on node-e") + 1]
    assert not any(line.startswith(("GPU-0", "GPU-1", "GPU-2")) for line in lines)
    assert "GPU-3 on node-e" in Pages(store.path).lines("/hosts", q="GPU-3")


@pytest.mark.slow
def test_the_page_of_a_host_lists_its_jobs_and_what_it_cost_each_window(tmp_path: Path) -> None:
    """Rank 3, alone on node-d, is slow in two windows of one job and in one of three of another."""
    pages = Pages(write_watched(tmp_path / "s.store"))
    assert "/hosts?host=node-d" in [link.href for link in found(pages.page("/hosts"), "Link")]
    slow, fine = pages.text("/hosts", host="node-d"), pages.text("/hosts", host="node-a")
    assert "The culprit in 2 of its last 2 jobs; at worst it cost" in slow
    assert "The culprit in 0 of its last 2 jobs." in fine
    rows = [lines(row) for row in found(pages.page("/hosts", host="node-d"), "Tr")]
    (row,) = [row for row in rows if "over" in row and "slow rank" in row]
    assert row[:2] == ["over", "3"]
    assert "No job in this store says that it ran on this host." in pages.text("/hosts", host="nowhere")


def test_hosts_are_told_by_their_jobs_and_what_they_cost_each(handmade_store: Path) -> None:
    """Of three jobs on three hosts, b costs 27.4 and 15.9 % of a step of two: 4.25 of 15.5 s, and half of that."""
    pages = Pages(handmade_store)
    said = [" | ".join(pages.lines("/hosts", **state)) for state in ({}, {"q": "a"}, {"q": "zz"})]
    all_hosts, host_a, nobody = said
    assert (
        "Last seen | b | culprit in 2 of its last 3 jobs | repaired | : slow rank | slow | : slow rank | 20"
        in all_hosts
    )
    assert "| 2 more are not listed: they were the culprit less often, or never. Search for" in all_hosts
    assert "Last seen | a | never the culprit in its last 3 jobs | 20" in host_a
    assert nobody.endswith("No host | No host or GPU has 'zz' in its name. | All hosts")
    of_host = " | ".join(pages.lines("/hosts", host="b"))
    worst = "The culprit in 2 of its last 3 jobs; at worst it cost 27% of a window of slow."
    assert f"All hosts | {worst} | What it cost" in of_host
    jobs = of_host.partition("Causes on this host alone | Last window | ")[2]
    rows = [["fine", "1", "0.0%", "none on this host alone"], ["repaired", "1", "15.9%", "slow rank"],
            ["slow", "1", "27.4%", "slow rank"]]  # fmt: skip
    assert [row.split(" | ")[:4] for row in re.split(r"UTC(?: \| |$)", jobs)[:-1]] == rows
    page = pages.page("/hosts", host="b")
    (drawn,) = (part for part in found(page, "Section", "hero"))
    assert str(Tone.BAD) in drawn.className.split()
    links = {"".join(lines(link)): link.href for link in found(page, "Link")}
    assert links["slow"] == "/job?job=slow&window=0"
    good = pages.page("/hosts", host="a")
    assert "The culprit in 0 of its last 3 jobs." in lines(good)
    assert [part.className.split()[-1] for part in found(good, "Section", "hero")] == [Tone.GOOD]


@pytest.mark.every_push
def test_a_page_shows_a_new_window_by_itself_and_keeps_the_place_of_its_reader(
    tmp_path: Path, show: Callable[[Path], Serving], visit: Callable[..., Page]
) -> None:
    store = Store(tmp_path / "s.store")
    store.begin_watch("live", "torchrun")
    store.append(window(0, analysed=True))
    opened = visit("/job?job=live", base=show(store.path).url)
    expect(opened.get_by_text("Window 0 of 0 to 0")).to_be_visible()
    opened.evaluate("() => { window.reader = 'here'; window.scrollTo(0, 200); }")
    store.append(window(1, analysed=True))
    expect(opened.get_by_text("Window 1 of 0 to 1")).to_be_attached()
    assert opened.evaluate("() => [window.reader, window.scrollY]") == ["here", 200]


TABS = ("/workers", "/pipeline", "/whatif", "/timeline", "/compare")


@pytest.mark.parametrize("path", TABS)
def test_every_page_of_a_window_shows_it_says_so_and_leads_to_pages_of_it(path: str, pages: Pages) -> None:
    shown = pages.page(path, job="live", window="1")
    assert "Window 1, steps 2 to 3." in pages.lines(path, job="live", window="1")
    links = [link for kind in ("Link", "A") for link in found(shown, kind) if "job=live" in link.href]
    newest = [link.href for link in links if "window=1" not in link.href and "since=" not in link.href]
    assert newest == [f"{path}?job=live"]
    assert len(links) > len(TABS)
    assert "Window 2, steps 0 to 3: the newest of 3." in pages.lines(path, job="live")


def test_what_a_page_of_a_window_asks_for_later_is_of_that_window(
    live_store: Path, show: Callable[[Path], Serving], visit: Callable[..., Page]
) -> None:
    """The newest window is balanced, and has steps 0 to 3; this one has steps 2 and 3, which are slow."""
    opened = visit("/workers?job=live&window=1", base=show(live_store).url)
    opened.locator("#workers-step").fill("1")
    expect(opened.get_by_text("Step 2: 4.25 s lost")).to_be_visible()
    opened.get_by_role("link", name="Timeline").first.click()
    expect(opened).to_have_url(re.compile(r"/timeline\?job=live&window=1"))
    expect(opened.locator("#timeline-slowest tbody tr").first).to_be_visible()
    expect(opened.locator("#timeline-step option")).to_have_count(2)
    expect(opened.locator("#timeline-perfetto")).to_have_attribute("href", re.compile("window=1"))


def test_lists_of_many_are_cut_off_and_say_how_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three jobs with an incident each, of which one is closed, on four hosts."""
    store = Store(tmp_path / "s.store")
    for number in range(3):
        store.append(analysed(trace(slow=True, name=f"job-{number}")))
    store.end_watch("job-0")
    pages = Pages(store.path)
    for page in ("incidents", "hosts"):
        monkeypatch.setattr(f"tracekit.dashboards.browser.pages.{page}.MOST_LISTED", 1)
    text = pages.text("/incidents")
    assert "2 open, the first 1 of them" in text
    assert "1 closed" in text
    assert ("job-1" in text, "job-2" in text) == (False, True)  # the newer of equal ones
    hosts = pages.text("/hosts")
    assert "culprit in 3 of its last 3 jobs" in hosts
    assert "3 more are not listed: they were the culprit less often" in hosts
    assert "never the culprit in its last 3 jobs" in pages.text("/hosts", q="node-b")
