"""The hooks of collectives and transfers on a GPU that the test plays, with works that behave as NCCL's do."""

import types

import pytest

from tests.collectors.fake_cuda import FakeCuda
from tracekit.collectors.record.device import DeviceClock
from tracekit.collectors.record.wire_format import Category, Flag, RuntimeOptions

US, MS = 1_000, 1_000_000
COALESCED, ALLREDUCE = 17, 1


class Sink:
    """A recorder that keeps what it is told."""

    off = None

    def __init__(self):
        self.records, self.facts, self.dropped = [], [], 0

    def add(self, record):
        self.records.append(record)

    def fact(self, kind, value):
        self.facts.append((kind, value))

    def first_of_all_ranks(self, _what):
        return True


class Host:
    """A host clock that only the test moves."""

    def __init__(self):
        self.now_ns = 10**9

    def __call__(self):
        return self.now_ns


class Gpu:
    """Started work of a communicator: it begins when the launching stream is there, on a stream of its own."""

    def __init__(self, cuda):
        self.cuda, self.stream = cuda, cuda.Stream()

    def launch(self, duration_ns):
        self.stream.tail_ns = max(self.stream.tail_ns, self.cuda.current_stream().tail_ns)
        self.cuda.launch(duration_ns, self.stream)
        return self.stream.tail_ns


class Work:
    """What NCCL hands back. A coalesced one has a null future: asking for it ends the process."""

    def __init__(self, cuda, end_ns, op_type=ALLREDUCE):
        self.cuda, self.end_ns, self.op_type = cuda, end_ns, op_type

    def _get_op_type(self):
        return self.op_type

    def get_future(self):
        assert self.op_type != COALESCED, "segmentation fault"
        return self

    def add_done_callback(self, callback):
        """At once, on a stream of the pool that waits for the collective."""
        with self.cuda.Stream() as pooled:
            pooled.tail_ns = self.end_ns
            callback(self)

    def wait(self):
        self.cuda.current_stream().tail_ns = max(self.cuda.current_stream().tail_ns, self.end_ns)


@pytest.fixture
def rig(monkeypatch):
    from tracekit.collectors.record import session as session_module
    from tracekit.collectors.record.collectives import SessionCollectives
    from tracekit.collectors.record.hooks_comm import CollectiveHooks, ReducerHooks

    host = Host()
    monkeypatch.setattr(session_module, "now_ns", host)
    cuda, sink = FakeCuda(host, latency_ns=0), Sink()
    session = session_module.Session(sink, RuntimeOptions(), rank=0, world_size=2, attempt=0)
    clock = DeviceClock(
        cuda, sink.add, lambda _: None, opened=session.device_opened, failed=session.device_failed, host_clock=host
    )
    clock.owns = lambda tensor: tensor is not None
    session.use_device(clock, lambda _: types.SimpleNamespace(begin=lambda: None))
    clock.tick()
    collectives = SessionCollectives(session)
    hooks = CollectiveHooks(collectives, ReducerHooks(collectives))
    collectives._groups["dp"] = 4
    made = types.SimpleNamespace(session=session, cuda=cuda, sink=sink, clock=clock, hooks=hooks, host=host)
    made.collectives, made.nccl = collectives, Gpu(cuda)
    made.group = types.SimpleNamespace(group_name="dp")
    yield made
    assert session.failures == {}


def drained(rig):
    """(begin, duration) in ms of what was recorded, from the first begin on, flags checked."""
    rig.host.now_ns += 1000 * MS
    rig.clock.tick()
    assert all(record[1] & Flag.DEVICE_CLOCK for record in rig.sink.records)
    zero = rig.sink.records[0][7]
    return [(round((r[7] - zero) / MS, 3), round((r[8] - r[7]) / MS, 3)) for r in rig.sink.records]


def tensors():
    """What a collective is given. Whoever only collects the tests is spared the import."""
    import torch

    return [torch.ones(2)]


