"""Records that a GPU timed, written by hand: two clocks in one trace, launches ahead of the GPU, queued collectives."""

import pytest

from tests.collectors.merge.test_ops import GROUP, MS, compute, merged, ops_of, rank
from tracekit.base.errors import TraceError
from tracekit.collectors.merge.merge import merge_attempt
from tracekit.collectors.record.wire_format import GPU_SUFFIX, Category, Flag, rank_stem
from tracekit.collectors.run_directory.segments import AttemptRecording, ClockFit
from tracekit.trace.model import OpKind

GPU = Flag.DEVICE_CLOCK
#: The device's clock is 100 ms behind the host's.
READINGS = [[0, 100 * MS, 100 * MS], [1000 * MS, 1100 * MS, 1100 * MS]]
PP = {"names": ["dp", "pp"], "ranks": [[0, 1]]}


def on_gpu(number, rows, **options):
    """A rank whose clock was read; it trains data-parallel unless told otherwise."""
    options.setdefault("mesh", {"names": ["dp"], "ranks": [0, 1]})
    one = rank(number, rows, groups=[GROUP], **options)
    one.facts["device-clock"] = READINGS
    return one


def timed(category, name, start, end, **fields):
    return (category, name, start, end, {"flags": GPU, **fields})


def test_device_times_become_times_of_the_host():
    """The forward from 10 to 30 of the device's clock ran from 110 to 130; the data was loaded from 105 to 109."""
    rows = [
        (Category.DATA_LOAD, "data-load", 105, 109, {}),
        timed(Category.COMPUTE, "forward-compute", 10, 30, microbatch=0),
    ]
    result = merged(on_gpu(0, rows), on_gpu(1, rows))
    assert ops_of(result, 0, OpKind.DATA_LOAD) == [(0, 4)]
    assert ops_of(result, 0, OpKind.FORWARD_COMPUTE) == [(5, 25)]
    assert result.trace.metadata["device_clock"]["ranks"]["1"]["uncertainty_ns"] == 0


def test_the_gpus_of_ranks_are_named_with_their_samples(tmp_path):
    """Rank 0 has samples of its clock; both are of one host."""
    rows = [timed(Category.COMPUTE, "forward-compute", 10, 30, microbatch=0)]
    ranks = [on_gpu(0, rows), on_gpu(1, rows)]
    for one, model in zip(ranks, ("NVIDIA H100", "NVIDIA A100"), strict=True):
        one.facts["device"] = [{"model": "older"}, {"model": model}]
    (tmp_path / f"{rank_stem(0)}{GPU_SUFFIX}").write_text("[0, 1980, 60, 650000, 0]\n[1, 1410, 60, 650000, 0]\n")
    metadata = merge_attempt(AttemptRecording(0, tmp_path, dict(enumerate(ranks))), name="by hand").trace.metadata
    assert metadata["gpu_model"] == "NVIDIA A100, NVIDIA H100"
    assert [metadata["gpus"][rank]["model"] for rank in "01"] == ["NVIDIA H100", "NVIDIA A100"]
    assert (metadata["gpus"]["0"]["host"], metadata["gpus"]["0"]["sm_mhz"]["min"]) == ("a", 1410)
    assert metadata["gpus"]["1"]["samples"] == 0


def test_the_clocks_of_hosts_come_on_top():
    rows = [timed(Category.COMPUTE, "forward-compute", 10, 30, microbatch=0)]
    late = ClockFit(local_ns=0, offset_ns=-7.0 * MS, drift=0.0, uncertainty_ns=0.0, samples=1)
    result = merged(on_gpu(0, rows), on_gpu(1, rows, host="b"), clocks={"b": late})
    assert ops_of(result, 0, OpKind.FORWARD_COMPUTE) == [(0, 20)]
    assert ops_of(result, 1, OpKind.FORWARD_COMPUTE) == [(-7, 13)]


