"""Jobs of other shapes: every one is recorded whole, and trains to the same bits as alone."""

import socket
import sys

import polars as pl
import pytest

from tests.collectors.conftest import SCRIPTS, collect, plain, python, torchrun, weights
from tracekit.analysis.attribution import attribute
from tracekit.analysis.job_replay import JobReplay
from tracekit.model import OpKind, Worker

pytest.importorskip("torch", reason="collecting needs the extra `torch`")


def counts(trace) -> dict[str, int]:
    """Ops of each kind per worker and step, where all have as many; without the host work between them."""
    table = trace.ops.filter(pl.col("kind") != str(OpKind.HOST_DELAY)).group_by("rank", "step", "kind").len()
    return {
        kind: part["len"][0] if part["len"].n_unique() == 1 else part["len"].to_list()
        for (kind,), part in table.group_by("kind")
    }


def test_ddp_with_gradient_accumulation(tmp_path):
    """Four data-parallel ranks, two microbatches, the buckets of a step one reduction behind the second backward."""
    collected = collect(tmp_path, torchrun(4, "ddp_accumulation.py"))
    trace = collected.trace
    assert (trace.layout.dp, trace.layout.pp) == (4, 1)
    assert collected.attempt["layout_source"] == "gradient groups"
    assert counts(trace) == {
        OpKind.FORWARD_COMPUTE: 2,
        OpKind.BACKWARD_COMPUTE: 2,
        OpKind.ALL_REDUCE: 1,
        OpKind.OPTIMIZER: 1,
    }
    assert attribute(JobReplay.from_trace(trace)).trust.replay_error < 0.05
    alone = plain(torchrun(4, "ddp_accumulation.py"), tmp_path)
    assert weights(alone) == collected.weights


def test_fsdp2_with_interleaved_pipeline(tmp_path):
    """Two chunks per rank, parameters gathered before and gradients scattered behind the computes."""
    collected = collect(tmp_path, torchrun(4, "fsdp_interleaved.py"))
    trace = collected.trace
    assert (trace.layout.dp, trace.layout.pp, trace.layout.vpp) == (2, 2, 2)
    seen = counts(trace)
    assert seen[OpKind.FORWARD_COMPUTE] == seen[OpKind.BACKWARD_COMPUTE] == 8
    assert seen[OpKind.GRADS_REDUCE_SCATTER] == 1
    assert OpKind.PARAMS_ALL_GATHER in seen
    assert trace.metadata["collect"]["unmatched_p2p"] == 0
    assert attribute(JobReplay.from_trace(trace)).trust.replay_error < 0.05
    alone = plain(torchrun(4, "fsdp_interleaved.py"), tmp_path)
    assert weights(alone) == collected.weights


FSDP_STEP = {
    OpKind.FORWARD_COMPUTE: 2,
    OpKind.FORWARD_COLLECTIVES: 1,
    OpKind.BACKWARD_COMPUTE: 2,
    OpKind.BACKWARD_COLLECTIVES: 1,
    OpKind.GRADS_REDUCE_SCATTER: 2,
    OpKind.OPTIMIZER: 1,
}


def test_fsdp2_without_a_pipeline(tmp_path):
    """Two data-parallel ranks, gradients of two layers scattered; what computes wait for is apart from them."""
    collected = collect(tmp_path, torchrun(2, "fsdp_alone.py"))
    trace = collected.trace
    assert (trace.layout.dp, trace.layout.pp) == (2, 1)
    assert collected.attempt["layout_source"] == "gradient groups"
    assert counts(trace) == FSDP_STEP
    assert trace.metadata["collect"]["nested"] == {"all_gather_single@default_pg": 2 * 5 * 4}
    assert attribute(JobReplay.from_trace(trace)).trust.replay_error < 0.05
    alone = plain(torchrun(2, "fsdp_alone.py"), tmp_path)
    assert weights(alone) == collected.weights


