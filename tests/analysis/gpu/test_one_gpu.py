"""Why one GPU idles: by hand, against an oracle that looks at every microsecond, and what each finding saves."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.handmade import run
from tests.kineto_files import GEMM, document, event, kernel, launch, write
from tracekit import load
from tracekit.analysis.gpu.roofline import Card, cards, roofline_s
from tracekit.analysis.gpu.times import times_of
from tracekit.analysis.job.graph import RecordingJob
from tracekit.base.errors import FormatError

Event = dict[str, Any]
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
OWN = "train.py(10): step"
US = pytest.approx


def recording(folder: Path, events: Iterable[Event]) -> RecordingJob:
    write(folder / "trace.json", document(events, world=1))
    job = load(folder)
    assert isinstance(job, RecordingJob)
    return job


def gpu(folder: Path, events: Iterable[Event]) -> dict[str, Any]:
    """The GPU in the report, with times in microseconds."""
    return in_us(recording(folder, events).whatif().to_dict()["gpu"])


def in_us(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: value * 1e6 if _is_time(key, value) else in_us(value) for key, value in found.items()}
    return [in_us(one) for one in found] if isinstance(found, list) else found


def _is_time(key: str, value: object) -> bool:
    return isinstance(value, float) and (key.endswith("_s") or key == "seconds" or key in REASONS)


REASONS = (
    "loader",
    "gc",
    "synchronise",
    "allocation",
    "runtime-call",
    "operator",
    "python",
    "host",
    "queued",
    "unknown",
)


def two_kernels(*between: Event, called: float = 280, ends: float = 100) -> list[Event]:
    """One kernel until `ends`, the next from 300 to 400, which a call from `called` on launches."""
    return [
        launch(0, 1), kernel(GEMM, 10, ends - 10, correlation=1), *between,
        launch(called, 2), kernel(GEMM, 300, 100, correlation=2),
    ]  # fmt: skip


def call(name: str, ts: float, dur: float, **more: Any) -> Event:
    return event("cuda_runtime", name, ts, dur, **more)


OPERATOR = event("cpu_op", "aten::mm", 6, 300)
FUNCTION = event("python_function", OWN, 6, 300)
#: What the thread does, and what the gap from 100 to 300 consists of, microseconds.
GAPS: dict[str, tuple[list[Event], dict[str, float]]] = {
    "an operator": (two_kernels(OPERATOR), {"operator": 180, "launch-call": 5, "launch-latency": 15}),
    "a function": (two_kernels(FUNCTION), {"python": 180, "launch-call": 5, "launch-latency": 15}),
    "nothing": (two_kernels(), {"python": 180, "launch-call": 5, "launch-latency": 15}),
    "a loader in a function": (
        two_kernels(FUNCTION, event("user_annotation", LOADER, 120, 140), event("cpu_op", "aten::stack", 130, 50)),
        {"loader": 140, "python": 40, "launch-call": 5, "launch-latency": 15},
    ),
    "garbage collection in an operator": (
        two_kernels(OPERATOR, event("python_gc", "Python GC", 150, 60)),
        {"gc": 60, "operator": 120, "launch-call": 5, "launch-latency": 15},
    ),
    "a wait until after the kernel": (
        two_kernels(OPERATOR, call("cudaStreamSynchronize", 20, 100)),
        {"synchronise": 20, "operator": 160, "launch-call": 5, "launch-latency": 15},
    ),
    "allocation": (
        two_kernels(OPERATOR, call("cudaMalloc", 150, 70)),
        {"allocation": 70, "operator": 110, "launch-call": 5, "launch-latency": 15},
    ),
    "another call": (
        two_kernels(OPERATOR, call("cudaFuncGetAttributes", 150, 70)),
        {"runtime-call": 70, "operator": 110, "launch-call": 5, "launch-latency": 15},
    ),
    "an operator of another thread in the middle of the time": (
        two_kernels(event("cpu_op", "MulBackward0", 90, 110, tid=200)),
        {"operator": 180, "launch-call": 5, "launch-latency": 15},
    ),
    "an operator of another process with the same thread number": (
        two_kernels(event("cpu_op", "aten::mm", 6, 300, pid=77)),
        {"operator": 180, "launch-call": 5, "launch-latency": 15},
    ),
    "launched long before": (two_kernels(called=20), {"queued": 200}),
    "launched just before": (two_kernels(called=95), {"launch-latency": 200}),
    "launched nowhere": (two_kernels()[:-2] + two_kernels()[-1:], {"unknown": 200}),
}


@pytest.mark.parametrize("name", GAPS)
def test_a_gap_is_what_the_launching_thread_does(name: str, tmp_path: Path) -> None:
    events, expected = GAPS[name]
    found = gpu(tmp_path, events)
    assert {row["reason"]: row["seconds"] for row in found["idle_by_reason"]} == US(expected)
    assert (found["idle_s"], found["busy_s"], found["span_s"]) == US((200, 190, 390))
    assert {row["gaps"] for row in found["idle_by_reason"]} == {1}
    assert [row["seconds"] for row in found["idle_by_reason"]] == US(sorted(expected.values(), reverse=True))


def test_names_say_operator_call_and_line(tmp_path: Path) -> None:
    found = gpu(tmp_path, two_kernels(FUNCTION, OPERATOR, call("cudaMalloc", 150, 70)))
    rows = {row["reason"]: row["names"][0] for row in found["idle_by_reason"]}
    assert (rows["operator"]["name"], rows["allocation"]["name"]) == ("aten::mm", "cudaMalloc in aten::mm")
    assert rows["operator"]["where"] == rows["allocation"]["where"] == OWN


def test_the_time_before_the_first_op(tmp_path: Path) -> None:
    """The recording begins at 0, the first launch at 1,000, its kernel at 1,020."""
    events = [
        event("python_function", "data.py(5): read", 0, 800), event("cpu_op", "aten::stack", 200, 100),
        launch(1000, 1), kernel(GEMM, 1020, 480, correlation=1),
    ]  # fmt: skip
    found = gpu(tmp_path, events)
    assert found["before_first"]["seconds"] == US(1020)
    assert found["before_first"]["by_reason"] == US({"python": 900, "operator": 100})
    (finding,) = found["findings"]
    assert (finding["reason"], finding["where"], finding["saves_s"]) == ("python", "data.py(5): read", US(800, abs=1))


def test_how_gaps_begin(tmp_path: Path) -> None:
    waits = two_kernels(OPERATOR, call("cudaStreamSynchronize", 20, 100))
    assert gpu(tmp_path / "a", waits)["idle_opened_by"] == US({"synchronise": 200})
    assert gpu(tmp_path / "b", two_kernels(OPERATOR))["idle_opened_by"] == US({"host": 200})
    (row,) = gpu(tmp_path / "a", waits)["synchronisations"]
    assert (row["call"], row["op"], row["count"]) == ("cudaStreamSynchronize", "aten::mm", 1)
    assert (row["blocked_s"], row["idle_after_s"]) == US((100, 200))


def test_only_the_threads_of_a_rank_wait_for_its_gpu(tmp_path: Path) -> None:
    """The main threads of both ranks have the same number."""
    waits = two_kernels(OPERATOR, call("cudaStreamSynchronize", 20, 100))
    for rank, events in enumerate((two_kernels(OPERATOR), waits)):
        write(tmp_path / f"rank{rank}.json", document(events, rank=rank))
    both = load(tmp_path)
    assert isinstance(both, RecordingJob)
    opened = [in_us(times_of(both.recording, rank).idle_opened_by) for rank in (0, 1)]
    assert opened == [US({"host": 200}), US({"synchronise": 200})]


def test_copies_by_kind_and_what_they_expose(tmp_path: Path) -> None:
    """A copy of 100 us of which a kernel hides 40, and one within the GPU."""
    name = "Memcpy HtoD (Pageable -> Device)"
    events = [
        launch(0, 1), kernel(GEMM, 10, 90, correlation=1),
        event("gpu_memcpy", name, 60, 100, pid=0, tid=9, device=0, stream=9, correlation=-1, bytes=3_000_000),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 200, 10, pid=0, tid=9, device=0, stream=9, bytes=8),
    ]  # fmt: skip
    rows = {row["kind"]: row for row in gpu(tmp_path, events)["transfers"]}
    assert (rows["HtoD"]["pageable"], rows["HtoD"]["bytes"], rows["HtoD"]["exposed_s"]) == (True, 3_000_000, US(60))
    assert (rows["DtoD"]["pageable"], rows["DtoD"]["seconds"], rows["DtoD"]["exposed_s"]) == (False, US(10), US(10))


def test_a_call_that_copies_pageable_memory_waits_though_it_returns_before_the_last_piece(tmp_path: Path) -> None:
    """The call waits for the product and hands the copy on, until 5 us before its end. Pinned, 2.4 MB take 100 us of
    24 GB/s instead of 500: the copy and what follows it come 400 us earlier.
    """
    name = "Memcpy HtoD (Pageable -> Device)"
    events = [
        launch(0, 1), kernel(GEMM, 10, 100, correlation=1),
        call("cudaMemcpyAsync", 5, 600, correlation=2),
        event("gpu_memcpy", name, 110, 500, pid=0, tid=7, device=0, stream=7, correlation=2, bytes=2_400_000),
        launch(610, 3), kernel(GEMM, 620, 100, correlation=3),
    ]  # fmt: skip
    found = gpu(tmp_path, events)["findings"][0]
    assert (found["reason"], found["saves_s"]) == ("transfer", US(400))


def test_operators_with_the_sizes_of_their_inputs(tmp_path: Path) -> None:
    """A product of 1024 x 512 by 512 x 256 in float32: 268 MFLOP, and 3.6 MB read and written."""
    args = {"Input Dims": [[1024, 512], [512, 256]], "Input type": ["float", "float"]}
    events = [event("cpu_op", "aten::mm", 0, 20, **args), launch(5, 1), kernel(GEMM, 20, 100, correlation=1)]
    (op,) = gpu(tmp_path, events)["ops"]
    (shape,) = op["shapes"]
    assert (op["name"], op["gpu_ops"], shape["dims"]) == ("aten::mm", 1, "[[1024, 512], [512, 256]]")
    assert shape["flops_s"] / 1e6 == US(2 * 1024 * 512 * 256 / 100e-6)
    assert shape["bytes_s"] / 1e6 == US(4 * (1024 * 512 + 512 * 256 + 1024 * 256) / 100e-6)


def allocated(ts: float, now: int, kept: int, *, device: int = 0, kind: int = 1) -> Event:
    args = {"Total Allocated": now, "Total Reserved": kept, "Device Id": device, "Device Type": kind, "Bytes": 1}
    return {**event("cpu_instant_event", "[memory]", ts, 0, **args), "ph": "i", "s": "t"}


def test_memory_over_time_is_that_of_the_gpu(tmp_path: Path) -> None:
    """Not of the host, nor of another GPU that has less; an hour of changes is thinned out, and keeps its peak."""
    events = [allocated(20 + number, 100 + number % 7, 900) for number in range(1000)]
    events[500] = allocated(520, 800, 1000)
    events += [allocated(3, 10**6, 10**6, kind=0), allocated(4, 50, 60, device=1)]
    memory = gpu(tmp_path / "a", [*steps(3), *events])["memory"]
    assert (memory["peak_bytes"], memory["reserved_bytes"]) == (800, 1000)
    assert 100 < len(memory["points"]) <= 200
    assert max((one["bytes"], one["seconds"]) for one in memory["points"]) == (800, US(520))
    assert gpu(tmp_path / "b", steps(3))["memory"] is None


def test_occupancy_is_the_mean_by_time(tmp_path: Path) -> None:
    """100 us at 50 %, 300 us at 10 %, and a kernel for which the profiler gives none."""
    name = "est. achieved occupancy %"
    events = [
        kernel(GEMM, 0, 100, **{name: 50}),
        kernel(GEMM, 100, 300, **{name: 10}),
        kernel(GEMM, 400, 99, **{name: 0}),
    ]
    (row,) = gpu(tmp_path, events)["kernels"]
    assert row["occupancy"] == US((100 * 0.5 + 300 * 0.1) / 400)


# ---- against an oracle


def oracle(events: list[Event]) -> Counter[str]:
    """Microseconds of each reason, instant by instant, by the definitions of docs/kineto.md; times are even numbers."""
    gpu_ops = sorted((e for e in events if e["cat"] == "kernel"), key=lambda e: e["ts"])
    launches = {
        e["args"]["correlation"]: e for e in events if "correlation" in e["args"] and e["cat"] == "cuda_runtime"
    }
    found: Counter[str] = Counter()
    reached = gpu_ops[0]["ts"]
    for op in gpu_ops:
        if op["ts"] > reached:
            found += one_gap(events, launches.get(op["args"]["correlation"]), reached, op["ts"])
        reached = max(reached, op["ts"] + op["dur"])
    return found


def one_gap(events: list[Event], called: Event | None, begin: int, end: int) -> Counter[str]:
    if called is None:
        return Counter(unknown=end - begin)
    start, done = called["ts"], called["ts"] + called["dur"]
    if start < begin:
        return Counter({"queued" if start + 10 <= begin else "launch-latency": end - begin})
    found: Counter[str] = Counter()
    for instant in range(begin, end):
        if instant >= start:
            found["launch-call" if instant < done else "launch-latency"] += 1
            continue
        found[reason_of(around(events, instant))] += 1
    return found


def around(events: list[Event], instant: int) -> list[Event]:
    """The spans around an instant, the innermost last."""
    here = [e for e in events if e["cat"] != "kernel" and e["ts"] <= instant < e["ts"] + e["dur"]]
    return sorted(here, key=lambda e: (e["ts"], -e["dur"]))


def reason_of(spans: list[Event]) -> str:
    if any("DataLoader" in e["name"] for e in spans):
        return "loader"
    if any(e["cat"] == "python_gc" for e in spans):
        return "gc"
    if spans and spans[-1]["cat"] == "cuda_runtime":
        name = spans[-1]["name"]
        return "synchronise" if "Sync" in name else "allocation" if "Malloc" in name else "runtime-call"
    return "operator" if any(e["cat"] == "cpu_op" for e in spans) else "python"


KINDS = (
    ("cpu_op", "aten::add"), ("cpu_op", "aten::mul"), ("python_function", OWN), ("user_annotation", LOADER),
    ("python_gc", "Python GC"), ("cuda_runtime", "cudaMalloc"), ("cuda_runtime", "cudaDeviceSynchronize"),
    ("cuda_runtime", "cudaFuncGetAttributes"), ("user_annotation", "forward"),
)  # fmt: skip


def drawn(draw: random.Random) -> list[Event]:
    """Nested spans of a thread, and kernels, some with no recorded launch."""
    events: list[Event] = []

    def spans(begin: int, end: int, depth: int) -> None:
        at = begin + draw.randrange(0, 12)
        while at + 8 < end:
            length = draw.randrange(8, max(9, (end - at)))
            category, name = draw.choice(KINDS)
            events.append(event(category, name, at, length))
            if depth and category != "cuda_runtime":
                spans(at + 1, at + length - 1, depth - 1)
            at += length + draw.randrange(1, 20)

    spans(0, 600, 3)
    stream_end = 0
    for number in range(1, 13):
        called = draw.randrange(stream_end, stream_end + 60)
        start = max(stream_end, called + draw.randrange(6, 25))
        stream_end = start + draw.randrange(5, 40)
        events.append(kernel(GEMM, start, stream_end - start, correlation=number))
        if fits(events, called) and draw.random() < 0.9:
            events.append(launch(called, number))
    return events


def fits(events: list[Event], called: int) -> bool:
    """Whether a call of 5 us lies inside or outside of each span, and in no other call."""
    for span in (e for e in events if e["cat"] != "kernel"):
        begin, end = span["ts"], span["ts"] + span["dur"]
        inside = begin <= called and called + 5 <= end and span["cat"] != "cuda_runtime"
        if not inside and begin <= called + 5 and called <= end:
            return False
    return True


@pytest.mark.parametrize("seed", range(40))
def test_reasons_are_those_of_an_oracle_and_sum_to_the_idle_time(seed: int, tmp_path: Path) -> None:
    events = drawn(random.Random(seed))
    times = times_of(recording(tmp_path, events).recording, 0)
    found = {row.reason: row.seconds * 1e6 for row in times.idle_by_reason}
    assert found == US(dict(oracle(events)), abs=1e-6)
    assert sum(found.values()) == US(times.idle_s * 1e6, abs=1e-6)


# ---- what findings save


def steps(count: int, *, loader_us: float = 0, item: bool = False, kernel_us: float = 400) -> list[Event]:
    """Steps of ten kernels; the host launches one every 20 us, after the loader."""
    events: list[Event] = []
    at, stream_end, number = 0.0, 0.0, 0
    for step in range(count):
        begin = at
        if loader_us:
            events.append(event("user_annotation", LOADER, at, loader_us))
            at += loader_us
        for _ in range(10):
            number += 1
            events += [event("cpu_op", "aten::mm", at, 18), launch(at + 10, number)]
            start = max(stream_end, at + 20)
            stream_end = start + kernel_us
            events.append(kernel(GEMM, start, kernel_us, correlation=number))
            at += 20
        if item:
            events += [event("python_function", "train.py(88): log", at, stream_end + 10 - at),
                       event("cpu_op", "aten::item", at, stream_end + 10 - at),
                       call("cudaStreamSynchronize", at + 2, stream_end + 6 - at)]  # fmt: skip
            at = stream_end + 10
        events.append(event("user_annotation", f"ProfilerStep#{step}", begin, at - begin))
    return events


def first(folder: Path, events: list[Event]) -> dict[str, Any]:
    return dict(gpu(folder, events)["findings"][0])


def test_a_loader_costs_what_the_queue_does_not_hide(tmp_path: Path) -> None:
    """5 steps of 4,000 us of kernels, launched in 200 us. A loader of 6,000 us leaves the GPU idle for 2,200 us of each

    step but the first, which it delays as a whole; one of 3,000 us delays only the first step.
    """
    long, short = first(tmp_path / "a", steps(5, loader_us=6000)), first(tmp_path / "b", steps(5, loader_us=3000))
    assert (long["reason"], long["name"], long["seconds"]) == ("loader", LOADER, US(5 * 6000))
    assert long["saves_s"] == US(6000 + 4 * 2200, rel=0.02)
    assert (short["reason"], short["saves_s"]) == ("loader", US(3000, rel=0.02))
    assert "_SingleProcess" in long["name"] and "num_workers" in long["action"]  # noqa: PT018


def test_an_item_in_every_step_costs_the_gaps_and_not_the_waits(tmp_path: Path) -> None:
    """Each of 5 calls waits 3.8 ms; after it, the GPU idles for 30 us until the next launch arrives."""
    found = gpu(tmp_path, steps(5, item=True))
    finding = next(one for one in found["findings"] if one["reason"] == "synchronise")
    assert (finding["name"], finding["where"], finding["count"]) == ("aten::item", "train.py(88): log", 5)
    assert finding["seconds"] > 15_000
    assert 4 * 25 < finding["saves_s"] < 5 * 45
    assert "train.py:88" in finding["action"]


def test_kernels_shorter_than_their_launch_are_launch_bound(tmp_path: Path) -> None:
    """50 kernels of 2 us, one launched every 20 us: as a graph, 50 x 2 us and one launch are left."""
    found = gpu(tmp_path, steps(5, kernel_us=2))
    finding = found["findings"][0]
    assert (finding["reason"], finding["name"]) == ("launch-bound", "aten::mm")
    assert found["launch"]["short_kernels"] == 50
    assert finding["saves_s"] == US(1000 - 100 - 20, rel=0.1)


def test_a_job_that_keeps_its_gpu_busy_has_no_finding(tmp_path: Path) -> None:
    assert gpu(tmp_path, steps(5))["findings"] == []
    assert "BALANCED: nothing costs 5%" in run("whatif", tmp_path).out


def test_a_first_call_that_takes_long_is_warm_up(tmp_path: Path) -> None:
    """The first launch loads a module for 50 ms, the others take 5 us."""
    events = [event("cpu_op", "aten::mm", 0, 50_020), call("cudaLaunchKernel", 10, 50_000, correlation=1),
              kernel(GEMM, 50_015, 100, correlation=1)]  # fmt: skip
    for number in range(2, 30):
        at = 50_000 + number * 100
        events += [
            event("cpu_op", "aten::mm", at, 30),
            launch(at + 10, number),
            kernel(GEMM, at + 20, 60, correlation=number),
        ]
    finding = first(tmp_path, events)
    assert (finding["reason"], finding["saves_s"]) == ("launch-call", US(50_000, rel=0.02))
    assert "schedule" in finding["action"]


def every_5_ms(count: int, work: Iterable[Event], *, called: float = 4900) -> list[Event]:
    """Kernels of 50 us every 5 ms, and before the launch of each but the first, the same work."""
    events = [launch(0, 1), kernel(GEMM, 10, 50, correlation=1)]
    for number in range(1, count):
        begin = 5000 * (number - 1)
        events += [{**one, "ts": one["ts"] + begin} for one in work]
        events += [launch(begin + called, number + 1), kernel(GEMM, begin + called + 20, 50, correlation=number + 1)]
    return events


def test_operators_that_launch_kernels_do_not_compute_on_the_host(tmp_path: Path) -> None:
    """4.8 ms inside an operator before each launch: dispatch if the launch is inside of it, else work of the host."""
    inside = gpu(tmp_path / "a", every_5_ms(9, [event("cpu_op", "aten::mm", 100, 4850)]))["findings"]
    outside = gpu(tmp_path / "b", every_5_ms(9, [event("cpu_op", "aten::sort", 100, 4790)]))["findings"]
    assert [one["reason"] for one in inside if one["name"] == "aten::mm"] == ["launch-bound"]
    assert [one["reason"] for one in outside if one["name"] == "aten::sort"] == ["operator"]
    assert outside[0]["saves_s"] == US(8 * 4790, rel=0.01)
    assert "workers" not in outside[0]["action"]


def test_lines_of_the_profiler_are_not_blamed(tmp_path: Path) -> None:
    """4 ms before each launch: 1 ms of the user's own, then 3 in the profiler, 2 of which wait for the GPU."""
    work = [
        event("python_function", "train.py(7): run", 90, 4850), event("python_function", "train.py(9): log", 100, 1000),
        event("python_function", "/env/torch/profiler/profiler.py(822): step", 1100, 3000),
        event("python_function", "torch/cuda/__init__.py(9): synchronize", 1200, 2000),
        call("cudaDeviceSynchronize", 1200, 2000),
    ]  # fmt: skip
    found = gpu(tmp_path, every_5_ms(9, work))
    assert {row["reason"]: row["names"][0]["where"] for row in found["idle_by_reason"]}["synchronise"] == (
        "/env/torch/profiler/profiler.py(822): step"
    )
    assert [(one["reason"], one["where"]) for one in found["findings"]] == [
        ("python", "train.py(9): log"), ("python", "train.py(7): run"),
    ]  # fmt: skip
    assert found["findings"][0]["saves_s"] == US(8 * 1000, rel=0.01)
    redacted = load(tmp_path).redacted().whatif().to_dict()["gpu"]["findings"]
    assert [one["saves_s"] * 1e6 for one in redacted] == [one["saves_s"] for one in found["findings"]]
    assert [one["action"].partition(" ")[0] for one in redacted] == [
        one["action"].partition(" ")[0] for one in found["findings"]
    ]
    assert "train.py" not in str(redacted)


