"""The rules from records to ops, on records written by hand."""

import numpy as np
import pytest

from tracekit.analysis.graph import Posting
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import TraceError
from tracekit.collectors.merge.merge import merge_attempt
from tracekit.collectors.merge.placement import LayoutOptions
from tracekit.collectors.record.wire_format import Category, Flag
from tracekit.collectors.run_directory.segments import RECORD_DTYPE, AttemptRecording, ClockFit, RankRecording
from tracekit.trace.model import OpKind

MS = 1_000_000
MESH = {"names": ["dp", "pp"], "ranks": [[0, 1]]}
GROUP = {"number": 0, "name": "0", "description": "dp", "ranks": [0, 1]}


def rank(number, rows, *, mesh, groups=(), host="a", world_size=2):
    """A recording from (category, name, start ms, end ms, fields) rows of step 1."""
    names = sorted({row[1] for row in rows} | {"step"})
    records = np.zeros(len(rows) + 1, RECORD_DTYPE)
    step = (Category.STEP, "step", 0, 1000, {"flags": Flag.COMPLETE | Flag.RECORDING})
    for record, (category, name, start, end, fields) in zip(records, [*rows, step], strict=True):
        for field in ("microbatch", "chunk", "peer"):
            record[field] = -1
        record["category"], record["name"], record["step"] = category, names.index(name), 1
        record["start_ns"], record["end_ns"] = start * MS, end * MS
        for field, value in fields.items():
            record[field] = value
    facts = {
        "process": [{"rank": number, "world_size": world_size, "host": host, "time_ns": 0, "monotonic_ns": 0}],
        "mesh": [mesh] if mesh else [],
        "group": list(groups),
    }
    return RankRecording(number, records, dict(enumerate(names)), facts)


def merged(*ranks, **options):
    """The merged attempt of these ranks."""
    recording = AttemptRecording(0, "attempt-000", {one.rank: one for one in ranks})
    return merge_attempt(recording, name="by hand", **options)


def ops_of(result, rank_number, kind):
    """(start, end) in ms of one rank's ops of a kind."""
    rows = result.trace.ops.filter((result.trace.ops["rank"] == rank_number) & (result.trace.ops["kind"] == str(kind)))
    return [
        (pytest.approx(s * 1e3), pytest.approx((s + d) * 1e3)) for s, d in rows.select("start", "duration").iter_rows()
    ]


def compute(name, start, end, **fields):
    return (Category.COMPUTE, name, start, end, {"microbatch": 0, **fields})


def data_parallel(rows):
    """Two data-parallel ranks with the same rows."""
    mesh = {"names": ["dp"], "ranks": [0, 1]}
    return merged(*(rank(number, rows, mesh=mesh, groups=[GROUP]) for number in range(2)))


def test_a_reduction_is_cut_out_of_the_last_backward():
    """The backward ends where the last bucket starts; a bucket hidden behind it is part of that one."""
    result = data_parallel(
        [
            compute("forward-compute", 0, 10),
            compute("backward-compute", 10, 50),
            (Category.COLLECTIVE, "allreduce", 20, 25, {"peer": 0}),
            (Category.COLLECTIVE, "allreduce", 40, 49, {"peer": 0}),
            (Category.OPTIMIZER, "optimizer", 51, 60, {}),
        ]
    )
    assert ops_of(result, 0, OpKind.BACKWARD_COMPUTE) == [(10, 40)]
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == [(40, 49)]


#: Kinds of collectives that begin at 2 ms, before all computes, at 22 behind a forward, at 42 behind a backward, at 72
#: behind the last one, and at 92 behind the optimizer. Those for which no call waits have no direction.
DIRECTIONS = {2: "forward-collectives", 22: "forward-collectives", 42: "backward-collectives"}
KINDS = {
    ("allreduce", False): {72: "all-reduce", 92: "all-reduce"},
    ("allreduce", True): {**DIRECTIONS, 72: "all-reduce", 92: "all-reduce"},
    ("_reduce_scatter_base", False): {72: "grads-reduce-scatter", 92: "grads-reduce-scatter"},
    ("_reduce_scatter_base", True): {**DIRECTIONS, 72: "grads-reduce-scatter", 92: "grads-reduce-scatter"},
    ("_allgather_base", False): {2: "params-all-gather"},
    ("_allgather_base", True): {**DIRECTIONS, 2: "params-all-gather", 72: "all-reduce"},
    ("alltoall_base", False): dict.fromkeys((2, 22, 42, 72, 92), "all-to-all"),
    ("broadcast", False): {},
    ("broadcast", True): {**DIRECTIONS, 72: "all-reduce"},
}


@pytest.mark.parametrize(("name", "blocking"), KINDS)
def test_what_a_collective_is_follows_from_its_name_and_from_the_computes_around_it(name, blocking):
    fields = {"peer": 0, "flags": Flag.BLOCKING if blocking else 0}
    begins = (2, 22, 42, 72, 92)
    result = data_parallel(
        [
            compute("forward-compute", 10, 20),
            compute("backward-compute", 30, 40),
            compute("forward-compute", 50, 60, microbatch=1),
            compute("backward-compute", 60, 70, microbatch=1),
            (Category.OPTIMIZER, "optimizer", 80, 90, {}),
            *((Category.COLLECTIVE, name, begin, begin + 4, fields) for begin in begins),
        ]
    )
    named = {begin: kind for kind in OpKind for begin in begins if (begin, begin + 4) in ops_of(result, 0, kind)}
    named = {begin: kind for begin, kind in named.items() if kind is not OpKind.HOST_DELAY}
    assert named == KINDS[name, blocking]
    without_kind = 2 * (len(begins) - len(named))
    others = result.trace.metadata["collect"].get("other", {})
    assert sum(other["count"] for other in others.values()) == without_kind


def buckets(first_end, second_end, *, backward_end=40):
    """A step whose two buckets are launched at the end of the backward and run until then."""
    return [
        compute("forward-compute", 0, 10),
        compute("backward-compute", 10, backward_end),
        (Category.COLLECTIVE, "allreduce", backward_end, first_end, {"peer": 0}),
        (Category.COLLECTIVE, "allreduce", backward_end, second_end, {"peer": 0}),
        (Category.OPTIMIZER, "optimizer", 80, 90, {}),
    ]


