"""What a report says of the mean step, as parts of a bill: by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from tracekit.bill.bill import ALL, Part
from tracekit.bill.costs import Costs, costs_of


def report(stragglers_s: float, *, trusted: bool = True) -> str:
    def cause(kind: str, saved_s: float, workers: int = 0, ranks: Sequence[int] = ()) -> dict[str, object]:
        where = {"workers": [{}] * workers, "ranks": ranks}
        return {"kind": kind, "saved_s": saved_s, "alone_s": saved_s / 2, "where": where}

    losses = {"straggler": stragglers_s, "input-bound": 2.0, "stalls": 4.0, "communication-bound": 9.0}
    content = {
        "critical_path": [
            {"kind": "data-load", "recorded_s": 1.5},
            {"kind": "checkpoint", "recorded_s": 3.0},
            {"kind": None, "recorded_s": 5.0},
        ],
        "trust": {"trustworthy": trusted},
        "step_time_s": {"original": 20.0, "ideal": 20.0 - stragglers_s},
        "verdict": {"losses": [{"kind": kind, "lost_s": lost_s} for kind, lost_s in losses.items()]},
        "causes": [
            *(cause("bad-worker", 1.0, 1), cause("bad-worker", 0.5, 1)),
            cause("checkpoint-stalls", 3.0),
            cause("checkpoint-stalls", 0.5, workers=1),  # a few workers that stop the others
            cause("late-data-loading", 0.5, ranks=[2]),  # a rank of an op trace, for whose data the others wait
            cause("of a plug-in", 7.0),
        ],
    }
    return json.dumps(content)


@pytest.mark.parametrize(
    ("stragglers_s", "expected"),
    [
        (3.0, {"bad-worker": 1.5, "checkpoint-stalls": 0.5, "late-data-loading": 0.5, "unexplained": 0.5}),
        # Causes that hide each other share what they cost.
        (1.25, {"bad-worker": 0.75, "checkpoint-stalls": 0.25, "late-data-loading": 0.25}),
    ],
)
def test_stragglers_are_divided_among_their_causes_and_nothing_counts_twice(
    stragglers_s: float, expected: dict[str, float]
) -> None:
    assert costs_of(report(stragglers_s)) == Costs(
        planned={Part.CHECKPOINTS: 3.0, Part.EVALUATION: 0.0, Part.INPUT: 1.5},
        lost={(Part.STRAGGLERS, kind): seconds for kind, seconds in expected.items()}
        | {(Part.INPUT, "late data"): 0.5, (Part.IDLE, "pauses and stalls"): 1.0},
    )


def test_of_a_report_that_is_not_trusted_only_what_was_recorded_is_billed() -> None:
    rest = (Part.UNKNOWN, "analysis not trusted", ALL)
    planned = {Part.CHECKPOINTS: 3.0, Part.EVALUATION: 0.0, Part.INPUT: 1.5}
    assert costs_of(report(3.0, trusted=False)) == Costs(planned, {}, rest)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"critical_path": 1}', '{"critical_path": [{"kind": "gc"}]}'])
def test_a_report_with_other_keys_has_no_costs(text: str) -> None:
    assert costs_of(text) is None
