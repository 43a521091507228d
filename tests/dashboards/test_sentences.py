"""What the patterns, the kinds and the correlations mean in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.dashboards.test_worker_map import small
from tracekit.dashboards.sentences import (
    believed,
    correlation_words,
    host_words,
    listed,
    space_words,
    time_words,
    verdict,
)

ROWS = [{"step": step, "slowdown": slowdown} for step, slowdown in ((1, 1.0), (2, 1.1), (5, 1.4), (6, 1.5))]


def space(shape: str, *workers: tuple[int, int], host: str | None = None) -> dict[str, Any]:
    named = [{"dp_rank": dp_rank, "pp_rank": stage} for dp_rank, stage in workers]
    return {"shape": shape, "workers": named, "host": host, "stays": 0.75}


def over_time(shape: str, **more: Any) -> dict[str, Any]:
    return {"shape": shape, "since_step": None, "period": None, "slow_steps": []} | more


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (space("none"), "No worker stands out: the largest S_w is 1.300."),
        (space("one-worker", (1, 0), host="a"), "One worker is slow: (1,0) on a, S_w = 1.300. The same worker is the"),
        (space("one-host", (0, 1), (1, 0), host="a"), "The slow workers sit on one host, a: (0,1), (1,0)."),
        (space("one-stage", (0, 1), (1, 1)), "One stage is slow on nearly every DP rank: stage 1."),
        (space("one-dp-rank", (3, 0), (3, 1)), "One DP rank is slow on nearly every stage: DP rank 3"),
        (
            space("several-workers", (1, 0), (3, 0)),
            "Several workers are slow: (1,0), (3,0). The same worker is the worst",
        ),
        (space("diffuse"), "The slow place moves"),
    ],
)
def test_each_shape_on_the_map_has_its_sentence(pattern: dict[str, Any], words: str) -> None:
    said = space_words(pattern, small())
    assert said.startswith(words)
    if "The same worker" in said:
        assert said.endswith("The same worker is the worst in 75% of the steps.")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (over_time("none"), "No slowdown"),
        (over_time("persistent"), "The slowdown comes and goes from the first step on: 3 of 4 steps straggle."),
        (over_time("changed", since_step=5), "S rose at step 5, from 1.05 on average to 1.45"),
        (over_time("drifting"), "The slowdown drifts"),
        (over_time("periodic", period=4, slow_steps=[1, 5]), "The slowdown comes back every 4 steps (slow: 1, 5)"),
        (over_time("transient", slow_steps=[6]), "Single slow steps: 6."),
    ],
)
def test_each_shape_over_time_has_its_sentence(pattern: dict[str, Any], words: str) -> None:
    assert time_words(pattern, ROWS).startswith(words)


def test_one_step_says_nothing_about_since_when() -> None:
    assert time_words(over_time("persistent"), ROWS[:1]) == "One step was traced: since when cannot be said."


def test_a_slowdown_in_all_steps_is_said_to_be_in_all() -> None:
    assert (
        time_words(over_time("persistent"), ROWS[2:]) == "The slowdown is there in every step, from the first one on."
    )


def test_the_only_host_of_a_job_is_no_place_to_point_at() -> None:
    found = replace(small(), hosts=("a",), host=np.zeros((3, 2), np.int64))
    assert found.only_host == "a"
    assert small().only_host is None
    everyone = [(dp_rank, stage) for dp_rank in (0, 1, 3) for stage in (0, 1)]
    assert space_words(space("one-host", *everyone, host="a"), found).startswith(
        "All 6 workers are slow on the only host of the job, a."
    )
    assert space_words(space("one-host", (0, 1), (1, 0), host="a"), found).startswith(
        "Several workers ((0,1), (1,0)) are slow on the only host of the job, a."
    )


def test_a_report_that_is_not_trustworthy_says_so_first() -> None:
    assert believed({"trust": {"trustworthy": True}}, "One worker.") == "One worker."
    assert believed({"trust": {"trustworthy": False}}, "One worker.") == "Not trustworthy: One worker."


def test_a_host_is_drained_only_when_one_of_its_workers_is_slow() -> None:
    loads = small().host_loads()
    assert host_words(loads).endswith("its worker (1,0) has S_w = 1.300; 2 of 2 hosts reach 1.02.")
    assert host_words(loads[:1]).endswith("no other host is known.")
    assert host_words([]) == "The trace does not name its hosts."


def test_long_lists_are_cut_and_counted() -> None:
    assert listed([str(number) for number in range(9)]) == "0, 1, 2, 3, 4, 5 and 3 more"
    assert listed(["0", "1"]) == "0, 1"


def report(straggling: bool = True, **saved: float) -> dict[str, Any]:
    return {
        "straggling": straggling,
        "slowdown": 1.25,
        "step_time_s": {"original": 5.0, "ideal": 4.0},
        "trust": {"discrepancy": 0.01},
        "by_kind": [{"kind": kind.replace("_", "-"), "saved_s": value} for kind, value in saved.items()],
    }


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            report(forward_compute=0.5, optimizer=0.3, backward_pp_comm=0.1),
            "Compute: fixing it kind by kind saves 800.0",
        ),
        (
            report(forward_compute=0.1, forward_pp_comm=0.5, all_to_all=0.2),
            "Communication: fixing it kind by kind saves",
        ),
        (report(forward_compute=0.1, gc=0.5), "Host work: fixing it kind by kind saves 500.0 ms of the 1.00 s"),
        (report(forward_compute=0.1, gc=0.05), "No kind of op by itself"),
        (report(straggling=False, forward_compute=0.1), "Neither: no straggler"),
    ],
)
def test_compute_or_communication_is_said_in_one_sentence(found: dict[str, Any], words: str) -> None:
    assert verdict(found).startswith(words)
    assert verdict(found).endswith("Launch delays add 1.0% to the original step.")


def test_correlation_on_every_stage_means_microbatches_on_one_stage_a_worker() -> None:
    assert "microbatches differ" in correlation_words([0, 1, 2], [0.95, 0.99, 0.91])
    assert correlation_words([0, 1, 2], [0.1, None, 0.99]).startswith("Long together on stage 2 alone")
    assert correlation_words([0, 1], [0.1, None]).startswith("Not long together")