def all_reduce(rig, duration_ns, op_type=ALLREDUCE):
    """The hooked `allreduce` of a process group."""

    def original(_group, _tensors):
        return Work(rig.cuda, rig.nccl.launch(duration_ns), op_type)

    return rig.hooks.collective("allreduce", original)(rig.group, tensors())


def test_the_played_gpu_answers_to_the_names_that_torch_has():
    """What the collector calls exists in this torch, with the arguments it passes."""
    import inspect

    import torch

    names = ("is_initialized", "is_current_stream_capturing", "current_stream", "current_device", "Stream", "Event")
    assert all(hasattr(torch.cuda, name) for name in names)
    assert "enable_timing" in inspect.signature(torch.cuda.Event.__new__).parameters
    assert "priority" in inspect.signature(torch.cuda.Stream.__new__).parameters
    assert hasattr(torch.Stream, "device_index")
    assert all(hasattr(torch.cuda.Event, name) for name in ("record", "query", "elapsed_time"))
    assert {"get_future", "_get_op_type", "wait"} <= set(dir(torch.distributed.Work))


def test_what_a_compute_waits_for_inside_is_measured_on_its_stream(rig):
    """2 ms of work are launched behind a collective of 7: the stream waits 5."""

    def stream_waits():
        rig.cuda.current_stream().tail_ns = max(rig.cuda.current_stream().tail_ns, rig.nccl.stream.tail_ns)

    def of_fsdp():
        rig.nccl.launch(7 * MS)
        rig.cuda.launch(2 * MS)
        group = types.SimpleNamespace(_all_gather_process_group=rig.group)
        rig.hooks._wait_for_unshard(lambda _group: stream_waits())(group)

    of_fsdp()
    assert not rig.sink.records, "outside computes it is nobody's wait"
    rig.session.busy = 1
    of_fsdp()
    assert drained(rig) == [(0.0, 5.0)]
    (record,) = rig.sink.records
    assert (record[0], record[6]) == (Category.WAIT, 4)


def test_a_work_that_is_waited_for_inside_a_compute(rig):
    rig.session.busy = 1
    work = all_reduce(rig, 7 * MS)
    rig.cuda.launch(2 * MS)
    rig.hooks.wait(Work.wait)(work)
    assert drained(rig) == [(0.0, 7.0), (2.0, 5.0)]
    assert [record[0] for record in rig.sink.records] == [Category.COLLECTIVE, Category.WAIT]


def test_a_collective_begins_with_its_stream_and_ends_with_its_future(rig):
    """Launched while the stream has 5 ms to do, it takes 3 ms; the compute behind it does not wait for it."""
    rig.cuda.launch(5 * MS)
    before = rig.session.instant()
    all_reduce(rig, 3 * MS)
    rig.session.record_compute("forward-compute", before, rig.session.instant(), 0, 0)
    assert drained(rig) == [(0.0, 3.0), (0.0, 0.0)]


def test_two_collectives_run_in_turn_on_the_communicators_stream(rig):
    all_reduce(rig, 3 * MS)
    all_reduce(rig, 4 * MS)
    assert drained(rig) == [(0.0, 3.0), (0.0, 7.0)]


def test_a_collective_without_a_work_ran_on_the_current_stream(rig):
    def original(_group, _tensors):
        rig.cuda.launch(2 * MS)

    rig.hooks.collective("allreduce", original)(rig.group, tensors())
    assert drained(rig) == [(0.0, 2.0)]


def test_a_coalesced_work_is_never_asked_for_its_future(rig):
    """It ends where the stream waits for it."""
    work = all_reduce(rig, 3 * MS, COALESCED)
    wait = rig.hooks.wait(Work.wait)
    wait(work)
    assert drained(rig) == [(0.0, 3.0)]


def test_a_captured_collective_is_left_alone(rig):
    """Not even its future is asked for: the callback's stream would become part of the graph."""
    rig.cuda.capturing = True
    work = rig.hooks.collective("allreduce", lambda _group, _tensors: Work(rig.cuda, 0, COALESCED))
    assert isinstance(work(rig.group, tensors()), Work)
    rig.cuda.capturing = False
    assert rig.sink.records == []
    assert rig.collectives.waited_for == {}


