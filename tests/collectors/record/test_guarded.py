"""Around a hook's guarded part: what a caller passes by name, and what objects of users raise, never reach them."""

from types import SimpleNamespace

import pytest

from tests.collectors.record.test_clipping import Sink
from tracekit.collectors.record.wire_format import RuntimeOptions


class Told(Sink):
    """A recorder that keeps records, and no files."""

    def first_of_all_ranks(self, _what):
        return False


@pytest.fixture
def session():
    from tracekit.collectors.record.session import Session

    clock = iter(range(1, 10**6))
    return Session(Told(lambda: next(clock)), RuntimeOptions(), rank=0, world_size=1, attempt=0)


class Stage:
    """A stage of `torch.distributed.pipelining`, as far as hooks look at it."""

    stage_index, is_last, num_stages, group, group_rank = 0, True, 1, None, 0

    def forward_one_chunk(self, fwd_chunk_id):
        return "forward", fwd_chunk_id

    def get_fwd_send_ops(self, fwd_chunk_id):
        return [SimpleNamespace(chunk=fwd_chunk_id)]


def hooked(session, name):
    from tracekit.collectors.record.hooks_compute import FORWARD, PipelineHooks

    hooks = PipelineHooks(session, lambda: None)
    hooks._described.add(0)
    original = getattr(Stage, name)
    return hooks._compute(FORWARD, original) if name.startswith("forward") else hooks._tag("forward-send", original)


@pytest.mark.parametrize("name", ["forward_one_chunk", "get_fwd_send_ops"])
def test_a_microbatch_that_is_passed_by_name_is_recorded_as_one_that_is_not(session, name):
    hook = hooked(session, name)
    by_place, by_name = hook(Stage(), 3), hook(Stage(), fwd_chunk_id=3)
    assert not session.failures
    if name == "forward_one_chunk":
        assert by_place == by_name == ("forward", 3)
        session.flush_held()
        assert [record[4] for record in session.recorder.records] == [3, 3]
    else:
        assert vars(by_place[0]) == vars(by_name[0])


def test_what_a_call_lacks_is_its_own_error(session):
    """The caller's TypeError names his own function."""
    with pytest.raises(TypeError, match=r"forward_one_chunk\(\) missing 1 required positional argument"):
        hooked(session, "forward_one_chunk")(Stage())


def test_transfers_whose_arguments_changed_are_made_and_not_recorded(session):
    """An op without a tensor, a wait with a name: the schedule gets what it would get alone."""
    from tracekit.collectors.record.hooks_compute import PipelineHooks

    hooks = PipelineHooks(session, lambda: None)
    posted = hooks._batch(lambda _ops, desc=None: [desc])
    assert posted([SimpleNamespace()], desc="forward") == ["forward"]
    assert session.off == {"p2p"}
    session.off.clear()
    assert hooks._wait(lambda work: f"waited for {work}")(work=[1]) == "waited for [1]"


def test_a_module_with_parameters_that_raise_is_evaluated_and_called(session):
    import torch

    from tracekit.collectors.record.hooks_compute import LoopHooks

    class Lazy(torch.nn.Module):
        def parameters(self):
            raise RuntimeError("not materialized")

    module, loop = Lazy(), LoopHooks(session)
    loop._before_forward(module, ())
    assert session.failures["forward"] == 1
    evaluate = session.evaluation._eval(torch.nn.Module.eval)
    assert evaluate(module) is module
    assert not module.training
    assert session.failures["evaluation"] == 1


def test_an_engine_without_the_method_that_is_asked_steps(session):
    """As a DeepSpeed of another version."""
    from tracekit.collectors.record.hooks_compute import DeepSpeedHooks, LoopHooks
    from tracekit.collectors.record.hooks_host import HostHooks

    hooks = DeepSpeedHooks(session, LoopHooks(session), HostHooks(session))
    assert hooks._step(lambda _engine: "stepped")(SimpleNamespace()) == "stepped"
    assert session.failures["deepspeed"] == 1


def test_a_clock_that_fails_within_a_call_leaves_its_result(session, monkeypatch):
    """It worked as the call began."""
    from tracekit.collectors.record import hooks_host
    from tracekit.collectors.record.wire_format import Category

    def fails():
        raise OSError("clock_gettime")

    monkeypatch.setattr(hooks_host, "now_ns", fails)
    save = hooks_host.HostHooks(session)._timed(Category.CHECKPOINT, "checkpoint", lambda _: None, lambda: "saved")
    assert save() == "saved"
    assert session.failures["checkpoint"] == 1
