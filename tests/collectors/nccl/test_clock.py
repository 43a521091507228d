"""The GPU's clock fitted from what NCCL reports, against a clock whose error is known."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tracekit.collectors.nccl.rings import fit_gpu_clock

SECOND = 1_000_000_000
#: Nanoseconds since 1970, as GPUs count them: far beyond what a float64 holds to the nanosecond.
GPU_BASE_NS = 1_790_000_000_123_456_789


def reports(count, *, drift=0.0, seconds=60.0, seed=0, least_latency_us=4.0, spread_us=200.0):
    """Channels and operations of a job; returns them with the host times their kernels really had."""
    random = np.random.default_rng(seed)
    enqueue = np.sort(random.uniform(0, seconds * SECOND, count)).astype(np.int64) + 5 * SECOND

    def late():
        return (1e3 * (least_latency_us + random.exponential(spread_us, count))).astype(np.int64)

    start = enqueue + late()
    end = start + late()

    def gpu(host):
        return GPU_BASE_NS + host + np.round(drift * (host - 5 * SECOND)).astype(np.int64)

    handles = np.arange(count)
    channels = pl.DataFrame(
        {
            "operation": handles,
            "gpu_start_ns": gpu(start),
            "gpu_end_ns": gpu(end),
            "seen_start_ns": start + late(),
            "seen_end_ns": end + late(),
        }
    )
    return channels, pl.DataFrame({"handle": handles, "enqueue_ns": enqueue}), start, end


@pytest.mark.parametrize("drift", [0.0, 2e-5, -5e-5])
def test_offset_and_drift_are_taken_out(drift):
    """A minute of 2000 kernels, launched and reported between 4 us and a millisecond late."""
    channels, operations, start, end = reports(2000, drift=drift)
    clock = fit_gpu_clock(channels, operations)
    assert clock.drift == pytest.approx(-drift, abs=3e-7)
    errors = np.abs(clock.to_host(channels["gpu_start_ns"].to_numpy()) - start)
    assert errors.max() <= clock.uncertainty_ns < 40_000
    durations = clock.to_host(channels["gpu_end_ns"].to_numpy()) - clock.to_host(channels["gpu_start_ns"].to_numpy())
    assert np.abs(durations - (end - start)).max() <= 2  # to the nanosecond, though the times are 1.8e18


def test_a_host_that_runs_ahead_of_its_gpu_bounds_the_clock_from_one_side_only():
    """All but the first ten kernels wait 80 ms in the queue of the GPU; NCCL's reports still show the drift."""
    channels, operations, start, _ = reports(2000, drift=2e-5)
    ahead = pl.when(pl.int_range(pl.len()) >= 10).then(80_000_000).otherwise(0)
    clock = fit_gpu_clock(channels, operations.with_columns(pl.col("enqueue_ns") - ahead))
    assert clock.drift == pytest.approx(-2e-5, abs=3e-7)
    errors = np.abs(clock.to_host(channels["gpu_start_ns"].to_numpy()) - start)
    assert errors.max() <= clock.uncertainty_ns < 200_000


@examples(40)
@given(st.integers(1, 400), st.floats(-5e-5, 5e-5), st.floats(0.01, 600.0), st.integers(0, 2**32 - 1))
def test_the_uncertainty_holds(count, drift, seconds, seed):
    """Few kernels or many, over 10 ms or 10 minutes: no kernel is further off than twice what the fit says."""
    channels, operations, start, _ = reports(count, drift=drift, seconds=seconds, seed=seed)
    clock = fit_gpu_clock(channels, operations)
    if clock is None:  # too few kernels to know the drift over that long
        assert count < 64
        assert seconds > 30
        return
    errors = np.abs(clock.to_host(channels["gpu_start_ns"].to_numpy()) - start)
    assert errors.max() <= 2 * clock.uncertainty_ns + 1


def test_one_kernel_bounds_the_clock_from_both_sides():
    """Enqueued at 100 ns, seen ended at 500 ns, 300 ns long: it began at 100 to 200 ns, 150 give or take 50."""
    channels = pl.DataFrame(
        {
            "operation": [1],
            "gpu_start_ns": [9000],
            "gpu_end_ns": [9300],
            "seen_start_ns": [400],
            "seen_end_ns": [500],
        }
    )
    clock = fit_gpu_clock(channels, pl.DataFrame({"handle": [1], "enqueue_ns": [100]}))
    assert clock.to_host(np.array([9000, 9300])).tolist() == [150, 450]
    assert clock.uncertainty_ns == 50


def test_a_clock_that_was_set_back_is_none():
    """No line goes through both sides of the jump, and times off by a second are worse than host times."""
    channels, operations, *_ = reports(200, spread_us=1.0)
    jump = pl.when(pl.int_range(pl.len()) >= 150).then(-SECOND).otherwise(0)
    moved = channels.with_columns(pl.col("gpu_start_ns") + jump, pl.col("gpu_end_ns") + jump)
    assert fit_gpu_clock(channels, operations) is not None
    assert fit_gpu_clock(moved, operations) is None


def test_without_an_ended_kernel_there_is_no_clock():
    """Nothing ties the GPU's time to the host's."""
    channels, operations, *_ = reports(3)
    cut = channels.with_columns(gpu_end_ns=pl.lit(None, pl.Int64), seen_end_ns=pl.lit(None, pl.Int64))
    assert fit_gpu_clock(cut, operations) is None
    assert fit_gpu_clock(channels.clear(), operations) is None
