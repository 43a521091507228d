"""What the patterns mean in words."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from tests.figures.test_worker_map import small
from tests.reports import report_with
from tracekit.analysis.attribution.patterns import SpacePattern, TimePattern
from tracekit.dashboards.browser.ui.sentences import (
    believed,
    space_words,
    time_words,
    why_no_advice,
)
from tracekit.report.tables import OfStep


def of_step(step: int, lost_s: float | None) -> OfStep:
    return OfStep(step, 1.0, recorded_s=2.0, original_s=2.0, ideal_s=2.0, lost_s=lost_s)


ROWS = [of_step(step, lost_s) for step, lost_s in ((1, None), (2, 0.1), (5, 0.4), (6, 0.5))]


def space(shape: str, *workers: tuple[int, int], host: str | None = None) -> SpacePattern:
    named = [{"dp_rank": dp_rank, "pp_rank": stage} for dp_rank, stage in workers]
    return msgspec.convert({"shape": shape, "workers": named, "host": host, "stays": 0.75}, SpacePattern)


def over_time(shape: str, **more: Any) -> TimePattern:
    empty: dict[str, Any] = {"statistic": None, "needed": 0.0, "since_step": None, "period": None, "slow_steps": []}
    return msgspec.convert({"shape": shape} | empty | more, TimePattern)


def test_each_shape_on_the_map_has_its_sentence() -> None:
    for pattern, words in (
        (space("none"), "No worker stands out: none alone costs more than 23.1% of a step."),
        (
            space("one-worker", (1, 0), host="a"),
            "One worker stands out: rank 2 on a, which alone costs 23.1% of a step. The same",
        ),
        (
            space("one-host", (0, 1), (1, 0), host="a"),
            "Workers of one host stand out, a: rank 1, rank 2.",
        ),
        (space("one-stage", (0, 1), (1, 1)), "One stage stands out on nearly every DP rank: stage 1."),
        (space("one-dp-rank", (3, 0), (3, 1)), "One DP rank stands out on nearly every stage: DP rank 3."),
        (
            space("several-workers", (1, 0), (3, 0)),
            "Several workers stand out: rank 2, rank 6. The same worker is",
        ),
        (space("diffuse"), "The slowest worker changes from step to step"),
    ):
        said = space_words(pattern, small())
        assert said.startswith(words)
        if "The same worker" in said:
            assert said.endswith("The same worker is the slowest in 75% of the steps.")


def test_each_shape_over_time_has_its_sentence() -> None:
    for pattern, words in (
        (over_time("none"), "What steps lose shows no pattern: 0.0% to 25.0% of each."),
        (
            over_time("persistent"),
            "The loss comes and goes from the first step on: it is 5% or more in 3 of 4 steps.",
        ),
        (over_time("changed", since_step=5), "The loss rose at step 5, from 2.5% of a step on average to 22.5%."),
        (over_time("drifting"), "The loss drifts"),
        (over_time("periodic", period=4, slow_steps=[1, 5]), "The loss rises every 4 steps (slow: 1, 5)."),
        (over_time("transient", slow_steps=[6]), "Single slow steps: 6."),
    ):
        assert time_words(pattern, ROWS).startswith(words)


def test_one_step_says_nothing_about_since_when() -> None:
    assert time_words(over_time("persistent"), ROWS[:1]) == "One step was traced: since when cannot be said."


def test_a_loss_in_all_steps_is_said_to_be_in_all() -> None:
    words = time_words(over_time("persistent"), ROWS[2:])
    assert words == "Every step loses time, from the first one on: 20.0% to 25.0%."


def test_the_only_host_of_a_job_is_no_place_to_point_at() -> None:
    found = structs.replace(small(), hosts=("a",), host=np.zeros((3, 2), np.int64))
    assert found.only_host == "a"
    assert small().only_host is None
    everyone = [(dp_rank, stage) for dp_rank in (0, 1, 3) for stage in (0, 1)]
    assert space_words(space("one-host", *everyone, host="a"), found).startswith(
        "All 6 workers of the only host of the job, a, stand out."
    )
    assert space_words(space("one-host", (0, 1), (1, 0), host="a"), found).startswith(
        "Several workers (rank 1, rank 2) of the only host of the job, a, stand out."
    )


def test_a_report_that_is_not_trustworthy_says_so_first() -> None:
    assert believed(report_with(trust={"trustworthy": True}), "One worker.") == "One worker."
    assert believed(report_with(trust={"trustworthy": False}), "One worker.") == "Not trustworthy: One worker."


def test_why_nothing_is_advised() -> None:
    """A fix for a cause that is withheld says why; one that any job could try says nothing."""
    cause = {"kind": "bad-worker", "title": "slow", "suggested_fix": "replace it"}
    withheld = {"cause": "bad-worker", "withheld": "the noise is larger"}
    for report, why in (
        (report_with(trust={"trustworthy": False}, fixes=[withheld]), "the figures are not to be trusted"),
        (report_with(fixes=[{"withheld": "of no cause"}, withheld]), "the noise is larger"),
        (report_with(fixes=[{"withheld": "of no cause"}]), "no cause is named"),
        (report_with(causes=[cause]), "no fix for the named cause would save 1% of the step"),
    ):
        assert why_no_advice(report) == why


def test_long_lists_are_cut_and_counted() -> None:
    steps = [of_step(step, 1.0) for step in range(9)]
    every = time_words(over_time("transient", slow_steps=list(range(9))), steps)
    assert every.startswith("Single slow steps: 0, 1, 2, 3, 4, 5 and 3 more.")
    few = time_words(over_time("transient", slow_steps=[0, 1]), steps)
    assert few.startswith("Single slow steps: 0, 1.")
