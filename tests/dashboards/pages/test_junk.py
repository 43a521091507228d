"""What an address cannot mean is said in words, with the rest of the page shown; markup in it stays text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page

from tests.dashboards.page_text import Pages, sent
from tracekit.dashboards.browser.data.replays import WhatifQuery

Visit = Callable[..., Page]
JOB = "slow-worker"
MARKUP = "<script>alert(1)</script>"
JUNK: list[tuple[str, dict[str, str], str]] = [
    ("/workers", {"step": "abc"}, "'abc' is not a step number: all steps are shown."),
    ("/workers", {"step": "1e999"}, "'1e999' is not a step number: all steps are shown."),
    ("/workers", {"step": "-5"}, "Step -5 was not analysed: this is step 100."),
    ("/workers", {"step": "999999999999999"}, "Step 999999999999999 was not analysed: this is step 201."),
    ("/workers", {"worker": "../../etc/passwd"}, "is no rank: write its number, or DP rank and stage, such as 1,2."),
    (
        "/workers",
        {"worker": "9999999,9999999"},
        "The worker at dp 9999999, stage 9999999 was not analysed in this job.",
    ),
    ("/workers", {"worker": "0,99"}, "The worker at dp 0, stage 99 was not analysed in this job."),
    ("/workers", {"host": MARKUP}, f"No host '{MARKUP}' in this job."),
    ("/timeline", {"step": "9999"}, "the nearest is 201"),
    ("/timeline", {"step": "../../etc/passwd"}, "step='../../etc/passwd' is not a number"),
    ("/timeline", {"view": MARKUP}, "is not one of recorded, original, ideal, both"),
    ("/timeline", {"worker": "9,9"}, "no worker matches the filter"),
    ("/timeline", {"stage": "x"}, "stage='x' is not numbers or ranges"),
    ("/timeline", {"from": "5", "to": "1"}, "the window ends before it begins"),
    ("/timeline", {"from": "nan", "to": "1e999"}, "from='nan' is not milliseconds"),
    ("/timeline", {"op": "1,2,rm,0"}, "op='1,2,rm,0' is not DP,PP,KIND,SEQ"),
    ("/compare", {"split": "abc"}, "'abc' is not a step number"),
    ("/compare", {"split": MARKUP}, "is not a step number"),
    ("/compare", {"split": "-1"}, "cannot split the job"),
    ("/compare", {"split": "9" * 400}, "cannot split the job"),
    ("/compare", {"split": "9" * 6000}, "is not a step number"),
    ("/compare", {"with": "no such <b>job</b>"}, "no job named 'no such <b>job</b>'"),
    ("/compare", {"with": "../../etc/passwd"}, "no job named"),
    ("/compare", {"job": "nobody", "with": JOB}, "no job named 'nobody'"),
    ("/whatif", {"select": "../../etc/passwd"}, "is unknown"),
    ("/whatif", {"select": MARKUP}, "is unknown"),
    ("/whatif", {"select": "stage=0", "action": "<img src=x>"}, "expected peers, scale, keep"),
    ("/whatif", {"select": "stage=0", "action": "scale", "factor": "1e999"}, "expected a number from 0 to 100"),
    ("/whatif", {"select": "stage=0", "action": "scale"}, "expected a number from 0 to 100"),
    ("/whatif", {"select": "not " * 900 + "all"}, "characters; expected at most"),
    ("/whatif", {"select": "stage=99999999999999999999"}, "matches no op"),
    ("/whatif", {"kept": "junk;peers:nonsense;;;"}, "is no kept scenario"),
    ("/whatif", {"kept": "peers:stage=17"}, "matches no op"),
    ("/", {"q": "x" * 201}, "the filter has 201 characters; expected at most 200"),
    ("/job", {"more": "x" * 7490}, "the address has 7,501 characters; expected at most 7,500"),
    ("/hosts", {"host": "nowhere"}, "No job in this store says that it ran on this host."),
    ("/whatif", {"job": "no such <b>job</b>"}, "no job named 'no such <b>job</b>'"),
    ("/whatif", {"job": "../jobs.duckdb"}, "no job named"),
]


@pytest.fixture(scope="module")
def pages(sample_store: Path) -> Pages:
    """The pages of a server that has looked for ops of stages that there are not."""
    pages = Pages(sample_store)
    stored = pages.service.results.stored(JOB)
    for selection in ("stage=99999999999999999999", "stage=17"):
        pages.service.replays.ask(stored, WhatifQuery(selection), wait_s=300)
    return pages


@pytest.mark.parametrize(("path", "state", "said"), JUNK, ids=lambda value: str(value)[:60])
def test_junk_in_the_address_is_answered_in_words(pages: Pages, path: str, state: dict[str, str], said: str) -> None:
    text = sent(pages.page(path, **{"job": JOB, **state}))
    assert said in text
    assert "Traceback" not in text
    assert "Something broke" not in text


def test_markup_in_the_address_is_text_on_every_page(visit: Visit) -> None:
    """The browser runs nothing of it; its console stays silent."""
    page = visit("/")
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    for path, state, said in JUNK:
        if MARKUP in state.values():
            visit(f"{path}?{urlencode({'job': JOB, **state})}", within=page)
            page.get_by_text(said).first.wait_for()
            assert page.locator("#page script").count() == 0
