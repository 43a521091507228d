"""Every surface measures by one yardstick, per cent lost and time, and calls a thing by one name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases import case
from tests.dashboards.page_text import Pages
from tests.dashboards.watched import write_watched
from tests.handmade import run
from tracekit.commands.mcp import why_slow
from tracekit.dashboards.documents.card import card
from tracekit.dashboards.documents.markdown import messages
from tracekit.live.receivers import text_message
from tracekit.live.watch import Changes, lines
from tracekit.store import Store

#: What no surface says: figures of the published method, names of JSON and of code, arrows for words.
FORBIDDEN = re.compile(
    r"\bS( alone)? ?([=<>]|>=|is \d|of \d)|\bS_w\b|\bM_[WS]\b|\bS of\b|slowdown (alone|of )?\d|summed excess|\bwaste"
    r"|bad[ -]worker|Planned gc|\d( us| ms| s)? ?-> ?\d"
)
#: Pages about a job, and those about all of them.
PAGES, OF_ALL = (
    ("/job", "/workers", "/whatif", "/pipeline", "/time", "/timeline", "/compare"),
    ("/", "/incidents", "/hosts"),
)


def said(store: Path) -> Iterator[tuple[str, str]]:
    """What each surface says about each job of a store, after its name."""
    opened, pages = Store(store), Pages(store)
    for name in (job.name for job in opened.jobs()):
        named = ("--store", store, "--job", name)
        full = run("whatif", *named, "--full", env={"COLUMNS": "200"}).out
        yield f"{name}, terminal", re.split(r"^ *Method", full, maxsplit=1, flags=re.MULTILINE)[0]
        yield f"{name}, Markdown", run("whatif", *named, "--markdown", "-").out
        yield f"{name}, culprits", run("culprits", *named).out
        report = opened.report(name)
        assert report is not None
        yield f"{name}, card", re.sub(r"<style>.*?</style>", "", card(report), flags=re.DOTALL)
        for form, text in messages(report, "http://here").items():
            yield f"{name}, {form}", text
        answer = why_slow(str(store), name)["answer"]
        yield f"{name}, MCP", json.dumps({key: answer[key] for key in ("headline", "cost", "who", "why", "fix")})
        for path in PAGES if report.by_worker else PAGES[:1]:
            yield f"{name}, {path}", pages.text(path, job=name)
    yield "bill", run("bill", store, "--by", "cause").out
    for path in OF_ALL:
        yield path, pages.text(path)


def check(store: Path, names: tuple[str, ...] = ()) -> None:
    for surface, text in said(store):
        with case(surface):
            assert not (found := FORBIDDEN.search(text)), text[max(found.start() - 80, 0) : found.end() + 80]


@pytest.mark.slow
def test_every_surface_of_every_source_speaks_of_time_that_is_lost(sample_store: Path) -> None:
    check(sample_store)


@pytest.mark.slow
def test_windows_incidents_and_messages_speak_of_time_that_is_lost(tmp_path: Path) -> None:
    store = Store(write_watched(tmp_path / "live.store"))
    check(store.path)
    incidents = store.incidents()
    changes = Changes({"live": store.history("live").to_dicts()}, opened=incidents[:1], closed=incidents[1:])
    texts = [*lines(changes), text_message(incidents[:1], incidents[1:], "")]
    assert not [text for text in texts if FORBIDDEN.search(text)]
    # 0.2 s of 0.51 s.
    assert "39.2% lost, straggler: rank 3 on node-d" in texts[0]
