"""An export of Nsight Systems reads as torch.profiler's trace of the same would."""

import pytest

from tests.cases import case
from tests.collectors.importers.nsys.exports import (
    ALL_REDUCE,
    GEMM,
    SET,
    TWO_RANKS,
    call,
    copy,
    export,
    kernel,
    launch,
    nccl,
    payload_tables,
    pid,
    span,
)
from tracekit.analysis.gpu.matching import match_collectives
from tracekit.collectors.importers.kineto.reader import read_kineto
from tracekit.sources.load import jobs_in, load


def read(path, rows, **more):
    return read_kineto([export(path / "job.sqlite", rows, **more)])


def launched(recording):
    """The start, in microseconds, of each GPU op and of the call that launched it."""
    calls = [*recording.calls["start"].to_list(), None]
    return [
        (rank, round(start * 1e6), None if row is None else round(calls[row] * 1e6))
        for rank, start, row in recording.gpu_ops.select("rank", "start", "launch").rows()
    ]


def test_gpu_ops_have_the_names_that_torch_profiler_gives_them(tmp_path):
    rows = [
        launch(0, 1),
        kernel(GEMM, 10, 20, 1),
        copy(40, 5, 2, 1, srcKind=0, dstKind=2),
        copy(50, 5, 3, 2, srcKind=2, dstKind=1),
        copy(60, 5, 4, 8, srcKind=2, dstKind=2),
        copy(70, 5, 5, 1),
        (SET, {**kernel("", 80, 1)[1], "bytes": 64, "memKind": 2}),
        ("TARGET_INFO_GPU", {"id": 0, "name": "NVIDIA H100 80GB HBM3"}),
    ]
    recording = read(tmp_path, rows)
    assert recording.gpu_ops.select("name", "activity", "kernel_class", "shape", "bytes").rows() == [
        (GEMM, "kernel", "matrix-product", "4x1x1/128x1x1", None),
        ("Memcpy HtoD (Pageable -> Device)", "memcpy", "memory", "", 4096),
        ("Memcpy DtoH (Device -> Pinned)", "memcpy", "memory", "", 4096),
        ("Memcpy DtoD (Device -> Device)", "memcpy", "memory", "", 4096),
        ("Memcpy HtoD (Unknown -> Unknown)", "memcpy", "memory", "", 4096),
        ("Memset (Device)", "memset", "memory", "", 64),
    ]
    assert recording.gpu_ops["start"].to_list() == pytest.approx([t * 1e-6 for t in (10, 40, 50, 60, 70, 80)])
    assert recording.gpu_ops["duration"].to_list() == pytest.approx([t * 1e-6 for t in (20, 5, 5, 5, 5, 1)])
    assert recording.device_name == "NVIDIA H100 80GB HBM3"
    assert recording.ranks == (0,)


def test_calls_lose_the_version_of_cuda_and_say_whether_they_wait(tmp_path):
    rows = [
        call("cudaMemcpyAsync_v3020", 0, 50, 1),
        copy(10, 20, 1, 1, srcKind=0, dstKind=2),
        call("cudaStreamSynchronize_v3020", 60, 10, 2),
        call("cudaStreamWaitEvent_ptsz_v7000", 80, 1, 3),
        call("cudaStreamGetCaptureInfo_v2_v11030", 90, 1, 4),
        call("cuLaunchKernelEx", 100, 1, 5),
        kernel(GEMM, 110, 5, 5),
    ]
    calls = read(tmp_path, rows).calls
    assert calls.select("name", "role", "waits").rows() == [
        ("cudaMemcpyAsync", "launch", True),
        ("cudaStreamSynchronize", "synchronise", True),
        ("cudaStreamWaitEvent_ptsz", "stream-wait", False),
        ("cuLaunchKernelEx", "launch", False),
    ]


def test_each_gpu_is_a_rank_and_their_collectives_match(tmp_path):
    """Rank 0: 20 to 50 and 60 to 100; rank 1 from 70 on: 50 to 70 idle."""
    path = export(tmp_path / "job.sqlite", TWO_RANKS)
    recording = read_kineto([path])
    assert launched(recording) == [(0, 20, 0), (0, 60, 10), (1, 20, 0), (1, 70, 10)]
    assert recording.calls["thread"].to_list() == [0] * 4
    assert match_collectives(recording).matched == 1
    figures = {
        row["rank"]: [round(row[name] * 1e6) for name in ("span_s", "compute_s", "communication_s", "idle_s")]
        for row in load(path).whatif().to_dict()["by_rank"]
    }
    assert figures == {0: [80, 30, 40, 10], 1: [80, 30, 30, 20]}


