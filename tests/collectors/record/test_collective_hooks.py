"""Hooks of collectives on the host: what they record of calls.

Works and process groups are played here, so that each moment is known; real ones are those of `test_job_shapes.py`.
"""

import gc
import json
import time
import weakref
from types import SimpleNamespace

import pytest

from tracekit.collectors.record.recorder import Recorder
from tracekit.collectors.record.wire_format import NONE, RECORD, Category, Flag, RuntimeOptions

BLOCKS, CONTINUES = SimpleNamespace(asyncOp=False), SimpleNamespace(asyncOp=True)


class Group:
    """A process group; `allreduce` is what is hooked."""

    def __init__(self, name="dp"):
        self.group_name = name

    def size(self):
        return 2


class Work:
    """A collective under way. `future`: whether it has one, which is this object."""

    def __init__(self, *, future=True):
        self.has_future, self.callbacks, self.waited = future, [], 0

    def get_future(self):
        if not self.has_future:
            raise RuntimeError("not implemented")
        return self

    def add_done_callback(self, callback):
        self.callbacks.append(callback)

    def completes(self):
        """As a thread of gloo: calls back, and lets go."""
        while self.callbacks:
            self.callbacks.pop()(self)

    def wait(self):
        self.waited += 1
        return True


class Rig:
    """A session whose recorder writes nothing to disk, and its hooks."""

    def __init__(self, directory, monkeypatch):
        from tracekit.collectors.record.collectives import SessionCollectives
        from tracekit.collectors.record.hooks_comm import CollectiveHooks
        from tracekit.collectors.record.session import Session

        monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda _group: [0, 1])
        options = RuntimeOptions()
        self.recorder = Recorder(directory, 0, 0, options)
        self.session = Session(self.recorder, options, rank=0, world_size=2, attempt=0)
        self.collectives = SessionCollectives(self.session)
        self.hooks = CollectiveHooks(self.collectives, SimpleNamespace(hooked=False))
        self.group = Group()
        self.wait = self.hooks.wait(Work.wait)

    def launch(self, work, *args, group=None, name="allreduce"):
        """Call the hooked method of a process group that returns `work`."""
        return self.hooks.collective(name, lambda *_args: work)(group or self.group, *args)

    @property
    def records(self):
        """Each record: its fields, and begin and end."""
        unpacked = RECORD.iter_unpack(self.recorder.ring.take(4096))
        names = {number: name for name, number in self.session._names.items()}
        return [SimpleNamespace(**zip_fields(one), op=names[one[2]]) for one in unpacked]

    @property
    def described(self):
        """category, op, process group, bytes and flags of each record."""
        return [(one.category, one.op, one.peer, one.extra, one.flags) for one in self.records]


def zip_fields(record):
    fields = ("category", "flags", "name", "step", "microbatch", "chunk", "peer", "start", "end", "extra")
    return dict(zip(fields, record, strict=False))


@pytest.fixture
def rig(tmp_path, monkeypatch):
    made = Rig(tmp_path, monkeypatch)
    yield made
    assert made.recorder.dropped == 0


def tensors(*sizes):
    """Tensors of so many float32."""
    import torch

    return [torch.ones(size) for size in sizes]


def test_a_collective_that_blocks_is_over_where_its_caller_goes_on(rig):
    """Not where a thread of gloo, which may get no processor for a while, tells of it."""
    before = time.monotonic_ns()
    work = rig.launch(Work(future=False), tensors(16), BLOCKS)
    launched = time.monotonic_ns()
    assert rig.records == []
    assert rig.wait(work) is True
    (record,) = rig.records
    assert before <= record.start <= launched <= record.end <= time.monotonic_ns()
    assert (record.step, record.microbatch, record.chunk) == (0, NONE, NONE)
    assert rig.described == [(Category.COLLECTIVE, "allreduce", 0, 64, Flag.BLOCKING)]
    assert rig.collectives.waited_for == {}


def test_a_collective_that_does_not_block_is_over_when_its_future_completes(rig):
    work = rig.launch(Work(), tensors(16), CONTINUES)
    assert (rig.records, len(work.callbacks)) == ([], 1)
    before = time.monotonic_ns()
    work.completes()
    (record,) = rig.records
    assert before <= record.end <= time.monotonic_ns()
    rig.wait(work)
    assert rig.described == [(Category.COLLECTIVE, "allreduce", 0, 64, 0)]


