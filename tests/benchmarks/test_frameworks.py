"""The matrix of frameworks: how reports are judged, and that its rows train alike with and without recording."""

import pytest

from benchmarks import frameworks_train
from benchmarks.frameworks import ROWS, judge, present
from tests.collectors.conftest import several
from tracekit.model import OpKind


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


@pytest.mark.parametrize(
    ("part", "said", "right"),
    [
        ("", report(), True),
        ("", report(("host-bound-launch", [])), True),
        ("", report(("bad-worker", [0])), False),
        ("", report(trustworthy=False), False),
        ("forward", report(("bad-worker", [1])), True),
        ("forward", report(("bad-worker", [1]), pp=2), True),
        ("forward", report(("bad-worker", [1]), trustworthy=False), False),
        ("forward", report(("bad-worker", [1]), ("late-data-loading", [0])), False),
        ("forward", report(("late-data-loading", [1])), False),
        ("host", report(("host-bound-launch", []), ("slow-host-code", [1])), True),
        ("gc", report(), False),
    ],
)
def test_what_counts_as_right(part, said, right):
    assert judge("ddp", part, said).right is right


def test_every_row_has_its_training_and_missing_frameworks_are_named(monkeypatch):
    assert set(ROWS) == set(frameworks_train.ROWS)
    monkeypatch.setitem(ROWS, "lightning", "no_such_framework")
    found, missing = present(["ddp", "lightning"])
    assert (list(found), missing) == (["ddp"], ["lightning"])
    assert found["ddp"].startswith("torch 2.")


def test_a_row_trains_alike_with_and_without_recording(tmp_path):
    """The same weights, bit by bit, and its steps are recorded on both ranks. What accumulates gradients and evaluates
    in between is the row that no other test trains (`test_job_shapes`).
    """
    row = "accumulation"
    runs = {row: f"RANKS=2 STEPS=5 ../../../benchmarks/frameworks_train.py {row}"}
    (tmp_path / "recorded").mkdir()
    (tmp_path / "alone").mkdir()
    recorded = several(tmp_path / "recorded", runs)[row]
    alone = several(tmp_path / "alone", runs, under_collect=False)[row]
    assert recorded.exit_codes == alone.exit_codes == [0, 0], recorded.complained
    assert recorded.weights == alone.weights
    assert len(recorded.weights) == 2
    assert recorded.trace.steps.tolist() == [1, 2, 3, 4]
    kinds = set(recorded.trace.ops["kind"].cast(str))
    assert {OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE, OpKind.OPTIMIZER} <= kinds
    assert recorded.attempt["missing_ranks"] == []
