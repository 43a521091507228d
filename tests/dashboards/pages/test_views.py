"""Named views of the table of jobs: kept in the browser of whoever named them, and sent to others as a link."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.dashboards.clicks import address, wait_for_state

Visit = Callable[..., Page]
UNEVEN = ["sequence-lengths", "slow-last-stage"]


def jobs(page: Page) -> list[str]:
    page.wait_for_selector("#jobs a.job")
    return page.locator("#jobs a.job").all_inner_texts()


def name_it(page: Page, name: str) -> None:
    page.get_by_label("Name of this view").fill(name)
    page.keyboard.press("Enter")


@pytest.mark.every_push
def test_a_view_that_was_named_is_listed_leads_back_and_is_deleted(visit: Visit) -> None:
    page = visit("/?verdict=uneven+work", anew=True)
    assert jobs(page) == UNEVEN
    name_it(page, "<b>on call</b>")
    link = page.locator("#jobs-views a")
    expect(link).to_have_text("<b>on call</b>")
    wait_for_state(page, verdict="uneven work", view="<b>on call</b>")
    expect(page.get_by_label("Name of this view")).to_have_count(0)  # it has one
    page.goto(page.url.partition("?")[0])
    expect(page.locator("#jobs a.job")).to_have_count(8)
    link.click()
    wait_for_state(page, verdict="uneven work", view="<b>on call</b>")
    expect(page.locator("#jobs a.job")).to_have_count(2)
    page.click("#jobs-views button:has-text('\u00d7')")
    expect(link).to_have_count(0)
    page.reload()
    page.wait_for_selector("#jobs-views form")
    expect(link).to_have_count(0)


def test_whoever_is_sent_a_view_can_keep_it_under_its_name(visit: Visit) -> None:
    page = visit("/?verdict=uneven+work", anew=True)
    name_it(page, "uneven")
    wait_for_state(page, verdict="uneven work", view="uneven")
    other = visit(address(page), anew=True)
    assert jobs(other) == UNEVEN
    expect(other.get_by_label("Name of this view")).to_have_value("uneven")
    other.get_by_role("button", name="Keep").click()
    expect(other.locator("#jobs-views a")).to_have_text("uneven")


def test_a_name_that_is_given_again_is_that_of_the_newer_view(visit: Visit) -> None:
    page = visit("/?sort=gpus", anew=True)
    name_it(page, "mine")
    wait_for_state(page, sort="gpus", view="mine")
    page = visit("/?sort=job&q=slow", within=page)
    name_it(page, "mine")
    expect(page.locator("#jobs-views a")).to_have_attribute("href", "?q=slow&sort=job&view=mine")


def test_all_jobs_need_no_name_and_nonsense_in_the_storage_is_no_view(visit: Visit) -> None:
    page = visit("/", anew=True)
    page.wait_for_selector("#jobs-views", state="attached")
    for nonsense in ('{"a": 1}', "[[1, 2], null]", "not JSON", '[["a"], ["b", "sort=job", "c"]]'):
        page.evaluate("(text) => localStorage.setItem('tracekit.views', text)", nonsense)
        page.reload()
        page.wait_for_selector("#jobs-views", state="attached")
        expect(page.locator("#jobs-views")).to_be_hidden()
