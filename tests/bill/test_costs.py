"""What a report says of the mean step, as parts of a bill: by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from tests.reports import report_with
from tracekit.analysis.numeric.statistics import Estimate
from tracekit.costs import ALL, USEFUL, BillPart, ClaimedCosts, PlacedLoss, stored_costs
from tracekit.costs.of_report import costs_of, when_slow
from tracekit.report.finding import LossKind
from tracekit.report.report import Report

UNEXPLAINED_DELAYS = (BillPart.UNKNOWN, "launch delays without a cause", 0.0)


def cause(kind: str, saved_s: float, alone_s: float = 0.0, **where: object) -> dict[str, object]:
    return {"kind": kind, "saved_s": saved_s, "alone_s": alone_s, "where": where}


#: What a GPU did, but for what a test states.
GPU = {
    **dict.fromkeys(("rank", "recording_s", "span_s", "idle_s", "after_last_s"), 0),
    **dict.fromkeys(("idle_by_reason", "ops", "synchronisations", "transfers", "findings"), ()),
    **dict.fromkeys(("stacks", "shapes"), False),
    **dict.fromkeys(("memory", "unprofiled_reason")),
    "idle_opened_by": {},
    "before_first": {"seconds": 0.0, "by_reason": {}, "names": ()},
    "launch": dict.fromkeys(("calls", "call_s", "short_kernels", "short_s", "kernels", "kernel_s"), 0),
    "steps": {"count": 0, "mean_s": None},
}


def report(
    losses: Mapping[str, float],
    causes: Sequence[Mapping[str, object]] = (),
    *,
    source: str = "pipeline",
    lost_s: float | None = None,
    path: Mapping[str, float] | None = None,
    by_kind: Mapping[str, float] | None = None,
    doubt: str | None = None,
    **more: Any,
) -> Report:
    """Of 4 GPUs and steps of 20 s, ideally 10 s. `by_kind`: S of the ops of a kind alone."""
    stated = {
        "job": {"source": source, "gpus": 4},
        "step_time_s": {"recorded": 20.0, "original": 20.0, "ideal": 10.0},
        "verdict": {
            "lost_s": sum(losses.values()) if lost_s is None else lost_s,
            "losses": [{"kind": kind, "lost_s": seconds} for kind, seconds in losses.items()],
        },
        "trust": {"trustworthy": doubt is None, "reasons": [doubt] if doubt else [], "unexplained": 0.0},
        "causes": causes,
        "critical_path": [{"kind": None, "recorded_s": 5.0}]
        + [{"kind": kind, "recorded_s": seconds} for kind, seconds in (path or {}).items()],
        "by_kind": [{"kind": kind, "slowdown": slowdown} for kind, slowdown in (by_kind or {}).items()],
    }
    return report_with(**stated | more)


def costs(*arguments: Any, **options: Any) -> ClaimedCosts:
    return costs_of(report(*arguments, **options))


@pytest.mark.parametrize(
    ("kind", "part", "rest"),
    [
        ("straggler", BillPart.STRAGGLERS, "unexplained"),
        ("input-bound", BillPart.INPUT, "input-bound"),
        ("host-bound", BillPart.HOST, "host-bound"),
        ("communication-bound", BillPart.COMMUNICATION, "communication-bound"),
        ("compute-bound", BillPart.COMPUTE, "compute-bound"),
        ("idle", BillPart.IDLE, "idle"),
        ("stalls", BillPart.IDLE, "stalls"),
        ("evaluation", BillPart.EVALUATION, "evaluation"),
        *((kind, BillPart.POST_TRAINING, kind) for kind in ("queueing", "tail", "engines", "tools", "reward", "sync")),
    ],
)
def test_every_kind_of_loss_has_a_row_though_nobody_knows_its_cause(kind: str, part: BillPart, rest: str) -> None:
    assert costs({kind: 6.0}).lost == {(part, rest): 6.0}


def test_a_straggler_without_a_cause_is_lost_not_useful() -> None:
    """As op traces report it: with a finding of its own that says so."""
    found = costs({"straggler": 3.0}, [cause("unexplained", 3.0, 3.0)])
    assert found.lost == {(BillPart.STRAGGLERS, "unexplained"): 3.0}
    assert found.rest == (UNEXPLAINED_DELAYS, USEFUL)


@pytest.mark.parametrize(
    ("lost_s", "expected"),
    [
        (3.0, {"bad-worker": 1.5, "late-rank": 0.5, "unexplained": 1.0}),
        # Causes that hide each other share what they cost, as 0.75 + 0.25 to 0.375: the mean of both their costs.
        (1.0, {"bad-worker": 8 / 11, "late-rank": 3 / 11}),
    ],
)
def test_a_loss_is_divided_among_its_causes(lost_s: float, expected: dict[str, float]) -> None:
    causes = [cause("bad-worker", 1.0, 0.5), cause("bad-worker", 0.5), cause("late-rank", 0.25, 0.5, ranks=[2])]
    found = costs({"straggler": lost_s}, [*causes, cause("of a plug-in", 7.0)])
    assert found.lost == pytest.approx({(BillPart.STRAGGLERS, kind): seconds for kind, seconds in expected.items()})


def test_causes_that_overlap_share_what_they_cost_together_and_say_what_each_saves_by_itself() -> None:
    """A rank that computes 5 s longer hides the late data of another, of 3 s: without it the step takes 2 s less,
    without both 5 s. Stragglers cost 4 s by S, which counts the late rank, too.
    """
    causes = [cause("bad-worker", 2.0, 5.0), cause("late-data-loading", 0.0, 3.0, dp_ranks=[2])]
    divided = costs({"straggler": 4.0, "input-bound": 0.0}, causes, lost_s=5.0)
    assert divided.lost == {(BillPart.STRAGGLERS, "bad-worker"): 3.5, (BillPart.INPUT, "late-data-loading"): 1.5}
    assert [(loss.saved_s, loss.overlaps) for loss in divided.losses] == [(2.0, True), (0.0, True)]


def test_losses_cost_together_what_the_verdict_says() -> None:
    """5 s of which the second loss shares 1 s with the first, and 5 s of which 2 s go only with both."""
    losses = {"host-bound": 4.0, "communication-bound": 2.0}
    assert costs(losses, lost_s=5.0).lost == {
        (BillPart.HOST, "host-bound"): 4.0,
        (BillPart.COMMUNICATION, "communication-bound"): 1.0,
    }
    assert costs({"host-bound": 2.0, "communication-bound": 1.0}, lost_s=5.0).lost == {
        (BillPart.HOST, "host-bound"): 2.0,
        (BillPart.COMMUNICATION, "communication-bound"): 1.0,
        (BillPart.UNKNOWN, "losses that hide each other"): 2.0,
    }


def test_planned_work_is_billed_once_whatever_loss_counts_it() -> None:
    """Stalls of 4 s are a checkpoint of 3 s on all ranks, and 1 s of something else; 0.5 s of checkpoint are one
    worker's. The path shows 3 s of checkpoints, of 3.5 s that losses count, and 1.5 s of loading, which one rank does
    0.5 s of; data is late for 2 s.
    """
    causes = [
        cause("checkpoint-stalls", 3.0),
        cause("checkpoint-stalls", 0.5, workers=[{"dp_rank": 0, "pp_rank": 0}]),
        cause("late-data-loading", 0.5, ranks=[2]),
        cause("late-data-loading", 2.0),
    ]
    losses = {"stalls": 4.0, "straggler": 1.0, "input-bound": 2.0}
    found = costs(losses, causes, path={"checkpoint": 3.0, "data-load": 1.5})
    assert found.planned == {BillPart.CHECKPOINTS: 3.0, BillPart.EVALUATION: 0.0, BillPart.INPUT: 1.5}
    assert found.lost == pytest.approx(
        {
            (BillPart.CHECKPOINTS, "checkpoint-stalls"): 0.5 * 3.0 / 3.5,
            (BillPart.STRAGGLERS, "checkpoint-stalls"): 0.5 * 0.5 / 3.5,
            (BillPart.IDLE, "stalls"): 1.0,
            (BillPart.STRAGGLERS, "late-data-loading"): 1.0 * 0.5 / 2.5,
            (BillPart.INPUT, "late-data-loading"): 1.0 * 2.0 / 2.5,
        }
    )
    assert sum(found.planned.values()) + sum(found.lost.values()) == pytest.approx(sum(losses.values()))


def test_stragglers_without_a_cause_that_are_checkpoints_of_a_rank_are_billed_as_checkpoints() -> None:
    """With its checkpoint alone as recorded, S is 1.2: 2 s of a step of ideally 10 s."""
    found = costs({"straggler": 3.0}, path={"checkpoint": 2.0}, by_kind={"checkpoint": 1.2, "forward": 1.1})
    assert (found.planned[BillPart.CHECKPOINTS], found.lost) == (
        2.0,
        {(BillPart.STRAGGLERS, "unexplained"): pytest.approx(1)},
    )


def test_launch_delays_without_a_cause_are_unknown() -> None:
    trust = {"trustworthy": True, "reasons": [], "unexplained": 0.04}
    assert costs({}, trust=trust).rest == ((*UNEXPLAINED_DELAYS[:2], pytest.approx(0.8)), USEFUL)


def test_of_a_recording_only_what_gpus_compute_is_useful() -> None:
    """The median rank computes for 8 s, of which slow kernels waste 1 s, transfers are exposed for 2 s; both may share
    their time with the loss that leads. Recording cost a fifth or more of the 20 s.
    """

    def gpu(compute_s: float, overhead_s: float | None = 1.0) -> dict[str, object]:
        by_class = {"matrix-product": compute_s, "communication": 5.0}
        kernels = [{"name": kind, "count": 1, "class": kind, "seconds": spent_s} for kind, spent_s in by_class.items()]
        step = {"profiled_step_s": 5.0, "overhead_s": overhead_s, "per_operator_s": 0.0, "how": ""}
        step["step_s"] = dict.fromkeys(Estimate.__struct_fields__, 0.0)
        return GPU | {
            "about": "rank",
            "busy_s": 19.0,
            "kernels": kernels,
            "unprofiled": None if overhead_s is None else step,
        }

    found = costs(
        {"host-bound": 6.0},
        [cause("host-bound-launch", 6.0), cause("slow-kernels", 1.5, 1.0)],
        source="recording",
        gpus=[gpu(8.0), gpu(12.0, 1.5), gpu(7.5, None)],
        verdict={"lost_s": 6.0, "losses": [{"kind": "host-bound", "lost_s": 6.0}], "exposed_communication_s": 2.0},
    )
    assert found.claims == (
        (BillPart.HOST, "host-bound-launch", 6.0),
        (BillPart.USEFUL, "training", 7.0),
        (BillPart.COMPUTE, "slow-kernels", 1.0),
        (BillPart.COMMUNICATION, "exposed-communication", 2.0),
        (BillPart.UNKNOWN, "the profiler's own cost", 4.0),
        (BillPart.UNKNOWN, "no GPU computes, for no known loss", ALL),
    )


@pytest.mark.parametrize(("basis", "decoded_s"), [("trajectories", 5.0), ("phases", 0.0)])
def test_of_post_training_only_what_engines_decode_is_useful(basis: str, decoded_s: float) -> None:
    """A generation of 8 s with a tail of 3 s."""
    found = costs(
        {"tail": 3.0},
        [cause("tail", 3.0, 3.0), cause("sync", 0.5, 0.5)],
        job={"source": "rl", "gpus": 4, "basis": basis},
        generation_s=8.0,
        unaccounted_s=1.0,
        length_s=70.0,
    )
    assert found.length_s == 70.0
    assert found.claims == (
        (BillPart.POST_TRAINING, "tail", 3.0),
        (BillPart.POST_TRAINING, "sync", 0.5),
        (BillPart.UNKNOWN, "in no phase", 1.0),
        (BillPart.USEFUL, "generation", decoded_s),
        (BillPart.UNKNOWN, "phases: the log shows no compute", ALL),
    )


def test_of_a_report_that_is_not_trusted_only_what_was_recorded_is_billed() -> None:
    found = costs({"straggler": 3.0}, path={"checkpoint": 2.0}, doubt="clocks are off")
    rest = ((BillPart.UNKNOWN, "analysis not trusted", ALL),)
    planned = {BillPart.CHECKPOINTS: 2.0, BillPart.EVALUATION: 0.0, BillPart.INPUT: 0.0}
    assert found == ClaimedCosts(planned, (), rest, 4, None, "clocks are off")


def test_what_a_source_without_compute_shows_beyond_its_losses_is_unknown() -> None:
    """10 ms of 20 s are a late rank; the rest lies between collectives."""
    lack = {"fact": "compute", "why": "the log holds no compute", "instead": "record it"}
    found = costs({"straggler": 4.0}, lacks=[lack])
    assert found.rest == ((BillPart.UNKNOWN, "the log holds no compute", ALL),)


def test_communication_is_billed_once_if_it_is_also_a_loss_or_a_cause() -> None:
    """Of 2 s of exposed transfers nothing is left beside a loss of 6 s, or a cause of 1 s, of the same part."""
    exposed = (BillPart.COMMUNICATION, "exposed-communication")
    kernels = [{"name": "k", "count": 1, "class": "matrix-product", "seconds": 8.0}]
    gpus = [GPU | {"about": "rank", "busy_s": 19.0, "kernels": kernels, "unprofiled": None}]
    for kind, more, exposed_s in (
        ("host-bound", (), 2.0),
        ("communication-bound", (), 0.0),
        ("host-bound", (cause("exposed-communication", 1.5, 1.0),), 0.0),
    ):
        found = costs(
            {kind: 6.0},
            [cause("host-bound-launch", 6.0), *more],
            source="recording",
            gpus=gpus,
            verdict={"lost_s": 6.0, "losses": [{"kind": kind, "lost_s": 6.0}], "exposed_communication_s": 2.0},
        )
        assert found.rest[-3] == (*exposed, exposed_s)


def test_a_loss_is_timed_by_the_steps_that_lose() -> None:
    """Steps 2 and 3 of 0 to 4 are slow. A loss that begins after them may be in any step, as far as they tell."""
    lost_s = (0.0, 0.0, 1.0, 1.0, 0.0)
    by_step = [
        {"step": step, "slowdown": None, "recorded_s": 2.0, "original_s": 2.0, "ideal_s": 2.0 - lost, "lost_s": lost}
        for step, lost in enumerate(lost_s)
    ]
    timed = when_slow(report({}, by_step=by_step), {0: 100.0, 4: 140.0})
    loss = PlacedLoss(LossKind.STRAGGLER, BillPart.STRAGGLERS, "bad-worker", 1.0)
    for first, steps, times in (
        (None, (2, 3), (120.0, 132.0)),
        (3, (3, 3), (130.0, 132.0)),
        (4, (0, 4), (100.0, 142.0)),
    ):
        found = timed(replace(loss, first_step=first))
        assert ((found.first_step, found.last_step), (found.since, found.until)) == (steps, times)


def test_stored_costs_that_cannot_be_read_are_none() -> None:
    for text in ("", "{", "[]", '{"planned": 3}', "[" * 100_000):
        assert stored_costs(text) is None
