"""Sizes of gradients and the time of their reductions, from records written by hand."""

import numpy as np
import polars as pl
import pytest

from tests.collectors.merge.test_ops import GROUP, compute, merged, rank
from tracekit.collectors.merge.collective_ops import _ON_HOST, _ON_STREAM, _delay, _service, _TimedBuckets
from tracekit.collectors.record.wire_format import Category, Flag

MIB = 1 << 20


def _bucket(start, end, size):
    return (Category.COLLECTIVE, "allreduce", start, end, {"peer": 0, "extra": size, "flags": Flag.BUCKET})


def _recorded(late, *, gradients=True):
    rows = [compute("forward-compute", 10, 100), compute("backward-compute", 110, 300)]
    ranks = []
    for number in range(2):
        start = 150 + late * number
        one = rank(
            number,
            [*rows, _bucket(start, 200, 10 * MIB), _bucket(start + 100, 290, 2 * MIB)],
            mesh={"names": ["dp"], "ranks": [0, 1]},
            groups=[GROUP],
        )
        if gradients:
            one.facts["gradients"] = [{"bytes": [2 * MIB, 10 * MIB], "bucket_cap_mb": 5.0, "first_bucket_mb": 1.0}]
        ranks.append(one)
    return merged(*ranks).trace.metadata


def test_buckets_are_timed_alone_and_beside_the_backward() -> None:
    figures = _recorded(late=10)["gradients"]
    assert figures["bytes"] == [[2 * MIB, 10 * MIB]]
    assert figures["bucket_cap_mb"] == 5.0
    # From the last rank on: 160 to 200 beside the backward, which ends when its last bucket is ready, at 260.
    assert [(row[0], *(round(each, 6) for each in row[1:])) for row in figures["reductions"]] == [
        (10 * MIB, 0.0, 0.04, 0.05),
        (2 * MIB, 0.03, 0.0, 0.15),
    ]


def test_of_buckets_that_equally_many_steps_have_those_of_the_later_step_count() -> None:
    """The first step, in which the reducer learns the order of gradients, has others than those after it."""
    second = {"step": 2}
    rows = [
        compute("forward-compute", 10, 100),
        compute("backward-compute", 110, 300),
        _bucket(150, 200, 9 * MIB),
        _bucket(250, 290, 3 * MIB),
        (Category.STEP, "step", 1000, 2000, {**second, "flags": Flag.COMPLETE | Flag.RECORDING}),
        compute("forward-compute", 1010, 1100, **second),
        compute("backward-compute", 1110, 1300, **second),
        *((*row[:4], row[4] | second) for row in (_bucket(1150, 1200, 10 * MIB), _bucket(1250, 1290, 2 * MIB))),
    ]
    ranks = [rank(number, rows, mesh={"names": ["dp"], "ranks": [0, 1]}, groups=[GROUP]) for number in range(2)]
    for one in ranks:
        one.facts["gradients"] = [{"bytes": [2 * MIB, 10 * MIB], "bucket_cap_mb": 5.0, "first_bucket_mb": 1.0}]
    reductions = merged(*ranks).trace.metadata["gradients"]["reductions"]
    assert [row[0] for row in reductions] == [10 * MIB, 2 * MIB]


def test_the_reducer_copies_bucket_after_bucket_until_its_backward_ends() -> None:
    """From 290 ms, when the second bucket is reduced, the backward copies it for 10 ms: at most 5 ms a MiB. Both would
    take (300 - 260) / 12 from the first one on.
    """
    assert _recorded(late=10)["gradients"]["copy_per_mb_s"] == pytest.approx(0.040 / 12)


def test_two_buckets_share_the_threads_of_gloo() -> None:
    ready, end = np.array([[0.0, 10.0, 20.0]]), np.array([[30.0, 40.0, 50.0]])
    alone, beside = _service(ready, end, 2)
    # 0-10 the first, 10-30 the first two, 30-40 the last two, 40-50 the last; ready last at 20.
    assert (alone.tolist(), beside.tolist()) == ([[5.0, 10.0, 15.0]], [[15.0, 5.0, 0.0]])
    alone, beside = _service(ready, end, 1)  # a stream of a GPU: one after the other
    assert (alone.tolist(), beside.tolist()) == ([[10.0, 10.0, 10.0]], [[20.0, 0.0, 0.0]])


def test_the_delay_of_a_backward_is_what_it_waits_for_a_processor_more_than_elsewhere() -> None:
    step = {"category": "step", "rank": 0, "step": 1, "name": "step", "peer": 60_000, "chunk": 140_000}
    reductions = pl.DataFrame({"rank": [0], "step": [1], "start_ns": [[0, 100_000_000]], "queued_us": [[0, 40_000]]})
    # Of 100 ms between the buckets it ran for 60, of 100 ms elsewhere for 80: a quarter slower.
    assert _delay(reductions, pl.DataFrame([step])) == {"delay_s": pytest.approx(0.025), "delay_error_s": 0.0}
    # In another step, it runs for 70 of the 100 ms between the buckets, of 100 ms elsewhere for 70.
    both = pl.DataFrame([step, step | {"step": 2}])
    other = reductions.with_columns(step=pl.lit(2, pl.Int64), queued_us=pl.lit([0, 30_000]))
    figures = _delay(pl.concat([reductions, other]), both)
    assert figures == {"delay_s": pytest.approx(0.1 - 0.065 / 0.75), "delay_error_s": pytest.approx(0.005 / 0.75)}
    # Elsewhere, it does not run at all: that shows no usual share.
    assert _delay(reductions, pl.DataFrame([step | {"chunk": 60_000}])) == {}
    assert _delay(reductions.with_columns(queued_us=pl.lit([-1, -1])), pl.DataFrame([step])) == {}


def test_buckets_of_no_step_have_no_figures_and_those_of_a_gpu_are_not_copied() -> None:
    none, ready, over = np.zeros((0, 1)), np.array([[0.1]]), np.array([0.3])
    assert _TimedBuckets([MIB], none, none, np.zeros(0), _ON_HOST).rows() == []
    assert _TimedBuckets([MIB], none, none, np.zeros(0), _ON_HOST).copy_per_mb_s() == 0.0
    assert _TimedBuckets([MIB], ready, ready + 0.1, over, _ON_HOST).copy_per_mb_s() == pytest.approx(0.1)
    assert _TimedBuckets([MIB], ready, ready + 0.1, over, _ON_STREAM).copy_per_mb_s() == 0.0


def test_without_sizes_there_are_no_figures() -> None:
    assert "gradients" not in _recorded(late=0, gradients=False)