def test_a_collective_of_host_tensors_is_timed_on_the_host(rig):
    rig.clock.owns = lambda _tensor: False
    rig.cuda.launch(500 * MS)

    def original(_group, _tensors):
        rig.host.now_ns += 2 * MS

    rig.hooks.collective("allreduce", original)(rig.group, tensors())
    ((_, flags, *_, begin, end, _),) = rig.sink.records
    assert flags & Flag.DEVICE_CLOCK == 0
    assert end - begin == 2 * MS


def test_the_bucket_of_a_reducer_is_timed_like_a_collective(rig):
    start = rig.collectives.launched((tensors(),))
    work = Work(rig.cuda, rig.nccl.launch(3 * MS))
    rig.collectives.started("allreduce", rig.group, (tensors(),), start, work)
    assert drained(rig) == [(0.0, 3.0)]


def test_transfers_of_a_batch_share_one_work_and_end_where_the_stream_goes_on(rig):
    """A recv that takes 6 ms beside 2 ms of compute: the stream waits for the remaining 4."""
    from tracekit.collectors.record.hooks_compute import PipelineHooks

    pipeline = PipelineHooks(rig.session, pipelined=lambda: None)
    ops = [types.SimpleNamespace(tensor=tensors()[0], peer=1) for _ in range(2)]
    stage = types.SimpleNamespace(stage_index=0)
    for op, kind in zip(ops, ("forward-recv", "backward-send"), strict=True):
        pipeline._tag(kind, lambda _stage, _chunk, op=op: [op])(stage, 3)
    post = pipeline._batch(lambda _ops: [Work(rig.cuda, rig.nccl.launch(6 * MS), COALESCED)])
    wait = pipeline._wait(lambda works: [work.wait() for work in works])
    works = post(ops)
    rig.cuda.launch(2 * MS)
    wait(works)
    assert drained(rig) == [(0.0, 6.0), (0.0, 6.0)]
    assert [record[9] - record[7] for record in rig.sink.records] == [2 * MS, 2 * MS]
    assert [record[4] for record in rig.sink.records] == [3, 3]


def test_a_span_named_after_work_of_the_gpu_is_timed_there(rig):
    for name in ("optimizer", "tokenize"):
        start = rig.session.begin_span(name)
        rig.cuda.launch(8 * MS)
        rig.host.now_ns += 1 * MS
        rig.session.end_span(name, start)
    rig.host.now_ns += 1000 * MS
    rig.clock.tick()
    lasted = {bool(record[1] & Flag.DEVICE_CLOCK): record[8] - record[7] for record in rig.sink.records}
    assert lasted == {True: 8 * MS, False: 1 * MS}


def test_the_step_record_carries_the_compute_time_of_the_device(rig):
    start = rig.session.instant()
    rig.cuda.launch(9 * MS)
    rig.host.now_ns += 1 * MS
    rig.session.record_compute("forward-compute", start, rig.session.instant(), 0, 0)
    rig.host.now_ns += 50 * MS
    rig.session.set_step(1)
    rig.session.set_step(2)
    steps = [record for record in rig.sink.records if record[2] == rig.session.name("step")]
    assert [record[9] for record in steps] == [0, 9 * MS]


@pytest.mark.parametrize("recording", [True, False])
def test_a_step_lasts_as_long_as_the_gpu_takes_however_far_ahead_its_host_is(rig, recording):
    """The host launches five steps of 7 ms at once: what recording costs is measured by these."""
    session = rig.hooks.session
    session.recording = recording
    for _ in range(5):
        start = session.optimizer_begins(1)
        rig.cuda.launch(7 * MS)
        session.optimizer_ended(start)
    session.set_step(9)
    rig.host.now_ns += 1000 * MS
    rig.clock.tick()
    steps = [record for record in rig.sink.records if record[0] == Category.STEP]
    assert [bool(record[1] & Flag.DEVICE_CLOCK) for record in steps] == [False, True, True, True, True]
    assert [round((record[8] - record[7]) / MS, 3) for record in steps[1:]] == [7.0] * 4