def test_without_a_future_a_collective_is_over_when_somebody_has_waited(rig):
    """Asked once: gloo has no future for some collectives, and says so with an exception."""
    asked = []
    work = Work(future=False)
    work.get_future = lambda: asked.append(work) or Work.get_future(work)
    hooked = rig.hooks.collective("gather", lambda *_args: work)
    for _ in range(2):
        hooked(rig.group, tensors(1), CONTINUES)
        assert rig.wait(work)
    assert rig.described == [(Category.COLLECTIVE, "gather", 0, 4, 0)] * 2
    assert len(asked) == 1
    assert rig.session.failures == {}


def test_what_a_kernel_started_is_over_when_somebody_has_waited(rig):
    """Buckets of DistributedDataParallel that a dispatcher kernel saw: no hook of a process group started them."""
    work = Work(future=False)
    rig.collectives.started("allreduce", rig.group, (tensors(16),), time.monotonic_ns(), work)
    assert rig.wait(work)
    assert rig.described == [(Category.COLLECTIVE, "allreduce", 0, 64, 0)]


def test_a_collective_without_a_work_is_over_when_its_call_returns(rig):
    assert rig.launch(None, tensors(2)) is None
    assert rig.described == [(Category.COLLECTIVE, "allreduce", 0, 8, 0)]


def test_the_size_is_that_of_all_tensors(rig):
    for sizes in ((1, 2), (), (3,)):
        rig.launch(None, tensors(*sizes), CONTINUES)
        rig.launch(None, [tensors(*sizes)], CONTINUES)
        rig.launch(None, tuple(tensors(*sizes)), CONTINUES)
    assert [one[3] for one in rig.described] == [12, 12, 12, 0, 0, 0, 12, 12, 12]


def test_the_size_of_other_arguments(rig):
    """A parameter is a tensor, too; a barrier has options only."""
    import torch

    rig.launch(None, torch.nn.Parameter(torch.ones(5)), CONTINUES)
    rig.launch(None, [torch.nn.Parameter(torch.ones(5))], CONTINUES)
    rig.launch(None, torch.ones(6), CONTINUES)
    rig.launch(None, BLOCKS)
    rig.launch(None)
    assert [one[3] for one in rig.described] == [20, 20, 24, 0, 0]


