"""A simulated data-parallel job, recorded as torch.profiler (Kineto) would: one JSON file per rank.

Does not import tracekit. Each rank has a main thread that loads data, launches the forward and the optimizer and reads
the loss (a synchronising copy), and a thread that launches the backward; kernels run on stream 7, gradient all-reduces
on stream 20 behind events that the profiler does not record. With `cuda_graphs`, one call launches forward, backward
and all-reduces of a step; these share its correlation and record nothing but their names. Windows begin at different
times and clocks differ. `Job.run` returns the content of the files and the true time of the job.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPUTE_STREAM, COMM_STREAM = 7, 20
BASE_NS = 1_700_000_000_000_000_000
_LAUNCH_US, _DISPATCH_US, _CALL_US, _SYNC_US = 4.0, 3.0, 5.0, 10.0
_GRAPH_LAUNCH_US, _GRAPH_DISPATCH_US = 12.0, 1.2
_LAYER = (
    ("aten::linear", "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn", (96, 1, 1), 60.0),
    ("aten::native_layer_norm", "void at::native::vectorized_layer_norm_kernel<float, float>(int)", (512, 1, 1), 9.0),
    (
        "aten::scaled_dot_product_attention",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>(pytorch_flash::Flash_fwd_params)",
        (16, 4, 8), 45.0,
    ),
    ("aten::gelu", "void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>(int)", (1024, 1, 1), 12.0),
)  # fmt: skip
_INSIDE = ("aten::to", "aten::_to_copy", "aten::copy_")
_SMALL = ("aten::view", "aten::as_strided")
#: What recording costs, by the gap that shows it.
_OF_GAP = 2.3


@dataclass(frozen=True)
class Trouble:
    """The trouble of a rank: `gpu` and `host` stretch its kernels and its host work, the others add time.

    `input_us`, `gc_us`, `pause_us`: before the forward, and inside the forward and the backward, of every step.
    `extra_kernels`: more per step. `syncs`: calls of `.item()` per step, inside the forward. `link_us`: its last
    transfer of a step ends so much later. `only_step`: the one step that all this is in.
    """

    rank: int
    gpu: float = 1.0
    host: float = 1.0
    input_us: float = 0.0
    pause_us: float = 0.0
    extra_kernels: int = 0
    gc_us: float = 0.0
    syncs: int = 0
    link_us: float = 0.0
    only_step: int | None = None


@dataclass
class _Rank:
    """One rank while it runs. `graph`: the launch of the current CUDA graph. `events`: those of its profiler.

    `call_us`, `recording_us`: as of `Job`.
    """

    rank: int
    trouble: Trouble
    random: random.Random
    call_us: float = _CALL_US
    recording_us: float = 0.0
    host_us: float = 0.0
    compute_us: float = 0.0
    comm_us: float = 0.0
    correlation: int = 0
    graph: int | None = None
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return 4000 + self.rank

    def span(self, category: str, name: str, thread: int, start: float, end: float, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": self.pid, "tid": thread, "ts": start,
             "dur": end - start, "args": {"External id": len(self.events), **args}}
        )  # fmt: skip

    def work(self, us: float) -> None:
        """Host work of about `us`; none inside a graph."""
        if self.graph is None:
            self.host_us += us * self.trouble.host * self.random.uniform(0.95, 1.05)

    def launch(self, thread: int, call: str) -> int:
        """A call of the runtime; its correlation."""
        self.correlation += 1
        self.span("cuda_runtime", call, thread, self.host_us, self.host_us + self.call_us, correlation=self.correlation)
        return self.correlation

    def gpu(
        self, category: str, name: str, stream: int, start: float, us: float, correlation: int, **args: Any
    ) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": us,
             "args": {"device": 0, "context": 1, "stream": stream, "correlation": correlation, **args}}
        )  # fmt: skip

    def kernel(self, thread: int, operator: str, name: str, grid: tuple[int, ...], us: float, host_us: float) -> None:
        """An operator that launches one kernel on the compute stream, or a node of the graph that does."""
        if self.graph is not None:
            self._compute(name, grid, us, self.compute_us + _GRAPH_DISPATCH_US, self.graph)
            return
        begin, gap, slower = self.host_us + self.recording_us, self.recording_us, 0.0
        self.work(host_us)
        if gap:
            slower = self.call_us / 2
            for number, small in enumerate(_SMALL):
                begin_us = begin + 0.5 + number * (gap + 0.1)
                self.span("cpu_op", small, thread, begin_us, begin_us + 0.1)
            operators = len(_SMALL) + 1 + len(_INSIDE)
            self.host_us += _OF_GAP * (operators * gap + 2 * gap + slower) - slower - gap
        correlation = self.launch(thread, "cudaLaunchKernel")
        start = max(self.compute_us + _DISPATCH_US, self.host_us + _LAUNCH_US + slower)
        self._compute(name, grid, us, start, correlation)
        self.host_us += self.call_us
        self.host_us += gap
        for number, inner in enumerate((operator, *_INSIDE)):
            # Nested, with the arguments that make up most of a real file.
            dims = [[4, 2048, 1024], [1024, 4096], []]
            self.span(
                "cpu_op", inner, thread, begin + 0.1 * number, self.host_us - 0.1 * number,
                **{"Record function id": 0, "Concrete Inputs": ["", "", "1"], "Input type": ["c10::BFloat16"] * 2,
                   "Input Strides": dims, "Input Dims": dims, "Ev Idx": correlation},
            )  # fmt: skip
        for phase, stream, time_us in (("s", thread, self.host_us - self.call_us), ("f", COMPUTE_STREAM, start)):
            flow = {"ph": phase, "id": correlation, "pid": self.pid, "tid": stream, "cat": "ac2g", "name": "ac2g"}
            self.events.append({**flow, "ts": time_us, "dur": 0.0, "args": {}})

    def _compute(self, name: str, grid: tuple[int, ...], us: float, start: float, correlation: int) -> None:
        took = us * self.trouble.gpu * self.random.uniform(0.98, 1.02)
        self.gpu("kernel", name, COMPUTE_STREAM, start, took, correlation, grid=list(grid), block=[256, 1, 1])
        self.compute_us = start + took

    def launch_graph(self, thread: int, host_us: float) -> None:
        """A call that launches all kernels up to `end_graph`."""
        self.work(host_us)
        self.graph = self.launch(thread, "cudaGraphLaunch")
        self.compute_us = max(self.compute_us, self.comm_us, self.host_us + _GRAPH_LAUNCH_US)
        self.host_us += self.call_us

    def end_graph(self) -> None:
        """Launch later kernels one by one again."""
        self.graph = None

    def collect_garbage(self) -> None:
        """A run of Python's garbage collector, if the rank has one."""
        if self.trouble.gc_us:
            self.span("user_annotation", "Python GC", self.pid, self.host_us, self.host_us + self.trouble.gc_us)
            self.host_us += self.trouble.gc_us

    def item(self) -> None:
        """Read a number from the GPU: a copy that the host waits for."""
        begin = self.host_us
        correlation = self.launch(self.pid, "cudaMemcpyAsync")
        start = max(self.compute_us + _DISPATCH_US, self.host_us + _LAUNCH_US)
        self.gpu("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", COMPUTE_STREAM, start, 1.5, correlation, bytes=4)
        self.compute_us = start + 1.5
        self.host_us += self.call_us + 1.0
        end = max(self.host_us, self.compute_us) + _SYNC_US
        self.correlation += 1
        self.span("cuda_runtime", "cudaStreamSynchronize", self.pid, self.host_us, end, correlation=self.correlation)
        self.host_us = end
        self.span("cpu_op", "aten::item", self.pid, begin, self.host_us)


