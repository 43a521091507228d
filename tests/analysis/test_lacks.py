"""What a source cannot show, no report on it concludes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import tracekit
from tests import outputs
from tests.analysis.causes.corpus import STRENGTHS
from tracekit.report.finding import NEEDS, LossKind
from tracekit.sources.registry import SOURCES
from tracekit.synth import BaseCosts, LateDataLoading, SlowWorker, SynthSpec, synthesize
from tracekit.trace.facts import Fact
from tracekit.trace.model import Layout

SPEC = SynthSpec(Layout(dp=4, pp=4, tp=4), steps=10, seed=11)
#: What leads in a job that waits for its host, and in one that mostly transfers.
ALL_WAIT = SynthSpec(Layout(dp=4, pp=1), steps=10, seed=3, costs=BaseCosts(launch_delay_s=0.02))
STRONGEST = [*(replace(SPEC, causes=(strengths[-1],)) for strengths in STRENGTHS), ALL_WAIT]


@pytest.mark.parametrize("spec", STRONGEST, ids=lambda spec: spec.causes[0].NAME if spec.causes else "launch delays")
def test_a_source_without_compute_gets_no_verdict_that_rests_on_it(spec: SynthSpec) -> None:
    """Whatever is wrong with the job: the same ops as a log of collectives has them."""
    trace = synthesize(spec)
    log = replace(trace, metadata={**trace.metadata, "format": "nccl-inspector"})
    report = tracekit.job_of(log).whatif()
    drawn = {report.verdict.kind, *(loss.kind for loss in report.verdict.losses)}
    assert Fact.COMPUTE not in {NEEDS.get(kind) for kind in drawn}
    assert not report.daily
    words = " ".join([report.answer.headline, report.answer.cost or "", report.answer.saves or ""])
    assert not re.search(r"% (of|to) (each|the|every) step", words)
    assert ("Missing", log.source_kind.lacks[0].sentence) in [(remark.name, remark.words) for remark in report.remarks]


def test_the_same_jobs_have_those_verdicts_where_compute_is_recorded() -> None:
    kinds = {
        tracekit.job_of(synthesize(spec)).whatif().verdict.kind
        for spec in (ALL_WAIT, replace(SPEC, causes=(LateDataLoading(delay_s=0.6),)))
    }
    assert kinds == {LossKind.HOST, LossKind.INPUT}


def test_who_is_late_is_told_in_seconds() -> None:
    trace = synthesize(replace(SPEC, causes=(SlowWorker(factor=2.5),)))
    log = replace(trace, metadata={**trace.metadata, "format": "nccl-inspector"})
    answer = tracekit.job_of(log).whatif().answer
    assert "ms of each step" in answer.headline
    assert answer.cost is not None
    assert answer.cost.endswith("ms a step")


def test_the_pages_of_limits_and_formats_have_these_tables() -> None:
    pages = {name: (outputs.DOCS / name).read_text("utf-8") for name in outputs.BEGINNINGS}
    assert {name: outputs.with_table(name, page) for name, page in pages.items()} == pages
    page = pages["limits.md"]
    assert all(kind.title in page for source in SOURCES for kind in source.kinds)