def test_the_reducer_ends_its_reduction_where_the_backward_ends_that_copies_it():
    """The last bucket comes back at 45 ms, and 5 ms later its backward returns: no launch delay of the optimizer."""
    result = data_parallel(
        [
            compute("forward-compute", 0, 10),
            compute("backward-compute", 10, 50),
            (Category.COLLECTIVE, "allreduce", 40, 45, {"peer": 0, "flags": Flag.BUCKET}),
            (Category.OPTIMIZER, "optimizer", 50, 60, {}),
        ]
    )
    assert ops_of(result, 0, OpKind.BACKWARD_COMPUTE) == [(10, 40)]
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == [(40, 50)]
    assert PipelineJob(result.trace).attribution.discrepancy == pytest.approx(0)


def test_buckets_that_run_at_the_same_time_are_one_reduction():
    """They share the network; one after the other, the second would seem to start 38 ms before it could."""
    result = data_parallel(buckets(first_end=78, second_end=75))
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == [(40, 78)]
    trust = PipelineJob(result.trace).attribution.trust
    assert (trust.replay_error, trust.reasons) == (pytest.approx(0), ())


def test_layers_that_are_scattered_inside_the_last_backward_are_one_reduction():
    """Each rank scatters three layers, the last from 40 (rank 0) and 60 ms (rank 1) on; all end at 64 ms.

    By themselves, the first two would end on rank 0 before rank 1 has begun, who moved them to its last one's start.
    """

    def of_rank(number, last):
        scatter = (Category.COLLECTIVE, "reduce_scatter_single", {"peer": 0, "flags": Flag.BLOCKING})
        starts = ((15, 18), (20, 23), (last, 64))
        rows = [
            compute("forward-compute", 0, 10),
            compute("backward-compute", 10, 65),
            *((*scatter[:2], start, end, scatter[2]) for start, end in starts),
            (Category.OPTIMIZER, "optimizer", 65, 75, {}),
        ]
        return rank(number, rows, mesh={"names": ["dp"], "ranks": [0, 1]}, groups=[GROUP])

    result = merged(of_rank(0, 40), of_rank(1, 60))
    assert [ops_of(result, number, OpKind.GRADS_REDUCE_SCATTER) for number in (0, 1)] == [[(40, 64)], [(60, 64)]]
    assert PipelineJob(result.trace).attribution.trust.reasons == ()


def test_what_a_backward_waits_for_in_a_reduction_of_its_own_is_counted_once():
    """Both scatter a layer inside the backward, rank 1 30 ms later than rank 0, and the last one from 60 ms on."""

    def of_rank(number, enters):
        scatter = {"peer": 0, "flags": Flag.BLOCKING}
        rows = [
            compute("forward-compute", 0, 10),
            compute("backward-compute", 10, 65),
            (Category.COLLECTIVE, "reduce_scatter_single", enters, 52, scatter),
            (Category.WAIT, "reduce_scatter_single", enters, 52, {"peer": 0}),
            (Category.COLLECTIVE, "reduce_scatter_single", 60, 64, scatter),
            (Category.WAIT, "reduce_scatter_single", 60, 64, {"peer": 0}),
            (Category.OPTIMIZER, "optimizer", 65, 75, {}),
        ]
        return rank(number, rows, mesh={"names": ["dp"], "ranks": [0, 1]}, groups=[GROUP])

    result = merged(of_rank(0, 20), of_rank(1, 50))
    assert ops_of(result, 0, OpKind.BACKWARD_COMPUTE) == [(10, 20), (52, 60)]
    assert ops_of(result, 1, OpKind.BACKWARD_COMPUTE) == [(10, 50), (52, 60)]
    assert ops_of(result, 0, OpKind.BACKWARD_COLLECTIVES) == [(20, 52)]
    assert ops_of(result, 1, OpKind.BACKWARD_COLLECTIVES) == [(50, 52)]
    for number in (0, 1):
        assert ops_of(result, number, OpKind.GRADS_REDUCE_SCATTER) == [(60, 64)]
    trust = PipelineJob(result.trace).attribution.trust
    assert (trust.replay_error, trust.reasons) == (pytest.approx(0), ())


def exchanging(number, works, *, reduces=True):
    """Two all-to-alls in a forward and one in its backward, 2 ms after the slower rank; rank `number` works so long."""
    at, rows = 0, []
    for at_ms, kind in ((0, "forward-compute"), (100, "backward-compute")):
        at, inner = at_ms, []
        for mine, slower in works[kind]:
            inner.append((at + mine, at + slower + 2))
            at += slower + 2
        rows.append(compute(kind, at_ms, at + 5))
        for piece, (enters, leaves) in enumerate(inner):
            fields = {"peer": 0, "chunk": piece}
            rows.append((Category.COLLECTIVE, "alltoall_base", enters, leaves, {**fields, "flags": Flag.BLOCKING}))
            rows.append((Category.WAIT, "alltoall_base", enters, leaves, fields))
    if reduces:
        rows.append((Category.COLLECTIVE, "allreduce", 180, 190, {"peer": 0, "flags": Flag.BLOCKING}))
    rows.append((Category.OPTIMIZER, "optimizer", 190, 200, {}))
    found = rank(number, rows, mesh=None, groups=[GROUP])
    found.facts["rows"] = [
        {"number": 0, "sent": [3, 1], "received": [3, 4] if number == 0 else [1, 0]},
        {"number": 1, "sent": [3, 4] if number == 0 else [1, 0], "received": [3, 1]},
    ]
    return found


WORKS = (
    {"forward-compute": [(10, 20), (30, 30)], "backward-compute": [(40, 40)]},
    {"forward-compute": [(20, 20), (15, 30)], "backward-compute": [(10, 40)]},
)