def test_allocation_does_not_repeat_what_is_warm_up(tmp_path: Path) -> None:
    """The first of 9 calls takes 4 ms, the others 1 ms: 3 ms are warm-up, 9 ms allocation."""
    events = every_5_ms(10, [event("cpu_op", "aten::empty", 90, 4600), call("cudaFree", 100, 1000)], called=4800)
    next(one for one in events if one["name"] == "cudaFree")["dur"] = 4000
    saves = [one["saves_s"] for one in gpu(tmp_path, events)["findings"] if one["reason"] == "allocation"]
    assert saves == US([9000, 3000], rel=0.02)


def test_annotations_are_not_moved_but_looked_into(tmp_path: Path) -> None:
    events = every_5_ms(9, [event("user_annotation", "Optimizer.step#Adam.step", 100, 4000)])
    (finding,) = (one for one in gpu(tmp_path, events)["findings"] if one["name"].startswith("Optimizer"))
    assert "with_stack=True" in finding["action"]
    assert "fused" in finding["action"]
    assert "move" not in finding["action"]


def test_nobody_doubts_a_rank_that_is_the_only_one(tmp_path: Path) -> None:
    report = recording(tmp_path, steps(5, loader_us=6000)).whatif()
    assert report.answer.who == "its only rank"


CHECKPOINT = "/env/torch/utils/checkpoint.py"
NAMED = {"recompute_fn": f"{CHECKPOINT}(1657): recompute_fn", "reentrant": f"{CHECKPOINT}(277): backward"}
GRADIENTS = "/env/torch/autograd/__init__.py(255): backward"


