"""Traces of torch.profiler get in, whatever dialect they speak, and what is none of them says so."""

import gzip
import itertools
import json
from types import SimpleNamespace

import polars as pl
import pytest

from tests.cases import case
from tests.kineto_files import COMM, GEMM, all_reduce, document, event, kernel, launch, write
from tracekit.base.errors import FormatError, SelectionError
from tracekit.collectors.importers.kineto import json_events
from tracekit.collectors.importers.kineto.event_columns import _list_at
from tracekit.collectors.importers.kineto.rank_placement import _unused, pg_config, rank_list
from tracekit.collectors.importers.kineto.reader import KernelClasses, kernel_classes, read_kineto
from tracekit.sources.load import jobs_in, load
from tracekit.trace.gpu_activity import KernelClass
from tracekit.trace.model import ProcessGroup

EVENTS = [
    event("user_annotation", "ProfilerStep#4", 0, 60),
    event("cpu_op", "aten::mm", 9, 8),
    launch(10, 1),
    kernel(GEMM, 20, 30, correlation=1, grid=[4, 1, 1], block=[128, 1, 1]),
    event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 55, 2, pid=0, tid=7, device=0, stream=7, correlation=9),
    event("python_function", "forward", 0, 100),
    {"ph": "M", "name": "process_name", "pid": 100, "tid": 0, "args": {"name": "python"}},
    {"ph": "s", "id": 1, "pid": 100, "tid": 100, "ts": 10, "cat": "ac2g", "name": "ac2g"},
]


def names(recording):
    return recording.gpu_ops.sort("start")["name"].to_list()


def test_a_launch_gives_its_kernel_a_step_and_what_was_launched_before_has_none(tmp_path):
    recording = read_kineto([write(tmp_path / "trace.json", document(EVENTS))])
    ops = recording.gpu_ops.select("name", "kernel_class", "launch", "step", "shape").rows()
    assert ops == [
        (GEMM, "matrix-product", 0, 4, "4x1x1/128x1x1"),
        ("Memcpy HtoD (Pageable -> Device)", "memory", None, None, ""),
    ]
    assert recording.calls.select("operator", "phase", "role").rows() == [("aten::mm", "forward", "launch")]
    assert recording.gpu_ops["start"].to_list() == pytest.approx([10e-6, 45e-6])  # from the launch, the first event


def test_a_bare_list_of_events_is_a_trace(tmp_path):
    """As Chrome's own format allows, with blanks before it."""
    (tmp_path / "trace.json").write_text(f"\n {json.dumps(EVENTS)}")
    assert names(read_kineto([tmp_path / "trace.json"])) == [GEMM, "Memcpy HtoD (Pageable -> Device)"]


def test_times_may_be_absolute_or_relative_whole_or_fractional(tmp_path):
    relative = {"baseTimeNanoseconds": 1_700_000_000_000_000_000}
    for scale, head in ((1.7e15, {}), (1.7e15 + 0.5, {}), (0.0, relative), (123.25, relative)):
        events = [{**one, "ts": one["ts"] + scale} if "ts" in one else one for one in EVENTS]
        with case(scale):
            recording = read_kineto([write(tmp_path / "trace.json.gz", document(events, **head))])
            assert recording.gpu_ops["start"].to_list() == pytest.approx([10e-6, 45e-6], abs=0.5e-6)
            assert recording.began_s == pytest.approx(1.7e9 + scale * 1e-6 % 1.7e9, abs=1e-3)
    assert read_kineto([write(tmp_path / "boot.json", document(EVENTS))]).began_s is None


def test_relative_times_of_files_meet_by_their_bases(tmp_path):
    """The second file's base is 3 ms later."""
    for rank, base in ((0, 5_000_000_000_000), (1, 5_000_003_000_000)):
        write(tmp_path / f"{rank}.json", document([kernel(GEMM, 20, 30)], rank, baseTimeNanoseconds=base))
    starts = read_kineto([tmp_path]).gpu_ops.select("rank", "start").rows()
    assert starts == [(0, 0.0), (1, pytest.approx(3e-3))]


