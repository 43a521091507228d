"""How much longer a kernel takes on another GPU, against figures by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.analysis.hardware.ops import gpu_ops
from tests.analysis.hardware.passports import TENSORS, drawn_time_s, elementwise, matmul, passport, slower, usual
from tracekit.analysis.hardware.scaling import WIDE_90, Scaling, Work, works_of
from tracekit.base.errors import SelectionError

SMALL, LARGE = (1, 1024, 1024, 1024), (1, 2048, 1024, 1024)


def test_a_product_goes_by_the_nearest_shapes():
    """At distance 0 the weight is 1 / .5^2 = 4, at distance 1 it is 1 / 1.5^2 = .444: 2 ^ (4 / 4.444) = 1.866."""
    source = passport(matmul(SMALL, 1.0), matmul(LARGE, 3.0))
    target = passport(matmul(SMALL, 2.0), matmul(LARGE, 3.0), gpu="other")
    scaled = Scaling(source, target).of(Work("matmul", "fp32", SMALL))
    assert scaled.tier == "shapes"
    assert scaled.factor == pytest.approx(2 ** (4 / (4 + 1 / 1.5**2)))


def test_the_error_is_how_badly_the_other_kernels_predict_each_one():
    """Of three sizes in a row, the ends are each 4 apart in squares, the others 1: the last takes twice as long."""
    rows = [elementwise(sizes, 1.0) for sizes in TENSORS[:3]]
    target = passport(*rows[:2], elementwise(TENSORS[2], 2.0))
    near, far = 1 / 1.5**2, 1 / 4.5**2
    errors = np.log(2) * np.array([far / (near + far), 0.5, 1.0])
    error = Scaling(passport(*rows), target).of(Work("softmax", "fp32", elements=9)).error
    assert error == pytest.approx(1.4826 * np.median(errors), rel=1e-6)


def test_few_kernels_do_not_show_their_error():
    """Two tensors, or eight products: their sizes are one and four dimensions. Ratios of peaks are off by as much."""
    products = [(1, 1 << power, 64, 64) for power in range(6, 15)]
    source, target = (passport(*(matmul(shape, time) for shape in products)) for time in (1.0, 2.0))
    assert Scaling(source, target).of(Work("matmul", "fp32", SMALL)).error == pytest.approx(0.0, abs=1e-12)
    fewer = passport(*(matmul(shape, 2.0) for shape in products[:8]))
    assert Scaling(source, fewer).of(Work("matmul", "fp32", SMALL)).error == 0.49


def test_without_a_shape_the_median_of_the_larger_half_stands_in():
    shapes = [(1, 1 << power, 64, 64) for power in range(6, 12)]
    source = passport(*(matmul(shape, 1.0) for shape in shapes))
    target = passport(*(matmul(shape, time) for shape, time in zip(shapes, (9, 9, 9, 2, 3, 8), strict=True)))
    scaled = Scaling(source, target).of(Work("matmul", "fp32"))
    assert (scaled.tier, scaled.factor) == ("class", pytest.approx(3.0))


def test_memory_bound_kernels_go_by_their_size():
    times = (1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0)
    source = passport(*(elementwise(sizes, 1.0) for sizes in TENSORS))
    target = passport(*(elementwise(sizes, time) for sizes, time in zip(TENSORS, times, strict=True)))
    scaling = Scaling(source, target)
    small, large = (scaling.of(Work("elementwise", "fp32", elements=TENSORS[place][0])) for place in (0, -1))
    assert small.factor < 1.1
    assert large.factor > 1.9
    assert small.tier == large.tier == "class"


def test_without_measured_kernels_peaks_stand_in():
    source = passport(peak_tflops={"fp32": 10.0}, bandwidth_gb_s=1000.0)
    target = passport(peak_tflops={"fp32": 40.0}, bandwidth_gb_s=500.0, gpu="other")
    product, memory = (Scaling(source, target).of(work) for work in (Work("matmul", "fp32"), Work("softmax", "fp32")))
    assert (product.tier, product.factor) == ("roofline", 0.25)
    assert (memory.tier, memory.factor) == ("roofline", 2.0)
    assert product.error == memory.error > 0.4


def test_hosts_and_collectives_without_data_stay():
    scaling = Scaling(usual(), slower(2.0))
    for kind in ("host", "host copy", "collective"):
        assert (scaling.of(Work(kind)).tier, scaling.of(Work(kind)).factor) == ("unchanged", 1.0)


def test_collectives_with_data_are_scaled():
    rows = [("collective", "all_reduce of 2", "fp32", 1 << power, 1, 0, 0, 1.0, 1.0) for power in range(20, 26)]
    target = passport(*((*row[:-1], 0.5) for row in rows))
    assert Scaling(passport(*rows), target).of(Work("collective")).factor == pytest.approx(0.5)


@pytest.mark.parametrize("work", [
    Work("matmul", "fp32", SMALL), Work("matmul", "fp32"), Work("elementwise", "fp32", elements=99), Work("attention"),
    Work("softmax"), Work("optimizer"), Work("matmul", "fp64"), Work("compute", "bf16"), Work("collective"),
])  # fmt: skip
def test_the_same_gpu_changes_nothing(work):
    own = passport(matmul(SMALL, 0.3), matmul(LARGE, 0.7), *(elementwise(sizes, 0.1) for sizes in TENSORS))
    scaled = Scaling(own, own).of(work)
    assert (scaled.factor, scaled.error, scaled.cast_s) == (1.0, 0.0, 0.0)


def test_a_precision_goes_by_its_own_rows_and_adds_casts():
    """Operands of 2 x 1024^2 elements are read in 4 bytes and written in 2, at 12 bytes in 1e-11 s an element."""
    rows = [matmul(SMALL, 1.0), *(elementwise(sizes, sizes[0] * 1e-11) for sizes in TENSORS)]
    own = passport(*rows, matmul(SMALL, 0.1, "bf16"))
    scaling = Scaling(own, own, "bf16")
    product = scaling.of(Work("matmul", "fp32", SMALL, switched=True))
    assert product.factor == pytest.approx(0.1)
    assert product.cast_s == pytest.approx(2 * 1024**2 * 6 / (12 / 1e-11))
    assert scaling.of(Work("elementwise", "fp32", elements=1 << 20)).factor == pytest.approx(0.5)
    assert scaling.of(Work("softmax", "fp32", keeps_type=True)).factor == pytest.approx(1.0)


def test_without_measured_copies_casts_take_what_the_memory_allows():
    """At 3 TB/s, or no time if nobody knows."""
    for bandwidth_gb_s, cast_s in ((3000.0, 2 * 1024**2 * 6 / 3e12), (0.0, 0.0)):
        own = passport(matmul(SMALL, 1.0), matmul(SMALL, 0.1, "bf16"), bandwidth_gb_s=bandwidth_gb_s)
        assert Scaling(own, own, "bf16").of(Work("matmul", "fp32", SMALL, switched=True)).cast_s == pytest.approx(
            cast_s
        )


def test_tf32_is_for_products_of_libraries_only():
    own = passport(matmul(SMALL, 1.0), matmul(SMALL, 0.2, "tf32"))
    scaling = Scaling(own, own, "tf32")
    assert scaling.of(Work("matmul", "fp32", SMALL, switched=True)).factor == pytest.approx(0.2)
    assert scaling.of(Work("attention", "fp32")).factor == 1.0
    assert scaling.of(Work("elementwise", "fp32")).factor == 1.0


def test_autocast_left_ops_in_float32_that_another_precision_leaves_so():
    own = passport(matmul(SMALL, 1.0, "bf16"), matmul(SMALL, 5.0), *(elementwise(sizes, 1.0) for sizes in TENSORS))
    up = Scaling(own, own, "fp32", recorded="bf16")
    assert up.of(Work("elementwise", "bf16")).factor == pytest.approx(2.0)
    assert up.of(Work("elementwise", "fp32")).factor == 1.0
    tf32 = Scaling(own, own, "tf32", recorded="bf16")
    assert tf32.of(Work("attention", "bf16")).factor == pytest.approx(5.0)


def test_products_of_a_type_that_neither_card_has_are_scaled_as_those_of_other_types():
    source, target = passport(matmul(SMALL, 1.0)), passport(matmul(SMALL, 3.0), gpu="other")
    assert Scaling(source, target).of(Work("matmul", "fp8", SMALL)).factor == pytest.approx(3.0)


def test_a_precision_that_was_not_measured_is_refused():
    with pytest.raises(SelectionError, match="--precision 'fp8': the passport of other has fp32"):
        Scaling(usual(), passport(matmul(SMALL, 1.0), gpu="other"), "fp8").check()


@pytest.mark.slow
def test_bars_cover_what_a_simulated_gpu_takes():
    """Of 100 pairs of GPUs that differ in peak, bandwidth and size, 85 % to 98 % of models are within their bars."""
    rng = np.random.default_rng(7)
    shapes = 2 ** rng.integers((0, 6, 6, 6), (1, 14, 14, 13), (64, 4))
    covered, widths = [], []
    for _ in range(100):
        cards = [(10 ** rng.uniform(13, 14.5), 10 ** rng.uniform(11.5, 12.5), rng.integers(40, 200)) for _ in range(2)]
        source, target = (
            passport(
                *(matmul(tuple(shape), drawn_time_s(shape, *card, rng)) for shape in shapes.tolist()), gpu=str(card)
            )
            for card in cards
        )
        model = (2 ** rng.uniform((0, 9, 9, 9), (1, 13, 13, 13), (rng.integers(1, 7), 4))).astype(int).tolist()
        now, then = ([drawn_time_s(shape, *card, rng) for shape in model] for card in cards)
        scaled = [Scaling(source, target).of(Work("matmul", "fp32", tuple(shape))) for shape in model]
        value = sum(one.factor * time for one, time in zip(scaled, now, strict=True))
        half = np.exp(WIDE_90 * scaled[0].error)
        covered.append(value / half <= sum(then) <= value * half)
        widths.append(half**2)
    assert 0.85 <= np.mean(covered) <= 0.98
    assert np.median(widths) < 2


KERNELS = {
    "fp32 by its inputs": (("matrix-product", "ampere_sgemm", "aten::mm", '[[[4,8],[8,2]],["float","float"]]'),
                           Work("matmul", "fp32", (1, 4, 2, 8), switched=True)),
    "TF32 by its name": (("matrix-product", "gemm_f32f32_tf32f32", "aten::bmm",
                          '[[[3,4,8],[3,8,2]],["float","float"]]'),
                         Work("matmul", "tf32", (3, 4, 2, 8), switched=True)),
    "bf16 by its name": (("attention", "flash_fwd_bf16", None, None), Work("attention", "bf16")),
    "a norm": (("element-wise", "vectorized_layer_norm_kernel<float>", "aten::native_layer_norm", None),
               Work("norm", "fp32", keeps_type=True)),
    "a loss": (("element-wise", "nll<float>", "aten::nll_loss_forward", '[[[8,9]],["float"]]'),
               Work("elementwise", "fp32", elements=72, keeps_type=True)),
    "a collective": (("communication", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", None, None), Work("collective")),
    "an optimizer": (("optimizer", "multi_tensor_apply_kernel<adam>", None, None), Work("optimizer", keeps_type=True)),
    "a copy to the host": (("memory", "Memcpy DtoH (Device -> Pageable)", None, None),
                           Work("host copy", keeps_type=True)),
}  # fmt: skip


@pytest.mark.parametrize(("kernel", "expected"), KERNELS.values(), ids=KERNELS)
def test_what_a_kernel_does_is_read_from_its_name_and_inputs(kernel, expected):
    ops = gpu_ops(kernel)
    (work,) = works_of(ops, np.ones(ops.height)).each
    assert work == expected


def test_a_kernel_of_unknown_type_has_that_of_most_time():
    ops = gpu_ops(KERNELS["bf16 by its name"][0], ("element-wise", "mystery", None, None))
    assert [work.dtype for work in works_of(ops, np.array([2.0, 1.0])).each] == ["bf16", "bf16"]