@pytest.mark.parametrize("reduces", [True, False])
def test_each_all_to_all_is_an_op_with_the_rows_that_it_moves(reduces):
    """Also where nothing else shows which ranks train together."""
    result = merged(*(exchanging(number, works, reduces=reduces) for number, works in enumerate(WORKS)))
    assert (result.trace.layout.dp, result.trace.layout.pp) == (2, 1)
    assert ops_of(result, 0, OpKind.FORWARD_COMPUTE) == [(0, 10), (22, 52), (54, 59)]
    assert ops_of(result, 1, OpKind.FORWARD_COMPUTE) == [(0, 20), (22, 37), (54, 59)]
    assert ops_of(result, 0, OpKind.FORWARD_COLLECTIVES) == [(10, 22), (52, 54)]
    assert ops_of(result, 1, OpKind.FORWARD_COLLECTIVES) == [(20, 22), (37, 54)]
    assert ops_of(result, 1, OpKind.BACKWARD_COLLECTIVES) == [(110, 142)]
    moved = result.trace.ops.filter(rank=0, kind=OpKind.FORWARD_COLLECTIVES).sort("seq")
    assert moved["sent"].to_list() == [[3, 1], [3, 4]]
    assert moved["received"].to_list() == [[3, 4], [3, 1]]
    rest = result.trace.ops.filter(~result.trace.ops["kind"].cast(str).str.ends_with("collectives"))
    assert rest["sent"].null_count() == rest.height
    assert PipelineJob(result.trace).attribution.trust.replay_error == pytest.approx(0, abs=1e-9)


def test_an_all_to_all_without_rows_is_an_op_as_well():
    """As of a recorder that keeps only the newest records."""
    ranks = [exchanging(number, works, reduces=True) for number, works in enumerate(WORKS)]
    for one in ranks:
        del one.facts["rows"]
    result = merged(*ranks)
    assert ops_of(result, 0, OpKind.FORWARD_COMPUTE) == [(0, 10), (22, 52), (54, 59)]
    moved = result.trace.ops.filter(rank=0, kind=OpKind.FORWARD_COLLECTIVES)
    assert moved["sent"].to_list() == moved["received"].to_list() == [[], []]


def test_what_context_parallel_ranks_wait_for_each_other_is_part_of_the_compute():
    """Their worker is one, so that no lane would meet rank 0 in an op of its own; `waited` says who was late."""

    def of_rank(number, enters):
        exchanged = {"peer": 0, "flags": Flag.BLOCKING}
        rows = [
            compute("forward-compute", 0, 40),
            (Category.COLLECTIVE, "all_to_all_single", enters, 30, exchanged),
            (Category.WAIT, "all_to_all_single", enters, 30, {"peer": 0}),
            compute("backward-compute", 40, 60),
            (Category.OPTIMIZER, "optimizer", 70, 80, {}),
        ]
        return rank(number, rows, mesh={"names": ["cp"], "ranks": [0, 1]}, groups=[GROUP])

    result = merged(of_rank(0, 10), of_rank(1, 25))
    assert (result.trace.layout.dp, result.trace.layout.cp) == (1, 2)
    assert ops_of(result, 0, OpKind.FORWARD_COMPUTE) == [(0, 40)]
    assert ops_of(result, 0, OpKind.FORWARD_COLLECTIVES) == []
    waited = result.trace.ops.filter(kind=OpKind.FORWARD_COMPUTE)["waited"][0]
    assert list(waited) == [pytest.approx(0.015), pytest.approx(0.0)]


def test_gradients_that_context_parallel_ranks_reduce_are_part_of_the_backward():
    """Their worker is one: the graph has no reduction inside it, and what was cut out was a launch delay."""
    rows = [
        compute("forward-compute", 0, 40),
        compute("backward-compute", 40, 60),
        (Category.COLLECTIVE, "allreduce", 45, 58, {"peer": 0}),
        (Category.OPTIMIZER, "optimizer", 60, 80, {}),
    ]
    mesh = {"names": ["cp"], "ranks": [0, 1]}
    result = merged(*(rank(number, rows, mesh=mesh, groups=[GROUP]) for number in range(2)))
    assert ops_of(result, 0, OpKind.BACKWARD_COMPUTE) == [(40, 60)]
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == []
    assert PipelineJob(result.trace).attribution.trust.discrepancy == pytest.approx(0)


def test_the_gradients_of_weights_that_are_put_off_are_ops_of_the_backward():
    """Zero-bubble schedules compute them later; they may run while the next transfer is waited for."""
    mesh = {"names": ["dp"], "ranks": [0, 1]}
    rows = [
        compute("forward-compute", 0, 10),
        compute("backward-compute", 10, 30),
        compute("backward-weight", 32, 50),
        (Category.COLLECTIVE, "allreduce", 50, 55, {"peer": 0}),
        (Category.OPTIMIZER, "optimizer", 60, 70, {}),
    ]
    result = merged(*(rank(number, rows, mesh=mesh, groups=[GROUP]) for number in range(2)))
    assert ops_of(result, 0, OpKind.BACKWARD_WEIGHT) == [(32, 50)]
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == [(50, 55)]
    assert result.trace.metadata["collect"]["other"] == {}


def test_what_overlaps_on_one_rank_is_one_reduction_on_all():
    """Else a rank whose buckets happened to end in turn would have an op without a counterpart."""
    mesh = {"names": ["dp"], "ranks": [0, 1]}
    rows = (
        buckets(70, 75),
        [
            compute("forward-compute", 0, 10),
            compute("backward-compute", 10, 60),
            (Category.COLLECTIVE, "allreduce", 60, 70, {"peer": 0}),
            (Category.COLLECTIVE, "allreduce", 71, 75, {"peer": 0}),
            (Category.OPTIMIZER, "optimizer", 80, 90, {}),
        ],
    )
    result = merged(*(rank(number, one, mesh=mesh, groups=[GROUP]) for number, one in enumerate(rows)))
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == [(40, 75)]
    assert ops_of(result, 1, OpKind.ALL_REDUCE) == [(60, 75)]
    assert PipelineJob(result.trace).attribution.trust.replay_error == pytest.approx(0)


def test_collectives_inside_computes_are_counted_there():
    """A gather in the middle of a forward, as FSDP does it, is part of the forward; one before it is an op."""
    result = data_parallel(
        [
            (Category.COLLECTIVE, "all_gather_single", 0, 2, {"peer": 0}),
            compute("forward-compute", 3, 10),
            (Category.COLLECTIVE, "all_gather_single", 5, 6, {"peer": 0}),
            compute("backward-compute", 10, 30),
            (Category.COLLECTIVE, "reduce_scatter_single", 31, 35, {"peer": 0}),
            (Category.OPTIMIZER, "optimizer", 36, 40, {}),
        ]
    )
    assert ops_of(result, 0, OpKind.PARAMS_ALL_GATHER) == [(0, 2)]
    assert ops_of(result, 0, OpKind.GRADS_REDUCE_SCATTER) == [(31, 35)]
    assert result.trace.metadata["collect"]["nested"] == {"all_gather_single@dp": 2}