def test_a_barrier_of_torch_blocks(rig, monkeypatch):
    """It names its options where it calls the process group, as no other collective of torch does."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist.ProcessGroup, "barrier", rig.hooks.collective("barrier", dist.ProcessGroup.barrier))
        monkeypatch.setattr(dist.Work, "wait", rig.hooks.wait(dist.Work.wait))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    assert [(record.op, record.flags & Flag.BLOCKING) for record in rig.records] == [("barrier", Flag.BLOCKING)]


@pytest.mark.parametrize("future", [True, False])
@pytest.mark.parametrize("inside", ["busy", "optimizing"])
def test_a_wait_inside_an_op_is_recorded_with_the_step_in_which_it_is(rig, inside, future):
    def within(whether):
        setattr(rig.session, inside, type(getattr(rig.session, inside))(whether))

    within(True)
    work = rig.launch(Work(future=future), tensors(16), CONTINUES)
    rig.session.step = 7
    before = time.monotonic_ns()
    rig.wait(work)
    within(False)
    waited = rig.records[0]
    assert (waited.category, waited.op, waited.step, waited.peer) == (Category.WAIT, "allreduce", 7, 0)
    assert (waited.extra, waited.flags) == (0, 0)
    assert before <= waited.start <= waited.end
    assert rig.collectives.inside == {}
    work.completes()
    assert [one.category for one in rig.records] == [Category.WAIT, Category.COLLECTIVE]
    rig.wait(work)
    assert len(rig.records) == 2


def rows_told(rig):
    facts = [json.loads(fact) for fact in rig.recorder._facts]
    return [(one["value"]["sent"], one["value"]["received"]) for one in facts if one["kind"] == "rows"]


def test_an_all_to_all_and_the_wait_for_it_name_the_rows_that_they_move(rig):
    """Told once for each different list: 3 + 1 rows out and 2 + 5 in, back again, and 4 each way in equal parts."""
    rig.session.busy = 1
    out, back = tensors(7, 4), tensors(4, 7)
    for args in (
        (*out, [2, 5], [3, 1], BLOCKS),
        (*back, [3, 1], [2, 5], BLOCKS),
        (*out, [2, 5], [3, 1], BLOCKS),
        (*tensors(4, 4), [], [], BLOCKS),
    ):
        rig.wait(rig.launch(Work(), *args, name="alltoall_base"))
    lists = rig.launch(Work(), tensors(2, 5), tensors(3, 1), BLOCKS, name="alltoall")
    rig.wait(lists)
    records = rig.records
    assert [one.chunk for one in records if one.category == Category.WAIT] == [0, 1, 0, 2, 0]
    assert [one.chunk for one in records if one.category == Category.COLLECTIVE] == [0, 1, 0, 2, 0]
    assert rows_told(rig) == [([3, 1], [2, 5]), ([2, 5], [3, 1]), ([2, 2], [2, 2])]


def test_rows_are_not_told_where_disk_space_is_limited(rig):
    rig.recorder.bounded = True
    rig.wait(rig.launch(Work(), *tensors(7, 4), [2, 5], [3, 1], BLOCKS, name="alltoall_base"))
    assert [one.chunk for one in rig.records] == [NONE]
    assert rows_told(rig) == []


def test_a_wait_behind_the_op_that_launched_is_none_of_it(rig):
    rig.session.busy = 1
    work = rig.launch(Work(), tensors(16), CONTINUES)
    rig.session.busy = 0
    rig.wait(work)
    assert rig.records == []
    assert rig.collectives.inside == {}


def test_the_first_collective_behind_an_optimizer_begins_a_step(rig):
    start = rig.session.optimizer_begins(1)
    rig.session.optimizer_ended(start)
    rig.launch(None, tensors(1), CONTINUES)
    assert [(one.category, one.step) for one in rig.records][-1] == (Category.COLLECTIVE, 1)
    assert rig.session.step == 1


@pytest.mark.slow
def test_process_groups_have_numbers_that_they_keep(rig):
    """Also where many have ended, and another has the address of one of those."""
    gc.freeze()  # only what is made from now on is looked through, not all of torch each time
    second = Group("tp")
    for number in range(50):
        rig.launch(None, tensors(1), CONTINUES, group=Group(f"short {number}"))
        rig.launch(None, tensors(1), CONTINUES, group=second)
        rig.launch(None, tensors(1), CONTINUES)
        gc.collect()
    numbers = [one.peer for one in rig.records]
    names = {number: name for name, number in rig.collectives._groups.items()}
    expected = [name for number in range(50) for name in (f"short {number}", "tp", "dp")]
    assert [names[number] for number in numbers] == expected


def test_the_latest_works_of_a_group_live_until_it_has_started_two_more(rig):
    """Gloo's threads are not their last owners."""
    alive = []
    for _ in range(4):
        work = rig.launch(Work(), tensors(1), CONTINUES)
        alive.append(weakref.ref(work))
        work.completes()
        del work
    gc.collect()
    assert [reference() is not None for reference in alive] == [False, False, True, True]


def test_the_end_waits_for_callbacks_that_gloo_still_has(rig):
    def pending():
        return bool(rig.collectives._callbacks._alive)

    work = rig.launch(Work(), tensors(1), CONTINUES)
    assert pending()
    work.completes()
    assert not pending()
    rig.session.process_group_ends()


def test_a_hook_that_fails_is_reported_switched_off_and_does_not_reach_training(rig, capsys):
    def fail(_group):
        raise ValueError("no such group")

    rig.collectives.group_number = fail
    work = Work()
    for _ in range(3):
        assert rig.launch(work, tensors(1), CONTINUES) is work
    assert rig.records == []
    assert rig.session.failures == {"allreduce": 3}
    assert rig.session.off == {"allreduce"}
    assert "the hook allreduce failed (ValueError: no such group)" in capsys.readouterr().err


