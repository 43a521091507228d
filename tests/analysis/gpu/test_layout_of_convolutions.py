"""Convolutions around which tensors are transposed: named as a layout, and priced without the transposes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kineto_files import document, event, kernel, launch, write
from tracekit import load
from tracekit.analysis.detectors.slow_kernels import SlowKernels

LAST = "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true, (cudnnKernelDataType_t)0>(...)"
FIRST = "void cudnn::ops::nhwcToNchwKernel<__half, __half, float, true, false, (cudnnKernelDataType_t)0>(...)"
CONVOLUTION = "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32"
NORM = "void at::native::batch_norm_transform_input_kernel<c10::Half, float, float, true>(...)"
IMAGES = [64, 256, 56, 56]
#: To read 64 x 256 x 56 x 56 values of 2 bytes at 3.35 TB/s, microseconds.
READ_US = 2 * 64 * 256 * 56 * 56 / 3.35e12 * 1e6
#: Operator, kernel, microseconds: input and weight are transposed, and the output back.
NCHW = [("cudnn_convolution", LAST, 120), ("cudnn_convolution", LAST, 20), ("cudnn_convolution", CONVOLUTION, 400),
        ("cudnn_convolution", FIRST, 110), ("native_batch_norm", NORM, 300)]  # fmt: skip
NHWC = [("cudnn_convolution", FIRST, 120), ("cudnn_convolution", FIRST, 20), ("cudnn_convolution", CONVOLUTION, 400),
        ("cudnn_convolution", LAST, 110), ("native_batch_norm", NORM, 300)]  # fmt: skip


def report_on(folder: Path, layer: list[tuple[str, str, int]], **head: Any) -> Any:
    """The report on 4 steps of ten such layers, launched far ahead of the GPU."""
    args = {"Input Dims": [IMAGES, [256, 256, 3, 3]], "Input type": ["c10::Half", "c10::Half"]}
    events, end = [], 30.0
    for number, (operator, name, taken) in enumerate(layer * 40):
        at = number * 20.0
        events += [event("cpu_op", f"aten::{operator}", at, 15, **args), launch(at + 5, number + 1),
                   kernel(name, end, taken, correlation=number + 1)]  # fmt: skip
        if number % (10 * len(layer)) == 0:
            step = number // (10 * len(layer))
            events.append(event("user_annotation", f"ProfilerStep#{step}", at, 200 * len(layer) - 0.5))
        end += taken
    write(folder / "trace.json", document(events, world=1, **head))
    return load(folder).whatif()


H100 = {"deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}]}


def test_transposes_go_with_channels_last_and_norms_may_become_faster(tmp_path: Path) -> None:
    """250 of 950 us a layer for sure; of the 300 us of a norm, all but one read of the images at most."""
    report = report_on(tmp_path, NCHW, **H100)
    finding = report.findings[0]
    assert finding.spent is not None
    assert (finding.spent.reason, finding.spent.name, finding.spent.count) == ("kernel", "nchwToNhwc", 120)
    assert "channels_last" in finding.suggested_fix
    assert finding.saved_s == pytest.approx(40 * 250e-6, rel=0.01)
    evidence = load(tmp_path).evidence
    (candidate,) = (one for one in SlowKernels().find(evidence) if one.most is not None)
    most_s = evidence.recorded_s - float(evidence.step_times((candidate.most,)).mean())
    assert most_s == pytest.approx(40 * (250 + 300 - READ_US) * 1e-6, rel=0.01)


def test_on_an_unknown_card_only_the_transposes_are_priced(tmp_path: Path) -> None:
    finding = next(
        one for one in report_on(tmp_path, NCHW).findings if one.spent is not None and one.spent.name == "nchwToNhwc"
    )
    assert finding.saved_s == pytest.approx(40 * 250e-6, rel=0.01)
    assert not finding.bound


def test_tensors_in_channels_last_are_not_told_to_become_that(tmp_path: Path) -> None:
    """More is transposed to NCHW than back: the tensors are channels_last, and the kernels are not."""
    finding = report_on(tmp_path, NHWC, **H100).findings[0]
    assert finding.spent is not None
    assert finding.spent.name == "nhwcToNchw"
    assert "memory_format" not in finding.suggested_fix
    assert "autocast" in finding.suggested_fix


def test_a_few_transposes_are_no_finding(tmp_path: Path) -> None:
    few = [("cudnn_convolution", LAST, 5), ("cudnn_convolution", CONVOLUTION, 400), ("native_batch_norm", NORM, 300)]
    assert not [one for one in report_on(tmp_path, few, **H100).findings if "transpose" in one.effect]