def test_emitted_operators_are_operators_and_the_ranges_of_a_user_are_annotations(tmp_path):
    rows = [
        span("forward", 0, 100),
        span("FSDP::pre_forward (blocks.1), op_id = 7", 1, 90),
        span("aten::linear, seq = 12, op_id = 8, sizes = [[4, 8], [8]], input_op_ids = [[1, 0]]", 2, 40),
        span("aten::mm, op_id = 9", 3, 30),
        launch(5, 1),
        kernel(GEMM, 20, 20, 1),
        span("MyFunction, seq = 13", 50, 30),
        span("autograd::engine::evaluate_function: MmBackward0, seq = 13", 55, 20),
        launch(60, 2),
        kernel(GEMM, 70, 20, 2),
        launch(85, 3),
        kernel(GEMM, 95, 2, 3),
    ]
    calls = read(tmp_path, rows).calls
    assert calls.select("operator", "inner", "phase").rows() == [
        ("aten::linear", "aten::mm", "forward"),
        ("MyFunction", "autograd::engine::evaluate_function: MmBackward0", "backward"),
        (None, None, "forward"),
    ]
    linear = read(tmp_path / "2", [row for row in rows if not row[1].get("text", "").startswith("aten::mm")]).calls
    assert linear["inputs"].to_list()[0] == "[[[4, 8], [8]],[]]"


def test_what_nsight_costs_a_host_is_not_taken_for_what_torch_profiler_does(tmp_path):
    small = [span(f"aten::view, op_id = {number}", 1 + 2 * number, 1) for number in range(40)]
    rows = [span("aten::mul, op_id = 99", 0, 90), *small, launch(85, 1), kernel(GEMM, 95, 2, 1)]
    recording = read(tmp_path, rows)
    assert recording.whats.height > 2
    assert recording.costs == {}


def test_a_range_from_any_start_to_any_end_is_not_around_what_its_thread_does(tmp_path):
    rows = [
        span("aten::mm, op_id = 1", 0, 10),
        span("request", 5, 95, eventType=60),
        span("aten::add, op_id = 2", 30, 20),
        launch(35, 1),
        kernel(GEMM, 40, 10, 1),
        launch(60, 2),
        kernel(GEMM, 70, 10, 2),
    ]
    assert read(tmp_path, rows).calls["inner"].to_list() == ["aten::add", None]


def test_registered_names_and_collectives_of_torch(tmp_path):
    """The range around a launch names the collective, and its text stands in StringIds."""
    rows = [
        *TWO_RANKS,
        *(span("record_param_comms, op_id = 5", 5, 30, process=100 + rank) for rank in (0, 1)),
        *(span(None, 8, 20, process=100 + rank, textId=900) for rank in (0, 1)),
    ]
    recording = read(tmp_path, rows, texts={900: "nccl:all_reduce, op_id = 6"})
    assert recording.gpu_ops["collective"].to_list() == [None, "all_reduce"] * 2
    assert recording.calls["collective_call"].to_list() == [False, True] * 2


STEPS = {
    "step 3": (["step 3", "step 4"], [3, 4]),
    "train_step_12": (["train_step_12", "train_step_13", "train_step_14"], [12, 13, 14]),
    "Iteration": (["Iteration: 7", "Iteration: 8"], [7, 8]),
    "torch": (["ProfilerStep#1", "ProfilerStep#2"], [1, 2]),
    "one": (["step 3"], []),
    "not one by one": (["step 3", "step 5"], []),
    "no number of a step": (["layer 1", "layer 2"], []),
    "a word that ends alike": (["writer 1", "writer 2"], []),
}


def test_ranges_that_count_up_are_steps(tmp_path):
    for name, (texts, steps) in STEPS.items():
        rows = [span(text, 100 * place, 90) for place, text in enumerate(texts)]
        rows += [span(f"micro_step {place % 2}", 45 * place, 40) for place in range(4)]
        with case(name):
            recording = read(tmp_path / name, [*rows, launch(10, 1), kernel(GEMM, 20, 5, 1)])
            assert recording.step_spans["step"].to_list() == steps
            assert recording.gpu_ops["step"].to_list() == [steps[0] if steps else None]


COMM = 0xFEDC_BA98_7654_3210