def test_what_interrupts_training_is_not_swallowed(rig):
    def interrupt(_group):
        raise KeyboardInterrupt

    rig.collectives.group_number = interrupt
    with pytest.raises(KeyboardInterrupt):
        rig.launch(Work(), tensors(1), CONTINUES)


def test_what_a_collective_raises_reaches_its_caller(rig):
    def fail(*_args):
        raise ConnectionError("peer closed")

    with pytest.raises(ConnectionError):
        rig.hooks.collective("allreduce", fail)(rig.group, tensors(1), CONTINUES)
    work = rig.launch(Work(), tensors(1), BLOCKS)
    with pytest.raises(ConnectionError):
        rig.hooks.wait(fail)(work)
    assert (rig.records, rig.session.failures) == ([], {})


def test_keywords_reach_the_collective(rig):
    given = []
    hooked = rig.hooks.collective("allreduce", lambda *args, **kwargs: given.append((len(args), kwargs)))
    hooked(rig.group, tensors(1), opts=CONTINUES)
    assert given == [(2, {"opts": CONTINUES})]


def test_steps_end_with_what_nobody_waited_for(rig):
    rig.session.busy = 1
    rig.launch(Work(), tensors(1), BLOCKS)
    rig.session.busy = 0
    rig.session._enter(1)
    assert rig.session.unfinished == 1
    assert rig.collectives.waited_for == rig.collectives.inside == {}


# ---- functional collectives --------------------------------------------------------------------------------------


@pytest.fixture
def functional(rig, monkeypatch):
    """Hooked functions: `all_reduce(tensor, op, group)` returns what waits, `wait_tensor`."""
    import torch

    from tracekit.collectors.record.hooks_comm import FunctionalHooks

    module = SimpleNamespace(_resolve_group_name=lambda group: group if isinstance(group, str) else "dp")
    monkeypatch.setattr("torch.distributed.distributed_c10d._resolve_process_group", Group)

    def all_reduce(tensor, _op, group):
        return SimpleNamespace(elem=tensor.clone()) if group != "at once" else tensor.clone()

    hooks = FunctionalHooks(rig.collectives)
    return SimpleNamespace(
        all_reduce=hooks.functional("all_reduce", module, all_reduce), wait_tensor=hooks.wait_tensor(torch.clone)
    )


def test_a_functional_collective_is_over_when_a_view_of_its_result_was_waited_for(rig, functional):
    (tensor,) = tensors(8)
    before = time.monotonic_ns()
    result = functional.all_reduce(tensor, "sum", "dp")
    launched = time.monotonic_ns()
    functional.wait_tensor(tensor)
    assert rig.records == []
    functional.wait_tensor(result.elem.view(2, 4))
    (record,) = rig.records
    assert before <= record.start <= launched <= record.end
    assert rig.described == [(Category.COLLECTIVE, "all_reduce", 0, 32, 0)]
    functional.wait_tensor(result.elem)
    assert len(rig.records) == 1


def test_a_functional_collective_that_waits_is_over_when_it_returns(rig, functional):
    (tensor,) = tensors(8)
    functional.all_reduce(tensor, "sum", "at once")
    assert [one[1] for one in rig.described] == ["all_reduce"]


@pytest.mark.parametrize("group", ["dp", [0, 1]])
def test_a_functional_collective_may_name_its_group_in_many_ways(rig, functional, group):
    (tensor,) = tensors(8)
    for result in (functional.all_reduce(tensor, "sum", group), functional.all_reduce(tensor, "sum", group=group)):
        functional.wait_tensor(result.elem)
    assert [one[2] for one in rig.described] == [0, 0]
    assert rig.session.failures == {}


def test_a_functional_hook_that_fails_is_switched_off(rig, functional):
    (tensor,) = tensors(8)
    result = functional.all_reduce(tensor, "sum", group=None)  # no group of that name
    assert rig.session.failures == {}
    rig.collectives.functional_group = lambda _module, _group: 1 / 0
    for group in ("other", "other"):
        assert functional.all_reduce(tensor, "sum", group).elem.shape == tensor.shape
    assert rig.session.failures == {"all_reduce": 2}
    functional.wait_tensor(result.elem)
    assert len(rig.records) == 1
