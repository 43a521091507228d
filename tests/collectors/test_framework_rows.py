"""Rows of the matrix of frameworks (`benchmarks/frameworks_train.py`) train alike with and without recording."""

import re
from pathlib import Path

import polars as pl
import pytest

from tests.cases import case
from tests.collectors.conftest import contradictions
from tests.collectors.shared_runs import ROWS
from tracekit.trace.model import OpKind
from tracekit.trace.schema import OFF_CPU

pytestmark = pytest.mark.slow
#: Where Linux says how long a thread waited for a processor.
SCHEDSTAT = Path("/proc/thread-self/schedstat")
#: Row -> ops of a step on each rank, where all have as many, beside what comes now and then.
LOOP = {OpKind.FORWARD_COMPUTE: 1, OpKind.LOSS: 1, OpKind.BACKWARD_COMPUTE: 1, OpKind.OPTIMIZER: 1, OpKind.DATA_LOAD: 1}
SHARDED = LOOP | dict.fromkeys((OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE), 2)
WAITING = dict.fromkeys((OpKind.FORWARD_COLLECTIVES, OpKind.BACKWARD_COLLECTIVES), 1)
#: A dispatch and a combine in each direction, and the computes around them.
EXCHANGING = dict.fromkeys(WAITING, 2) | dict.fromkeys((OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE), 3)
STAGED = dict.fromkeys((OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE, OpKind.BACKWARD_WEIGHT), 8)
STEPS = {
    "fsdp1": SHARDED | WAITING | {OpKind.GRADS_REDUCE_SCATTER: 1},
    "sequence_parallel": LOOP,
    "context_parallel": LOOP,
    "expert_parallel": LOOP | EXCHANGING,
    "zero_bubble": STAGED | {OpKind.OPTIMIZER: 1, OpKind.DATA_LOAD: 1},
}
REDUCED = {"expert_parallel"}
NOW_AND_THEN = [OpKind.GC, OpKind.HOST_DELAY, OpKind.EVALUATION, OpKind.FORWARD_SEND, OpKind.FORWARD_RECV]
NOW_AND_THEN += [OpKind.BACKWARD_SEND, OpKind.BACKWARD_RECV]


def test_a_row_trains_alike_with_and_without_recording(runs, alone):
    """The same weights and losses, bit by bit, and their steps are recorded whole on both ranks."""
    for row in ROWS:
        with case(row):
            check(runs[row], alone[row], row)


def test_all_to_alls_say_which_rows_they_move(runs):
    """What one rank sends to the other is what that receives."""
    ops = runs["expert_parallel"].trace.ops.filter(pl.col("sent").is_not_null())
    assert set(ops["kind"]) == set(WAITING)
    keys = ["step", "kind", "seq"]
    mine, theirs = (ops.filter(rank=rank).sort(keys) for rank in (0, 1))
    assert mine["sent"].list.get(1).to_list() == theirs["received"].list.get(0).to_list()
    assert mine["received"].list.get(1).to_list() == theirs["sent"].list.get(0).to_list()


def check(run, alone, row):
    assert run.exit_codes == alone.exit_codes == [0, 0], run.complained
    assert digests(run.said) == digests(alone.said)
    assert len(digests(run.said)) == 4
    assert run.attempt["missing_ranks"] == []
    assert run.trace.steps.tolist() == [1, 2, 3]
    ops = run.trace.ops.filter(~pl.col("kind").is_in([str(kind) for kind in NOW_AND_THEN]))
    counted = ops.group_by("rank", "step", "kind").len()
    seen = {kind: set(part["len"]) for (kind,), part in counted.group_by("kind")}
    reduced = {OpKind.ALL_REDUCE: 1} if row in REDUCED else {}
    assert seen == {kind: {count} for kind, count in (STEPS[row] | reduced).items()}
    assert contradictions(run.trace) == []
    assert (OFF_CPU in run.trace.ops.columns) == SCHEDSTAT.exists()
    if OFF_CPU in run.trace.ops.columns:
        counted = run.trace.ops.filter(pl.col(OFF_CPU).is_not_null())
        assert sorted(counted["step"]) == sorted([1, 2, 3] * counted["rank"].n_unique())
        assert counted[OFF_CPU].list.len().sum() == 6


def digests(said):
    """Those of weights and losses, by rank."""
    return set(re.findall(r"rank \d (?:weights|losses) [0-9a-f]{64}", said))