def communicating(rank, *, device):
    """A rank's communicator, an all-reduce, and in one group a transfer from rank 0 to rank 1."""
    mine = {"process": 100 + device}
    transfer = nccl("ncclSend" if rank == 0 else "ncclRecv", 55, 2, COMM, 512, 1 - rank, **mine)
    return [
        nccl("ncclCommInitRank", 0, 1, COMM, 2, rank, device, **mine),
        nccl("ncclAllReduce", 10, 2, COMM, 1024, 0, **mine),
        launch(11, 1, **mine),
        kernel(ALL_REDUCE, 30, 10, 1, deviceId=device, **mine),
        span("ncclGroupStart", 52, 1, **mine),
        transfer,
        span("ncclGroupEnd", 60, 10, **mine),
        launch(62, 2, **mine),
        kernel("ncclDevKernel_SendRecv()", 70, 10, 2, deviceId=device, **mine),
        launch(80, 3, **mine),
        kernel(GEMM, 90, 5, 3, deviceId=device, **mine),
    ]


def test_the_payloads_of_nccl_say_ranks_and_collectives(tmp_path):
    """Device 0 is rank 1."""
    recording = read(tmp_path, [*payload_tables(), *communicating(1, device=0), *communicating(0, device=1)])
    columns = ("rank", "device", "collective", "elements", "group", "source", "destination")
    group = "0xfedcba9876543210"
    assert recording.gpu_ops.select(*columns).rows() == [
        (0, 1, "all_reduce", 1024, group, None, None),
        (0, 1, "send", 512, group, 0, 1),
        (0, 1, None, None, None, None, None),
        (1, 0, "all_reduce", 1024, group, None, None),
        (1, 0, "recv", 512, group, 0, 1),
        (1, 0, None, None, None, None, None),
    ]
    assert [group.ranks for group in recording.groups] == [(0, 1)]
    assert recording.world_size == 2
    assert [(group.transfers, group.matched) for group in match_collectives(recording).groups] == [
        (False, 1),
        (True, 1),
    ]


def test_a_file_of_one_rank_has_the_rank_that_nccl_says(tmp_path):
    for rank in (0, 1):
        export(tmp_path / f"{1 - rank}.sqlite", [*payload_tables(), *communicating(rank, device=0)])
    recording = read_kineto([tmp_path])
    assert [recording.files[rank].rsplit("/")[-1] for rank in recording.ranks] == ["1.sqlite", "0.sqlite"]
    assert [group.matched for group in match_collectives(recording).groups] == [1, 1]


def test_files_of_ranks_meet_by_the_start_of_their_sessions(tmp_path):
    for rank, began in enumerate((1_700_000_000_000_000_000, 1_700_000_000_000_500_000)):
        rows = [kernel(GEMM, 20, 30), ("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": began})]
        export(tmp_path / "runs" / f"rank{rank}.sqlite", rows)
    assert jobs_in(tmp_path) == [tmp_path]
    assert launched(read_kineto([tmp_path])) == [(0, 0, None), (1, 500, None)]


def test_a_thread_of_a_process_with_several_gpus_counts_for_those_it_launches_on(tmp_path):
    rows = [
        *(launch(10 * gpu, 1 + gpu, thread=1 + gpu) for gpu in (0, 1)),
        *(kernel(GEMM, 20, 10, 1 + gpu, deviceId=gpu) for gpu in (0, 1)),
        launch(40, 3, thread=3),
        launch(50, 4, thread=3),
        *(kernel(GEMM, 60, 10, 3 + gpu, deviceId=gpu) for gpu in (0, 1)),
        call("cudaDeviceSynchronize_v3020", 80, 5, 5, thread=4),
    ]
    recording = read(tmp_path, rows)
    assert launched(recording) == [(0, 20, 0), (0, 60, 40), (1, 20, 10), (1, 60, 50)]
    calls = [(rank, round(start * 1e6)) for rank, start in recording.calls.select("rank", "start").rows()]
    assert calls == [(0, 0), (0, 40), (0, 80), (1, 10), (1, 50), (1, 80)]


def test_processes_that_call_their_gpu_0_are_ranks_by_their_real_gpu(tmp_path):
    rows = [kernel(GEMM, 20 + 10 * rank, 5, process=100 + rank) for rank in (0, 1)]
    assert launched(read(tmp_path, rows)) == [(0, 0, None), (1, 10, None)]
    seen = [("TARGET_INFO_CUDA_DEVICE", {"pid": 100 + rank, "cudaId": 0, "gpuId": 5 - rank}) for rank in (0, 1)]
    assert launched(read(tmp_path / "2", [*rows, *seen])) == [(4, 10, None), (5, 0, None)]


