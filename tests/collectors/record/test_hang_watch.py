"""Where a rank says that it stands: what PyTorch's recorders list, and the transfers that it has not got past."""

import json
import os
import pickle
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
    from tracekit.collectors.record.hang_watch import HangWatch

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


def operation(number, name, group, state):
    return {
        "record_id": number, "pg_id": 0, "process_group": group, "collective_seq_id": number, "p2p_seq_id": 0,
        "profiling_name": name, "time_created_ns": 1_000 + number, "input_sizes": [[4]], "input_dtypes": ["Float"],
        "output_sizes": [[4]], "output_dtypes": ["Float"], "state": state, "retired": state == "completed",
        "is_p2p": False,
    }  # fmt: skip


def recorder(*operations):
    """A recorder of torch: all it holds, and what it counts."""
    status = {"0": {"last_enqueued_collective": len(operations), "last_completed_collective": 0}} if operations else {}
    dump = {"version": "2.10", "pg_config": {}, "pg_status": status, "entries": list(operations)}
    return lambda *_: pickle.dumps(dump), lambda _: json.dumps(status).encode()


@pytest.mark.parametrize("both", [False, True])
def test_a_hang_in_nccl_is_in_its_own_recorder(tmp_path, monkeypatch, both):
    """Rank 1 has not issued the second reduction. The group has a backend for each device, or NCCL only."""
    import torch

    from tracekit.analysis.hang.hang_culprits import find_hang
    from tracekit.collectors.importers.flight_recorder import read_flight_records
    from tracekit.collectors.record import hang_watch

    group, members = type("Default", (), {"group_desc": "default_pg"})(), ("0", "default_pg")
    world = types.SimpleNamespace(pg_group_ranks={group: {0: 0, 1: 1}}, pg_names={group: "0"})
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_world", world)
    c10d = torch._C._distributed_c10d
    for rank, issued in ((0, 2), (1, 1)):
        states = ["completed", "scheduled"][:issued]
        nccl = [operation(number, "nccl:all_reduce", members, state) for number, state in enumerate(states, 1)]
        gloo = [operation(number, "gloo:barrier", members, "completed") for number in (1, 2, 3)] if both else []
        for name, found in (("nccl", recorder(*nccl)), ("fr", recorder(*gloo))):
            monkeypatch.setattr(c10d, f"_dump_{name}_trace", found[0], raising=False)
            monkeypatch.setattr(c10d, f"_dump_{name}_trace_json", found[1], raising=False)
        session = types.SimpleNamespace(step=0, rank=rank, world_size=2, process_id=os.getpid())
        dump = hang_watch.HangWatch(session, tmp_path)._dump()
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(dump))
    report = find_hang(read_flight_records(tmp_path))
    assert [one.rank for one in report.culprits] == [1]
    assert [one.rank for one in report.waiting] == [0]
    assert report.notes == ()
