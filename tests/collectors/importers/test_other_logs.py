"""What is no trace is refused by its name, with what to do instead; a bare list of events is a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tracekit
from tests.handmade import run
from tests.kineto_files import document, event
from tracekit.base.errors import FormatError

ITERATION = (
    " iteration        3/      10 | consumed samples:  48 | elapsed time per iteration (ms): 729.5 | lm loss: 1.1\n"
)
TITAN = "[rank0]:\x1b[31mstep:  1  \x1b[32mloss:  8.1  \x1b[33mgrad_norm: 1.4  \x1b[34mtps: 7,000  \x1b[35mmfu: 40.1%\n"
WATCHDOG = "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=78, OpType=BROADCAST)\n"
RAS = "Warnings\n#0-0 (78db) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"
LOGS = {
    "megatron.log": (ITERATION, "a log of Megatron"),
    "torchtitan.txt": (TITAN, "a log of torchtitan"),
    "skyrl.log": ("2026 | INFO | Finished: 'generate', time cost: 45.11s\n", "lines of SkyRL's timers"),
    "cosmos.log": ("Step: 1/9, Reward Mean: 0.1, Reward Std: 0.2, Completion Length Mean: 3.0\n", "a log of cosmos-rl"),
    "trl.out": ("{'loss': 0.1, 'reward': 0.5, 'step_time': 12.5}\n", "(or TRL)"),
    "deepspeed.log": ("[Rank 0] step=10, skipped=0, lr=[1e-05]\n", "a log of DeepSpeed"),
    "stderr.log": (WATCHDOG, "messages of NCCL's watchdog about ranks of a hung job; type `tracekit hang"),
    "ncclras": (RAS, "a report of NCCL's RAS (ncclras); type `tracekit hang"),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_is_not_read_is_named(tmp_path: Path, name: str) -> None:
    text, words = LOGS[name]
    (tmp_path / name).write_text(f"some line before\n{text}")
    for command in (["whatif"], ["store", "list"], ["rl"]):
        ran = run(*command, tmp_path / name)
        assert (ran.code, ran.out) == (2, "")
        assert words in ran.message


def test_scalars_of_tensorboard_are_named(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(b"H\0\0\0\0\0\0\0\x96\x92H\x9d\tns\xcf\x05\xdaA\x1a\rbrain.Event:2R.")
    assert "scalars of TensorBoard, not a trace" in run("whatif", path).message


def npu(**more: object) -> list[dict[str, object]]:
    """Events of an Ascend profiler, whose kernels have no category."""
    named = {"ph": "M", "name": "process_name", "pid": 8, "args": {"name": "Ascend Hardware"}}
    return [named, {"ph": "X", "name": "MatMul", "pid": 8, "tid": 3, "ts": "10", "dur": 5} | more]


def test_traces_of_other_accelerators_are_named_also_as_lists(tmp_path: Path) -> None:
    operator = event("cpu_op", "aten::mm", 0, 5)
    for content, words in (
        ([operator, *npu()], "Ascend NPUs"),
        (npu(), "Ascend NPUs"),
        ({"traceEvents": [operator, *npu()]}, "Ascend NPUs"),
        ({"traceEvents": [operator, operator | {"cat": "dpu_op"}]}, "the categories dpu_op"),
        ({"traceEvents": [operator, operator | {"cat": "Spyre op"}]}, "AIU (Spyre)"),
    ):
        (tmp_path / "trace.json").write_text(json.dumps(content))
        with pytest.raises(FormatError, match="an accelerator that tracekit does not know") as error:
            tracekit.load(tmp_path / "trace.json")
        assert words in str(error.value)
        assert "CPU only" not in str(error.value)


def test_a_bare_list_of_events_reads_as_the_object_with_them(tmp_path: Path) -> None:
    events = [event("cpu_op", "aten::mm", 0, 5), event("kernel", "gemm", 10, 20, device=0, stream=7, correlation=1)]
    for name, content in (("list.json", events), ("object.json", document(events))):
        (tmp_path / name).write_text(json.dumps(content))
    bare, whole = (tracekit.load(tmp_path / name) for name in ("list.json", "object.json"))
    assert bare.trace.ops.equals(whole.trace.ops)
    assert "gemm" in bare.trace.ops["name"].to_list()
