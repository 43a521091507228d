"""What hooks share: whether anything is recorded, and when a collective is over."""

from types import SimpleNamespace

import pytest

from tests.collectors.runtime.test_clipping import MS, Loop
from tracekit.collectors.runtime.wire_format import Category, Flag


@pytest.fixture
def loop(monkeypatch):
    return Loop(monkeypatch)


def test_a_recorder_that_is_off_has_its_hooks_taken_out_at_the_next_step(loop):
    """The disk is full in step 1: steps from the next one on cost what an idle session costs, and are still counted."""
    loop.step()
    loop.backward()
    assert loop.session.recording
    loop.sink.off = "OSError: No space left on device"
    loop.step()
    loop.step()
    loop.step()
    assert not loop.session.recording
    assert loop.session.step == 4
    assert loop.optimizers_ms == [(0, 5), (25, 30)]


def test_a_collective_that_blocks_is_over_where_its_caller_goes_on(loop):
    """Not where a thread of gloo, which may get no processor for a while, tells of it."""
    from tracekit.collectors.runtime.collectives import Collectives
    from tracekit.collectors.runtime.hooks_comm import CollectiveHooks
    from tracekit.collectors.runtime.hooks_reducer import ReducerHooks

    collectives = Collectives(loop.session)
    hooks = CollectiveHooks(collectives, ReducerHooks(collectives))
    collectives.group_number = lambda _group: 0
    work, start = SimpleNamespace(), loop.session.instant()  # it has no future to be asked for
    group = SimpleNamespace(group_name="a group")
    collectives.started("allreduce", group, (SimpleNamespace(asyncOp=False),), start, work)
    hooks._wait(lambda _work: loop.takes(5))(work)
    loop.takes(3)
    (record,) = [one for one in loop.sink.records if one[0] == Category.COLLECTIVE]
    assert record[1] == Flag.BLOCKING
    assert (record[8] - record[7]) / MS == 5
