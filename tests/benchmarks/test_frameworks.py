"""Judging the matrix of frameworks. Its rows train in `tests/collectors`."""

import pytest

from benchmarks.frameworks import ROWS, judge, present


def report(*causes, trustworthy=True, pp=1):
    """A report that blames ranks: (kind, ranks) each."""
    axis = "pp_rank" if pp > 1 else "dp_rank"
    return {
        "slowdown": 1.2,
        "job": {"layout": {"dp": 2, "pp": pp}},
        "trust": {"trustworthy": trustworthy, "discrepancy": 0.01},
        "causes": [
            {"kind": kind, "saved_s": 0.012, "where": {"workers": [{axis: rank} for rank in ranks]}}
            for kind, ranks in causes
        ],
    }


def test_rank_1_alone_must_be_blamed_for_a_fitting_reason_and_nobody_on_a_healthy_run():
    cases = [
        ("", report(), True),
        ("", report(("host-bound-launch", [])), True),
        ("", report(("bad-worker", [0])), False),
        ("", report(trustworthy=False), False),
        ("forward", report(("bad-worker", [1])), True),
        ("forward", report(("bad-worker", [1]), pp=2), True),
        ("backward", report(("stage-imbalance", [1]), pp=2), True),
        ("forward", report(("stage-imbalance", [0]), pp=2), False),
        ("optimizer", report(("stage-imbalance", [1]), pp=2), False),
        ("forward", report(("bad-worker", [1]), trustworthy=False), False),
        ("forward", report(("bad-worker", [1]), ("late-data-loading", [0])), False),
        ("forward", report(("late-data-loading", [1])), False),
        ("host", report(("host-bound-launch", []), ("slow-host-code", [1])), True),
        ("gc", report(), False),
    ]
    for part, found, right in cases:
        assert judge("ddp", part, found).right is right, (part, found["causes"])


@pytest.mark.slow
def test_every_row_has_its_training_and_missing_frameworks_are_named(monkeypatch):
    from benchmarks import frameworks_train  # with torch

    assert set(ROWS) == set(frameworks_train.ROWS)
    monkeypatch.setitem(ROWS, "lightning", "no_such_framework")
    found, missing = present(["ddp", "lightning"])
    assert (list(found), missing) == (["ddp"], ["lightning"])
    assert found["ddp"].startswith("torch 2.")
