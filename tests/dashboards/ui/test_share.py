"""Share: what is copied, and the report as a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from playwright.sync_api import Page, expect

from tests.dashboards.conftest import Serving


@pytest.mark.every_push
def test_the_answer_is_copied_with_the_address_of_the_view(visit: Callable[..., Page]) -> None:
    page = visit("/timeline?job=slow-worker&step=103")
    page.wait_for_selector("#timeline-host[data-painted]")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".share > summary").click()
    for form, link in (
        ("as Markdown", "**[slow-worker]({})"),
        ("for Slack", "\n{}\n"),
        ("for Jira", "h3. [slow-worker|{}]"),
    ):
        page.get_by_role("button", name=f"Copy {form}").click()
        expect(page.locator(".share [role=status]")).to_have_text("Copied")
        page.wait_for_function(
            "(start) => navigator.clipboard.readText().then((text) => text.includes(start))", arg=link.split("{}")[0]
        )
        copied = page.evaluate("navigator.clipboard.readText()")
        assert "rank 9 on host-0001 costs 31% of each step" in copied
        assert re.sub("[()]", "", link.format(page.evaluate("location.href"))) in re.sub("[()]", "", copied)
    page.keyboard.press("Escape")
    expect(page.locator(".share")).not_to_have_attribute("open", "")


def test_the_report_is_a_page_to_download(visit: Callable[..., Page], serving: Serving) -> None:
    for job in ("slow-worker", "gpu_slow_input"):
        page = visit(f"/job?job={job}")
        page.locator(".share > summary").click()
        with page.expect_download() as download:
            page.get_by_role("link", name="Download HTML").click()
        assert download.value.suggested_filename == f"{job}.html"
        text = Path(download.value.path()).read_text()
        assert text.startswith("<!doctype html>\n<!-- tracekit whatif -->")
        assert job in text
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"{serving.url}/download/report.html?job=nobody")