def test_a_folder_is_searched_with_all_below_and_other_files_are_left_alone(tmp_path):
    for rank in (0, 1):
        folder = tmp_path / f"host{rank}" / "iteration_5"
        write(folder / f"rank{rank}_trace.json.gz", document([kernel(GEMM, 20, 30)], rank=None))
    write(tmp_path / "config.json", {"layers": 4})
    assert read_kineto([tmp_path]).ranks == (0, 1)
    assert jobs_in(tmp_path) == [tmp_path]


def test_a_fused_file_holds_several_ranks(tmp_path):
    events = [
        {**kernel(GEMM, 20 + rank, 30, correlation=1), "pid": rank * 100_000_000} for rank in range(3)
    ] + [{**launch(10 + rank, 1), "pid": rank * 100_000_000 + 4000} for rank in range(3)]  # fmt: skip
    recording = read_kineto([write(tmp_path / "fused.json", document(events, rank=None, world=None))])
    assert recording.ranks == (0, 1, 2)
    assert recording.gpu_ops["launch"].to_list() == [0, 1, 2]


#: (as it should be, what a writer makes of it, events that are lost)
MISTAKES = [
    ('"Memcpy HtoD', '"Memcpy "HtoD"', 0),
    ('"block": [128, 1, 1]', '"occupancy": inf, "block": [128, 1, 1]', 0),
    ('"correlation": 9', '"correlation": 36893488147419103232', 0),
    ('"stream": 7', '"stream": 4294967295', 0),
    ('"cat": "gpu_memcpy"', '"x": [{"a": 1}, {"b": 2}], "cat": "gpu_memcpy"', 0),
    ('"name": "ProfilerStep#4"', '"name": }', 1),
]


def test_what_writers_get_wrong_costs_no_other_event(tmp_path):
    text = json.dumps(document(EVENTS))
    for right, wrong, lost in MISTAKES:
        assert right in text
        path = tmp_path / "trace.json"
        path.write_text(text.replace(right, wrong, 1))
        with case(wrong):
            recording = read_kineto([path])
            assert recording.gpu_ops.height == 2
            assert sum("damaged" in note for note in recording.notes) == lost


def test_a_negative_duration_is_zero_and_one_of_236_years_is_left_out(tmp_path):
    events = [*EVENTS, kernel("a", 60, -0.5), kernel("b", 70, 7.4e15)]
    recording = read_kineto([write(tmp_path / "trace.json", document(events, world=1))])
    assert recording.gpu_ops.filter(name="a")["duration"].to_list() == [0.0]
    assert "b" not in names(recording)
    assert recording.notes == (
        "trace.json: left out 1 event with impossible times",
        "trace.json: set 1 negative duration to 0",
    )


IMPOSSIBLE = {
    "event with impossible times": [
        *(("ts", value) for value in ("1e40", "1e17", "null")),
        *(("dur", value) for value in ("1e400", "NaN", "null", "1e7")),
    ],
    "damaged event": [
        *(("name", value) for value in ("null", "7", '"\\ud800"')),
        ("tid", "[1]"),
        ("args", "[" * 5000 + "]" * 5000),
    ],
}


@pytest.mark.parametrize("at", [0, 2])
def test_an_event_that_cannot_be_is_left_out_and_counted(tmp_path, at):
    """The third of ten, or the first."""
    path = tmp_path / "trace.json"
    for note, field, value in ((note, *damage) for note, several in IMPOSSIBLE.items() for damage in several):
        events = [kernel(GEMM, 20 + 10 * number, 5) for number in range(10)]
        events[at][field] = "here"
        path.write_text(json.dumps(document(events, world=1)).replace('"here"', value))
        with case((field, value[:9])):
            recording = read_kineto([path])
            assert recording.gpu_ops.height == 9
            assert recording.notes == (f"trace.json: left out 1 {note}",)
            assert recording.damaged == {0: pytest.approx(0.1, abs=0.02)}