def checkpointed(frame: str | None) -> list[Event]:
    """5 products of 2 ms forward; in the backward, each is repeated inside of `frame`, then its gradient takes 3 ms."""
    args = {"Input Dims": [[4096, 1024], [1024, 2048]], "Input type": ["float", "float"]}
    events, start = [], 100.0
    for number in range(15):
        at, again, length = number * 10.0, number >= 5 and number % 2, 2000 if number < 5 or number % 2 else 3000
        events += [event("cpu_op", "aten::mm", at + 2, 7, **args), launch(at + 3, number + 1),
                   kernel(GEMM, start, length, correlation=number + 1)]  # fmt: skip
        start += length
        if again:
            node = "autograd::engine::evaluate_function: CheckpointFunctionBackward"
            events += [event("python_function", GRADIENTS, at, 20), event("cpu_op", node, at, 20)]
            if frame:
                events += [event("python_function", frame, at + 1, 8 if "recompute_fn" in frame else 18),
                           event("python_function", GRADIENTS, at + 10, 8)]  # fmt: skip
    return events


@pytest.mark.parametrize("kind", NAMED)
def test_what_the_backward_repeats_is_priced_without_it_and_says_the_memory(kind: str, tmp_path: Path) -> None:
    """5 products of 2 ms; each writes 4096 x 2048 numbers of 4 bytes, 0.168 GB in all."""
    found = gpu(tmp_path, checkpointed(NAMED[kind]))["findings"]
    (finding,) = (one for one in found if one["reason"] == "recompute")
    assert (finding["name"], finding["count"], finding["seconds"]) == ("aten::mm", 5, US(10_000))
    assert finding["saves_s"] == US(10_000, abs=5)
    assert "at most 0.168 GB more" in finding["action"]


