"""The matrix of frameworks: how reports are judged, and that rows train alike with and without recording.

The row `accumulation` trains beside the shared runs: `tests/collectors/test_job_shapes.py`.
"""

import re

import polars as pl
import pytest

from benchmarks.frameworks import ROWS, judge, present
from tests.collectors.conftest import contradictions, several
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
        ("backward", report(("stage-imbalance", [1]), pp=2), True),
        ("forward", report(("stage-imbalance", [0]), pp=2), False),
        ("optimizer", report(("stage-imbalance", [1]), pp=2), False),
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
    from benchmarks import frameworks_train  # with torch

    assert set(ROWS) == set(frameworks_train.ROWS)
    monkeypatch.setitem(ROWS, "lightning", "no_such_framework")
    found, missing = present(["ddp", "lightning"])
    assert (list(found), missing) == (["ddp"], ["lightning"])
    assert found["ddp"].startswith("torch 2.")


#: Rows that no other test trains -> ops of a step on each rank, where all have as many, beside what comes now and then.
LOOP = {OpKind.FORWARD_COMPUTE: 1, OpKind.LOSS: 1, OpKind.BACKWARD_COMPUTE: 1, OpKind.OPTIMIZER: 1, OpKind.DATA_LOAD: 1}
SHARDED = LOOP | dict.fromkeys((OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE), 2)
WAITING = dict.fromkeys((OpKind.FORWARD_COLLECTIVES, OpKind.BACKWARD_COLLECTIVES), 1)
STAGED = dict.fromkeys((OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE, OpKind.BACKWARD_WEIGHT), 8)
STEPS = {
    "fsdp1": SHARDED | WAITING | {OpKind.GRADS_REDUCE_SCATTER: 1},
    "sequence_parallel": LOOP,
    "context_parallel": LOOP,
    "expert_parallel": SHARDED | WAITING,
    "zero_bubble": STAGED | {OpKind.OPTIMIZER: 1, OpKind.DATA_LOAD: 1},
}
REDUCED = {"expert_parallel"}
NOW_AND_THEN = [OpKind.GC, OpKind.HOST_DELAY, OpKind.EVALUATION, OpKind.FORWARD_SEND, OpKind.FORWARD_RECV]
NOW_AND_THEN += [OpKind.BACKWARD_SEND, OpKind.BACKWARD_RECV]


def test_rows_train_alike_with_and_without_recording(tmp_path):
    """The same weights and losses, bit by bit, and their steps are recorded whole on both ranks."""
    runs = {row: f"RANKS=2 STEPS=4 ../../../benchmarks/frameworks_train.py {row}" for row in STEPS}
    (tmp_path / "recorded").mkdir()
    (tmp_path / "alone").mkdir()
    recorded = several(tmp_path / "recorded", runs)
    alone = several(tmp_path / "alone", runs, under_collect=False)
    for row, expected in STEPS.items():
        run = recorded[row]
        assert run.exit_codes == alone[row].exit_codes == [0, 0], run.complained
        assert digests(run.said) == digests(alone[row].said)
        assert len(digests(run.said)) == 4
        assert run.attempt["missing_ranks"] == []
        assert run.trace.steps.tolist() == [1, 2, 3]
        ops = run.trace.ops.filter(~pl.col("kind").is_in([str(kind) for kind in NOW_AND_THEN]))
        counted = ops.group_by("rank", "step", "kind").len()
        seen = {kind: set(part["len"]) for (kind,), part in counted.group_by("kind")}
        reduced = {OpKind.ALL_REDUCE: 1} if row in REDUCED else {}
        assert seen == {kind: {count} for kind, count in (expected | reduced).items()}, row
        assert contradictions(run.trace) == [], row


def digests(said):
    """Those of weights and losses, by rank."""
    return set(re.findall(r"rank \d (?:weights|losses) [0-9a-f]{64}", said))