@dataclass(frozen=True)
class Job:
    """A job of `ranks` with `layers`, whose gradients are reduced every `bucket` layers.

    `host_us`: host work per kernel. `clocks_us`, `late_us`: how far clocks are apart and how late windows begin, at
    most. `cuda_graphs`: whether a step is a graph. `call_us`: a launch. `recording_us`: the gap that shows what
    it costs to record an operator, 0 for a profiler that costs nothing; else half of `call_us` is the profiler's, too.
    """

    ranks: int = 4
    steps: int = 3
    layers: int = 12
    bucket: int = 4
    host_us: float = 12.0
    transfer_us: float = 300.0
    clocks_us: float = 40.0
    late_us: float = 0.0
    troubles: tuple[Trouble, ...] = ()
    seed: int = 0
    cuda_graphs: bool = False
    call_us: float = _CALL_US
    recording_us: float = 0.0

    def run(self) -> Recording:
        """Run it."""
        wrong = {one.rank: one for one in self.troubles}
        ranks = [
            _Rank(
                number,
                wrong.get(number, Trouble(number)),
                random.Random(self.seed * 1000 + number),
                self.call_us,
                self.recording_us,
            )
            for number in range(self.ranks)
        ]
        for step in range(self.steps):
            self._step(ranks, step, wrong)
        draw = random.Random(self.seed)
        ahead = [draw.uniform(-self.clocks_us, self.clocks_us) for _ in ranks]
        late = [draw.uniform(0, self.late_us) for _ in ranks]
        ends = max(max(event["ts"] + event["dur"] for event in one.events) for one in ranks)
        return Recording(
            [
                sorted(
                    ({**event, "ts": round(event["ts"] + offset + 1e4, 3), "dur": round(event["dur"], 3)}
                     for event in one.events if event["ts"] >= begin),
                    key=lambda event: event["ts"],
                )
                for one, offset, begin in zip(ranks, ahead, late, strict=True)
            ],
            ahead, ends,
        )  # fmt: skip

    def _step(self, ranks: list[_Rank], step: int, wrong: Mapping[int, Trouble]) -> None:
        begins = [state.host_us for state in ranks]
        for state in ranks:
            stated = wrong.get(state.rank, Trouble(state.rank))
            state.trouble = stated if stated.only_step in {None, step} else Trouble(state.rank)
            self._forward(state)
        reduced: list[list[tuple[float, int]]] = [[] for _ in range(self.layers // self.bucket)]
        for state in ranks:
            self._backward(state, reduced)
        for number, bucket in enumerate(reduced):
            self._all_reduce(ranks, number, bucket)
        for state, begin in zip(ranks, begins, strict=True):
            self._optimizer(state)
            state.span("user_annotation", f"ProfilerStep#{step + 5}", state.pid, begin, state.host_us)

    def _forward(self, state: _Rank) -> None:
        begin = state.host_us
        state.host_us += 40.0 + state.trouble.input_us
        state.span(
            "user_annotation",
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
            state.pid,
            begin,
            state.host_us,
        )
        if self.cuda_graphs:
            state.collect_garbage()
            state.launch_graph(state.pid, self.host_us)
        for layer in range(self.layers):
            for operator, name, grid, us in _LAYER:
                state.kernel(state.pid, operator, name, grid, us, self.host_us)
            if layer == self.layers // 2 and not self.cuda_graphs:
                state.collect_garbage()
            if layer < state.trouble.syncs:
                state.item()
        for _ in range(state.trouble.extra_kernels):
            operator, name, _, us = _LAYER[0]
            state.kernel(state.pid, operator, name, (97, 3, 1), us, self.host_us)

    def _backward(self, state: _Rank, reduced: list[list[tuple[float, int]]]) -> None:
        """The thread of autograd launches; the main thread waits."""
        thread = state.pid + 50
        state.work(30.0)
        for layer in range(self.layers):
            if layer == self.layers // 2:
                state.host_us += state.trouble.pause_us
            for operator, name, grid, us in reversed(_LAYER):
                backward = f"autograd::engine::evaluate_function: {operator.removeprefix('aten::').title()}Backward0"
                state.kernel(
                    thread, backward, name.replace("fwd", "bwd"), (*grid[:2], grid[2] + 1), 2 * us, self.host_us
                )
            if (layer + 1) % self.bucket == 0 and state.graph is not None:
                reduced[layer // self.bucket].append((state.compute_us, state.graph))
            elif (layer + 1) % self.bucket == 0:
                begin = state.host_us
                state.work(15.0)
                state.span("cuda_runtime", "cudaStreamWaitEvent", thread, state.host_us, state.host_us + 1.0)
                state.host_us += 1.0
                correlation = state.launch(thread, "cudaLaunchKernelExC")
                ready = max(state.compute_us, state.host_us + _LAUNCH_US)
                reduced[layer // self.bucket].append((ready, correlation))
                state.host_us += state.call_us
                state.span(
                    "cpu_op", "record_param_comms", thread, begin, state.host_us, **self._args(), Rank=state.rank
                )
        state.end_graph()
        state.work(20.0)

    def _args(self) -> dict[str, Any]:
        return {
            "Collective name": "allreduce", "In msg nelems": 7_087_872, "Out msg nelems": 7_087_872,
            "dtype": "BFloat16",
            "Group size": self.ranks, "Process Group Name": "0", "Process Group Description": "default_pg",
            "Process Group Ranks": str(list(range(self.ranks))),
        }  # fmt: skip

    def _all_reduce(self, ranks: list[_Rank], number: int, bucket: list[tuple[float, int]]) -> None:
        starts = [
            max(state.comm_us + _DISPATCH_US, ready + _DISPATCH_US)
            for state, (ready, _) in zip(ranks, bucket, strict=True)
        ]
        for state, start, (_, correlation) in zip(ranks, starts, bucket, strict=True):
            late = state.trouble.link_us if number == self.layers // self.bucket - 1 else 0.0
            end = max(starts) + self.transfer_us * (1 + 0.1 * number) + late + state.random.uniform(0, 2.0)
            name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            state.gpu(
                "kernel",
                name,
                COMM_STREAM,
                start,
                end - start,
                correlation,
                grid=[16, 1, 1],
                block=[512, 1, 1],
                **({} if self.cuda_graphs else self._args()),
            )
            state.comm_us = end

    def _optimizer(self, state: _Rank) -> None:
        begin = state.host_us
        if not self.cuda_graphs:
            state.span("cuda_runtime", "cudaStreamWaitEvent", state.pid, state.host_us, state.host_us + 1.0)
            state.host_us += 1.0
        state.compute_us = max(state.compute_us, state.comm_us)
        for _ in range(4):
            name = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>(int)"
            state.kernel(state.pid, "aten::_fused_adamw_", name, (320, 1, 1), 80.0, self.host_us)
        state.span("user_annotation", "Optimizer.step#AdamW.step", state.pid, begin, state.host_us)
        state.item()


@dataclass(frozen=True)
class Recording:
    """The recordings of all ranks. `ahead_us`: offset of each clock. `took_us`: true time of the job."""

    events: list[list[dict[str, Any]]]
    ahead_us: list[float]
    took_us: float

    def document(self, rank: int) -> dict[str, Any]:
        """The file of a rank."""
        world = len(self.events)
        group = {
            "pg_name": "0",
            "pg_desc": "default_pg",
            "backend_config": "cuda:nccl",
            "pg_size": world,
            "ranks": list(range(world)),
        }
        return {
            "schemaVersion": 1,
            "distributedInfo": {
                "backend": "nccl", "rank": rank, "world_size": world, "pg_count": 1, "pg_config": [group],
                "nccl_version": "2.27.5",
            },
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": self.events[rank],
            "traceName": f"node-0_{4000 + rank}.1.pt.trace.json",
        }  # fmt: skip

    def write(self, folder: Path) -> list[Path]:
        """A gzipped file per rank, the same bytes for the same events."""
        paths = []
        for rank in range(len(self.events)):
            path = folder / f"rank{rank}_trace.json.gz"
            text = json.dumps(self.document(rank), separators=(",", ":")).encode()
            path.write_bytes(gzip.compress(text, 9, mtime=0))
            paths.append(path)
        return paths

    def write_repeated(self, folder: Path, size: int) -> Iterator[Path]:
        """A file per rank of about `size` bytes: the recording over and over, later each time."""
        for rank, events in enumerate(self.events):
            path = folder / f"rank{rank}_trace.json"
            document = self.document(rank) | {"traceEvents": []}
            head, tail = json.dumps(document).split('"traceEvents": []')
            period, most = self.took_us + 5e4, max(event["args"].get("correlation", 0) for event in events)
            with path.open("w") as file:
                file.write(f'{head}"traceEvents": [')
                templates = [_template(event) for event in events]
                again = 0
                while file.tell() < size:
                    file.write("," * bool(again))
                    file.write(",\n".join(text % values(again, period, most) for text, values in templates))
                    again += 1
                file.write(f"]{tail}")
            yield path


def _template(event: dict[str, Any]) -> tuple[str, Callable[[int, float, int], Any]]:
    """An event's JSON as a template, and a function that returns the values of a repetition."""
    start, correlation = event["ts"], event["args"].get("correlation")
    step = event["name"].startswith("ProfilerStep#")
    open_places = {
        **event,
        "ts": "@ts",
        "args": {**event["args"], **({} if correlation is None else {"correlation": "@id"})},
    }
    if step:
        open_places["name"] = "ProfilerStep#@step"
    text = json.dumps(open_places).replace("%", "%%").replace('"@id"', "%(id)d").replace('"@ts"', "%(ts).3f")
    number = int(event["name"].removeprefix("ProfilerStep#")) if step else 0

    def values(again: int, period: float, correlations: int) -> Any:
        return {
            "ts": start + again * period,
            "id": (correlation or 0) + again * correlations,
            "step": number + 100 * again,
        }

    return text.replace("@step", "%(step)d"), values
