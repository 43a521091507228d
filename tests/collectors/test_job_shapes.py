"""Jobs of other shapes: every one is recorded whole, and trains to the same bits as alone."""

import sys

import polars as pl
import pytest

from tests.cases import case
from tests.collectors.conftest import (
    CLOCK_TICK_S,
    HEAVY,
    SCRIPTS,
    TIMEOUT_S,
    collect,
    contradictions,
    quick_and_slow,
)
from tests.collectors.shared_runs import LAUNCHERS, PAUSES, STYLES
from tracekit.trace.canonical import RUN_QUEUE
from tracekit.trace.model import OpKind, Worker


@pytest.mark.parametrize(
    "names",
    quick_and_slow(["fsdp", "uneven", "sharded", "ddp", "fsdp-pipeline", "accumulation", "pipeline"]),
)
def test_a_job_trains_to_the_same_bits_as_alone(names, runs, alone):
    for name in names:
        run = runs[name]
        with case(name):
            assert set(run.exit_codes) == {0}, run.complained
            assert run.weights == alone[name].weights
            assert len(run.weights) >= 2


def counts(trace) -> dict[str, int]:
    """Ops of each kind per worker and step, where all have as many.

    Without the host work between them, and without garbage collections, which come when the interpreter likes.
    """
    by_chance = pl.col("kind").is_in([str(OpKind.HOST_DELAY), str(OpKind.GC)])
    table = trace.ops.filter(~by_chance).group_by("rank", "step", "kind").len()
    return {
        kind: part["len"][0] if part["len"].n_unique() == 1 else part["len"].to_list()
        for (kind,), part in table.group_by("kind")
    }


def test_ddp_with_gradient_accumulation(runs):
    """Four data-parallel ranks, two microbatches, the buckets of a step one reduction behind the second backward."""
    trace = runs["ddp"].trace
    assert (trace.layout.dp, trace.layout.pp) == (4, 1)
    assert runs["ddp"].attempt["layout_source"] == "gradient groups"
    assert counts(trace) == {
        OpKind.FORWARD_COMPUTE: 2,
        OpKind.LOSS: 2,
        OpKind.BACKWARD_COMPUTE: 2,
        OpKind.ALL_REDUCE: 1,
        OpKind.OPTIMIZER: 1,
    }
    assert contradictions(trace) == []


@pytest.mark.slow
def test_fsdp2_with_interleaved_pipeline(runs):
    """Two chunks per rank. What each gathers is its own; the chunk that is done first scatters among the backwards."""
    trace = runs["fsdp-pipeline"].trace
    assert (trace.layout.dp, trace.layout.pp, trace.layout.vpp) == (2, 2, 2)
    seen = counts(trace)
    assert seen[OpKind.FORWARD_COMPUTE] == seen[OpKind.BACKWARD_COMPUTE] == 8
    assert seen[OpKind.GRADS_REDUCE_SCATTER] == seen[OpKind.BACKWARD_COLLECTIVES] == 1
    gathers = trace.ops.filter(kind=OpKind.PARAMS_ALL_GATHER).sort("seq")
    gathered = gathers.group_by("rank", "step").agg("chunk")
    assert gathered["chunk"].to_list() == [[0, 1]] * 4 * 5
    assert trace.metadata["collect"]["unmatched_p2p"] == 0
    assert contradictions(trace) == []
    for kind in (OpKind.FORWARD_SEND, OpKind.FORWARD_RECV, OpKind.BACKWARD_SEND, OpKind.BACKWARD_RECV):
        transfers = trace.ops.filter(kind=kind).sort("rank", "step", "seq")
        ended = (pl.col("start") + pl.col("duration")).shift(1).over("rank", "step")
        assert transfers.filter(pl.col("start") < ended - CLOCK_TICK_S).is_empty()


