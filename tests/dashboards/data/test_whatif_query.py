"""Questions as texts of a form and of the address, and those a report suggests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracekit
from tests.analysis.rl.logs import lines, write
from tests.dashboards.conftest import SAMPLES
from tests.properties import examples
from tests.reports import report_with
from tracekit.analysis.whatif.selection_text import parse_selection
from tracekit.base.errors import SelectionError
from tracekit.dashboards.browser.data.replays import (
    LONGEST_SELECTION,
    MOST_KEPT,
    MOST_STEPS,
    ChosenOps,
    QueryAction,
    WhatifQuery,
    answered,
    kept_text,
    query_of,
    read_kept,
    read_query,
    suggestions,
)
from tracekit.report.conclusions import Fix

selections = st.sampled_from(["worker=1,2", "not communication", "stage=0-2 and (kind=gc or step=7)", "slowest=3%"])
questions = st.one_of(
    st.builds(WhatifQuery, selections, st.sampled_from([QueryAction.PEERS, QueryAction.KEEP])),
    st.builds(WhatifQuery, selections, st.just(QueryAction.SCALE), st.integers(0, 1000).map(lambda tenth: tenth / 10)),
)


@examples(25)
@given(st.lists(questions, max_size=MOST_KEPT, unique=True))
def test_kept_questions_survive_the_address(kept: list[WhatifQuery]) -> None:
    assert read_kept(kept_text(kept)) == (tuple(kept), ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rubbish", "no kept scenario"),
        ("peers:worker=1", "'1' is not DP_RANK,PP_RANK"),
        ("explode:worker=1,2", "action 'explode' is not known"),
        ("scale*much:worker=1,2", "expected a number from 0 to 100"),
    ],
)
def test_what_cannot_be_read_of_the_kept_ones_is_said_and_the_rest_shown(text: str, said: str) -> None:
    kept, problems = read_kept(f"keep:stage=2;{text}")
    assert kept == (WhatifQuery("stage=2", QueryAction.KEEP),)
    assert said in problems[0]


def test_more_kept_questions_than_fit_are_cut_and_that_is_said() -> None:
    kept, problems = read_kept(kept_text(WhatifQuery(f"step={step}") for step in range(MOST_KEPT + 1)))
    assert len(kept) == MOST_KEPT
    assert f"the first {MOST_KEPT} are shown" in problems[0]


@pytest.mark.parametrize("factor", ["", "nan", "inf", "-1", "101", "half", None])
def test_a_factor_is_a_number_from_0_to_100(factor: str | None) -> None:
    with pytest.raises(SelectionError, match="expected a number from 0 to 100"):
        read_query("all", "scale", factor)


def test_a_selection_of_absurd_length_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(SelectionError, match="characters; expected at most"):
        read_query("not " * LONGEST_SELECTION)


def test_the_factor_counts_only_where_something_is_scaled() -> None:
    assert read_query("all", "peers", "junk") == WhatifQuery("all")
    assert read_query(" all  but\tkind=gc ", None) == WhatifQuery("all but kind=gc")


@pytest.mark.slow
@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*.parquet")), ids=lambda path: path.stem)
def test_every_suggestion_for_a_job_can_be_answered_by_it(sample) -> None:
    job = tracekit.load(sample)
    suggested = suggestions(job.whatif())
    assert len({suggestion.query for suggestion in suggested}) == len(suggested) >= 5
    for suggestion in suggested:
        keep = suggestion.query.action is QueryAction.KEEP
        assert job.answer(suggestion.query.edit, keep=keep).ops > 0


def test_the_first_suggestion_is_the_first_cause() -> None:
    report = tracekit.load(SAMPLES / "slow_worker.parquet").whatif()
    assert suggestions(report)[0].title == "Rank 9 on host-0001 like peers"
    assert suggestions(report)[0].query == WhatifQuery("worker=1,2")


@pytest.mark.parametrize("sample", ["slow_worker", "slow_last_stage", "python_gc", "sequence_lengths"])
def test_every_fix_is_a_question_of_the_same_price(sample: str) -> None:
    """The text keeps six digits of factors. A fix that is no edit, more microbatches, has no question."""
    job = tracekit.load(SAMPLES / f"{sample}.parquet")
    report = job.whatif()
    queries = {fix.title: query_of(fix) for fix in report.fixes}
    assert {fix.kind for fix in report.fixes if queries[fix.title] is None} <= {"more-microbatches"}
    for fix in report.fixes:
        if (query := queries[fix.title]) is not None:
            assert query == read_query(query.selection, query.action, query.factor)
            assert answered(job, report, query).saved_s == pytest.approx(fix.saved_s, abs=2e-6)


def test_every_fix_of_post_training_is_a_question_of_the_same_price(tmp_path: Path) -> None:
    """By hand: without the sync, a step takes 10 of 11 s; one step of staleness hides all but the generation."""
    job = tracekit.load(write(tmp_path / "rl.jsonl", lines()))
    report = job.whatif()
    prices = {"fix=instant-sync": 1.0, "fix=overlap-reward": 0.5, "staleness=1": 5.5}
    assert {fix.edit: fix.saved_s for fix in report.fixes} == pytest.approx(prices)
    for fix in report.fixes:
        query = query_of(fix)
        assert query is not None
        assert query == read_query(query.selection, query.action, query.factor)
        assert answered(job, report, query).saved_s == pytest.approx(fix.saved_s)
    with pytest.raises(SelectionError, match="none of staleness=K"):
        answered(job, report, WhatifQuery("rank=1"))
    with pytest.raises(SelectionError, match="is for pipelines and op traces"):
        answered(job, report, WhatifQuery("kind=sync", QueryAction.KEEP))


def fix(edit: str | None) -> Fix:
    return report_with(fixes=[{"edit": edit}]).fixes[0]


def test_a_fix_that_scales_some_ops_fills_in_the_factor() -> None:
    assert query_of(fix("kind=gc * 0.5")) == WhatifQuery("kind=gc", QueryAction.SCALE, 0.5)
    assert query_of(fix("kind=gc * 0.5 + stage=1")) == WhatifQuery("kind=gc * 0.5 + stage=1")
    assert query_of(fix(None)) == query_of(fix(" + ".join(["stage=1"] * 200))) is None


def test_a_host_of_many_workers_is_not_named_worker_by_worker() -> None:
    workers = [{"dp_rank": 0, "pp_rank": stage} for stage in range(9)]
    where = {"workers": workers, "host": None, "links": [], "pp_ranks": [], "steps": []}
    cause = {"kind": "slow-host", "where": where}
    report = report_with(causes=[cause])
    assert all("worker=" not in suggestion.query.selection for suggestion in suggestions(report))
    report = report_with(causes=[cause | {"where": where | {"workers": workers[:2], "host": "host-7"}}])
    assert suggestions(report)[0].title == "Workers of host-7 like peers"
    assert suggestions(report)[0].query == WhatifQuery("worker=0,0 or worker=0,1")


def test_a_link_is_suggested_by_both_its_ends() -> None:
    link = {"dp_rank": 3, "pp_rank": 1, "next_pp_rank": 2}
    where = {"workers": [], "host": None, "links": [link], "pp_ranks": [], "steps": []}
    report = report_with(causes=[{"kind": "slow-p2p-link", "where": where}])
    assert suggestions(report)[0].query == WhatifQuery(
        "dp_rank=3 and stage=1,2 and kind=forward-pp-comm,backward-pp-comm"
    )


def test_each_place_of_a_cause_is_a_question_in_words() -> None:
    """The first suggestion for a cause at that place; from more workers, links or steps than fit in words, none."""
    nowhere: dict[str, Any] = {"workers": [], "host": None, "links": [], "pp_ranks": [], "steps": []}
    workers = [{"dp_rank": 0, "pp_rank": stage} for stage in range(9)]
    links = [{"dp_rank": 3, "pp_rank": stage, "next_pp_rank": stage + 1} for stage in range(3)]
    named = {"dp_rank": 0, "pp_rank": 0, "rank": 6, "host": "a", "slowdown": 1.0, "slowdown_error": None,
             "slowdown_approx": 1.0}  # fmt: skip

    def first(**where: Any) -> tuple[str, str]:
        report = report_with(by_worker=[named], causes=[{"kind": "bad-worker", "where": nowhere | where}])
        suggested = suggestions(report)[0]
        return suggested.title, suggested.query.selection

    assert first(workers=workers[:1]) == ("Rank 6 on a like peers", "worker=0,0")
    assert first(workers=workers[1:2]) == ("DP 0, stage 1 like peers", "worker=0,1")
    of_eight = " or ".join(f"worker=0,{stage}" for stage in range(8))
    assert first(workers=workers[:8]) == ("8 workers like peers", of_eight)
    assert first(pp_ranks=[1, 2]) == ("Computes of stage 1,2 like peers", "stage=1,2 and compute")
    assert first(pp_ranks=[3], chunks=[0, 1]) == (
        "Computes of model chunk 0,1 of stage 3 like peers", "stage=3 and compute and chunk=0,1")  # fmt: skip
    assert first(steps=[4, 7]) == ("Slow steps like others", "step=4,7")
    general = first()
    assert first(steps=list(range(MOST_STEPS + 1))) == first(workers=workers) == general
    assert first(steps=list(range(MOST_STEPS)))[1].startswith("step=0,1,")
    report = report_with(causes=[{"kind": "slow-p2p-link", "where": nowhere | {"links": links}}])
    assert [each.query.selection.partition(" and kind")[0] for each in suggestions(report)] == [
        "dp_rank=3 and stage=0,1", "dp_rank=3 and stage=1,2"]  # fmt: skip
    same = {"kind": "bad-worker", "where": nowhere | {"steps": [4]}}
    twice = [each.query.selection for each in suggestions(report_with(causes=[same, same]))]
    assert twice.count("step=4") == 1


def test_the_controls_show_the_selections_that_they_can_write() -> None:
    text = "kind=gc,optimizer and stage=0-1 and dp_rank=3 and (worker=1,2 or worker=0,3) and step=5-9 and slowest=3%"
    parse_selection(text)
    assert ChosenOps.of(text) == ChosenOps(("gc", "optimizer"), "0-1", "3", "1,2 0,3", "5-9", "", "3")
    assert ChosenOps.of("worker=1,2 and microbatch=4") == ChosenOps(workers="1,2", microbatches="4")


@pytest.mark.parametrize("text", ["", "not stage=3", "stage=1 or stage=2", "stage=1 and stage=2", "<script>"])
def test_the_controls_stay_empty_for_what_they_cannot_write(text: str) -> None:
    assert ChosenOps.of(text) == ChosenOps()
