"""Cost of recording: each hook around a function that does nothing, with the recorder writing to disk.

Collectives are real ones of gloo between two processes, since a thread that wakes from a wait has cold caches; their
hooks are timed inside the calls of torch. No Python call starts the buckets of DistributedDataParallel, so they are
timed in a group of one rank, in alternating blocks with and without hooks.
"""

import functools
import gc
import multiprocessing
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.measure import per_call_us, table
from tracekit.collectors import span, step

#: Collectives timed with and without hooks, and turns of both.
COLLECTIVES, TURNS = 4000, 5
#: Backwards per block, and blocks with and without hooks.
BLOCK_CALLS, BLOCKS = 5, 2000
#: Buckets of the model of DistributedDataParallel, one per parameter.
BUCKETS = 20
QUICK = {"COLLECTIVES": 50, "TURNS": 1, "BLOCKS": 20}


def section() -> str:
    """The Markdown of this section: cost per recorded op of each hook, and of calls that a script may make itself."""
    if find_spec("torch") is None:
        return "## Collecting\n\nNot measured: torch is not installed (extra `torch`)."
    empty_us = per_call_us(_empty)
    outside = {"span": _empty_span, "step()": _empty_step}
    rows = [
        [f"`{name}` outside `tracekit collect`", f"{(per_call_us(function) - empty_us) * 1e3:.0f} ns", ""]
        for name, function in outside.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        costs, size = _hook_costs(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        other = multiprocessing.get_context("spawn").Process(
            target=_collective_costs, args=(Path(folder), 1, COLLECTIVES, TURNS)
        )
        other.start()
        own = _collective_costs(Path(folder), 0, COLLECTIVES, TURNS)
        threads: dict[str, tuple[float, ...]] = {name: (us,) for name, us in own.items()}
        other.join()
    with tempfile.TemporaryDirectory() as folder:
        threads |= _bucket_costs(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        idle = _idle_costs(Path(folder))
    rows += [[name, f"{cost:.2f} us", ""] for name, cost in costs.items()]
    rows += [[name, *(f"{us:.1f} us" for us in found)] + [""] * (2 - len(found)) for name, found in threads.items()]
    return (
        "## Collecting\n\nCPU time added per recorded op while the writer thread runs: to the thread that trains, and"
        f" to all threads if another one records the end of the op. An op takes {size:.0f} bytes on disk. Targets: 5 us"
        " for a collective (launch and wait), 2 us for any other op.\n\n"
        + table(["op", "training thread", "all threads"], rows)
        + "\n\nWhile nothing is recorded (`--idle`, between samples, after a recorder has switched itself off); 0.00:"
        " the hook is removed.\n\n" + table(["op", "cost"], [[name, f"{cost:.2f} us"] for name, cost in idle.items()])
    )


def _empty_span() -> None:
    with span("work"):
        pass


def _empty_step() -> None:
    step()


def _empty() -> None:
    pass


class _PipelineStage:
    """The attributes of a pipeline stage that the hooks read."""

    stage_index, num_stages, is_last, group_rank, group = 0, 2, False, 0, None

    def forward_one_chunk(self, chunk_id):
        return chunk_id


class _Work:
    """A finished transfer."""

    def wait(self):
        return True


class _Loader:
    """The iterator of a data loader."""


class _FakeOp:
    """A p2p op of a stage."""

    peer, tensor = 1, None


def _hook_costs(folder: Path) -> tuple[dict[str, float], float]:
    """Hook -> microseconds added per op; bytes written per op."""
    from tracekit.collectors.record.hooks_compute import PipelineHooks
    from tracekit.collectors.record.hooks_host import HostHooks
    from tracekit.collectors.record.recorder import Recorder
    from tracekit.collectors.record.session import Session
    from tracekit.collectors.record.wire_format import Category, RuntimeOptions

    options = RuntimeOptions(ring_capacity=1 << 18)
    recorder = Recorder(folder, 0, 0, options)
    session = Session(recorder, options, rank=0, world_size=1, attempt=0)
    session.start()
    for _ in range(2 << 18):  # the memory of the ring is touched once in a run, not by every op
        recorder.add((Category.GC, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    _written(recorder)
    before = recorder.dropped
    pipeline, host = PipelineHooks(session, pipelined=lambda: None), HostHooks(session)
    pipeline._described.add(0)
    stage, work, op = _PipelineStage(), _Work(), _FakeOp()

    def nothing(*_args, **_kwargs):
        return [work]

    compute = pipeline._compute("forward-compute", _PipelineStage.forward_one_chunk)
    make_ops = pipeline._tag("forward-send", lambda _stage, _chunk: [op])
    post, wait = pipeline._batch(nothing), pipeline._wait(nothing)
    load, loader = host._timed(Category.DATA_LOAD, "data-load", session.evaluation.loads, nothing), _Loader()

    def transfer():
        make_ops(stage, 0)
        wait(post([op]))

    def optimize():
        host.optimizer_begins(stage)
        host.optimizer_ended(stage)

    def collect_garbage():
        host._on_gc("start", {"generation": 2})
        host._on_gc("stop", {"generation": 2})

    bare = per_call_us(lambda: stage.forward_one_chunk(0))
    measured = {
        "forward or backward": lambda: compute(stage, 0),
        "p2p transfer": transfer,
        "data-load, checkpoint": lambda: load(loader),
        "gc": collect_garbage,
        "optimizer": optimize,
    }
    costs = {}
    gc.disable()
    session._manual_steps = True  # the optimizer ends no step
    for name, function in measured.items():
        costs[name] = per_call_us(function) - bare
        _written(recorder)
    session._manual_steps = False
    costs["end of a step, once a step"] = per_call_us(optimize) - bare - costs["optimizer"]
    gc.enable()
    session.close()
    if recorder.dropped != before:
        raise RuntimeError(f"{recorder.dropped - before} records were dropped: their cost is not that of recording")
    written = sum(path.stat().st_size for path in folder.glob("rank-*"))
    return costs, written / recorder.written


def _written(recorder) -> None:
    """Wait for the writer, so that the ring has room for the next hook."""
    while recorder.ring.drained < recorder.ring.added:
        time.sleep(0.01)


def _idle_costs(folder: Path) -> dict[str, float]:
    """Cost of the hooks in a step that is not recorded, microseconds per op and per step."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import dataloader

    from tracekit.collectors.record.install import install_hooks
    from tracekit.collectors.record.recorder import Recorder
    from tracekit.collectors.record.session import Session
    from tracekit.collectors.record.wire_format import IDLE, RuntimeOptions

    hooked = {
        "collective": (dist.ProcessGroup, "allreduce"),
        "wait of a collective": (dist.Work, "wait"),
        "backward": (torch.autograd, "backward"),
        "data-load": (dataloader._BaseDataLoaderIter, "__next__"),
        "checkpoint": (torch, "save"),
        "evaluation": (torch.nn.Module, "eval"),
    }
    before = {name: getattr(owner, attribute) for name, (owner, attribute) in hooked.items()}
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(1, 1))
    small = torch.ones(1)
    parameter = torch.nn.Parameter(small.clone())
    parameter.grad = small.clone()
    bare_forward = per_call_us(lambda: model(small))
    bare_step = per_call_us(torch.optim.SGD([parameter], lr=0.0, foreach=False).step)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    options = RuntimeOptions(first_step=IDLE.first_step, last_step=IDLE.last_step)
    recorder = Recorder(folder, 0, 0, options)
    session = Session(recorder, options, rank=0, world_size=1, attempt=0)
    session.start()
    install_hooks(session)
    optimizer = torch.optim.SGD([parameter], lr=0.0, foreach=False)
    for _ in range(3):  # step 0 is recorded, so that its shape is known
        model(small).sum().backward()
        optimizer.step()
    if session.recording:
        raise RuntimeError("the session is not idle")
    costs = {"forward of the model": per_call_us(lambda: model(small)) - bare_forward}
    costs |= {name: 0.0 for name, (owner, attribute) in hooked.items() if getattr(owner, attribute) == before[name]}
    costs["a step: its optimizer and its record"] = per_call_us(optimizer.step) - bare_step
    session.close()
    dist.destroy_process_group()
    return costs


def _collective_costs(folder: Path, rank: int, calls: int, turns: int) -> dict[str, float]:
    """Collective -> microseconds of its hooks on the launching thread. Both ranks must call this together."""
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    from tracekit.collectors.record.collectives import SessionCollectives
    from tracekit.collectors.record.hooks_comm import CollectiveHooks, FunctionalHooks, ReducerHooks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(str(folder / "store"), 2))
    session = _session(folder, rank, 2)
    collectives = SessionCollectives(session)
    CollectiveHooks(collectives, ReducerHooks(collectives)).install()
    FunctionalHooks(collectives).install(functional)
    tensor, group = torch.ones(16), dist.group.WORLD

    def waited_for():
        dist.all_reduce(tensor, async_op=True).wait()

    measured = {
        "collective that blocks": lambda: dist.all_reduce(tensor),
        "collective that is waited for": waited_for,
        "functional collective": lambda: functional.wait_tensor(functional.all_reduce(tensor, "sum", group)),
    }
    called = (
        (dist.ProcessGroup, "allreduce"),
        (dist.Work, "wait"),
        (functional, "all_reduce"),
        (functional, "wait_tensor"),
    )
    hooks = [one for one in session.patches.patches if (one.owner, one.name) in called]
    session.patches.remove()
    costs = {}
    for busy, where in enumerate(("", ", inside a compute")):
        session.busy = busy
        costs |= {f"{name}{where}": _own_us(hooks, function, calls, turns) for name, function in measured.items()}
    session.close()
    dist.destroy_process_group()
    return costs


def _session(folder: Path, rank: int, world_size: int):
    """A session that records into `folder`."""
    from tracekit.collectors.record.recorder import Recorder
    from tracekit.collectors.record.session import Session
    from tracekit.collectors.record.wire_format import RuntimeOptions

    options = RuntimeOptions()
    session = Session(Recorder(folder, rank, 0, options), options, rank=rank, world_size=world_size, attempt=0)
    session.start()
    return session


def _bucket_costs(folder: Path) -> dict[str, tuple[float, float]]:
    """Operation -> microseconds added to the launching thread and to all threads."""
    import torch
    import torch.distributed as dist

    from tracekit.collectors.record.collectives import SessionCollectives
    from tracekit.collectors.record.hooks_comm import CollectiveHooks, DispatcherKernel, ReducerHooks, below_autograd

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    session = _session(folder, 0, 1)
    collectives = SessionCollectives(session)
    reducer = ReducerHooks(collectives)
    CollectiveHooks(collectives, reducer).install()
    reducer.install()
    bucket = "bucket of DistributedDataParallel, by a kernel"
    backward, buckets = _buckets()
    session.patches.remove()
    costs = {}
    costs["all buckets of DistributedDataParallel, once a backward"] = _added_us(session._switch, backward)
    reducer.hook()
    costs[bucket] = _each(_added_us(session._switch, backward), buckets)
    session._switch(recording=False)
    kernel = DispatcherKernel("allreduce_", below_autograd(torch.ops.c10d.allreduce_.default))

    def switch(*, recording: bool) -> None:
        (kernel.install if recording else kernel.remove)()

    costs["the same, by an empty one"] = _each(_added_us(switch, backward), buckets)
    session.close()
    dist.destroy_process_group()
    return costs


def _buckets():
    """The backward of a model of DistributedDataParallel, and how many buckets it reduces."""
    import torch
    import torch.distributed as dist

    dist._DEFAULT_FIRST_BUCKET_BYTES = 1
    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(BUCKETS)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1e-6)

    def backward():
        model(torch.ones(1, 8)).sum().backward()

    backward()  # buckets are rebuilt after the first one
    return backward, BUCKETS


def _each(cost: tuple[float, float], parts: int) -> tuple[float, float]:
    return cost[0] / parts, cost[1] / parts


def _own_us(hooks, function, calls: int, turns: int) -> float:
    """Microseconds of the hooks in one call of `function`: the median, less that of the clock's calls."""
    took = [_taken_us(hooks, function, calls) - _taken_us(hooks, function, calls, bare=True) for _ in range(turns)]
    return median(took)


def _taken_us(hooks, function, calls: int, *, bare: bool = False) -> float:
    """Time inside each hook but outside the call it wraps, summed over hooks; `bare`: without the hooks."""
    spent = 0

    def stamped(call, sign):
        @functools.wraps(call)
        def timed(*args, **kwargs):
            nonlocal spent
            began = time.monotonic_ns()
            result = call(*args, **kwargs)
            spent += sign * (time.monotonic_ns() - began)
            return result

        return timed

    for hook in hooks:
        inner = stamped(getattr(hook.owner, hook.name), -1)
        hook.install()  # keeps the original for `remove`
        setattr(hook.owner, hook.name, stamped(inner if bare else hook.wrap(inner), 1))
    times = []
    try:
        for _ in range(calls):
            spent = 0
            function()
            times.append(spent / 1e3)
    finally:
        for hook in hooks:
            hook.remove()
    return median(times)


def _added_us(switch, function) -> tuple[float, float]:
    """CPU time per call with hooks minus without, microseconds: of this thread, and of all threads.

    Compares short alternating blocks by their 5th percentiles, since other processes slow many blocks.
    `switch(recording=)` installs and removes the hooks.
    """
    own_thread, everywhere = {True: [], False: []}, {True: [], False: []}
    for block in range(2 * BLOCKS):
        recording = block % 2 == 0
        switch(recording=recording)
        function()
        began = time.thread_time(), time.process_time()
        for _ in range(BLOCK_CALLS):
            function()
        own_thread[recording].append((time.thread_time() - began[0]) / BLOCK_CALLS * 1e6)
        everywhere[recording].append((time.process_time() - began[1]) / BLOCK_CALLS * 1e6)
    return _fast(own_thread[True]) - _fast(own_thread[False]), _fast(everywhere[True]) - _fast(everywhere[False])


def _fast(times: list[float]) -> float:
    return sorted(times)[len(times) // 20]