@pytest.mark.slow
def test_a_row_of_the_matrix_of_frameworks(runs):
    """What accumulates gradients and evaluates in between (`benchmarks/frameworks_train.py`)."""
    run = runs["accumulation"]
    assert run.trace.steps.tolist() == [1, 2, 3, 4]
    kinds = set(run.trace.ops["kind"].cast(str))
    assert {OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE, OpKind.OPTIMIZER} <= kinds
    assert run.attempt["missing_ranks"] == []


FSDP_STEP = {
    OpKind.FORWARD_COMPUTE: 2,
    OpKind.FORWARD_COLLECTIVES: 1,
    OpKind.LOSS: 1,
    OpKind.BACKWARD_COMPUTE: 2,
    OpKind.BACKWARD_COLLECTIVES: 1,
    OpKind.GRADS_REDUCE_SCATTER: 1,  # both layers, inside the backward
    OpKind.OPTIMIZER: 1,
}


def test_fsdp2_without_a_pipeline(runs):
    """Two data-parallel ranks, gradients of two layers scattered; what computes wait for is apart from them."""
    trace = runs["fsdp"].trace
    assert set(trace.metadata[RUN_QUEUE]) == {"0", "1"}
    assert all(0 <= seconds < TIMEOUT_S for seconds in trace.metadata[RUN_QUEUE].values())
    assert (trace.layout.dp, trace.layout.pp) == (2, 1)
    assert runs["fsdp"].attempt["layout_source"] == "gradient groups"
    assert counts(trace) == FSDP_STEP
    assert trace.metadata["collect"]["nested"] == {"all_gather_single@default_pg": 2 * 5 * 4}


@pytest.mark.slow
def test_the_time_of_a_slow_rank_is_its_own(runs):
    """Its two layers sleep 20 ms each in every forward: its forward lasts as long, cut in two by the gathering."""
    forwards = runs["fsdp-slow"].trace.ops.filter(rank=1, kind=OpKind.FORWARD_COMPUTE)
    assert forwards.group_by("step").agg(pl.col("duration").sum())["duration"].min() >= 0.04


@pytest.mark.slow
def test_a_pipeline_without_a_data_loader(runs):
    """Where a step begins with a transfer, that is the transfer of this step; stages may differ in their layers."""
    trace = runs["uneven"].trace
    assert trace.metadata["layers"] == [1, 2]
    assert trace.metadata["gradients"]["bytes"] == [[4 * 16 * 17], [4 * 16 * 17] * 2]
    assert (trace.layout.dp, trace.layout.pp) == (1, 2)
    assert trace.metadata["collect"]["unmatched_p2p"] == 0
    received = trace.ops.filter(kind=OpKind.FORWARD_RECV)
    assert received.group_by("step").agg(pl.col("microbatch").sort())["microbatch"].to_list() == [[0, 1, 2]] * 5
    assert contradictions(trace) == []


@pytest.mark.slow
def test_a_sharded_optimizer(runs):
    """It steps another inside its own step, then sends the weights around: one optimizer, nothing of the next step.

    Warnings about how the user calls DistributedDataParallel name the user's line.
    """
    trace = runs["sharded"].trace
    assert counts(trace) == {
        OpKind.FORWARD_COMPUTE: 1,
        OpKind.LOSS: 1,
        OpKind.BACKWARD_COMPUTE: 1,
        OpKind.ALL_REDUCE: 1,
        OpKind.OPTIMIZER: 1,
    }
    assert "broadcast@default_pg" in trace.metadata["collect"]["other"]
    assert "collectors/record" not in runs["sharded"].complained


