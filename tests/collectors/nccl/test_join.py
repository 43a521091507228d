"""NCCL's operations against the step trace's collectives, on recordings and rings written by hand."""

import numpy as np
import pytest

from tests.collectors.merge.test_ops import GROUP, compute, ops_of, rank
from tests.collectors.nccl.handmade import MS, HandmadeRing
from tracekit.collectors.merge.merge import merge_attempt
from tracekit.collectors.record.wire_format import Category, Flag
from tracekit.collectors.run_directory.segments import AttemptRecording, ClockFit
from tracekit.trace.model import OpKind

DP_MESH = {"names": ["dp"], "ranks": [0, 1]}
PP_MESH = {"names": ["dp", "pp"], "ranks": [[0, 1]]}
#: GPU clocks count from somewhere of their own, differently on every GPU.
GPU_AHEAD_NS = (1_700_000_000_000_000_000, 1_600_000_000_000_000_007)


class Job:
    """Two ranks, processes 100 and 101 of host a, and the rings they wrote."""

    def __init__(self, directory, rows, mesh, *, groups=(GROUP,)):
        self.directory = directory / "attempt-000"
        self.ranks = [rank(number, rows[number], mesh=mesh, groups=groups) for number in range(2)]
        for number, one in enumerate(self.ranks):
            one.facts["process"][0]["process_id"] = 100 + number
        self.rings = [HandmadeRing("a", 100 + number, GPU_AHEAD_NS[number]) for number in range(2)]

    def merged(self, *, write=(0, 1), **options):
        for number in write:
            self.rings[number].write(self.directory)
        recording = AttemptRecording(0, self.directory, {one.rank: one for one in self.ranks})
        return merge_attempt(recording, name="by hand", **options)


def data_parallel(directory, collectives):
    """Both ranks: a forward, a backward from 10 to 50 ms, the given (name, start ms, end ms, bytes), the optimizer."""
    rows = [
        compute("forward-compute", 0, 10),
        compute("backward-compute", 10, 50),
        *(
            (Category.COLLECTIVE, name, start, end, {"peer": 0, "extra": size})
            for name, start, end, size in collectives
        ),
        (Category.OPTIMIZER, "optimizer", 70, 80, {}),
    ]
    return Job(directory, [rows, rows], DP_MESH)


def one_reduction(directory):
    """A reduction of 4000 bytes launched at 40 ms: on the GPUs from 41 and 45 ms, both until 60."""
    job = data_parallel(directory, [("allreduce", 40, 40, 4000)])
    for ring, place, start in zip(job.rings, (0, 1), (41, 45), strict=True):
        communicator = ring.communicator(7, 2, place)
        ring.operation(communicator, "AllReduce", 900, 1, 1, 1, step=0)  # started at once: the clocks are known exactly
        ring.operation(communicator, "AllReduce", 901, 40, start, 60, count=1000)
    return job


def test_a_collective_gets_its_gpu_times_and_its_wait_is_told(tmp_path):
    """The first rank waits 4 ms for the second, then both transfer 15 ms; the backward ends where the GPU began."""
    result = one_reduction(tmp_path).merged()
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == [(41, 60)]
    assert ops_of(result, 1, OpKind.ALL_REDUCE) == [(45, 60)]
    assert ops_of(result, 0, OpKind.BACKWARD_COMPUTE) == [(10, 41)]
    report = result.trace.metadata["nccl"]
    assert (report["timed"], report["untimed"], report["size_differs"]) == (2, 0, 0)
    assert report["unmatched_records"] == report["unmatched_operations"] == {}
    assert report["split"] == {
        "AllReduce": {"count": 1, "wait_s": pytest.approx(0.002), "transfer_s": pytest.approx(0.015)}
    }
    assert report["clocks"]["1"]["uncertainty_ns"] == pytest.approx(2200)  # 44 ms at 50 ppm
    assert report["ranks_without_ring"] == report["unreadable"] == []


def test_gpu_times_follow_the_clock_of_their_host(tmp_path):
    """A host whose clock is 3 ms behind the reference."""
    fit = ClockFit(local_ns=0, offset_ns=3 * MS, drift=0.0, uncertainty_ns=1000.0, samples=3)
    result = one_reduction(tmp_path).merged(clocks={"a": fit})
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == [(41, 60)]  # the step began 3 ms later, too
    assert result.trace.step_starts[1] == pytest.approx(0.003)


def test_a_rank_without_a_ring_keeps_host_times(tmp_path):
    """Its peer's communicator is known by the one process group it can be."""
    result = one_reduction(tmp_path).merged(write=(0,))
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == [(41, 60)]
    assert ops_of(result, 1, OpKind.ALL_REDUCE) == [(40, 40)]
    report = result.trace.metadata["nccl"]
    assert report["ranks_without_ring"] == [1]
    assert report["unmatched_records"] == {"allreduce": 1}
    assert report["split"] == {}