def test_what_the_backward_repeats_cannot_be_told_without_stacks(tmp_path: Path) -> None:
    """5 times 2 ms repeated and 3 ms of gradients are in the operator of the checkpoint."""
    (finding,) = (one for one in gpu(tmp_path, checkpointed(None))["findings"] if one["reason"] == "recompute")
    assert (finding["saves_s"], finding["seconds"]) == (None, US(25_000))
    assert "with_stack=True" in finding["cannot_tell"]


def test_without_sizes_what_the_backward_repeats_asks_for_them(tmp_path: Path) -> None:
    bare = [one | {"args": {}} if one["cat"] == "cpu_op" else one for one in checkpointed(NAMED["reentrant"])]
    (finding,) = (one for one in gpu(tmp_path, bare)["findings"] if one["reason"] == "recompute")
    assert finding["saves_s"] == US(10_000, abs=5)
    assert "record_shapes=True shows how much memory that takes" in finding["action"]


def two_streams(count: int, *, recorded: bool = True) -> list[Event]:
    """On stream 7 a product of 300 us, which waits for a copy of 200 us on stream 9, and so on; all launched while the

    first copy takes 2,000 us.
    """
    events, start = [], 2000.0
    for number in range(count):
        at, one = number * 10.0, 10 * number
        events += [
            call("cudaMemcpyAsync", at, 1, correlation=one + 1),
            call("cudaEventRecord", at + 2, 1, correlation=one + 2),
            call("cudaStreamWaitEvent", at + 4, 1, correlation=one + 3), launch(at + 5, one + 4),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", start - (200 if number else 2000),
                  200 if number else 2000, pid=0, tid=9, device=0, stream=9, correlation=one + 1, bytes=64),
            kernel(GEMM, start + 1, 300, correlation=one + 4),
        ]  # fmt: skip
        start += 200 + 301
        if recorded:
            args = {"wait_on_stream": 9, "wait_on_cuda_event_record_corr_id": one + 2, "correlation": one + 3}
            events.append(event("cuda_sync", "Stream Wait Event", at + 4, 0, pid=0, tid=7, stream=7, **args))
    return events