@pytest.mark.slow
def test_megatron_is_recognised(runs):
    """Its parallel state places the ranks, its timers become ops; it need not be a dependency of tracekit.

    What a hook saw inside a timer counts once (forwards, optimizer), fused transfers come apart, and other timers are
    kept under their names.
    """
    trace = runs["megatron"].trace
    assert runs["megatron"].attempt["layout_source"] == "Megatron parallel state"
    assert (trace.layout.dp, trace.layout.pp, trace.layout.tp) == (2, 2, 1)
    assert trace.worker_ranks() == {Worker(0, 0): 0, Worker(1, 0): 1, Worker(0, 1): 2, Worker(1, 1): 3}
    assert trace.steps.tolist() == [1, 2, 3, 4]
    for stage, transfers in enumerate((("forward-send", "backward-recv"), ("forward-recv", "backward-send"))):
        ops = trace.ops.filter((pl.col("pp_rank") == stage) & (pl.col("kind") != str(OpKind.HOST_DELAY)))
        per_step = {kind: part.height / 8 for (kind,), part in ops.group_by("kind")}
        assert per_step == {
            "forward-compute": 2,
            "backward-compute": 2,
            transfers[0]: 2,
            transfers[1]: 2,
            "all-reduce": 2,
            "optimizer-clip-main-grad": 1,
            "optimizer": 1,
        }
    assert {"forward-backward", "all-grads-sync", "interval-time"} <= set(trace.metadata["collect"]["other"])


@pytest.mark.slow
def test_ranks_that_the_script_spawns_itself(runs):
    """torch.multiprocessing instead of torchrun: both ranks are recorded, the process that spawns them is not."""
    run = runs["spawned"]
    assert run.exit_codes == [0], run.complained
    assert [rank["closed"] for rank in run.attempt["ranks"]] == [True, True]
    assert not run.attempt["missing_ranks"]
    assert run.trace.coverage().complete
    assert run.trace.layout.dp == 2
    assert counts(run.trace) == {
        OpKind.FORWARD_COMPUTE: 1,
        OpKind.LOSS: 1,
        OpKind.BACKWARD_COMPUTE: 1,
        OpKind.ALL_REDUCE: 4,
        OpKind.OPTIMIZER: 1,
    }


@pytest.mark.slow
def test_functional_collectives(runs):
    """Seen from their start to the wait for their result; one that nobody waits for is counted, not guessed."""
    assert counts(runs["functional-collectives"].trace) == {
        OpKind.FORWARD_COMPUTE: 1,
        OpKind.LOSS: 1,
        OpKind.BACKWARD_COMPUTE: 1,
        OpKind.ALL_REDUCE: 2,
        OpKind.OPTIMIZER: 1,
        OpKind.PARAMS_ALL_GATHER: 1,
    }
    assert runs["functional-collectives"].attempt["ranks"][0]["unfinished"] == 3


#: The ops of a step of `paused.py` in order, without the host work of the loop before it.
STEP = ["forward-compute", "loss", "backward-compute", "all-reduce", "optimizer"]
#: The same with a pause in it; one between forward and backward stands for the loss.
PAUSED = {
    "before": ["gc", *STEP],
    "middle": ["forward-compute", "gc", "backward-compute", "all-reduce", "optimizer"],
    "after": ["forward-compute", "loss", "backward-compute", "all-reduce", "gc", "optimizer"],
    "between": STEP,  # it opens the next step
    "nowhere": ["gc", *STEP],  # which has that of the step before
}


def in_order(trace, rank: int) -> dict[int, list[str]]:
    """The kinds of a rank's ops by step, in order of their start."""
    ops = trace.ops.filter(pl.col("rank") == rank).sort("step", "start")
    kinds = ops.group_by("step", maintain_order=True).agg(pl.col("kind").cast(pl.String))
    return {step: own[own[0] == "host-delay" :] for step, own in kinds.iter_rows()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAUSES)
