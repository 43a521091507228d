"""Attention as separate products: which kernels it consists of, and how long one fused kernel takes instead."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.analysis.gpu.jobs import loaded
from tests.kineto_files import document, event, kernel, launch, write
from tracekit.analysis.gpu.roofline import Card, find_unfused_attention
from tracekit.collectors.importers.kineto.reader import kernel_classes

#: 8 x 16 heads of 64, and 2,048 tokens.
QUERY, KEY, SCORES = [128, 2048, 64], [128, 64, 2048], [128, 2048, 2048]
BF16 = "c10::BFloat16"
H100 = "NVIDIA H100 80GB HBM3"
#: Operator, kernel, sizes of the inputs, microseconds.
Row = tuple[str, str, list[list[int]], float]
LINEAR: Row = ("aten::mm", "nvjet_sm90_a", [[16384, 1024], [1024, 4096]], 150)
FORWARD: list[Row] = [
    ("aten::bmm", "nvjet_sm90_b", [QUERY, KEY], 400),
    ("aten::div", "elementwise_kernel", [SCORES], 700),
    ("aten::masked_fill_", "elementwise_kernel_fill", [SCORES, [2048, 2048]], 1500),
    ("aten::_softmax", "softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 11, false, false>", [SCORES], 1500),
    ("aten::bmm", "nvjet_sm90_c", [SCORES, QUERY], 400),
]
BACKWARD: list[Row] = [
    ("aten::bmm", "nvjet_sm90_d", [SCORES, QUERY], 400),
    ("aten::bmm", "nvjet_sm90_e", [QUERY, KEY], 400),
    ("aten::_softmax_backward_data", "cunn_SoftMaxBackwardSmem<SoftMaxBackwardEpilogue>", [SCORES, SCORES], 1300),
    ("aten::masked_fill_", "elementwise_kernel_fill", [SCORES, [2048, 2048]], 1500),
    ("aten::div", "elementwise_kernel", [SCORES], 700),
    ("aten::bmm", "nvjet_sm90_f", [SCORES, QUERY], 400),
    ("aten::bmm", "nvjet_sm90_g", [KEY, SCORES], 400),
]
CLASSES = [[16384, 1024]]
LOSS: list[Row] = [
    ("aten::_log_softmax", "softmax_warp_forward<float, float, float, 10, true, false>", CLASSES, 500),
    ("aten::_log_softmax_backward_data", "softmax_warp_backward<float, float, float, 10, true, false>", CLASSES, 500),
]
STEP = [LINEAR, *FORWARD, LINEAR, *LOSS, LINEAR, *BACKWARD, LINEAR]
#: Both products compute 2 x 2 x 128 x 2048 x 2048 x 64: 139 us at 989 TFLOP/s; to move 4 x 128 x 2048 x 64 values of 2
#: bytes takes 40 us at 3.35 TB/s.
FUSED_US = 4 * 128 * 2048**2 * 64 / 989e12 * 1e6


def table(rows: Iterable[Row], *, operators: bool = True, shapes: bool = True) -> pl.DataFrame:
    rows = list(rows)
    kinds = kernel_classes().of([name for _, name, _, _ in rows])
    found, start = [], 0.0
    for (operator, name, sizes, taken), kind in zip(rows, kinds, strict=True):
        inputs = f"[{sizes}, {[BF16] * len(sizes)}]".replace("'", '"')
        found.append((name, operator if operators else None, str(kind), inputs if shapes else None, start, taken))
        start += taken
    schema = dict.fromkeys(("name", "operator", "kind", "inputs"), pl.String)
    return pl.DataFrame(found, {**schema, "start": pl.Float64, "duration": pl.Float64}, orient="row")


def found_in(kernels: pl.DataFrame, lane: Any = None, card: str | None = H100) -> Any:
    lanes = np.zeros(kernels.height, np.int64) if lane is None else lane
    return find_unfused_attention(kernels, lanes, Card.named(card))


def groups(found: Any) -> list[int]:
    return [int(one) for one in found.group]


@pytest.mark.parametrize(("operators", "shapes"), [(True, True), (True, False), (False, False)])
def test_forward_and_backward_are_whole_and_nothing_else_is(operators: bool, shapes: bool) -> None:
    """Two products and what lies between in the forward, four in the backward; neither layers nor the loss."""
    found = found_in(table(STEP, operators=operators, shapes=shapes))
    assert groups(found) == [-1, *[0] * 5, -1, -1, -1, -1, *[1] * 7, -1]
    assert [STEP[row][0] for row in np.flatnonzero(found.inner)] == [
        "aten::div", "aten::masked_fill_", "aten::_softmax", "aten::_softmax_backward_data", "aten::masked_fill_",
        "aten::div",
    ]  # fmt: skip


def test_a_fused_kernel_computes_both_products_and_moves_no_scores() -> None:
    """The backward has five products to the forward's two."""
    found = found_in(table(STEP))
    assert found.fused_s * 1e6 == pytest.approx([FUSED_US, 2.5 * FUSED_US])
    least, most = found.less_s(table(STEP)["duration"].to_numpy() * 1e-6, 0.7)
    assert least.sum() * 1e6 == pytest.approx(4500 - FUSED_US / 0.7 + 5100 - 2.5 * FUSED_US / 0.7)
    assert (least == most).all()