def test_a_stream_that_waits_for_another_is_named_and_priced_without_it(tmp_path: Path) -> None:
    """Copies of 2,000 and 4 x 200 us alternate with products of 301 us, until 4,305. Without waits, the products are

    done during the first copy, and the last copy ends at 2,800.
    """
    found = gpu(tmp_path, two_streams(5))["findings"]
    (finding,) = (one for one in found if one["reason"] == "queued")
    assert (finding["name"], finding["count"]) == ("Memcpy HtoD (Pinned -> Device)", 5)
    assert {"stream 7", "stream 9"} <= set(finding["names"])
    assert finding["saves_s"] == US(1505, abs=5)
    assert finding["cannot_tell"] is None
    assert not [one for one in gpu(tmp_path / "b", two_streams(5, recorded=False))["findings"]
                if one["reason"] == "queued" and one["saves_s"]]  # fmt: skip


def test_elementwise_kernels_of_one_size_in_a_row_are_a_chain_that_one_kernel_could_do(tmp_path: Path) -> None:
    """Three of 1, 2 and 3 ms on as many elements take as long as the longest once fused: 3 ms of 6. Two more, of
    another size, are no chain, and neither is a copy on another stream, 0.5 ms in the middle of the first.
    """
    copy = event(
        "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 500, 500, pid=0, tid=9, device=0, stream=9, correlation=9
    )
    events, begin = [call("cudaMemcpyAsync", 1, 2, correlation=9), copy], 200.0
    work = (("add", 1024, 1000), ("mul", 1024, 2000), ("relu", 1024, 3000), ("add", 512, 1000), ("mul", 512, 1000))
    for number, (op, size, took) in enumerate(work, 1):
        args = {"Input Dims": [[size]], "Input type": ["float"]}
        name = f"vectorized_elementwise_kernel<{op}>"
        events += [event("cpu_op", f"aten::{op}", 20 * number, 15, **args), launch(20 * number + 5, number),
                   kernel(name, begin, took, correlation=number)]  # fmt: skip
        begin += took
    write(tmp_path / "trace.json", document(events, world=1))
    (finding,) = (one for one in load(tmp_path).whatif().findings if "chains of elementwise" in one.effect)
    assert finding.effect.startswith("1 chains of elementwise kernels such as `aten::relu` take 73% of the recording")
    assert finding.spent is not None
    assert finding.spent.names == ("aten::relu", "aten::mul", "aten::add")
    assert finding.saved_s == pytest.approx(0.003, rel=0.01)