def fsdp(waits):
    """A step whose forward waits so for collectives, all ranks until 50 ms."""
    return [
        compute("forward-compute", 0, 70),
        *((Category.WAIT, "all_gather_single", start, end, {"peer": peer}) for start, end, peer in waits),
        compute("backward-compute", 70, 80),
        (Category.OPTIMIZER, "optimizer", 80, 85, {}),
    ]


SELF = {"number": 1, "name": "1", "description": "tp", "ranks": [0]}
#: Of a fast rank: one of its waits lies inside another, and one is not for data-parallel ranks.
FAST = fsdp([(10, 20, 0), (25, 28, 1), (30, 50, 0), (32, 48, 0)])
SLOW = fsdp([(18, 20, 0), (47, 50, 0)])


def test_what_a_compute_waits_for_inside_is_an_op_of_its_own():
    """The fast rank worked 20 ms up to the last wait and waited 30, the slow one 45 and 5; the rest is behind it."""
    mesh = {"names": ["dp"], "ranks": [0, 1]}
    result = merged(*(rank(at, rows, mesh=mesh, groups=[GROUP, SELF]) for at, rows in enumerate((FAST, SLOW))))
    assert ops_of(result, 0, OpKind.FORWARD_COMPUTE) == [(0, 20), (50, 70)]
    assert ops_of(result, 0, OpKind.FORWARD_COLLECTIVES) == [(20, 50)]
    assert ops_of(result, 1, OpKind.FORWARD_COMPUTE) == [(0, 45), (50, 70)]
    assert ops_of(result, 1, OpKind.FORWARD_COLLECTIVES) == [(45, 50)]
    assert ops_of(result, 0, OpKind.BACKWARD_COMPUTE) == [(70, 80)]
    assert result.trace.ops["microbatch"].drop_nulls().to_list() == [0] * 8
    attribution = PipelineJob(result.trace).attribution
    assert attribution.trust.replay_error == pytest.approx(0)
    # Computes of the ideal take 32.5 + 20 (on average) + 10 ms, the transfer 5 and the optimizer 5.
    assert attribution.slowdown == pytest.approx(85 / 72.5)


def test_in_a_pipeline_computes_stay_whole():
    """Each recv belongs to one compute."""
    group = {**GROUP, "ranks": [0, 2]}
    mesh = {"names": ["dp", "pp"], "ranks": [[0, 1], [2, 3]]}
    rows = fsdp([(10, 20, 0)])
    result = merged(*(rank(at, rows, mesh=mesh, groups=[group], world_size=4) for at in range(4)))
    assert ops_of(result, 0, OpKind.FORWARD_COMPUTE) == [(0, 70)]


def pair(*rows, groups=(GROUP,), mesh=None):
    """Two ranks with rows of their own."""
    mesh = mesh or {"names": ["dp"], "ranks": [0, 1]}
    return merged(*(rank(number, one, mesh=mesh, groups=groups) for number, one in enumerate(rows)))


def late_step(late, collective, **fields):
    """A step whose forward, with a collective inside, takes `late` ms longer on this rank up to the collective."""
    return [
        compute("forward-compute", 0, 30),
        (Category.COLLECTIVE, collective, 5 + late, 27, {"peer": 0, **fields}),
        compute("backward-compute", 30, 60),
        (Category.OPTIMIZER, "optimizer", 60, 70, {}),
    ]