@pytest.mark.slow
def test_an_absurd_number_in_one_event_ends_in_a_report(tmp_path):
    fields = ("pid", "tid", "grid", "block", "stream", "device", "correlation", "In msg nelems")
    values = (-1, 7, 1.5, 2**63 - 1, 2**63, 10**29, "x", True, None, {"a": [1]})
    """Where values are read alike, so that all that is analysed is the same, one report is enough."""
    write(tmp_path / "rank0.json", document([all_reduce(20 + 10 * number, 5) for number in range(4)], 0))
    reported = set()
    for field, value in itertools.product(fields, values):
        events = [all_reduce(20 + 10 * number, 5) for number in range(4)]
        (events[1] if field in events[1] else events[1]["args"])[field] = value
        write(tmp_path / "rank1.json", document(events, 1))
        with case((field, value)):
            job = load(tmp_path)
            read = repr([one.rows() if isinstance(one, pl.DataFrame) else one for one in vars(job.recording).values()])
            if read in reported:
                continue
            reported.add(read)
            report = job.whatif()
            assert report.job.gpu_ops >= 7
            json.loads(report.to_json())
    assert len(reported) > 5


def test_the_mark_of_a_step_with_thirty_digits_marks_nothing(tmp_path):
    events = [event("user_annotation", f"ProfilerStep#{'7' * 30}", 0, 60), *EVENTS]
    recording = read_kineto([write(tmp_path / "trace.json", document(events, world=1))])
    assert recording.step_spans["step"].to_list() == [4]


def test_a_file_whose_base_of_times_is_damaged_begins_with_the_others(tmp_path):
    for base in (10**30, -5, "x", 2**64):
        for rank, stated in enumerate((1_700_000_000_000_000_000, 1_700_000_000_000_000_000, base)):
            write(tmp_path / f"{rank}.json", document([kernel(GEMM, 20, 30)], rank, 3, baseTimeNanoseconds=stated))
        with case(base):
            assert read_kineto([tmp_path]).gpu_ops["start"].to_list() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([event("cpu_op", "aten::mm", 0, 5)], "holds no GPU ops (1 host events): it was recorded on the CPU only"),
        ([], "a Chrome trace, but not of torch.profiler"),
    ],
)
def test_a_rank_without_gpu_ops_does_not_keep_the_others_from_being_read(tmp_path, events, why):
    for rank in range(3):
        write(tmp_path / f"rank{rank}.json", document(events if rank == 1 else GPU, rank, 3))
    recording = read_kineto([tmp_path])
    assert recording.ranks == (0, 2)
    assert recording.left_out[1].startswith(why)