def test_host_work_counts_from_where_the_gpu_ran_dry():
    for start, end, left in (
        (112, 125, None),  # all of it while the GPU computes
        (125, 140, (30, 40)),  # the GPU ran dry at 130
        (140, 150, (40, 50)),  # the GPU had nothing to do
        (101, 108, (2, 8)),  # the forward ran until 102
    ):
        rows = [
            timed(Category.COMPUTE, "forward-compute", 0, 2, microbatch=0),
            timed(Category.COMPUTE, "backward-compute", 10, 30, microbatch=0),
            (Category.DATA_LOAD, "data-load", start, end, {}),
        ]
        result = merged(on_gpu(0, rows), on_gpu(1, rows))
        assert ops_of(result, 0, OpKind.DATA_LOAD) == ([left] if left else [])
        assert result.trace.metadata["device_clock"]["hidden"] == ({} if left else {"data-load": 2})


def test_a_step_timed_on_both_clocks_is_left_out_and_counted():
    """A launch takes microseconds: beside kernels it would look like a fast worker."""
    whole = [timed(Category.COMPUTE, "forward-compute", 10, 30, microbatch=0)]
    launches = [compute("forward-compute", 110, 110.1)]
    result = merged(on_gpu(0, whole), on_gpu(1, launches))
    assert result.trace.metadata["device_clock"]["left_out_rank_steps"] == 1
    assert result.trace.ops["rank"].to_list() == [0]
    with pytest.raises(TraceError, match="no rank finished"):
        merged(on_gpu(0, [*whole, *launches]), on_gpu(1, [*whole, *launches]))


def test_a_job_that_no_gpu_timed_keeps_its_launch_times():
    rows = [compute("forward-compute", 10, 30), compute("backward-compute", 30, 70)]
    result = merged(*(rank(number, rows, mesh=PP) for number in range(2)))
    assert "device_clock" not in result.trace.metadata
    assert ops_of(result, 0, OpKind.FORWARD_COMPUTE) == [(10, 30)]


def reduced(backward_end, *reductions):
    """A step whose stream gets past its backward at 60, unless that waits until `backward_end` for reductions."""
    rows = [
        timed(Category.COMPUTE, "forward-compute", 0, 20, microbatch=0),
        timed(Category.COMPUTE, "backward-compute", 20, backward_end, microbatch=0),
        *(timed(Category.COLLECTIVE, "allreduce", start, end, peer=0, extra=8) for start, end in reductions),
        timed(Category.OPTIMIZER, "optimizer", 96, 99),
    ]
    return merged(on_gpu(0, rows), on_gpu(1, rows))


def test_buckets_that_are_launched_inside_a_backward_are_one_reduction():
    """What is left of the first one after the backward says nothing about how long a bucket takes."""
    result = reduced(96, (50, 70), (55, 90), (60, 95))
    assert ops_of(result, 1, OpKind.ALL_REDUCE) == [(60, 95)]
    assert ops_of(result, 1, OpKind.BACKWARD_COMPUTE) == [(20, 60)]


def test_collectives_that_queue_behind_each_other_are_charged_their_own_time():
    """Three reductions, launched at 61, 62 and 63 after the backward, end at 70, 90 and 95."""
    result = reduced(60, (61, 70), (62, 90), (63, 95))
    assert ops_of(result, 1, OpKind.ALL_REDUCE) == [(61, 70), (70, 90), (90, 95)]
    assert ops_of(result, 1, OpKind.BACKWARD_COMPUTE) == [(20, 60)]


def test_a_recv_that_was_waited_for_ends_when_the_stream_went_on():
    """Send from 10 to 40 on stage 0; recv from 12, waited for from 15 to 40 on stage 1, all on the devices' clocks."""
    send = timed(Category.P2P, "forward-send", 10, 41, microbatch=0, chunk=0, peer=1, extra=30 * MS)
    recv = timed(Category.P2P, "forward-recv", 12, 40, microbatch=0, chunk=1, peer=0, extra=15 * MS)
    first = [timed(Category.COMPUTE, "forward-compute", 0, 10, microbatch=0, chunk=0), send]
    second = [recv, timed(Category.COMPUTE, "forward-compute", 40, 50, microbatch=0, chunk=1)]
    result = merged(on_gpu(0, first, mesh=PP), on_gpu(1, second, mesh=PP))
    assert ops_of(result, 0, OpKind.FORWARD_SEND) == [(-2, 28)]
    assert ops_of(result, 1, OpKind.FORWARD_RECV) == [(0, 28)]
    assert result.trace.metadata["collect"]["estimated_recvs"] == 0
    assert result.trace.layout.pp == 2