def test_who_waits_for_a_rank_that_collects_garbage_waits_in_the_reduction(runs, name):
    """Rank 1 collects at one place of a step after the other; rank 0 has the ops it would have alone.

    Its reduction ends behind the collection before rank 1's. The collection finalizes what takes 30 ms.
    """
    run = runs[name]
    assert set(run.exit_codes) == {0}, run.complained
    trace, places = run.trace, list(PAUSED)
    assert trace.steps.tolist() == list(range(1, 11))  # each place twice
    alone = ["host-delay", *STEP] if name == "collecting-in-closure" else STEP  # before its closure
    assert in_order(trace, 0) == dict.fromkeys(range(1, 11), alone)
    seen = {step: [kind for kind in kinds if kind != "host-delay"] for step, kinds in in_order(trace, 1).items()}
    assert seen == {step: PAUSED[places[step % 5]] for step in range(1, 11)}
    pauses = trace.ops.filter(kind=OpKind.GC)
    assert pauses["duration"].min() >= 0.03
    own = trace.ops.filter(rank=1, kind=OpKind.ALL_REDUCE).select("step", reduces="start")
    before = pauses.join(own, on="step").filter(pl.col("start") < pl.col("reduces"))
    reduced = trace.ops.filter(rank=0, kind=OpKind.ALL_REDUCE).join(before, on="step", suffix="_gc")
    assert reduced.height == before.height == pauses.height - 2  # the others are after the backward
    released = pl.col("start_gc") + pl.col("duration_gc")
    assert reduced.filter(pl.col("start") + pl.col("duration") < released - CLOCK_TICK_S).is_empty()
    assert contradictions(trace) == []


@pytest.mark.slow
def test_what_a_script_does_before_its_backward_is_an_op_of_that_rank(runs):
    """Rank 1 sleeps 30 ms between forward and backward, from the first step on: neither of them is longer for it."""
    trace = runs["slept"].trace
    losses = trace.ops.filter(kind=OpKind.LOSS)
    assert losses.group_by("rank").len().sort("rank")["len"].to_list() == [4, 4]
    assert losses.filter(rank=1)["duration"].min() >= 0.03
    before = trace.ops.filter(rank=1, kind=OpKind.FORWARD_COMPUTE).join(
        losses.filter(rank=1), on="step", suffix="_loss"
    )
    ended = pl.col("start") + pl.col("duration")
    assert before.filter((ended - pl.col("start_loss")).abs() > CLOCK_TICK_S).is_empty()
    assert contradictions(trace) == []


@pytest.mark.slow
def test_who_waits_at_a_meeting_between_steps_waits_in_it(runs):
    """Rank 1 sleeps 30 ms between steps, rank 0 waits for it in a broadcast: that is an op, and no time of the host."""
    trace = runs["met"].trace
    assert counts(trace)[OpKind.FORWARD_COLLECTIVES] == 1
    slept = trace.ops.filter(rank=1, kind=OpKind.HOST_DELAY).group_by("step").agg(pl.col("duration").sum())
    assert slept["duration"].min() >= 0.03
    met = trace.ops.filter(kind=OpKind.FORWARD_COLLECTIVES)
    ended = pl.col("start") + pl.col("duration")
    waited = met.filter(rank=0).join(met.filter(rank=1), on="step", suffix="_late")
    assert waited.filter(ended < pl.col("start_late") - CLOCK_TICK_S).is_empty()
    outside = trace.ops.filter(rank=0, kind=OpKind.HOST_DELAY).join(met.filter(rank=0), on="step", suffix="_met")
    inside = (pl.col("start") < pl.col("start_met") + pl.col("duration_met") - CLOCK_TICK_S) & (
        ended > pl.col("start_met") + CLOCK_TICK_S
    )
    assert outside.filter(inside).is_empty()


@pytest.mark.slow
def test_ranks_that_make_their_optimizer_first(runs):
    """As mpirun and srun start them, without RANK: none takes itself for the only one before it has met the others."""
    for launcher in LAUNCHERS:
        run = runs[launcher]
        with case(launcher):
            assert run.exit_codes == [0, 0], run.complained
            assert (run.trace.layout.dp, run.trace.coverage().complete) == (2, True)