def hybrid(*rows):
    """Four data-parallel ranks that gather in twos, as hybrid sharding does."""
    mesh = {"names": ["dp"], "ranks": [0, 1, 2, 3]}
    groups = [[{**GROUP, "ranks": [at // 2 * 2, at // 2 * 2 + 1]}] for at in range(4)]
    return merged(*(rank(at, one, mesh=mesh, groups=groups[at], world_size=4) for at, one in enumerate(rows)))


def test_waiting_inside_a_compute_for_some_ranks_is_not_its_time():
    """Rank 0 began to gather at 5 ms and waited until rank 1 came at 25 ms: its own forward took 10 ms, not 30."""
    result = hybrid(*(late_step(late, "all_gather_single", flags=Flag.BLOCKING) for late in (0, 20, 0, 0)))
    assert ops_of(result, 0, OpKind.FORWARD_COMPUTE) == [(0, 10)]
    assert ops_of(result, 1, OpKind.FORWARD_COMPUTE) == [(0, 30)]
    verdict = PipelineJob(result.trace).attribution
    assert verdict.worker_slowdown[1, 0] > verdict.worker_slowdown[0, 0]
    assert verdict.trust.replay_error == pytest.approx(0)


@pytest.mark.parametrize("flags", [0, Flag.BLOCKING | Flag.DEVICE_CLOCK])
def test_what_nobody_is_known_to_wait_for_stays_in_the_compute(flags):
    """An asynchronous collective, or one of a GPU, whose computing stream may not have waited."""
    result = hybrid(*(late_step(late, "all_gather_single", flags=flags) for late in (0, 20, 0, 0)))
    assert ops_of(result, 0, OpKind.FORWARD_COMPUTE) == [(0, 30)]


def test_a_checkpoint_keeps_its_collectives():
    """A distributed checkpoint gathers its plan before the next forward; those are no parameters."""
    result = pair(
        *(
            [
                (Category.CHECKPOINT, "checkpoint", 0, 20, {}),
                (Category.COLLECTIVE, "allgather", 2 + late, 12, {"peer": 0, "flags": Flag.BLOCKING}),
                (Category.GC, "gc", 14, 16, {}),
                compute("forward-compute", 20, 30),
                compute("backward-compute", 30, 50),
                (Category.OPTIMIZER, "optimizer", 50, 60, {}),
            ]
            for late in (0, 8)
        )
    )
    assert result.trace.metadata["collect"]["nested"] == {"allgather@dp": 2, "gc": 2}
    assert ops_of(result, 0, OpKind.PARAMS_ALL_GATHER) == ops_of(result, 0, OpKind.GC) == []
    assert ops_of(result, 0, OpKind.CHECKPOINT) == [(0, 12)]
    assert ops_of(result, 1, OpKind.CHECKPOINT) == [(0, 20)]


def test_waiting_between_computes_is_nobodys_delay():
    """A collective without a kind delays a worker from when the last rank is there."""
    rows = [
        [
            compute("forward-compute", 0, forward_ms),
            (Category.COLLECTIVE, "broadcast", forward_ms, 32, {"peer": 0}),
            compute("backward-compute", 32, 60),
            (Category.OPTIMIZER, "optimizer", 60, 70, {}),
        ]
        for forward_ms in (10, 30)
    ]
    result = pair(*rows)
    assert ops_of(result, 0, OpKind.HOST_DELAY) == ops_of(result, 1, OpKind.HOST_DELAY) == [(30, 32)]
    assert result.trace.metadata["collect"]["other"]["broadcast@dp"]["seconds"] == pytest.approx(0.024)


def test_the_norm_of_the_gradients_is_one_op():
    """Tensor-parallel ranks reduce it in parts, behind the reduction over the data-parallel ones."""
    mesh = {"names": ["dp", "tp"], "ranks": [[0, 1], [2, 3]]}
    rows = [
        compute("forward-compute", 0, 10),
        compute("backward-compute", 10, 30),
        (Category.COLLECTIVE, "all_reduce", 20, 22, {"peer": 1}),
        (Category.COLLECTIVE, "allreduce", 30, 35, {"peer": 0}),
        (Category.COLLECTIVE, "all_reduce", 36, 38, {"peer": 1}),
        (Category.COLLECTIVE, "all_reduce", 38, 41, {"peer": 1}),
        (Category.OPTIMIZER, "optimizer", 42, 50, {}),
    ]
    groups = {
        number: [
            {**GROUP, "ranks": [number % 2, number % 2 + 2]},
            {"number": 1, "name": "1", "description": "tp", "ranks": [number // 2 * 2, number // 2 * 2 + 1]},
        ]
        for number in range(4)
    }
    ranks = [rank(number, rows, mesh=mesh, groups=groups[number], world_size=4) for number in range(4)]
    result = merged(*ranks)
    assert ops_of(result, 0, OpKind.OPTIMIZER_CLIP_MAIN_GRAD) == [(36, 41)]
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == [(30, 35)]
    assert result.trace.metadata["collect"]["nested"] == {"all_reduce@tp": 2}
    assert PipelineJob(result.trace).attribution.trust.replay_error == pytest.approx(0)


def test_behind_a_reduction_there_is_no_host_delay():
    """The graph runs host delays before it; what lies behind is the launch delay of the optimizer, and counted."""
    result = data_parallel(
        [
            compute("forward-compute", 0, 10),
            compute("backward-compute", 10, 30),
            (Category.COLLECTIVE, "allreduce", 30, 50, {"peer": 0}),
            (Category.SPAN, "clip", 50, 54, {}),
            (Category.OPTIMIZER, "optimizer", 54, 80, {}),
        ]
    )
    assert ops_of(result, 0, OpKind.HOST_DELAY) == []
    assert result.trace.metadata["collect"]["other"]["clip"] == {
        "count": 2,
        "seconds": pytest.approx(0.008),
        "host_delays": 0,
    }
    assert PipelineJob(result.trace).attribution.trust.replay_error == pytest.approx(0)


def test_an_optimizer_begins_behind_its_closure():
    """The closure's forward, backward and reduction are ops of their own."""
    result = data_parallel(
        [
            (Category.OPTIMIZER, "optimizer", 0, 60, {}),
            compute("forward-compute", 1, 10),
            compute("backward-compute", 10, 50),
            (Category.COLLECTIVE, "allreduce", 40, 52, {"peer": 0}),
        ]
    )
    assert ops_of(result, 0, OpKind.OPTIMIZER) == [(52, 60)]
    assert PipelineJob(result.trace).attribution.trust.replay_error == pytest.approx(0)


def test_what_an_optimizer_does_before_its_closure_is_host_work():
    result = data_parallel(
        [
            (Category.OPTIMIZER, "optimizer", 0, 60, {}),
            compute("forward-compute", 12, 20),
            compute("backward-compute", 20, 50),
        ]
    )
    assert ops_of(result, 0, OpKind.HOST_DELAY) == [(0, 12)]
    assert result.trace.metadata["collect"]["other"]["optimizer before its closure"]["host_delays"] == 2
    assert PipelineJob(result.trace).attribution.discrepancy == pytest.approx(0)


def test_what_has_no_kind_keeps_its_name():
    """Between ops it delays the host; beside one it is only counted."""
    result = data_parallel(
        [
            (Category.SPAN, "tokenize", 0, 4, {}),
            (Category.SPAN, "inner", 1, 2, {}),
            compute("forward-compute", 5, 10),
            (Category.SPAN, "metrics", 6, 7, {}),
            compute("backward-compute", 10, 30),
            (Category.SPAN, "checkpoint", 31, 33, {}),
            (Category.OPTIMIZER, "optimizer", 36, 40, {}),
        ]
    )
    assert ops_of(result, 1, OpKind.HOST_DELAY) == [(0, 4)]
    assert ops_of(result, 1, OpKind.CHECKPOINT) == [(31, 33)]
    assert {name: row["host_delays"] for name, row in result.trace.metadata["collect"]["other"].items()} == {
        "inner": 0,
        "metrics": 0,
        "tokenize": 2,
    }


def pipeline(send, recv, **options):
    """Stage 0 sends, stage 1 receives; `recv` has its wait in ms."""
    start, end, wait = recv
    stage = {"microbatch": 0}
    return merged(
        rank(
            0,
            [
                compute("forward-compute", 0, 10, chunk=0),
                (Category.P2P, "forward-send", *send, {**stage, "chunk": 0, "peer": 1, "extra": send[1] * MS}),
            ],
            mesh=MESH,
        ),
        rank(
            1,
            [
                (Category.P2P, "forward-recv", start, end, {**stage, "chunk": 1, "peer": 0, "extra": wait * MS}),
                compute("forward-compute", end, end + 10, chunk=1),
            ],
            mesh=MESH,
            host=options.pop("host", "a"),
        ),
        **options,
    )


def test_a_send_ends_with_its_recv():
    """However late somebody waited for the send."""
    result = pipeline(send=(11, 90), recv=(1, 15, 1))
    assert ops_of(result, 0, OpKind.FORWARD_SEND) == [(11, 15)]
    assert result.trace.metadata["collect"]["estimated_recvs"] == result.trace.metadata["collect"]["unmatched_p2p"] == 0


def test_a_recv_that_was_there_before_its_wait_is_estimated():
    """Its end is not when somebody looked."""
    result = pipeline(send=(11, 12), recv=(1, 60, 60))
    assert result.trace.metadata["collect"]["estimated_recvs"] == 1
    assert ops_of(result, 1, OpKind.FORWARD_RECV) == [(1, 11)]


def one_transfer(*, asked, went_on):
    """Stage 0 computes for 10 ms, sends and waits for it; stage 1 loads data, asks for it then, and computes."""
    transfer = {"microbatch": 0, "peer": 0}
    sending = [
        compute("forward-compute", 0, 10, chunk=0),
        (Category.P2P, "forward-send", 11, went_on, {**transfer, "chunk": 0, "extra": 12 * MS}),
        (Category.OPTIMIZER, "optimizer", went_on + 1, went_on + 5, {}),
    ]
    receiving = [
        (Category.DATA_LOAD, "data-load", 0, asked - 1, {}),
        (Category.P2P, "forward-recv", asked, 22, {**transfer, "chunk": 1, "extra": (asked + 1) * MS}),
        compute("forward-compute", 23, 33, chunk=1),
        (Category.OPTIMIZER, "optimizer", 34, 40, {}),
    ]
    return merged(rank(0, sending, mesh=MESH), rank(1, receiving, mesh=MESH))


def test_a_send_ends_before_its_recv_where_its_host_went_on_earlier():
    """The receiver's thread came 2 ms late."""
    result = one_transfer(asked=16, went_on=20)
    assert ops_of(result, 0, OpKind.FORWARD_SEND) == [(11, 20)]
    assert ops_of(result, 1, OpKind.FORWARD_RECV) == [(16, 22)]


def test_what_the_host_of_a_pipeline_does_between_ops_is_host_work():
    """Cut where it asked for a transfer, without its waits; nothing is left to explain."""
    result = one_transfer(asked=16, went_on=20)
    assert ops_of(result, 0, OpKind.HOST_DELAY) == [(10, 11), (11, 12), (20, 21)]
    assert ops_of(result, 1, OpKind.HOST_DELAY) == [(15, 16), (16, 17), (22, 23), (33, 34)]
    trust = PipelineJob(result.trace).attribution.trust
    assert (trust.replay_error, trust.discrepancy) == (pytest.approx(0), pytest.approx(0))


def test_what_the_host_does_next_waits_for_its_transfers():
    """A transfer begins where the host asked for it, and the work behind its wait behind it, a send's too."""
    graph = PipelineJob(one_transfer(asked=16, went_on=20).trace).replay.graph
    assert graph.posting.rule is Posting.RECORDED
    waits = graph.to_networkx()
    send, recv, host = OpKind.FORWARD_SEND, OpKind.FORWARD_RECV, OpKind.HOST_DELAY
    assert {(before[2:], after[2:]) for before, after in waits.edges if send in (before[2], after[2])} == {
        ((OpKind.FORWARD_COMPUTE, 0), (send, 0)),
        ((host, 0), (send, 0)),
        ((send, 0), (host, 2)),
    }
    assert {(before[2:], after[2:]) for before, after in waits.edges if recv in (before[2], after[2])} == {
        ((host, 0), (recv, 0)),
        ((recv, 0), (host, 2)),
        ((recv, 0), (OpKind.FORWARD_COMPUTE, 0)),
    }


def test_nobody_waits_for_a_send_that_was_buffered():
    """It was over before its receiver asked for it."""
    waits = PipelineJob(one_transfer(asked=16, went_on=15).trace).replay.graph.to_networkx()
    assert not list(waits.successors((0, 0, OpKind.FORWARD_SEND, 0)))


def test_clocks_are_corrected_and_violations_counted():
    """A rank whose clock is 5 ms behind receives before the send starts, until its clock is corrected."""
    assert pipeline(send=(11, 14), recv=(1, 9, 1), host="b").trace.metadata["collect"]["causality_violations"] == 1
    fit = ClockFit(local_ns=0, offset_ns=5 * MS, drift=0.0, uncertainty_ns=1000.0, samples=3)
    corrected = pipeline(send=(11, 14), recv=(1, 9, 1), host="b", clocks={"b": fit})
    assert corrected.trace.metadata["collect"]["causality_violations"] == 0
    assert corrected.trace.metadata["clocks"]["b"]["uncertainty_ns"] == 1000.0


def test_no_whole_step_is_an_error():
    """It says what ends a step."""
    with pytest.raises(TraceError, match="a step ends with an optimizer step"):
        merged(rank(0, [compute("forward-compute", 0, 1)], mesh=None, world_size=1), first_step=2)


def test_a_span_around_an_op_a_hook_saw_adds_none():
    """It counts once, as the hook saw it, 2 ms into the span; where no hook saw anything the span is the op."""
    result = data_parallel(
        [
            (Category.SPAN, "forward-compute", 0, 12, {}),
            compute("forward-compute", 2, 10),
            (Category.SPAN, "backward-compute", 12, 40, {}),
            (Category.SPAN, "optimizer", 40, 60, {}),
            (Category.OPTIMIZER, "optimizer", 45, 58, {}),
        ]
    )
    assert ops_of(result, 0, OpKind.FORWARD_COMPUTE) == [(2, 10)]
    assert ops_of(result, 0, OpKind.BACKWARD_COMPUTE) == [(12, 40)]
    assert ops_of(result, 0, OpKind.OPTIMIZER) == [(45, 58)]


def test_what_the_loop_does_between_steps_is_host_work_of_the_step_behind():
    """The step record starts where the step before ended; a span there is an op, and the rest runs up to it."""
    rows = [
        (Category.SPAN, "log", 5, 9, {}),
        compute("forward-compute", 9, 20),
        compute("backward-compute", 20, 40),
        (Category.OPTIMIZER, "optimizer", 40, 45, {}),
    ]
    result = data_parallel(rows)
    assert ops_of(result, 0, OpKind.HOST_DELAY) == [(0, 5), (5, 9)]
    assert PipelineJob(result.trace).attribution.recorded_s == pytest.approx(0.045)


def test_between_recorded_steps_it_begins_with_the_last_op_of_the_step_before():
    """A GPU ends its optimizer later than the host says."""
    step = {"step": 2}
    rows = [
        compute("forward-compute", 0, 20),
        (Category.OPTIMIZER, "optimizer", 20, 50, {}),
        (Category.STEP, "step", 30, 90, {"flags": Flag.COMPLETE | Flag.RECORDING, **step}),
        compute("forward-compute", 70, 80, **step),
        (Category.OPTIMIZER, "optimizer", 80, 90, step),
    ]
    trace = data_parallel(rows).trace
    delays = trace.ops.filter(trace.ops["kind"] == str(OpKind.HOST_DELAY))
    assert delays.select("step", "start").unique().rows() == [(2, 0.0)]
    assert delays["duration"].to_list() == pytest.approx([0.02, 0.02])


def test_a_timer_of_two_transfers_is_two_ops():
    """Megatron times a send and a recv that go together under one name."""
    result = data_parallel(
        [
            compute("forward-compute", 0, 10),
            (Category.SPAN, "forward-send-backward-recv", 10, 14, {}),
            compute("backward-compute", 14, 30),
        ]
    )
    assert ops_of(result, 1, OpKind.FORWARD_SEND) == ops_of(result, 1, OpKind.BACKWARD_RECV) == [(10, 14)]
    assert result.trace.metadata["collect"]["other"] == {}


def meeting(arrives, released, *, flags=Flag.BLOCKING, name="broadcast"):
    """A collective of all data-parallel ranks whose caller waits."""
    return (Category.COLLECTIVE, name, arrives, released, {"peer": 0, "flags": flags})


def test_a_meeting_between_computes_is_an_op_of_all_who_meet():
    """It lasts from a rank's arrival to its release, so that the late rank's time is its own and nobody's host time."""
    rows = [
        [
            compute("forward-compute", 0, forward_ms),
            meeting(forward_ms, 32),
            compute("backward-compute", 32, 60),
            (Category.OPTIMIZER, "optimizer", 60, 70, {}),
        ]
        for forward_ms in (10, 30)
    ]
    result = pair(*rows)
    assert ops_of(result, 0, OpKind.FORWARD_COLLECTIVES) == [(10, 32)]
    assert ops_of(result, 1, OpKind.FORWARD_COLLECTIVES) == [(30, 32)]
    assert ops_of(result, 0, OpKind.HOST_DELAY) == []
    attribution = PipelineJob(result.trace).attribution
    assert attribution.trust.replay_error == pytest.approx(0)
    assert attribution.slowdown == pytest.approx(70 / 60)


def test_waiting_between_steps_is_no_host_time():
    """Rank 1 comes 100 ms late to a broadcast that opens the step, as Lightning's does. Rank 0's loop took 2 + 1 ms."""
    rows = [
        [
            (Category.STEP, "step", 0, 200, {"flags": Flag.COMPLETE | Flag.RECORDING}),
            meeting(arrives, 104),
            compute("forward-compute", 105, 120),
            compute("backward-compute", 120, 140),
            (Category.OPTIMIZER, "optimizer", 140, 150, {}),
        ]
        for arrives in (2, 102)
    ]
    result = pair(*rows)
    for number, arrives in enumerate((2, 102)):
        assert ops_of(result, number, OpKind.FORWARD_COLLECTIVES) == [(arrives, 104)]
    loops = {number: [end - start for start, end in spans(result, number)] for number in (0, 1)}
    assert loops == {0: [pytest.approx(2)], 1: [pytest.approx(102)]}


def spans(result, rank_number):
    """(start, end) in ms of a rank's host delays, as numbers."""
    rows = result.trace.ops.filter(rank=rank_number, kind=OpKind.HOST_DELAY)
    return [(1e3 * start, 1e3 * (start + duration)) for start, duration in rows.select("start", "duration").iter_rows()]


def test_waiting_for_some_ranks_between_steps_is_no_host_time_either():
    """Two of four ranks meet: no op of all, but the 98 ms of waiting are cut out of what the loop did."""
    rows = [
        [
            (Category.STEP, "step", 0, 200, {"flags": Flag.COMPLETE | Flag.RECORDING}),
            meeting(arrives, 104),
            compute("forward-compute", 105, 120),
            (Category.OPTIMIZER, "optimizer", 140, 150, {}),
        ]
        for arrives in (2, 100, 2, 100)
    ]
    result = hybrid(*rows)
    assert sum(end - start for start, end in spans(result, 0)) == pytest.approx(2 + 4)
    assert sum(end - start for start, end in spans(result, 1)) == pytest.approx(100 + 4)


def test_waiting_inside_an_optimizer_is_not_its_time():
    """A sharded optimizer updates for 5 ms and waits 20 ms for what others updated; the next step's loop is not it."""
    rows = [
        compute("forward-compute", 0, 10),
        compute("backward-compute", 10, 20),
        (Category.OPTIMIZER, "optimizer", 20, 45, {}),
        (Category.WAIT, "broadcast", 25, 45, {"peer": 0}),
        (Category.STEP, "step", 45, 90, {"flags": Flag.COMPLETE | Flag.RECORDING, "step": 2}),
        compute("forward-compute", 47, 50, step=2),
        (Category.OPTIMIZER, "optimizer", 50, 60, {"step": 2}),
    ]
    trace = data_parallel(rows).trace
    optimizers = trace.ops.filter(kind=OpKind.OPTIMIZER, rank=0)
    assert optimizers["duration"].to_list() == [pytest.approx(0.005), pytest.approx(0.01)]
    assert trace.ops.filter(kind=OpKind.HOST_DELAY, rank=0)["duration"].to_list() == [pytest.approx(0.002)]


@pytest.mark.parametrize("pause", [(1, 3), (12, 14), (41, 44)])
def test_a_collection_in_a_closure_is_an_op_at_its_place(pause):
    """Before the forward, between forward and backward, between the reduction and the optimizer."""
    result = data_parallel(
        [
            (Category.OPTIMIZER, "optimizer", 0, 60, {}),
            (Category.GC, "gc", *pause, {}),
            compute("forward-compute", 4, 12),
            compute("backward-compute", 15, 35),
            (Category.COLLECTIVE, "allreduce", 35, 40, {"peer": 0}),
        ]
    )
    assert ops_of(result, 0, OpKind.GC) == [pause]
    assert ops_of(result, 0, OpKind.OPTIMIZER) == [(max(40, pause[1]), 60)]


def test_a_collection_inside_an_optimizer_is_part_of_it():
    """It is counted, as one inside a compute is."""
    result = data_parallel(
        [
            compute("forward-compute", 0, 10),
            compute("backward-compute", 10, 30),
            (Category.OPTIMIZER, "optimizer", 30, 60, {}),
            (Category.GC, "gc", 40, 50, {}),
            (Category.COLLECTIVE, "allreduce", 52, 55, {"peer": 0, "flags": Flag.BLOCKING}),
        ]
    )
    assert ops_of(result, 0, OpKind.GC) == ops_of(result, 0, OpKind.ALL_REDUCE) == []
    assert ops_of(result, 0, OpKind.OPTIMIZER) == [(30, 60)]
    assert result.trace.metadata["collect"]["nested"] == {"gc": 2}
    assert result.trace.metadata["collect"]["other"]["allreduce@dp"]["count"] == 2


def test_a_reduction_ends_before_the_optimizer_that_waited_for_it():
    """The thread that tells its end came 4 ms late."""
    result = data_parallel(
        [
            compute("forward-compute", 0, 10),
            compute("backward-compute", 10, 30),
            (Category.COLLECTIVE, "allreduce", 30, 44, {"peer": 0}),
            (Category.OPTIMIZER, "optimizer", 40, 60, {}),
        ]
    )
    assert ops_of(result, 0, OpKind.ALL_REDUCE) == [(30, 40)]


def test_chunks_gather_what_is_theirs():
    """Both are asked for before the first forward, in the order of their use; one waits for the other to pass."""
    rows = (
        [
            (Category.COLLECTIVE, "all_gather_single", 0, 8, {"peer": 0}),
            (Category.COLLECTIVE, "all_gather_single", 1, 12, {"peer": 0}),
            compute("forward-compute", 8, 20, chunk=0),
            compute("forward-compute", 20, 30, chunk=1),
            compute("backward-compute", 30, 40, chunk=1),
            meeting(40, 45, name="reduce_scatter_single"),
            compute("backward-compute", 45, 60, chunk=0),
            meeting(60, 64, name="reduce_scatter_single"),
            (Category.OPTIMIZER, "optimizer", 64, 70, {}),
        ],
    ) * 2
    mesh = {"names": ["dp"], "ranks": [0, 1]}
    recorded = [rank(number, one, mesh=mesh, groups=[GROUP]) for number, one in enumerate(rows)]
    result = merged(*recorded, options=LayoutOptions(vpp=2))
    assert ops_of(result, 0, OpKind.PARAMS_ALL_GATHER) == [(0, 8), (8, 12)]
    assert result.trace.ops.filter(rank=0, kind=OpKind.PARAMS_ALL_GATHER)["chunk"].to_list() == [0, 1]
    assert ops_of(result, 0, OpKind.BACKWARD_COLLECTIVES) == [(40, 45)]
    assert ops_of(result, 0, OpKind.GRADS_REDUCE_SCATTER) == [(60, 64)]
    assert PipelineJob(result.trace).attribution.trust.replay_error == pytest.approx(0)


def test_ranks_of_a_worker_say_how_long_they_waited_for_each_other():
    """Rank 0 is at the first reduction 3 ms before rank 1, at the second 1 ms after it."""
    mesh = {"names": ["tp"], "ranks": [0, 1]}
    group = {"number": 0, "name": "0", "description": "tp", "ranks": [0, 1]}

    def computing(*reductions):
        rows = [compute("forward-compute", 0, 20), compute("backward-compute", 20, 50)]
        rows += [(Category.COLLECTIVE, "all_reduce", start, end, {"peer": 0}) for start, end in reductions]
        return [*rows, (Category.OPTIMIZER, "optimizer", 51, 60, {})]

    result = merged(
        rank(0, computing((5, 9), (30, 31)), mesh=mesh, groups=[group]),
        rank(1, computing((8, 9), (29, 31)), mesh=mesh, groups=[group]),
    )
    waited = dict(result.trace.ops.select("kind", "waited").iter_rows())
    assert waited["forward-compute"] == pytest.approx([0.003, 0.0])
    assert waited["backward-compute"] == pytest.approx([0.0, 0.001])
    assert waited["optimizer"] is None
    assert result.trace.metadata["ranks_of_workers"] == {"0": [0, 1]}


def test_ranks_of_a_worker_say_how_long_each_took():
    """Rank 1 collects garbage for 4 ms, and its optimizer takes 24 ms instead of 9; rank 0 collects none."""
    mesh = {"names": ["tp"], "ranks": [0, 1]}
    group = {"number": 0, "name": "0", "description": "tp", "ranks": [0, 1]}
    reduction = (Category.COLLECTIVE, "all_reduce", 8, 9, {"peer": 0})
    prompt = [compute("forward-compute", 0, 20), reduction, (Category.OPTIMIZER, "optimizer", 51, 60, {})]
    late = [
        (Category.GC, "gc", 0, 4, {}),
        compute("forward-compute", 4, 20),
        reduction,
        (Category.OPTIMIZER, "optimizer", 51, 75, {}),
    ]
    ops = merged(*(rank(at, rows, mesh=mesh, groups=[group]) for at, rows in enumerate((prompt, late)))).trace.ops
    assert set(ops["rank"]) == {0}
    assert dict(ops.select("kind", "lasted").iter_rows()) == {
        "forward-compute": pytest.approx([0.020, 0.016]),
        "gc": pytest.approx([0.0, 0.004]),
        "optimizer": pytest.approx([0.009, 0.024]),
    }
    assert ops.filter(kind=OpKind.GC)["duration"].to_list() == [0.0]


def test_ranks_of_a_worker_that_counted_differently_say_nothing():
    """Which of rank 0's reductions is the one of rank 1 cannot be told."""
    mesh = {"names": ["tp"], "ranks": [0, 1]}
    group = {"number": 0, "name": "0", "description": "tp", "ranks": [0, 1]}
    rows = [compute("forward-compute", 0, 20), compute("backward-compute", 20, 50)]
    first, second = ((Category.COLLECTIVE, "all_reduce", at, 19, {"peer": 0}) for at in (5, 12))
    end = (Category.OPTIMIZER, "optimizer", 51, 60, {})
    result = merged(
        rank(0, [*rows, first, second, end], mesh=mesh, groups=[group]),
        rank(1, [*rows, second, end], mesh=mesh, groups=[group]),
    )
    assert "waited" not in result.trace.ops.columns