def test_a_coalesced_call_spans_its_operations(tmp_path):
    """One record of 3000 bytes, two operations of 1000 and 2000, and another record behind it."""
    job = data_parallel(tmp_path, [("allreduce_coalesced", 40, 40, 3000), ("allreduce", 44, 44, 400)])
    for ring, place in zip(job.rings, (0, 1), strict=True):
        communicator = ring.communicator(7, 2, place)
        ring.operation(communicator, "AllReduce", 1, 41, 41, 52, count=250)
        ring.operation(communicator, "AllReduce", 2, 42, 52, 60, count=500)
        ring.operation(communicator, "AllReduce", 3, 45, 60, 65, count=100)
    result = job.merged()
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == [(41, 60), (60, 65)]
    report = result.trace.metadata["nccl"]
    assert (report["timed"], report["size_differs"]) == (4, 0)
    assert report["unmatched_operations"] == {}


def test_an_all_to_all_of_single_transfers_spans_them(tmp_path):
    """Each rank sends 500 bytes to each and receives as many: 1000 in all, from the first kernel to the last."""
    job = data_parallel(tmp_path, [("alltoall_base", 60, 60, 1000), ("alltoall_base", 66, 66, 400)])
    for ring, place in zip(job.rings, (0, 1), strict=True):
        communicator = ring.communicator(7, 2, place)
        for peer in range(2):
            ring.operation(communicator, "Send", 0, 61, 61, 64, peer=peer, count=125)
            ring.operation(communicator, "Recv", 0, 61, 61 + peer, 65, peer=peer, count=125)
        ring.operation(
            communicator, "Recv", 0, 67, 67, 68, peer=1 - place, count=99
        )  # of another size: not the second's
    result = job.merged()
    assert ops_of(result, 0, OpKind.ALL_TO_ALL) == [(61, 65), (66, 66)]
    report = result.trace.metadata["nccl"]
    assert (report["timed"], report["size_differs"]) == (2, 2)
    assert report["unmatched_operations"] == {"Recv": 2}


def test_a_match_of_another_size_is_not_believed(tmp_path):
    """400 bytes were reduced, NCCL moved 800."""
    job = data_parallel(tmp_path, [("allreduce", 40, 42, 400)])
    for ring, place in zip(job.rings, (0, 1), strict=True):
        ring.operation(ring.communicator(7, 2, place), "AllReduce", 1, 41, 41, 60, count=200)
    result = job.merged()
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == [(40, 42)]
    report = result.trace.metadata["nccl"]
    assert (report["timed"], report["size_differs"]) == (0, 2)
    assert report["unmatched_records"] == {"allreduce": 2}
    assert report["unmatched_operations"] == {"AllReduce": 2}


@pytest.mark.parametrize(("name", "function"), [("all_gather_single", "AllGather"), ("_allgather_base", "AllGather")])
def test_a_gather_is_as_large_as_all_its_parts(tmp_path, name, function):
    """The record has the size of the output, NCCL that of one rank's part."""
    job = data_parallel(tmp_path, [(name, 60, 61, 800), ("broadcast", 62, 63, 40)])
    for ring, place in zip(job.rings, (0, 1), strict=True):
        ring.operation(ring.communicator(7, 2, place), function, 1, 60, 60, 66, count=100)
    report = job.merged().trace.metadata["nccl"]
    assert report["timed"] == 2
    assert report["unmatched_records"] == {"broadcast": 2}


def test_operations_of_other_groups_and_unfinished_ones_are_counted(tmp_path):
    """A communicator that is no process group, a kernel without an end; steps outside the trace are left out."""
    job = data_parallel(tmp_path, [("allreduce", 40, 40, 400)])
    for ring, place in zip(job.rings, (0, 1), strict=True):
        ring.operation(ring.communicator(7, 2, place), "AllReduce", 1, 40, 41, None, count=100)
        ring.operation(ring.communicator(8, 5, place), "Broadcast", 1, 41, 42, 43)
        ring.operation(0, "AllReduce", 2, 41, 42, 43, step=55)
    result = job.merged()
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == [(40, 40)]
    report = result.trace.metadata["nccl"]
    assert (report["timed"], report["untimed"]) == (0, 2)
    assert report["unmatched_operations"] == {"Broadcast": 2}


def test_a_pipeline_s_transfers_get_their_gpu_times(tmp_path):
    """Sent from 12 ms on, received by a kernel that was there from 5 ms; the wait on the host says nothing."""
    stage = {"microbatch": 0}
    rows = [
        [
            compute("forward-compute", 0, 10, chunk=0),
            (Category.P2P, "forward-send", 11, 90, {**stage, "chunk": 0, "peer": 1, "extra": 90 * MS}),
        ],
        [
            (Category.P2P, "forward-recv", 1, 60, {**stage, "chunk": 1, "peer": 0, "extra": 60 * MS}),
            compute("forward-compute", 30, 40, chunk=1),
        ],
    ]
    job = Job(tmp_path, rows, PP_MESH, groups=[{**GROUP, "description": "pp"}])
    first, second = job.rings
    first.operation(first.communicator(7, 2, 0), "Send", 0, 11, 12, 20, peer=1, count=10)
    second.operation(second.communicator(7, 2, 1), "Recv", 0, 1, 5, 20, peer=0, count=10)
    for ring in job.rings:
        ring.operation(0, "Send", 0, 0.5, 0.5, 0.6, peer=0, step=0)
    result = job.merged()
    assert ops_of(result, 0, OpKind.FORWARD_SEND) == [(12, 20)]
    assert ops_of(result, 1, OpKind.FORWARD_RECV) == [(5, 20)]
    assert result.trace.metadata["collect"]["estimated_recvs"] == 0
    assert result.trace.metadata["nccl"]["timed"] == 2


