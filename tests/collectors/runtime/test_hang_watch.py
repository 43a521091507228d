"""Where a rank says that it stands: the transfers that it has not got past."""

import os
import types

import pytest


class Group:
    """A process group of two; this is its first member."""

    group_name, group_desc = "7", "mesh_pp"

    def name(self):
        return "gloo"

    def rank(self):
        return 0


@pytest.fixture
def watch(tmp_path):
    from tracekit.collectors.runtime.hang_watch import HangWatch

    session = types.SimpleNamespace(step=0, rank=0, world_size=2, process_id=os.getpid())
    return HangWatch(session, tmp_path)


def stands_in(watch):
    """Names of the transfers in its dump."""
    return [entry["profiling_name"] for entry in watch._transfers_waited_for({})]


def raises(*_args):
    raise RuntimeError("Connection closed by peer")


def test_a_transfer_that_was_waited_for_is_past(watch):
    seen = []
    work = watch._transfer("recv", lambda *_: object())(Group(), [], 1)
    watch._wait(lambda _: seen.extend(stands_in(watch)))(work)
    assert seen == ["gloo:recv 0<-1"]
    assert stands_in(watch) == []


@pytest.mark.parametrize("where", ["as it begins", "in its wait"])
def test_a_rank_has_not_got_past_a_transfer_that_fails(watch, where):
    """Where its peer is gone gloo raises in either place: that, not the last collective, is what failed."""
    if where == "as it begins":
        with pytest.raises(RuntimeError):
            watch._transfer("send", raises)(Group(), [], 1)
    else:
        work = watch._transfer("send", lambda *_: object())(Group(), [], 1)
        with pytest.raises(RuntimeError):
            watch._wait(raises)(work)
    assert stands_in(watch) == ["gloo:send 0->1"]