@pytest.mark.parametrize("styles", quick_and_slow(STYLES))
def test_single_process_loops(styles, runs, alone):
    """One forward, backward, optimizer step and batch per step, whatever the loop's style.

    The compiled styles use fullgraph=True: an additional graph break would be an error.
    """
    for style in styles:
        with case(style):
            check_a_loop(runs[style], alone, style)


def check_a_loop(run, alone, style):
    assert run.exit_codes == [0], run.complained
    assert run.attempt["ranks"][0]["failures"] == {}
    assert run.said == alone["plain"].said
    trace = run.trace
    first = 100 if style == "set-step" else 1
    last = 4 if style == "steps" else first + 4  # where the user says when a step begins, the newest never ends
    assert list(trace.steps) == list(range(first, last + 1)), run.complained
    seen = counts(trace)
    assert seen.pop(OpKind.CHECKPOINT, 0) == (style != "closure")
    assert seen.pop(OpKind.EVALUATION, 0) == (style == "eval")
    assert seen == {
        OpKind.FORWARD_COMPUTE: 1 + (style == "two-modules"),
        OpKind.LOSS: 1,
        OpKind.BACKWARD_COMPUTE: 1,
        OpKind.OPTIMIZER: 1,
        OpKind.DATA_LOAD: 1,
    }
    if style not in {"set-step", "steps"}:  # their steps end with the next data, where the graph has no place for it
        assert contradictions(trace) == []
    if style == "spans":
        assert trace.metadata["collect"]["other"]["tokenize"]["host_delays"] == 5


@pytest.mark.slow
def test_modules_are_compiled_as_often_as_alone(runs, alone):
    """Many modules, compiled in a step in which the roots of the loop are looked for, do not share what is compiled."""
    assert alone["compile-many"].said.startswith("compiled ")
    assert runs["compile-many"].said == alone["compile-many"].said


@pytest.mark.slow
def test_misuse_of_spans_costs_the_training_nothing(runs, alone):
    """A step that is no number is one warning; names without end are one name from some point on."""
    assert runs["misuse"].said == alone["plain"].said
    assert "the hook set-step failed (TypeError" in runs["misuse"].complained
    assert "(more names)" in runs["misuse"].trace.metadata["collect"]["other"]
    (failed,) = runs["misuse"].trace.metadata["failed_hooks"]
    assert (failed["hook"], failed["ranks"]) == ("set-step", [0])


#: A script as some launchers start it, which then says what its process has imported.
CODE = """
import runpy, sys
runpy.run_module("quick", run_name="__main__")
print("imported", *{name.partition(".")[0] for name in sys.modules})
"""


@pytest.fixture(scope="module")
def by_code(tmp_path_factory):
    """50 steps of code on the command line, with RANK and the like set, and the overhead measured."""
    variables = {"PYTHONPATH": SCRIPTS, "RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "STEPS": 50}
    collected = collect(tmp_path_factory.mktemp("code"), [sys.executable, "-c", CODE], "--overhead", **variables)
    assert collected.process.returncode == 0, collected.process.stderr
    return collected


@pytest.mark.slow
def test_code_on_the_command_line_is_recorded_without_heavy_imports(by_code):
    """In a training process is what torch itself imports, and nothing else of what tracekit's analysis needs."""
    assert counts(by_code.trace)[OpKind.OPTIMIZER] == 1
    (imported,) = (line.split()[1:] for line in by_code.process.stdout.splitlines() if line.startswith("imported "))
    assert {"torch", "_tracekit_recorder"} <= set(imported)
    assert not {"tracekit", "collectors", "analysis", "dashboards"} & set(imported)
    assert not HEAVY & set(imported)


@pytest.mark.slow
def test_overhead_is_measured(by_code):
    """--overhead compares blocks with and without recording, and gives the noise beside it."""
    cost = by_code.attempt["cost"]
    assert (cost["on_steps"], cost["off_steps"]) == (27, 18)  # less the first one behind each switch
    assert cost["share"] > -1
    assert cost["error"] >= 0
    assert "tracekit: recording costs " in by_code.process.stderr
