"""Checkpoints that the training thread writes: recognised by the functions around the work, or by copies in a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kineto_files import GEMM, document, event, kernel, launch, write
from tracekit import load
from tracekit.report.conclusions import Finding
from tracekit.report.report import Report

Event = dict[str, Any]
LINE = "train.py(88): keep"
COPY_US, COPIES = 50, 10


def report_on(folder: Path, *inside: str, category: str = "python_function", moved: int = 1 << 20) -> Report:
    """Five steps of ten kernels of 400 us, launched in 200 us; then ten tensors are copied, and the host works 9 ms.

    `inside`: functions or annotations around the copies and the work, the outermost first.
    """
    events: list[Event] = []
    at, number = 0.0, 0
    for step in range(5):
        begin, free = at, at
        for _ in range(10):
            number += 1
            events += [event("cpu_op", "aten::mm", at, 18), launch(at + 10, number)]
            start = max(free, at + 20)
            free = start + 400
            events.append(kernel(GEMM, start, 400, correlation=number))
            at += 20
        saves = at
        for _ in range(COPIES):
            number += 1
            start = max(free, at + 10)
            free = start + COPY_US
            events += [
                event("cpu_op", "aten::copy_", at, free + 5 - at),
                event("cuda_runtime", "cudaMemcpyAsync", at + 5, free - at - 3, correlation=number),
                event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", start, COPY_US, pid=0, tid=7, device=0, stream=7,
                      correlation=number, bytes=moved),
            ]  # fmt: skip
            at = free + 10
        at += 9000
        events += [event(category, name, saves + depth, at - saves - 2 * depth) for depth, name in enumerate(inside)]
        events.append(event("user_annotation", f"ProfilerStep#{step}", begin, at - begin))
    write(folder / "rank0.json", document(events, world=1))
    return load(folder).whatif()


def saves(report: Report) -> list[Finding]:
    return [one for one in report.findings if one.spent is not None and one.spent.reason == "checkpoint"]


@pytest.mark.parametrize(
    "function",
    [
        "torch/serialization.py(944): save",
        "/opt/lib/python3.12/site-packages/torch/distributed/checkpoint/state_dict_saver.py(120): save",
        "safetensors/torch.py(267): save_file",
        "<built-in function dump>",
        "transformers/modeling_utils.py(2600): save_pretrained",
        "ckpt.py(4): save_checkpoint",
    ],
)
def test_a_checkpoint_in_the_loop_is_written_in_the_background(function: str, tmp_path: Path) -> None:
    """The 9 ms of each step but the last go, after which no kernel waits; its ten copies of 50 us stay."""
    report = report_on(tmp_path, LINE, function, "torch/_utils.py(9): write")
    finding = report.findings[0]
    assert finding.spent is not None
    assert (finding.spent.reason, finding.spent.name, finding.spent.where) == ("checkpoint", function, LINE)
    assert finding.saved_s == pytest.approx(4 * 9e-3, rel=0.03)
    assert "async_save" in finding.suggested_fix
    assert [one.kind for one in report.findings if one.saved_s > 10e-3] == ["checkpoint-stalls"]
    assert report.gpu is not None
    idle_s = {one.reason: one.seconds for one in report.gpu.idle_by_reason}
    assert idle_s["checkpoint"] == pytest.approx(4 * 9e-3, rel=0.05)


@pytest.mark.parametrize("note", ["save_checkpoint", "## writing checkpoint ##", "Checkpoint"])
def test_an_annotation_is_enough(note: str, tmp_path: Path) -> None:
    report = report_on(tmp_path, note, category="user_annotation")
    assert [one.spent and one.spent.name for one in saves(report)] == [note]
    assert report.findings[0].saved_s == pytest.approx(4 * 9e-3, rel=0.03)


@pytest.mark.parametrize("name", ["model/checkpoint_wrapper.py(7): forward", "train.py(3): save_plot", "a.py(3): keep"])
def test_other_functions_are_no_checkpoint(name: str, tmp_path: Path) -> None:
    assert not saves(report_on(tmp_path, LINE, name))


def test_without_stacks_copies_in_a_row_look_like_one(tmp_path: Path) -> None:
    """Said with doubt, at most 9 ms a step; the Python is told once."""
    report = report_on(tmp_path)
    (finding,) = saves(report)
    assert finding.spent is not None
    assert "with_stack" in (finding.spent.cannot_tell or "")
    assert finding.bound
    assert finding.saved_s == pytest.approx(4 * 9e-3, rel=0.03)
    assert [one.kind for one in report.findings if one.saved_s > 10e-3] == ["checkpoint-stalls"]


def test_values_to_log_are_no_checkpoint(tmp_path: Path) -> None:
    """Ten copies of four bytes."""
    assert not saves(report_on(tmp_path, moved=4))