@pytest.mark.parametrize("packed", [False, True])
def test_of_a_file_that_is_cut_off_what_is_whole_is_read(tmp_path, packed):
    events = [launch(10, 1), *(kernel(GEMM, 20 + 10 * number, 5, correlation=1) for number in range(2000))]
    text = json.dumps(document(events, world=1)).encode()
    path = tmp_path / ("trace.json.gz" if packed else "trace.json")
    whole = gzip.compress(text) if packed else text
    path.write_bytes(whole[: len(whole) // 2])
    recording = read_kineto([path])
    assert 500 < recording.gpu_ops.height < 1999
    assert any("cut off" in note for note in recording.notes)


def test_blocks_of_any_size_give_the_same_events(tmp_path, monkeypatch):
    """Boundaries of blocks fall anywhere: inside events, strings and nested lists."""
    path = write(tmp_path / "trace.json", document(EVENTS * 20, deviceProperties=[{"id": 0}, {"id": 1}]))
    whole = read_kineto([path]).gpu_ops
    for size in (64, 333, 1000):
        monkeypatch.setattr(json_events, "BLOCK_BYTES", size)
        assert read_kineto([path]).gpu_ops.equals(whole)


def test_files_read_in_processes_of_their_own_give_the_same(tmp_path, monkeypatch):
    """Three files and two processes."""
    for rank in range(3):
        write(tmp_path / f"rank{rank}.json", document(EVENTS, rank, traceName="host_1.2.pt.trace.json", huge=2**70))
    alone = read_kineto([tmp_path])
    monkeypatch.setattr("tracekit.collectors.importers.kineto.reader.LARGEST_IN_PROCESS", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    together = read_kineto([tmp_path])
    assert together.gpu_ops.equals(alone.gpu_ops)
    assert together.calls.equals(alone.calls)
    assert together.hosts == alone.hosts == dict.fromkeys(range(3), "host")


def test_a_killed_process_is_one_error_that_names_its_file(tmp_path, monkeypatch):
    """More files than processes: those that find none left say nothing."""
    for rank in range(4):
        write(tmp_path / f"rank{rank}.json", document(EVENTS, rank))
    monkeypatch.setattr("tracekit.collectors.importers.kineto.reader.LARGEST_IN_PROCESS", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(
        "tracekit.collectors.importers.kineto.reader._READ", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    with pytest.raises(FormatError, match=r"rank\d\.json: the process that read it was killed \(-9\)"):
        read_kineto([tmp_path])


def test_what_is_wrong_with_a_file_that_another_process_read_is_said_as_if_read_here(tmp_path, monkeypatch):
    monkeypatch.setattr("tracekit.collectors.importers.kineto.reader.LARGEST_IN_PROCESS", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    write(tmp_path / "rank0.json", document(EVENTS, 0))
    (tmp_path / "rank1.json").write_text("{}")
    with pytest.raises(FormatError, match=r"rank1\.json: not JSON with traceEvents"):
        read_kineto([tmp_path / "rank0.json", tmp_path / "rank1.json"])


def test_groups_come_from_the_head_of_the_file_where_arguments_are_cut_short(tmp_path):
    config = [{"pg_name": "7", "pg_desc": "dp", "pg_size": 2, "ranks": [0, 1]}]
    events = [all_reduce(0, 5, **{"Process Group Ranks": "[0, ...", "Process Group Name": "7"})]
    for rank in range(2):
        content = document(events, rank)
        content["distributedInfo"]["pg_config"] = config
        write(tmp_path / f"rank{rank}.json", content)
    assert read_kineto([tmp_path]).groups == (ProcessGroup("default_pg 7", (0, 1)),)


def test_a_group_as_large_as_the_job_has_all_its_ranks_and_one_that_is_cut_has_none(tmp_path):
    """In the head of the file; what is no group is passed over."""
    config = [
        7,
        {"pg_name": "world", "pg_size": 4},
        {"pg_name": "dp", "pg_size": 2, "ranks": [0, 2]},
        {"pg_name": "cut", "pg_size": 3, "ranks": [0, 2]},
        {"pg_name": "text", "ranks": "[1, 3]"},
    ]
    file = SimpleNamespace(header={"distributedInfo": {"world_size": 4, "pg_config": config}})
    assert pg_config(file) == {"world": (0, 1, 2, 3), "dp": (0, 2), "text": (1, 3)}
    for listed in ("[0, 1, ...", "7", [0, -1], [0, "1"], None):
        assert rank_list(listed) == ()


def test_groups_of_one_name_are_told_apart_by_their_ranks():
    used = {"dp", "dp [0, 1]", "tp", "tp [0, 1, 2, 3 ...]", "tp [0, 1, 2, 3 ...] 2"}
    assert _unused("pp", used, (0, 1)) == "pp"
    assert _unused("dp", used, (2, 3)) == "dp [2, 3]"
    assert _unused("dp", used, (0, 1)) == "dp [0, 1] 2"
    assert _unused("tp", used, (0, 1, 2, 3, 4)) == "tp [0, 1, 2, 3 ...] 3"


def test_an_op_long_before_its_launch_is_left_out_and_said(tmp_path):
    """Of 200 launches each, the last op begins 2 ms before it."""
    events = [
        event
        for number in range(200)
        for event in (launch(100 * number, number), kernel(GEMM, 100 * number + 20, 9, correlation=number))
    ]
    events[-1]["ts"] -= 2020
    recording = read_kineto([write(tmp_path / "trace.json", document(events, world=1))])
    assert recording.gpu_ops.height == 199
    assert "trace.json: left out 1 GPU op that would begin before their launch" in recording.notes


def test_a_damaged_head_and_a_damaged_last_event_cost_no_event(tmp_path):
    text = json.dumps(document(EVENTS[2:4], world=1))
    for damaged in (
        text.replace('"schemaVersion": 1', '"schemaVersion": x'),
        text.replace("]}", '], "after": {"more": [1]}}').replace('"stream": 7, ', '"stream": 7, "name": "a"b", '),
    ):
        (tmp_path / "trace.json").write_text(damaged)
        assert names(read_kineto([tmp_path / "trace.json"])) == [GEMM]


def test_a_file_that_unpacks_to_hundreds_of_times_its_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(json_events, "_MOST_UNPACKED_BYTES", 1 << 16)
    text = json.dumps(document(EVENTS)).replace("[", "[" + " " * (8 << 20), 1)
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(FormatError, match="unpacks to more than 200 times its size, as no recording does"):
        read_kineto([tmp_path / "trace.json.gz"])


def test_a_list_that_is_none_is_its_text():
    text = b'{"args": [1, 2}'
    assert _list_at(text, 9, 14) == "[1, 2"
    assert _list_at(b"[1, 2]", 0, 6) == [1, 2]
    assert _list_at(text, -1, 3) is None


def test_the_names_of_groups_may_differ_between_ranks(tmp_path):
    for rank in range(2):
        args = {"Process Group Name": str(5 + rank), "Process Group Description": "undefined"}
        write(tmp_path / f"rank{rank}.json", document([all_reduce(0, 5, **args)], rank))
    recording = read_kineto([tmp_path])
    assert [group.ranks for group in recording.groups] == [(0, 1)]
    assert recording.gpu_ops["group"].n_unique() == 1


GPU = [kernel(GEMM, 0, 5)]
BAD = {
    "empty": ({"t.json": b""}, "empty; expected a trace of torch.profiler"),
    "none": ({}, "holds no traces of torch.profiler"),
    "memory snapshot": ({"t.json": b'{"segments": [], "device_traces": []}'}, "a memory snapshot of torch"),
    "pickled snapshot": ({"t.json": b"\x80\x04\x95\x8c\x08segments"}, "a memory snapshot of torch.cuda.memory"),
    "execution trace": ({"t.json": {"schema": "1.1", "nodes": []}}, "an execution trace of torch.profiler.Exec"),
    "only CPU": ({"t.json": document([event("cpu_op", "aten::mm", 0, 5)])}, "recorded on the CPU only; record with"),
    "another tool": (
        {"t.json": {"traceEvents": [{"ph": "X", "name": "a", "cat": "v8", "ts": 0, "dur": 1, "pid": 1, "tid": 1}]}},
        "a Chrome trace, but not of torch.profiler",
    ),
    "cut at once": ({"t.json": b'{"traceEvents": [{"ph": "X", '}, "is cut off or damaged before its first GPU op"),
    "two of a rank": (
        {"i10/rank0.json": document(GPU), "i20/rank0.json": document(GPU)},
        "both are traces of rank 0; give the files of one recording",
    ),
    "name and head": ({"rank1.json": document(GPU, rank=0)}, "distributedInfo says rank 0, its name rank 1"),
    "arguments and head": (
        {"t.json": document([*GPU, event("cpu_op", "record_param_comms", 0, 5, **all_reduce(0, 1)["args"], Rank=1)])},
        "distributedInfo says rank 0, the arguments of its collectives rank 1",
    ),
    "two jobs": (
        {"rank0.json": document(GPU, 0, world=2), "rank1.json": document(GPU, 1, world=4)},
        "says that the job has 2 ranks, but .* says 4",
    ),
    "one without rank": (
        {"rank0.json": document(GPU, None), "t.json": document([*GPU, all_reduce(0, 1)], None)},
        "does not state its rank, other files do",
    ),
    "recordings": (
        {"a/t.json": document(GPU, None, None), "b.json": document(GPU, 0, None), "c.json": document(GPU, None, None)},
        r"recordings: 3 recordings, not the ranks of one job: a/t.json, b.json, c.json; name one, such as `tracekit",
    ),
}  # fmt: skip


def test_what_is_no_such_trace_is_one_clear_sentence(tmp_path):
    for name, (files, message) in BAD.items():
        folder = tmp_path / name
        folder.mkdir()
        for path, content in files.items():
            if isinstance(content, bytes):
                (folder / path).write_bytes(content)
            else:
                write(folder / path, content)
        alone = list(files) == ["t.json"]
        with case(name), pytest.raises(FormatError, match=message):
            read_kineto([folder / "t.json" if alone else folder])


def test_files_of_different_steps_are_no_recording(tmp_path):
    for rank, step in enumerate((4, 104)):
        events = [event("user_annotation", f"ProfilerStep#{step}", 0, 50), launch(10, 1), kernel(GEMM, 20, 5)]
        write(tmp_path / f"rank{rank}.json", document(events, rank))
    with pytest.raises(
        FormatError, match=r"rank1\.json holds steps 104 to 104, .*rank0\.json steps 4 to 4: no step in common"
    ):
        read_kineto([tmp_path])


def test_missing_ranks_are_said(tmp_path):
    recording = read_kineto([write(tmp_path / "rank0.json", document(GPU, 0, world=4))])
    assert recording.notes == ("3 of 4 ranks were not recorded (1, 2, 3): the replay does not wait for them",)


def test_folders_named_by_rank_say_it_where_files_do_not(tmp_path):
    for rank in (0, 1):
        write(
            tmp_path / f"rank_{1 - rank}" / f"host_{rank}.pt.trace.json",
            document([kernel(str(rank), 0, 5)], None, None),
        )
    assert read_kineto([tmp_path]).gpu_ops.select("rank", "name").rows() == [(0, "1"), (1, "0")]


def test_numbers_in_names_count_as_numbers(tmp_path):
    for number in range(11):
        write(tmp_path / f"{number}.json", document([kernel(str(number), 0, 5)], None, None))
    assert read_kineto([tmp_path]).gpu_ops["name"].to_list() == list(map(str, range(11)))


def test_files_that_say_no_rank_are_numbered_and_the_report_says_so(tmp_path):
    for name in ("b.json", "a.json"):
        write(tmp_path / name, document([kernel(name, 0, 5)], None, None))
    recording = read_kineto([tmp_path])
    assert recording.gpu_ops.select("rank", "name").rows() == [(0, "a.json"), (1, "b.json")]
    assert "numbered in the order of the file names" in recording.notes[0]


KERNELS = {
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": KernelClass.COMMUNICATION,
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": KernelClass.COMMUNICATION,
    "ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)": KernelClass.COMMUNICATION,
    "void deep_ep::internode::dispatch<false, 8>(int4*)": KernelClass.COMMUNICATION,
    "void dpsk::ep::internode::combine<false, 4>(int4*)": KernelClass.COMMUNICATION,
    "void dpsk::ep::internode::cached_notify<false>(int)": KernelClass.COMMUNICATION,
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)": KernelClass.COMMUNICATION,
    "void mscclpp::allreduce7<__half>(int)": KernelClass.COMMUNICATION,
    "void dpsk::ep::cuda::get_dispatch_layout(int)": KernelClass.OTHER,
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(int)": KernelClass.MATRIX_PRODUCT,
    "Cijk_Alik_Bljk_SB_MT64x64x16": KernelClass.MATRIX_PRODUCT,
    "void pytorch_flash::flash_fwd_kernel<Traits>(Params)": KernelClass.ATTENTION,
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)": KernelClass.ELEMENT_WISE,
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>(int)": KernelClass.OPTIMIZER,
    "Memset (Device)": KernelClass.MEMORY,
    "my_own_kernel": KernelClass.OTHER,
}


def test_the_class_of_a_kernel_follows_from_its_name():
    assert dict(zip(KERNELS, KernelClasses().of(list(KERNELS)), strict=True)) == KERNELS


def test_a_users_patterns_come_first_from_options_and_files(tmp_path):
    path = tmp_path / "classes.yaml"
    path.write_text("communication: [my_ring_.*]\nattention: my_own\n")
    classes = kernel_classes([str(path), "optimizer=ampere_sgemm"])
    assert classes.of(["My_ring_step", "my_own_kernel", GEMM]) == [
        KernelClass.COMMUNICATION, KernelClass.ATTENTION, KernelClass.OPTIMIZER,
    ]  # fmt: skip


def test_a_pattern_that_cannot_be_meant_is_an_error():
    for stated, message in (
        ("speed=fast", "'speed' is not a kernel class; expected one of attention, communication"),
        ("attention=(", "'\\(' is not a regular expression: unclosed group"),
        (r"attention=(a)\1", "is not a regular expression: backreferences are not supported"),
        ("attention=(a{1000}){1000}", "is not a regular expression: Compiled regex exceeds size limit"),
        ("nowhere.yaml", "nowhere.yaml: no such file or folder"),
        ("gs://bucket/classes.yaml", "gs://bucket/classes.yaml: in object storage: "),
    ):
        with case(stated), pytest.raises((SelectionError, FormatError), match=message):
            kernel_classes([stated])


def test_a_collective_that_only_an_annotation_names_has_its_name(tmp_path):
    """Files of 2023 say so nowhere else."""
    events = [
        event("user_annotation", "nccl:all_to_all", 5, 20),
        event("cpu_op", "record_param_comms", 6, 15),
        launch(10, 1),
        kernel("ncclDevKernel_SendRecv(ncclDevComm*)", 20, 30, stream=COMM, correlation=1),
    ]
    recording = read_kineto([write(tmp_path / "trace.json", document(events))])
    assert recording.gpu_ops.select("collective", "stated", "group").rows() == [("all_to_all", False, None)]
    assert recording.calls["collective_call"].to_list() == [True]


def test_recorded_synchronisation_names_the_stream_and_since_when(tmp_path):
    events = [
        event("cuda_runtime", "cudaEventRecord", 12, 1, correlation=5),
        event("cuda_runtime", "cudaStreamWaitEvent", 14, 1, correlation=6),
        event("cuda_sync", "Stream Wait Event", 14, 0, pid=0, tid=20, stream=20, correlation=6, wait_on_stream=7,
              wait_on_cuda_event_record_corr_id=5),
        *EVENTS,
    ]  # fmt: skip
    calls = read_kineto([write(tmp_path / "trace.json", document(events))]).calls
    wait = (
        calls.filter(pl.col("role") == "stream-wait").select("waits_stream", "waits_for_stream", "recorded_at").row(0)
    )
    assert wait == (20, 7, pytest.approx(2e-6))


def on_a_mesh(folder, descriptions):
    """Four ranks, whose files list these groups: description -> lists of ranks."""
    for rank in range(4):
        groups = [
            {"pg_name": f"{name} {ranks}", "pg_desc": name, "pg_size": len(ranks), "ranks": ranks}
            for name, every in descriptions.items() for ranks in every if rank in ranks
        ]  # fmt: skip
        content = document(EVENTS, rank, world=4)
        content["distributedInfo"]["pg_config"] = groups
        write(folder / f"rank{rank}.json", content)
    return folder


ROWS, COLUMNS, ALL = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]


def test_ranks_have_coordinates_where_groups_are_named_after_axes(tmp_path):
    """What says nothing, such as default_pg, makes no axis; nor do groups that overlap; one over two axes is none."""
    for descriptions, axes in (
        ({"pp": COLUMNS, "tp": ROWS}, ("pp_rank", "tp_rank")),
        ({"TENSOR_MODEL_PARALLEL_GROUP": ROWS, "DATA_PARALLEL_GROUP": COLUMNS}, ("dp_rank", "tp_rank")),
        ({"mesh_dp": ROWS, "mesh_cp": COLUMNS, "mesh_dp_cp": ALL}, ("cp_rank", "dp_rank")),
        ({"default_pg": ALL, "undefined": ROWS, "mesh_dim_0": COLUMNS}, ()),
        ({"tp": [[0, 1], [1, 2, 3]]}, ()),
    ):
        with case(descriptions):
            assert read_kineto([on_a_mesh(tmp_path, descriptions)]).axes == axes
    mesh = read_kineto([on_a_mesh(tmp_path, {"default_pg": ALL, "mesh_tp": ROWS, "mesh_dp_shard": COLUMNS})])
    assert mesh.axes == ("dp_shard_rank", "tp_rank")
    assert mesh.coordinates["tp_rank"] == {0: 0, 1: 1, 2: 0, 3: 1}
    assert mesh.coordinates["dp_shard_rank"] == {0: 0, 1: 0, 2: 1, 3: 1}


def test_a_report_attributes_by_an_axis_of_the_mesh(tmp_path):
    folder = on_a_mesh(tmp_path, {"mesh_tp": ROWS, "mesh_dp": COLUMNS})
    table = load(folder).whatif(by=["tp_rank,dp_rank"]).table("by_label")
    values = table.group_by("labels").agg(pl.col("value").sort())
    found = dict(values.iter_rows())
    assert found["tp_rank"] == ["0", "1"]  # an axis, without being asked for
    assert found["tp_rank,dp_rank"] == ["0,0", "0,1", "1,0", "1,1"]