def test_fsdp2_names_the_slow_rank(tmp_path):
    """The other waits for it in the gathering inside its forward; that is not time of its own."""
    collected = collect(tmp_path, torchrun(2, "fsdp_alone.py"), STEPS=12, DEVICE_MS=10, SLOW_RANK=1, SLOW_MS=40)
    verdict = attribute(JobReplay.from_trace(collected.trace))
    assert verdict.slowest_workers[0] == Worker(1, 0)
    slow, other = (
        collected.trace.ops.filter(rank=rank, kind=OpKind.FORWARD_COMPUTE)["duration"].median() for rank in (1, 0)
    )
    assert slow > 1.5 * other


def test_a_pipeline_without_a_data_loader(tmp_path):
    """Where a step begins with a transfer, that is the transfer of this step; stages may differ in their layers."""
    collected = collect(tmp_path, torchrun(2, "plain_pipeline.py"))
    trace = collected.trace
    assert (trace.layout.dp, trace.layout.pp) == (1, 2)
    assert trace.metadata["collect"]["unmatched_p2p"] == 0
    received = trace.ops.filter(kind=OpKind.FORWARD_RECV)
    assert received.group_by("step").agg(pl.col("microbatch").sort())["microbatch"].to_list() == [[0, 1, 2]] * 5
    assert attribute(JobReplay.from_trace(trace)).trust.replay_error < 0.05
    assert weights(plain(torchrun(2, "plain_pipeline.py"), tmp_path)) == collected.weights


def test_a_sharded_optimizer(tmp_path):
    """It steps another inside its own step, then sends the weights around: one optimizer, nothing of the next step.

    Warnings about how the user calls DistributedDataParallel name the user's line.
    """
    collected = collect(tmp_path, torchrun(2, "sharded_optimizer.py"))
    assert counts(collected.trace) == {
        OpKind.FORWARD_COMPUTE: 1,
        OpKind.BACKWARD_COMPUTE: 1,
        OpKind.ALL_REDUCE: 1,
        OpKind.OPTIMIZER: 1,
    }
    assert "broadcast@default_pg" in collected.trace.metadata["collect"]["other"]
    assert "hooks_comm.py" not in collected.process.stderr
    assert weights(plain(torchrun(2, "sharded_optimizer.py"), tmp_path)) == collected.weights


