"""Advice and good or bad news come from the diagnosis alone, with its confidence, on every page."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from tests.cases import case
from tests.dashboards.page_text import Pages, found, lines
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.dashboards.browser.ui.sentences import Tone, first_action, headline, host_words, node_words
from tracekit.report.conclusions import Nodes
from tracekit.report.report import Report
from tracekit.store import Incoming, Store
from tracekit.synth import (
    BaseCosts,
    InjectedCause,
    LateDataLoading,
    SlowHost,
    SlowLastStage,
    SlowWorker,
    SynthSpec,
    synthesize,
)
from tracekit.trace.model import Layout

#: Hosts of eight workers; what is slow sits on the second one.
SPEC = {"layout": Layout(dp=16, pp=2), "steps": 6, "microbatches": 4, "seed": 3}
CAUSES: dict[str, tuple[InjectedCause, ...]] = {
    "healthy": (),
    "worker": (SlowWorker(dp_rank=9, pp_rank=0, factor=1.6),),
    "host": (SlowHost(host=1, factor=1.6),),
    "late": (LateDataLoading(delay_s=0.3),),
    "small-late": (LateDataLoading(delay_s=0.016),),
    "stage": (SlowLastStage(factor=1.6),),
    "untrusted": (SlowWorker(dp_rank=9, pp_rank=0, factor=1.6),),
}
#: What is said of the host of the slow worker, whose hardware nothing speaks against.
SPARED = Nodes((), ("host-0001",))
#: Pages of a job without a list of fixes; the timeline shows ops only.
PAGES = ("/workers", "/whatif", "/compare")
#: Words by which a sentence tells people to do something.
ADVISES = re.compile(r"\b(drain|replace|repair|prefetch|balance|look at|split|broken machine)\b", re.IGNORECASE)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(tmp_path_factory.mktemp("advice") / "jobs.duckdb")
    incoming = []
    for name, causes in CAUSES.items():
        costs = BaseCosts(launch_delay_s=0.006) if name == "untrusted" else BaseCosts()
        trace = synthesize(SynthSpec(**SPEC, causes=causes, costs=costs, name=name))
        incoming.append(Incoming(trace, name, "x", PipelineJob(trace).stored()))
    store.add(incoming)
    return store.path


@pytest.fixture(scope="module")
def pages(store: Path) -> Pages:
    return Pages(store)


@pytest.fixture(scope="module")
def reports(pages: Pages) -> dict[str, dict[str, Any]]:
    service = pages.service
    return {name: service.results.stored(name).report.to_dict() for name in CAUSES}


def as_report(content: dict[str, Any]) -> Report:
    return msgspec.convert(content, Report)


@pytest.mark.slow
def test_no_sentence_advises_without_its_confidence(pages: Pages) -> None:
    for path, name in itertools.product(PAGES, CAUSES):
        for line in pages.lines(path, job=name):
            if ADVISES.search(line):
                assert "% sure" in line or line.startswith(("No host to drain", "Do not drain", "No advice")), (
                    path,
                    name,
                    line,
                )


@pytest.mark.parametrize("name", ["healthy", "untrusted"])
def test_where_the_diagnosis_names_nobody_nothing_is_advised(
    pages: Pages, reports: dict[str, dict[str, Any]], name: str
) -> None:
    text = "\n".join(line for path in PAGES for line in pages.lines(path, job=name))
    assert not ADVISES.search(re.sub(r"No host to drain|Do not drain", "", text))
    assert "% sure" not in text
    assert first_action(as_report(reports[name])) is None
    job = pages.text("/job", job=name)
    assert {"healthy": "Nothing to do.", "untrusted": "No advice: the figures are not to be trusted."}[name] in job
    assert "What to do" not in job
    if name == "untrusted":
        assert reports[name]["trust"]["reasons"][0] in job


def test_a_slow_worker_is_named_and_the_others_of_its_host_are_left_alone(
    pages: Pages, reports: dict[str, dict[str, Any]]
) -> None:
    answer = reports["worker"]["answer"]
    assert first_action(as_report(reports["worker"])) == (answer["action"], answer["saves"])
    others = "The diagnosis names rank 9 (99% sure) on host-0001; the other 7 workers of it are not named."
    assert f"{SPARED.sentence} {others}" in pages.text("/workers", job="worker")


def test_nothing_is_said_of_nodes_where_software_is_slow(reports: dict[str, dict[str, Any]]) -> None:
    """Such as the training thread: no machine can be at fault."""
    report = as_report(reports["worker"])
    culprits = tuple(structs.replace(one, part="host") for one in report.answer.culprits)
    assert node_words(report) == SPARED.sentence
    assert node_words(structs.replace(report, answer=structs.replace(report.answer, culprits=culprits))) is None


def test_a_host_is_named_where_the_diagnosis_names_it(pages: Pages, reports: dict[str, dict[str, Any]]) -> None:
    assert [cause["kind"] for cause in reports["host"]["causes"]] == ["slow-host"]
    text = pages.text("/workers", job="host")
    (account,) = reports["host"]["answer"]["accounts"]
    assert f"{account['fix']} ({account['confidence']:.0%} sure)." in text


def test_a_large_slowdown_of_a_worker_alone_is_no_reason_to_drain_anything(
    pages: Pages, reports: dict[str, dict[str, Any]]
) -> None:
    """Every worker of the heavy stage has a large S_w, and none of them is to blame."""
    report = reports["stage"]
    assert report["by_worker"][0]["slowdown"] > 1.1
    found_map = pages.service.results.worker_map("stage")
    assert host_words(as_report(report), found_map) == "No host to drain: the diagnosis names no host and no worker."


def test_green_means_that_no_cause_costs_time(pages: Pages, reports: dict[str, dict[str, Any]]) -> None:
    for name, tone, badge in (
        ("healthy", Tone.GOOD, "balanced"),
        ("worker", Tone.BAD, "straggler, {lost:.0%} lost"),
        ("late", Tone.BAD, "input bound, {lost:.0%} lost"),
        ("small-late", Tone.UNSURE, "minor, {lost:.0%} lost"),
        ("untrusted", Tone.UNSURE, "no verdict"),
    ):
        verdict = headline(as_report(reports[name]))
        lost = reports[name]["verdict"]["share"]
        first, trust = found(pages.page("/workers", job=name), "Span", "badge")
        classes = {Tone.GOOD: "fine", Tone.BAD: "slow", Tone.UNSURE: "unsure"}
        with case(name):
            assert (verdict.tone, verdict.badge) == (tone, badge.format(lost=lost))
            assert lines(first) == [verdict.badge]
            assert classes[tone] in first.className.split()
            assert ("fine" in trust.className.split()) == reports[name]["trust"]["trustworthy"]


@pytest.mark.parametrize("name", ["late", "small-late"])
def test_time_lost_without_a_straggler_is_in_the_headline_with_its_size(
    reports: dict[str, dict[str, Any]], name: str
) -> None:
    report = reports[name]
    assert not report["straggling"]
    cause = report["causes"][0]
    said = headline(as_report(report)).sentence
    assert "data comes" in said
    assert f"{cause['saved_s'] * 1e3:.1f} ms" in said
    assert first_action(as_report(report)) == (report["answer"]["action"], report["answer"]["saves"])


@pytest.mark.parametrize(("name", "advised"), [("late", True), ("worker", False)])
def test_a_job_that_is_not_trustworthy_gets_advice_only_about_its_launch_delays(
    reports: dict[str, dict[str, Any]], name: str, advised: bool
) -> None:
    """Late data is why the replay falls short of the recording; a slow worker is a figure of that replay."""
    report = reports[name] | {
        "trust": reports[name]["trust"] | {"trustworthy": False, "reasons": ["launch delays add 25%"]}
    }
    assert (first_action(as_report(report)) is not None) == advised
    assert headline(as_report(report)).sentence.endswith("are not to be trusted.")
    assert headline(as_report(report)).badge.startswith("no verdict") != advised


def test_a_healthy_job_whose_trace_is_at_fault_gets_no_green(reports: dict[str, dict[str, Any]]) -> None:
    """No account says that the clock costs time, but something is to be done about it."""
    healthy = reports["healthy"]
    clock = healthy["causes"][0] | {"kind": "clock-error", "title": "Clock is off", "suggested_fix": "chrony"}
    assert headline(as_report(healthy)).tone is Tone.GOOD
    answer = healthy["answer"] | {"places": ["rank 1", "all ranks"]}
    doubtful = headline(as_report(healthy | {"causes": [clock, *healthy["causes"]], "answer": answer}))
    assert doubtful.tone is Tone.UNSURE
    assert doubtful.sentence.endswith("The trace may mislead: Clock is off, rank 1 (99% sure).")


def test_the_fleet_colours_no_slowdown_that_is_not_to_be_trusted(pages: Pages) -> None:
    (row,) = [row for row in found(pages.page("/"), "Tr") if "untrusted" in lines(row)]
    assert [lines(badge) for badge in found(row, "Span", "unsure")] == [["no verdict"]]
    assert list(found(row, "Span", "slow")) == []