@pytest.mark.parametrize("lacks", ["card", "shapes"])
def test_without_sizes_or_card_the_scores_go_at_least_and_all_of_it_at_most(lacks: str) -> None:
    kernels = table(STEP, shapes=lacks != "shapes")
    found = found_in(kernels, card=None if lacks == "card" else H100)
    least, most = found.less_s(kernels["duration"].to_numpy(), 0.7)
    assert (least.sum(), most.sum()) == (700 + 1500 + 1500 + 1300 + 1500 + 700, 4500 + 5100)


def test_streams_that_take_turns_do_not_hide_each_others_attention() -> None:
    """A second stream runs the same a microsecond later."""
    one = table(STEP)
    both = pl.concat([one, one.with_columns(pl.col("start") + 1)])
    lane = np.repeat([0, 1], one.height)
    order = np.argsort(both["start"].to_numpy(), kind="stable")
    found = found_in(both[order], lane[order])
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    assert (found.group >= 0)[back].tolist() == 2 * (found_in(one).group >= 0).tolist()


@pytest.mark.parametrize(
    "between",
    [
        pytest.param([("aten::_softmax", "cunn_SoftMaxForward<SoftMaxForwardEpilogue>", [[16384, 64]], 20),
                      ("aten::topk", "gatherTopK", [[16384, 64]], 20)], id="a router of experts"),
        pytest.param([("aten::_softmax", "cunn_SoftMaxForward<SoftMaxForwardEpilogue>", [[16384, 4096]], 20)],
                     id="a softmax over classes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shapes", [True, False])
def test_other_softmaxes_between_products_are_no_attention(between: list[Row], shapes: bool) -> None:
    assert set(groups(found_in(table([LINEAR, *between, LINEAR], shapes=shapes)))) == {-1}


def test_a_first_step_without_operators_is_priced_as_the_others() -> None:
    """What was launched before the recording has no operator; its softmax is the same kernel."""
    kernels = pl.concat(
        [table(FORWARD, operators=False, shapes=False), table(FORWARD).with_columns(pl.col("start") + 9e3)]
    )
    assert found_in(kernels).fused_s * 1e6 == pytest.approx([FUSED_US, FUSED_US])


def recorded(folder: Path, rows: list[Row], count: int, *, queue: int | None = None) -> Path:
    """Steps of these kernels, one launched every 20 us; with a `queue`, a launch returns when the GPU has made room."""
    events: list[dict[str, Any]] = []
    ends: list[float] = []
    at = 0.0
    for number, (operator, name, sizes, taken) in enumerate(rows * count):
        args = {"Input Dims": sizes, "Input type": [BF16] * len(sizes)}
        returned = at + 15 if queue is None or number < queue else max(at + 15, ends[number - queue])
        events += [event("cpu_op", operator, at, returned - at + 3, **args),
                   {**launch(at + 10, number + 1), "dur": returned - at - 10}]  # fmt: skip
        start = max(ends[-1] if ends else 0.0, at + 20)
        events.append(kernel(name, start, taken, correlation=number + 1))
        ends.append(start + taken)
        at = returned + 5
    write(folder / "trace.json", document(events, world=1, deviceProperties=[{"name": H100}]))
    return folder


def test_attention_is_the_first_finding_and_priced_whole(tmp_path: Path) -> None:
    report = loaded(recorded(tmp_path, STEP, 4)).whatif()
    finding = report.findings[0]
    assert finding.spent is not None
    assert (finding.spent.name, finding.spent.count) == ("aten::_softmax", 4 * 12)
    assert finding.saved_s * 1e6 == pytest.approx(4 * (9600 - 3.5 * FUSED_US / 0.7), rel=1e-3)
    assert finding.bound
    assert "scaled_dot_product_attention" in finding.suggested_fix


@pytest.mark.slow
def test_a_host_that_waits_for_room_in_the_queue_of_launches_is_not_busy(tmp_path: Path) -> None:
    """Of 2,400 launches, 600 fit into the queue: steps of 12 ms save as much as with room for all of them."""
    step = [LINEAR, *FORWARD, LINEAR, *BACKWARD, LINEAR, LINEAR]
    full = loaded(recorded(tmp_path / "full", step, 150, queue=600)).whatif().findings[0]
    free = loaded(recorded(tmp_path / "free", step, 150)).whatif().findings[0]
    assert free.saved_s == pytest.approx(150 * (9600 - 3.5 * FUSED_US / 0.7) / 1e6, rel=1e-3)
    assert full.saved_s == pytest.approx(free.saved_s, rel=0.02)
    assert full.spent == free.spent