def test_a_few_ops_on_the_gpu_of_another_process_are_no_rank(tmp_path):
    rows = [kernel(GEMM, 10 * place, 5, deviceId=gpu, process=100 + gpu) for place in range(200) for gpu in (0, 1)]
    recording = read(tmp_path, [*rows, kernel(GEMM, 5000, 5, process=101)])
    assert recording.gpu_ops.group_by("rank", "device").len().sort("rank", "device").rows() == [
        (0, 0, 200),
        (1, 0, 1),
        (1, 1, 200),
    ]


def test_the_kernels_of_a_graph_have_its_launch_and_graphs_recorded_whole_are_one_op(tmp_path):
    rows = [call("cudaGraphLaunch_v10000", 0, 5, 1), kernel(GEMM, 10, 5, 1, graphNodeId=3), kernel(GEMM, 20, 5, 1)]
    assert launched(read(tmp_path, rows)) == [(0, 10, 0), (0, 20, 0)]
    whole = ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", {**kernel("", 40, 50, 2)[1], "graphId": 9})
    recording = read(tmp_path / "2", [*rows, call("cudaGraphLaunch_v10000", 30, 5, 2), whole])
    assert recording.gpu_ops["name"].to_list() == [GEMM, GEMM, "CUDA graph 9"]
    assert "--cuda-graph-trace=node" in recording.notes[0]


def test_a_stream_that_waits_knows_for_which_and_as_of_when(tmp_path):
    ids = {"globalPid": pid(100), "eventSyncId": 77}
    waiting = {**kernel("", 25, 1, 3)[1], "streamId": 8, "syncType": 2, **ids}
    rows = [
        launch(0, 1),
        kernel(GEMM, 10, 30, 1),
        call("cudaEventRecord_v3020", 12, 1, 2),
        call("cudaStreamWaitEvent_v3020", 25, 1, 3),
        ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", waiting),
        ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", {**waiting, "syncType": 3, "correlationId": 1}),
        ("CUPTI_ACTIVITY_KIND_CUDA_EVENT", {"streamId": 7, "correlationId": 2, **ids}),
    ]
    calls = read(tmp_path, rows).calls.select("name", "waits_stream", "waits_for_stream", "recorded_at").rows()
    assert calls == [("cudaLaunchKernel", None, None, None), ("cudaStreamWaitEvent", 8, 7, pytest.approx(12e-6))]


BARE = [
    {"start": 1000, "end": 3000, "deviceId": 0, "shortName": "gemm"},
    {"start": 0, "end": 3000, "deviceId": 0, "streamId": 7, "correlationId": 5, "demangledName": "gemm"},
    {"start": 5000, "end": 7000},
]


def test_what_a_version_does_not_record_is_missing_and_nothing_else(tmp_path):
    for place, row in enumerate(BARE):
        rows = [
            ("CUPTI_ACTIVITY_KIND_KERNEL", row),
            ("CUPTI_ACTIVITY_KIND_RUNTIME", {"start": 0, "end": 900, "correlationId": 5}),
            ("NVTX_EVENTS", {"start": 0, "end": 90_000, "text": "forward"}),
        ]
        with case(row):
            recording = read(tmp_path / str(place), rows, strings="INTEGER")
            names = recording.gpu_ops["name"].to_list()
            assert names == ["gemm" if "gemm" in row.values() else "(unnamed)"]
            assert recording.gpu_ops["launch"].to_list() == [0 if "correlationId" in row else None]
            assert recording.ranks == (0,)


def test_damaged_times_are_left_out_and_negative_durations_become_0(tmp_path):
    rows = [
        *(kernel(GEMM, 10 * place, 5) for place in range(4)),
        kernel(GEMM, 50, -5),
        kernel(GEMM, 1e12, 5),
        kernel(GEMM, 60, 1e12),
        ("CUPTI_ACTIVITY_KIND_KERNEL", {**kernel(GEMM, 0, 0)[1], "start": 0, "end": 0}),
    ]
    recording = read(tmp_path, rows)
    assert [round(duration * 1e6) for duration in recording.gpu_ops["duration"].to_list()] == [5, 5, 5, 5, 0]
    assert [note.partition(": ")[2] for note in recording.notes] == [
        "left out 3 events with impossible times",
        "set 1 negative duration to 0",
    ]
    assert recording.damaged == {0: 0.5}