def test_ranks_that_the_script_spawns_itself(tmp_path):
    """torch.multiprocessing instead of torchrun: both ranks are recorded, the process that spawns them is not."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    collected = collect(tmp_path, python("fsdp_alone.py", port))
    assert collected.process.returncode == 0, collected.process.stderr
    assert [rank["closed"] for rank in collected.attempt["ranks"]] == [True, True]
    assert not collected.attempt["missing_ranks"]
    assert collected.trace.coverage().complete
    assert counts(collected.trace) == FSDP_STEP
    assert len(collected.weights) == 2


def test_functional_collectives(tmp_path):
    """Seen from their start to the wait for their result; one that nobody waits for is counted, not guessed."""
    collected = collect(tmp_path, torchrun(2, "functional.py"))
    assert collected.process.returncode == 0, collected.process.stderr
    assert counts(collected.trace) == {
        OpKind.FORWARD_COMPUTE: 1,
        OpKind.BACKWARD_COMPUTE: 1,
        OpKind.ALL_REDUCE: 2,
        OpKind.OPTIMIZER: 1,
        OpKind.PARAMS_ALL_GATHER: 1,
    }
    assert "rank 0: 3 transfers were never waited for" in collected.process.stderr


@pytest.mark.parametrize(
    "launch", [["-m", "loop"], ["-c", "import runpy; runpy.run_module('loop', run_name='__main__')"]]
)
def test_other_ways_to_start_a_process(tmp_path, launch):
    """A module, and code on the command line, as some launchers do; RANK and the like may be set."""
    command = [sys.executable, *launch, "plain"]
    variables = {"PYTHONPATH": SCRIPTS, "RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    collected = collect(tmp_path, command, **variables)
    assert collected.process.returncode == 0, collected.process.stderr
    assert collected.trace.steps.tolist() == [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def plain_weights(tmp_path_factory):
    """What every style of the single-process loop trains to."""
    return plain(python("loop.py", "plain"), tmp_path_factory.mktemp("plain")).stdout


@pytest.mark.parametrize(
    "style",
    [
        *(
            "plain",
            "scaler",
            "compile",
            "compile-in-place",
            "checkpointing",
            "fork",
            "spawn",
            "spans",
            "set-step",
            "eval",
        ),
        *("closure", "two-modules", "module-in-data", "autograd-grad", "functional"),
    ],
)
def test_single_process_loops(tmp_path, plain_weights, style):
    """One forward, backward, optimizer step and batch per step, whatever the loop's style.

    The compiled styles use fullgraph=True: an additional graph break would be an error.
    """
    collected = collect(tmp_path, ["python", "-W", "error::UserWarning", *python("loop.py", style)[1:]])
    assert collected.process.returncode == 0, collected.process.stderr
    assert "failed" not in collected.process.stderr
    assert collected.process.stdout.startswith(plain_weights)
    first = 100 if style == "set-step" else 1
    assert list(collected.trace.steps) == list(range(first, first + 5)), collected.process.stderr
    seen = counts(collected.trace)
    assert seen.pop(OpKind.CHECKPOINT, 0) == (style != "closure")
    assert attribute(JobReplay.from_trace(collected.trace)).trust.replay_error < 0.05
    assert seen == {
        OpKind.FORWARD_COMPUTE: 1 + (style == "two-modules"),
        OpKind.BACKWARD_COMPUTE: 1,
        OpKind.OPTIMIZER: 1,
        OpKind.DATA_LOAD: 1,
    }
    if style == "spans":
        assert collected.trace.metadata["collect"]["other"]["tokenize"]["host_delays"] == 5


def test_modules_are_compiled_as_often_as_alone(tmp_path):
    """Many modules, compiled in a step in which the roots of the loop are looked for, do not share what is compiled."""
    collected = collect(tmp_path, python("loop.py", "compile-many"))
    alone = plain(python("loop.py", "compile-many"), tmp_path)
    assert collected.process.returncode == 0, collected.process.stderr
    assert alone.stdout.startswith("compiled ")
    assert collected.process.stdout.startswith(alone.stdout)


def test_misuse_of_spans_costs_the_training_nothing(tmp_path, plain_weights):
    """A step that is no number is one warning; names without end are one name from some point on."""
    collected = collect(tmp_path, python("loop.py", "misuse"))
    assert collected.process.returncode == 0, collected.process.stderr
    assert collected.process.stdout.startswith(plain_weights)
    assert "the hook set-step failed (TypeError" in collected.process.stderr
    assert "(more names)" in collected.trace.metadata["collect"]["other"]


def test_steps_and_every_choose_what_is_recorded(tmp_path):
    """--steps 2:9 --every 3 keeps the steps 2, 5 and 8."""
    collected = collect(tmp_path, python("loop.py", "plain"), "--steps", "2:9", "--every", "3", STEPS=12)
    assert list(collected.trace.steps) == [2, 5, 8]


def test_sampling_keeps_all_ranks_on_the_same_steps(tmp_path):
    """Hooks go out and come back on the same step everywhere."""
    collected = collect(tmp_path, torchrun(4, "dp2_pp2.py"), "--every", "4", STEPS=10, DEVICE_MS=1)
    assert list(collected.trace.steps) == [1, 5, 9]
    assert collected.trace.coverage().complete
    assert attribute(JobReplay.from_trace(collected.trace)).trust.replay_error < 0.05


def test_overhead_is_measured(tmp_path):
    """--overhead compares blocks with and without recording, and gives the noise beside it."""
    collected = collect(tmp_path, python("loop.py", "plain"), "--overhead", STEPS=50)
    overhead = collected.attempt["overhead"]
    assert overhead["on_steps"] > 0
    assert overhead["off_steps"] > 0
    assert overhead["ratio"] > 0
    assert overhead["noise"] >= 0
    assert "overhead: step time with recording / without" in collected.process.stderr