def test_slow_products_are_priced_at_the_peak_of_the_card(tmp_path: Path) -> None:
    """A product of 8192^3 in float32 takes 100 ms without tensor cores; an A100 does 156 TFLOP/s of TF32.

    2 x 8192^3 FLOP take 7.05 ms at the peak, 10.07 ms at 70 % of it.
    """
    args = {"Input Dims": [[8192, 8192], [8192, 8192]], "Input type": ["float", "float"]}
    events = []
    for number in range(1, 6):
        at, start = number * 100, 200 + (number - 1) * 100_000
        events += [event("cpu_op", "aten::mm", at, 20, **args), launch(at + 5, number),
                   kernel("ampere_sgemm_128x128_nn", start, 100_000, correlation=number)]  # fmt: skip
    write(tmp_path / "trace.json", document(events, world=1, deviceProperties=[{"name": "NVIDIA A100-SXM4-80GB"}]))
    (finding,) = load(tmp_path).whatif().to_dict()["gpu"]["findings"]
    assert (finding["reason"], finding["name"]) == ("kernel", "aten::mm")
    assert finding["saves_s"] == pytest.approx(5 * (0.1 - 2 * 8192**3 / 156e12 / 0.7), rel=0.01)
    assert "tensor cores" in run("whatif", tmp_path).out


def test_kernels_with_fewer_blocks_than_the_card_has_multiprocessors(tmp_path: Path) -> None:
    """10 kernels of 1 ms with 33 blocks on an H100 of 132: they could take a quarter; 10 with 264 fill it."""
    events = []
    for number in range(20):
        at, name, grid = number * 20.0, ("aten::a", "aten::b")[number % 2], [(33, 264)[number % 2], 1, 1]
        more = {"grid": grid, "block": [128, 1, 1], "est. achieved occupancy %": 6}
        events += [event("cpu_op", name, at, 15), launch(at + 5, number + 1),
                   kernel("mine", 30 + number * 1000, 1000, correlation=number + 1, **more)]  # fmt: skip
    write(tmp_path / "trace.json", document(events, world=1, deviceProperties=[{"name": "NVIDIA H100 80GB HBM3"}]))
    report = load(tmp_path).whatif()
    (finding,) = (one for one in report.findings if "multiprocessors" in one.effect)
    assert finding.spent is not None
    assert (finding.spent.names, finding.spent.count, finding.spent.seconds) == (("aten::a",), 10, US(0.01))
    assert finding.saved_s == pytest.approx(10 * 0.00075, rel=0.001)
    assert "33 blocks in the mean for 132 multiprocessors" in finding.effect
    assert "6% occupancy" in finding.effect
    assert finding.bound


def test_nobody_is_blamed_for_what_is_not_recorded(tmp_path: Path) -> None:
    """GPU activity alone: nothing shows what the GPU waits for."""
    finding = first(tmp_path, [kernel(GEMM, at, 10) for at in (0, 500, 1000)])
    assert (finding["reason"], finding["saves_s"]) == ("unknown", None)
    assert "activities=[CPU, CUDA]" in finding["cannot_tell"]
    assert "launches nothing" not in run("whatif", tmp_path).out


def test_one_rank_of_several_cannot_show_that_nobody_straggles(tmp_path: Path) -> None:
    """The GPU is busy but for 0.1 % of the time: alone, the job is balanced; of eight, rank 0 speaks for itself. That
    the kernels could be faster is not said either, as the card is not known.
    """
    events = [one for at in range(0, 10_000, 1000) for one in (
        event("cpu_op", "aten::mm", at, 20), launch(at + 5, at + 1), kernel(GEMM, at + 12, 999, correlation=at + 1))
    ]  # fmt: skip
    for world, kind, nothing in ((1, "balanced", "nothing"), (8, "minor", "nothing that rank 0 alone shows")):
        folder = tmp_path / str(world)
        write(folder / "rank0.json", document(events, world=world))
        report = load(folder).report
        assert (report.verdict.kind, report.findings) == (kind, [])
        assert f"{nothing} costs 5% of" in report.answer.headline
        assert "straggler" not in run("whatif", folder, "--full").out.lower()


def test_what_was_launched_before_the_recording_is_said_and_does_not_spoil_the_trust(tmp_path: Path) -> None:
    """The GPU is still busy with earlier work for 4 ms, of which only the last op is recorded."""
    events = [kernel(GEMM, 4000, 100), event("cpu_op", "aten::mm", 0, 20), launch(5, 1)]
    events += [kernel(GEMM, 4100, 20_000, correlation=1)]
    report = recording(tmp_path, events).whatif()
    (finding,) = (one for one in report.to_dict()["gpu"]["findings"] if one["reason"] == "launch-latency")
    assert (finding["seconds"], finding["saves_s"]) == (US(0.004), None)
    assert report.trust.trustworthy
    assert "and 16.6% that the recording does not show" in report.answer.trust


def test_a_long_first_launch_is_not_earlier_work_of_the_gpu(tmp_path: Path) -> None:
    """The first launch loads a module for 9 ms; its kernel begins right after."""
    events = [event("cpu_op", "aten::mm", 0, 9020), call("cudaLaunchKernel", 10, 9000, correlation=1),
              kernel(GEMM, 9020, 1000, correlation=1)]  # fmt: skip
    report = recording(tmp_path, events).whatif()
    assert "launch-latency" not in [one["reason"] for one in report.to_dict()["gpu"]["findings"]]