def test_a_damaged_ring_and_a_stranger_s_are_named(tmp_path):
    """The trace is there all the same."""
    job = one_reduction(tmp_path)
    job.directory.mkdir(parents=True)
    (job.directory / "nccl-a-101.ring").write_bytes(b"no ring at all")
    HandmadeRing("b", 5).write(job.directory)
    report = job.merged(write=(0,)).trace.metadata["nccl"]
    damaged, stranger = report["unreadable"]
    assert "nccl-a-101.ring: 14 bytes; a ring of NCCL events has at least 40960" in damaged
    assert "nccl-b-5.ring: written by process 5 on b, which is not a recorded rank" in stranger
    assert report["ranks_without_ring"] == [1]


def test_a_ring_that_cannot_be_read_leaves_times_of_the_host(tmp_path):
    job = one_reduction(tmp_path)
    job.directory.mkdir(parents=True)
    (job.directory / "nccl-a-100.ring").write_bytes(b"no ring at all")
    result, of_host = job.merged(write=()), one_reduction(tmp_path / "none").merged(write=())
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == ops_of(of_host, 0, OpKind.ALL_REDUCE)
    assert result.trace.metadata["nccl"]["ranks_without_ring"] == [0, 1]


def test_without_rings_nothing_is_said(tmp_path):
    """A trace that was collected without NCCL's events has no word about them."""
    assert "nccl" not in one_reduction(tmp_path).merged(write=()).trace.metadata


def test_records_of_many_steps_are_matched_in_sequence(tmp_path):
    """Random gaps, several functions on two communicators of the same ranks: each op gets its own kernel."""
    random = np.random.default_rng(5)
    starts = np.cumsum(random.integers(2, 9, 40)) + 50
    names = random.choice(["allreduce", "reduce_scatter_single"], 40)
    job = data_parallel(tmp_path, [(str(name), int(at), int(at), 0) for name, at in zip(names, starts, strict=True)])
    for ring, place in zip(job.rings, (0, 1), strict=True):
        both = [ring.communicator(identity, 2, place) for identity in (7, 8)]
        for at, name in zip(starts, names, strict=True):
            function = "AllReduce" if name == "allreduce" else "ReduceScatter"
            ring.operation(both[int(random.integers(2))], function, 0, int(at), int(at), int(at) + 1.5)
    result = job.merged()
    reduced = ops_of(result, 0, OpKind.ALL_REDUCE) + ops_of(result, 0, OpKind.GRADS_REDUCE_SCATTER)
    ends = sorted(float(end.expected) for _, end in reduced)
    assert ends == pytest.approx([at + 1.5 for at in starts], abs=1e-3)
    assert result.trace.metadata["nccl"]["timed"] == 80


def test_buckets_that_cuda_events_timed_begin_when_they_were_launched(tmp_path):
    """Two buckets, launched at 35 and 40 ms of the backward. NCCL runs them in turn, from 41 and 60 to 60 and 65: the
    backward's own work ends with the last launch, not where the last bucket begins.
    """
    timed = {"flags": Flag.DEVICE_CLOCK}
    rows = [
        (Category.COMPUTE, "forward-compute", 0, 10, {**timed, "microbatch": 0}),
        (Category.COMPUTE, "backward-compute", 10, 66, {**timed, "microbatch": 0}),
        (Category.COLLECTIVE, "allreduce", 35, 60, {**timed, "peer": 0, "extra": 4000}),
        (Category.COLLECTIVE, "allreduce", 40, 66, {**timed, "peer": 0, "extra": 4000}),
        (Category.OPTIMIZER, "optimizer", 70, 80, timed),
    ]
    job = Job(tmp_path, [rows, rows], DP_MESH)
    for one, ring, place in zip(job.ranks, job.rings, (0, 1), strict=True):
        one.facts["device-clock"] = [[0, 0, 0]]
        communicator = ring.communicator(7, 2, place)
        ring.operation(communicator, "AllReduce", 900, 1, 1, 1, step=0)
        ring.operation(communicator, "AllReduce", 901, 35, 41, 60, count=1000)
        ring.operation(communicator, "AllReduce", 902, 40, 60, 65, count=1000)
    result = job.merged()
    assert result.trace.metadata["nccl"]["timed"] == 4
    assert ops_of(result, 0, OpKind.BACKWARD_COMPUTE) == [(10, 40)]
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == [(40, 65)]