def test_python_in_short_pieces_is_compiled_away_and_not_moved(tmp_path: Path) -> None:
    """10 x 4 ms at a time is work to move; 200 x 50 us around launches is what torch.compile spares."""
    long = every_5_ms(10, [event("python_function", OWN, 90, 4000)])
    short = [one for number in range(200) for one in (
        event("python_function", OWN, number * 100, 90), launch(number * 100 + 60, number + 1),
        kernel(GEMM, number * 100 + 70, 5, correlation=number + 1))]  # fmt: skip
    actions = [
        next(one["action"] for one in gpu(tmp_path / name, events)["findings"] if one["where"] == OWN)
        for name, events in (("a", long), ("b", short))
    ]
    assert actions[0].startswith("move step (train.py:10) out of the loop")
    assert actions[1].startswith("let torch.compile or a CUDA graph spare the Python of step (train.py:10)")


def test_several_ranks_that_all_idle_have_the_findings_together(tmp_path: Path) -> None:
    """Two ranks alike, each with 880 us of dispatch to save; their GPUs wait, and they do not wait for each other."""
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", document(steps(5, kernel_us=2), rank=rank))
    content = load(tmp_path).whatif().to_dict()
    assert [one["rank"] for one in content["gpus"]] == [0, 1]
    finding = next(one for one in content["gpus"][0]["findings"] if one["reason"] == "launch-bound")
    assert (finding["name"], finding["saves_s"]) == ("aten::mm", US(880e-6, rel=0.1))
    assert content["verdict"]["kind"] == "host-bound"


def test_one_step_says_nothing_of_a_day(tmp_path: Path) -> None:
    assert "a day" not in run("whatif", recording_in(tmp_path / "a", steps(1, kernel_us=2))).out
    assert "a day" in run("whatif", recording_in(tmp_path / "b", steps(5, kernel_us=2))).out


def recording_in(folder: Path, events: list[Event]) -> Path:
    write(folder / "trace.json", document(events, world=1))
    return folder


def test_the_first_screen_has_20_lines(tmp_path: Path) -> None:
    ran = run("whatif", recording_in(tmp_path, steps(5, loader_us=6000, item=True)), env={"COLUMNS": "80"})
    assert ran.code == 0
    assert len(ran.out.splitlines()) <= 20
    assert max(len(line) for line in ran.out.splitlines() if "  tracekit " not in line) <= 80


def test_a_store_and_an_op_trace_give_the_same_findings(tmp_path: Path) -> None:
    folder = recording_in(tmp_path / "job", steps(5, loader_us=6000, item=True))
    assert run("import", folder, "--store", tmp_path / "store").code == 0
    load(folder).trace.write_parquet(tmp_path / "ops.parquet")
    reports = [load(path).whatif().to_dict() for path in (folder, tmp_path / "ops.parquet", tmp_path / "store")]
    assert [one["gpu"] for one in reports] == [reports[0]["gpu"]] * 3
    assert [one["answer"]["headline"] for one in reports] == [reports[0]["answer"]["headline"]] * 3


def test_redacted_reports_name_no_function(tmp_path: Path) -> None:
    ran = run("whatif", recording_in(tmp_path, [*steps(5, item=True), FUNCTION]), "--redact", "--json")
    assert ran.code == 0
    assert "train.py" not in ran.out
    assert "aten::item" in ran.out


def test_operators_are_selected_by_the_name_that_findings_give_them(tmp_path: Path) -> None:
    """5 steps of 10 kernels of 400 us inside aten::mm, itself inside aten::linear: half as long saves half of them."""
    events = [event("cpu_op", "aten::linear", 0, 2), *steps(5)]
    events += [event("cpu_op", "aten::linear", one["ts"], 19) for one in events if one["name"] == "aten::mm"]
    folder = recording_in(tmp_path, events)
    (asked,) = load(folder).whatif(fix=["operator=aten::mm and stream=~^stream * 0.5"]).questions
    assert (asked.ops, asked.saved_s) == (50, pytest.approx(50 * 200e-6, rel=0.02))
    ran = run("whatif", folder, "--fix", "operator=aten::nn")
    assert ran.code == 2
    assert "'aten::nn' is not an operator of this job; it has aten::mm" in ran.err


def test_a_fix_is_asked_for_by_its_name(tmp_path: Path) -> None:
    """As priced by its finding; with kernels twice as fast, too, 5 x 10 x 200 us more, as they hide no launches."""
    folder = recording_in(tmp_path, steps(5, loader_us=6000))
    report = load(folder).whatif(fix=["fix=prefetch-data", "fix=prefetch-data + operator=aten::mm * 0.5"])
    (saved,) = (one.saved_s for one in report.findings if one.kind == "late-data-loading")
    first, both = report.questions
    assert first.saved_s == pytest.approx(saved)
    assert both.saved_s - saved == pytest.approx(50 * 200e-6, rel=0.02)
    assert (
        "the job has no such fix; it has hide-launch-delays, prefetch-data"
        in run("whatif", folder, "--fix", "fix=nothing").err
    )


def test_addresses_of_objects_are_no_part_of_names(tmp_path: Path) -> None:
    work = [event("python_function", f"<built-in method run of Engine object at 0x7f{n}ac>", 110 + n * 60, 50)
            for n in range(2)]  # fmt: skip
    (row,) = (one for one in gpu(tmp_path, two_kernels(*work))["idle_by_reason"] if one["reason"] == "python")
    assert row["names"][0] == {
        "name": "<built-in method run of Engine object at 0x...>", "seconds": US(100), "where": "",
    }  # fmt: skip


# ---- bad input


def test_an_empty_file_beside_a_trace_is_said(tmp_path: Path) -> None:
    folder = recording_in(tmp_path, steps(3))
    (folder / "rank1.json.gz").touch()
    assert load(folder).whatif().to_dict()["trust"]["notes"] == ["rank1.json.gz: empty, and left out"]
    (folder / "trace.json").unlink()
    assert f"{folder}: a folder with nothing but empty files" in run("whatif", folder).err


def test_another_accelerator_is_named(tmp_path: Path) -> None:
    folder = recording_in(
        tmp_path, [OPERATOR, event("mtia_runtime", "launch", 0, 5), event("mtia_ccp_events", "op", 5, 5)]
    )
    ran = run("whatif", folder)
    assert ran.code == 2
    assert "events of MTIA" in ran.err
    assert "CPU only" not in ran.err


BAD: dict[str, list[Event]] = {
    "one kernel": [kernel(GEMM, 0, 10)],
    "a malformed event among many": [*steps(3), {**OPERATOR, "dur": "long", "args": {"Input Dims": 7}}],
    "a copy of no number of bytes": [*steps(3), event("gpu_memcpy", "Memcpy HtoD (Pageable)", 9, 5, bytes="x")],
    "no correlation": [{**one, "args": {}} for one in steps(3)],
    "the host 5 ms behind": [{**one, "ts": one["ts"] + 5000 * (one["cat"] == "kernel")} for one in steps(3)],
    "the host 5 ms ahead": [{**one, "ts": one["ts"] + 5000 * (one["cat"] != "kernel")} for one in steps(3)],
    "a step cut at both ends": [*steps(3), event("user_annotation", "ProfilerStep#9", -500, 90)],
    "memory of no number of bytes": [
        *steps(3),
        {**allocated(5, 9, 9), "args": {"Total Allocated": "x", "Device Type": 1}},
    ],
    "memory without arguments": [*steps(3), {**allocated(5, 9, 9), "args": None}],
    "names with braces": [{**one, "name": "{lambda()#1} " + one["name"]} for one in steps(3, item=True)],
    "ops of no length": [{**one, "dur": 0} if one["cat"] == "kernel" else one for one in steps(3)],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_odd_recordings_are_answered(name: str, tmp_path: Path) -> None:
    ran = run("whatif", recording_in(tmp_path, BAD[name]), "--json")
    assert ran.code == 0, ran.err
    times = json.loads(ran.out)["gpu"]
    assert times["idle_s"] + times["busy_s"] == US(times["span_s"])
    assert sum(row["seconds"] for row in times["idle_by_reason"]) == US(times["idle_s"], abs=1e-9)


# ---- cards


@pytest.fixture
def own_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "cards.csv"
    monkeypatch.setenv("TRACEKIT_CARDS", str(path))
    cards.cache_clear()
    yield path
    cards.cache_clear()


HEAD = "name,half_tflops,tensor_tflops,single_tflops,memory_gb_s,link_gb_s,processors\n"


def test_a_file_adds_cards(own_cards: Path) -> None:
    own_cards.write_text(HEAD + "Mock 9,100,50,10,1000,20,64\n")
    card = Card.named("ACME Mock 9 PCIe")
    assert card == Card("Mock 9", 100e12, 50e12, 10e12, 1e12, 20e9, 64)
    assert roofline_s(1e12, 1e9, "c10::BFloat16", card) == pytest.approx(0.01)
    assert roofline_s(1e12, 1e9, "c10::Float8_e4m3fn", card) == pytest.approx(0.005)
    assert roofline_s(1e9, 1e12, "float", card) == pytest.approx(1.0)
    known = Card.named("NVIDIA H100 80GB HBM3")
    assert known is not None
    assert known.name == "H100"


BAD_CARDS = {
    "text": (HEAD + "Mock 9,fast,50,10,1000,20,64\n", "Mock 9: half_tflops is 'fast', not a positive number"),
    "zero": (HEAD + "Mock 9,100,50,10,0,20,64\n", "Mock 9: memory_gb_s is '0', not a positive number"),
    "below zero": (HEAD + "Mock 9,100,50,10,1000,-20,64\n", "link_gb_s is '-20'"),
    "no number": (HEAD + "Mock 9,nan,50,10,1000,20,64\n", "half_tflops is 'nan'"),
    "no end": (HEAD + "Mock 9,100,50,10,1000,20,inf\n", "processors is 'inf'"),
    "half a processor": (HEAD + "Mock 9,100,50,10,1000,20,64.5\n", "processors is 64.5, not a whole number"),
    "a short row": (HEAD + "Mock 9,100\n", "tensor_tflops is None"),
    "no name": (HEAD + ",100,50,10,1000,20,64\n", "without a name"),
    "no columns": ("name\nMock\n", "lacks the column half_tflops"),
    "nonsense": ("nonsense", "lacks the column name"),
    "empty": ("", "lacks the column name"),
    "only a head": (HEAD, "holds no card"),
    "no file": (None, "No such file or directory"),
}


@pytest.mark.parametrize("name", BAD_CARDS)
def test_a_file_of_cards_that_cannot_be_used_is_an_error_that_says_why(own_cards: Path, name: str) -> None:
    content, why = BAD_CARDS[name]
    if content is not None:
        own_cards.write_text(content)
    with pytest.raises(FormatError, match=r"TRACEKIT_CARDS=.*cards\.csv") as error:
        cards()
    assert why in str(error.value)
    assert content is None or "name,half_tflops,tensor_tflops" in str(error.value)


@pytest.mark.parametrize("extra", [-1, 2], ids=["equal steps", "a step with one kernel more"])
def test_a_kernel_that_runs_with_several_shapes_is_compared_with_its_own_kind(extra: int, tmp_path: Path) -> None:
    """One name and grid for products that take 9 ms and 0.9 ms: S stays near 1, and the report is trusted."""
    events, number, host_us, gpu_us = [], 0, 0.0, 10.0
    for step in range(4):
        begin = host_us
        for size, length_us in [(64, 900)] * (step == extra) + [(1024, 9000), (64, 900)] * 10:
            number += 1
            args = {"Input Dims": [[size, size], [size, size]], "Input type": ["float", "float"]}
            start = max(gpu_us, host_us + 10)
            events += [event("cpu_op", "aten::mm", host_us, 9, **args), launch(host_us + 2, number),
                       kernel("gemm", start, length_us, correlation=number)]  # fmt: skip
            gpu_us, host_us = start + length_us, max(host_us + 10, start + length_us - 30)
        events.append(event("user_annotation", f"ProfilerStep#{step}", begin, host_us - begin))
    write(tmp_path / "trace.json", document(events, world=1))
    report = load(tmp_path).whatif()
    assert report.slowdown == pytest.approx(1, abs=0.01)
    assert report.trust.trustworthy
