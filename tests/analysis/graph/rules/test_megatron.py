"""The dependency rules, one by one, on lanes small enough to draw."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from tracekit.analysis.graph.megatron import LaneOps, build_structure
from tracekit.base.errors import GraphError
from tracekit.trace.model import KINDS, OpKind

F, B = OpKind.FORWARD_COMPUTE, OpKind.BACKWARD_COMPUTE
FS, FR, BS, BR = OpKind.FORWARD_SEND, OpKind.FORWARD_RECV, OpKind.BACKWARD_SEND, OpKind.BACKWARD_RECV
GATHER, SCATTER = OpKind.PARAMS_ALL_GATHER, OpKind.GRADS_REDUCE_SCATTER
SEPARATE, NORM = OpKind.SEPARATE_GRADS_ALL_REDUCE, OpKind.LAYERNORM_GRADS_ALL_REDUCE
EMBEDDING, CLIP = OpKind.EMBEDDING_GRADS_ALL_REDUCE, OpKind.OPTIMIZER_CLIP_MAIN_GRAD
OPTIMIZER, GC, ALL_REDUCE = OpKind.OPTIMIZER, OpKind.GC, OpKind.ALL_REDUCE


@dataclass
class Lane:
    """Collects ops in any order; an op is named (stage, kind, seq) afterwards."""

    stages: int
    chunks: int = 1
    ops: list = field(default_factory=list)

    def add(self, stage, kind, start, duration=1.0, chunk=-1):
        seq = sum(op[:2] == (stage, kind) for op in self.ops)
        self.ops.append((stage, kind, seq, chunk, float(start), float(start + duration)))
        return self

    def build(self):
        rows = sorted(self.ops, key=lambda op: (op[0], op[1].code, op[2]))
        stage, kind, seq, chunk, start, end = zip(*rows, strict=True)
        return Built(
            build_structure(
                LaneOps(
                    pp_rank=np.array(stage, np.int16),
                    kind=np.array([item.code for item in kind], np.uint8),
                    seq=np.array(seq, np.int32),
                    chunk=np.array(chunk, np.int16),
                    start=np.array(start),
                    end=np.array(end),
                    stream_order=np.array(start),
                    stages=self.stages,
                    virtual=np.arange(self.chunks * self.stages).reshape(self.chunks, self.stages),
                    where="step 7, dp_rank 0",
                    after_tail=np.zeros(len(rows), np.int64),
                )
            )
        )


class Built:
    """A structure with its rows named."""

    def __init__(self, structure):
        self.structure = structure
        self.names = [
            (int(stage), KINDS[kind], int(seq))
            for stage, kind, seq in zip(structure.pp_rank, structure.kind, structure.seq, strict=True)
        ]

    def waits_for(self, *name):
        row = self.names.index(name)
        pairs = zip(self.structure.before, self.structure.after, strict=True)
        return {self.names[before] for before, after in pairs if after == row}

    def group_of(self, *name):
        group = self.structure.group[self.names.index(name)]
        return {other for other, number in zip(self.names, self.structure.group, strict=True) if number == group}

    def dp_key(self, *name):
        return self.structure.dp_key[self.names.index(name)]


def two_stages():
    """1F1B on two stages with two microbatches, collectives after it."""
    lane = Lane(stages=2)
    lane.add(0, GATHER, 0, chunk=0).add(1, GATHER, 0, chunk=0)
    lane.add(0, F, 1, chunk=0).add(0, FS, 2).add(0, F, 2, chunk=0).add(0, FS, 3)
    lane.add(0, BR, 5).add(0, B, 6, chunk=0).add(0, BR, 8).add(0, B, 9, chunk=0)
    lane.add(1, FR, 1).add(1, F, 3, chunk=0).add(1, B, 4, chunk=0).add(1, BS, 5)
    lane.add(1, FR, 4).add(1, F, 6, chunk=0).add(1, B, 7, chunk=0).add(1, BS, 8)
    for stage in (0, 1):
        lane.add(stage, GC, 10).add(stage, NORM, 11).add(stage, EMBEDDING, 12).add(stage, SCATTER, 13, chunk=0)
        lane.add(stage, SCATTER, 14, chunk=0).add(stage, CLIP, 15).add(stage, OPTIMIZER, 16)
    return lane


def test_computes_of_a_worker_follow_each_other_in_order_of_start():
    built = two_stages().build()
    assert built.waits_for(0, F, 1) == {(0, F, 0)}
    assert built.waits_for(0, B, 0) == {(0, F, 1), (0, BR, 0)}
    assert built.waits_for(1, F, 1) == {(1, B, 0), (1, FR, 1)}


def test_what_a_compute_waits_for_in_its_middle_stands_between_its_parts():
    """And joins the other DP ranks, number by number."""
    inside = OpKind.FORWARD_COLLECTIVES
    lane = Lane(stages=1)
    lane.add(0, F, 0, chunk=0).add(0, inside, 1).add(0, F, 2, chunk=0)
    lane.add(0, F, 3, chunk=0).add(0, inside, 4).add(0, F, 5, chunk=0).add(0, B, 6, chunk=0).add(0, OPTIMIZER, 7)
    built = lane.build()
    assert built.waits_for(0, inside, 0) == {(0, F, 0)}
    assert built.waits_for(0, F, 1) == {(0, inside, 0)}
    assert built.waits_for(0, inside, 1) == {(0, F, 2)}
    assert 0 <= built.dp_key(0, inside, 0) != built.dp_key(0, inside, 1) >= 0


def test_a_recv_precedes_its_compute_and_is_posted_after_the_one_before():
    built = two_stages().build()
    assert (1, FR, 0) in built.waits_for(1, F, 0)
    assert built.waits_for(1, FR, 0) == set()
    assert built.waits_for(1, FR, 1) == {(1, FR, 0), (1, F, 0)}


def test_a_compute_precedes_its_send_and_sends_form_a_stream():
    built = two_stages().build()
    assert built.waits_for(0, FS, 1) == {(0, F, 1), (0, FS, 0)}
    assert built.waits_for(1, BS, 0) == {(1, B, 0)}


def test_first_backward_recv_waits_for_the_forward_two_before_the_first_backward():
    built = two_stages().build()
    assert built.waits_for(0, BR, 0) == {(0, F, 0)}
    assert built.waits_for(0, BR, 1) == {(0, BR, 0), (0, B, 0)}


def test_a_send_and_its_recv_transfer_together():
    built = two_stages().build()
    assert built.group_of(0, FS, 1) == {(0, FS, 1), (1, FR, 1)}
    assert built.group_of(1, BS, 0) == {(1, BS, 0), (0, BR, 0)}


def test_gathering_parameters_precedes_the_first_forward():
    assert (0, GATHER, 0) in two_stages().build().waits_for(0, F, 0)


def test_plain_gradient_reduction_follows_the_last_compute_in_a_chain():
    built = two_stages().build()
    assert built.waits_for(0, GC, 0) == {(0, B, 1)}
    assert built.waits_for(0, NORM, 0) == {(0, GC, 0)}
    assert built.waits_for(0, EMBEDDING, 0) == {(0, NORM, 0)}
    assert built.waits_for(0, SCATTER, 0) == {(0, EMBEDDING, 0), (0, GATHER, 0)}
    assert built.waits_for(0, SCATTER, 1) == {(0, SCATTER, 0)}
    assert built.waits_for(0, CLIP, 0) == {(0, SCATTER, 1)}
    assert built.waits_for(0, OPTIMIZER, 0) == {(0, CLIP, 0)}


def test_collectives_join_stages_and_dp_ranks():
    built = two_stages().build()
    assert built.group_of(0, EMBEDDING, 0) == {(0, EMBEDDING, 0), (1, EMBEDDING, 0)}
    assert built.group_of(0, CLIP, 0) == {(0, CLIP, 0), (1, CLIP, 0)}
    assert built.dp_key(0, CLIP, 0) == built.dp_key(1, CLIP, 0) >= 0
    assert built.dp_key(0, SCATTER, 0) != built.dp_key(1, SCATTER, 0)
    assert built.dp_key(0, SCATTER, 0) != built.dp_key(0, SCATTER, 1)
    assert built.dp_key(0, NORM, 0) == built.dp_key(0, EMBEDDING, 0) == built.dp_key(0, FS, 0) == -1


def test_embedding_gradients_leave_middle_stages_alone():
    lane = Lane(stages=3)
    for stage in range(3):
        lane.add(stage, EMBEDDING, 0)
    built = lane.build()
    assert built.group_of(1, EMBEDDING, 0) == {(1, EMBEDDING, 0)}
    assert built.group_of(0, EMBEDDING, 0) == {(0, EMBEDDING, 0), (2, EMBEDDING, 0)}


def test_overlapped_gradient_reduction_follows_its_chunk():
    lane = Lane(stages=1, chunks=2)
    lane.add(0, F, 0, chunk=0).add(0, F, 1, chunk=1).add(0, B, 2, chunk=1).add(0, B, 3, chunk=0)
    lane.add(0, SCATTER, 3, chunk=1).add(0, SCATTER, 4, chunk=0)
    lane.add(0, GC, 4).add(0, NORM, 5).add(0, SEPARATE, 6).add(0, CLIP, 7).add(0, OPTIMIZER, 8)
    built = lane.build()
    assert built.waits_for(0, SCATTER, 0) == {(0, B, 0)}
    assert built.waits_for(0, SCATTER, 1) == {(0, B, 1), (0, SCATTER, 0)}
    assert built.waits_for(0, NORM, 0) == {(0, GC, 0), (0, SCATTER, 1)}
    assert built.waits_for(0, SEPARATE, 0) == {(0, NORM, 0)}
    assert built.waits_for(0, CLIP, 0) == {(0, SEPARATE, 0)}


def test_each_chunk_gathers_its_parameters_before_its_own_first_forward():
    lane = Lane(stages=1, chunks=2)
    lane.add(0, GATHER, 0, chunk=0).add(0, GATHER, 1, chunk=1)
    lane.add(0, F, 1, chunk=0).add(0, F, 2, chunk=0).add(0, F, 3, chunk=1)
    built = lane.build()
    assert (0, GATHER, 0) in built.waits_for(0, F, 0)
    assert (0, GATHER, 1) in built.waits_for(0, F, 2)
    assert built.waits_for(0, F, 1) == {(0, F, 0)}
    assert built.waits_for(0, GATHER, 1) == {(0, GATHER, 0)}


def virtual_stages(*, first_recv):
    """Two stages, two chunks, one microbatch, forwards only, recorded as Megatron-LM does.

    Real transfers: stage 0 chunk 0 -> stage 1 chunk 0 -> stage 0 chunk 1 -> stage 1 chunk 1. Recorded besides: a
    recv of the first chunk on the first stage (if `first_recv`), a send of the last chunk on the last stage, and a recv
    after the last forward on both.
    """
    lane = Lane(stages=2, chunks=2)
    if first_recv:
        lane.add(0, FR, 0, 0.1)
    lane.add(0, F, 1, chunk=0).add(0, FS, 2).add(0, FR, 4).add(0, F, 5, chunk=1).add(0, FS, 6).add(0, FR, 6, 0.1)
    lane.add(1, FR, 2).add(1, F, 3, chunk=0).add(1, FS, 4).add(1, FR, 6).add(1, F, 7, chunk=1).add(1, FS, 8, 0.1)
    return lane.add(1, FR, 8, 0.1)


@pytest.mark.parametrize("first_recv", [True, False])
def test_with_virtual_stages_transfers_wrap_and_no_ops_pair_with_nobody(first_recv):
    built = virtual_stages(first_recv=first_recv).build()
    second = 1 if first_recv else 0  # the recv of stage 0's chunk 1
    assert built.group_of(0, FS, 0) == {(0, FS, 0), (1, FR, 0)}
    assert built.group_of(1, FS, 0) == {(1, FS, 0), (0, FR, second)}
    assert built.group_of(0, FS, 1) == {(0, FS, 1), (1, FR, 1)}
    assert built.group_of(1, FS, 1) == {(1, FS, 1)}
    assert built.group_of(0, FR, second + 1) == {(0, FR, second + 1)}
    assert built.group_of(1, FR, 2) == {(1, FR, 2)}


@pytest.mark.parametrize("first_recv", [True, False])
def test_where_the_first_recv_is_missing_recvs_match_from_the_second_forward(first_recv):
    built = virtual_stages(first_recv=first_recv).build()
    second = 1 if first_recv else 0
    assert (0, FR, second) in built.waits_for(0, F, 1)
    assert ((0, FR, 0) in built.waits_for(0, F, 0)) == first_recv
    assert (0, F, 0) in built.waits_for(0, FR, second)


def test_a_recv_after_the_last_forward_stays_in_its_stream_only():
    built = virtual_stages(first_recv=True).build()
    assert built.waits_for(1, FR, 2) == {(1, FR, 1)}


def test_a_send_before_the_first_backward_has_ended_never_ran():
    lane = Lane(stages=2, chunks=2)
    lane.add(1, BS, 0, 0.1)  # recorded with the last warm-up forward
    lane.add(1, B, 1, chunk=1).add(1, BS, 2).add(0, BR, 2).add(0, B, 3, chunk=1).add(0, BS, 4).add(1, BR, 4)
    lane.add(1, B, 5, chunk=0).add(1, BS, 6).add(0, BR, 6).add(0, B, 7, chunk=0)
    built = lane.build()
    assert built.waits_for(1, BS, 0) == set()
    assert built.waits_for(1, BS, 1) == {(1, BS, 0), (1, B, 0)}
    assert built.group_of(1, BS, 1) == {(1, BS, 1), (0, BR, 0)}
    assert built.group_of(0, BS, 0) == {(0, BS, 0), (1, BR, 0)}


def test_only_transfers_that_ran_may_be_recorded():
    lane = Lane(stages=2, chunks=2)
    lane.add(0, F, 1, chunk=0).add(0, FS, 2).add(0, FR, 4).add(0, F, 5, chunk=1).add(0, FS, 6)
    lane.add(1, FR, 2).add(1, F, 3, chunk=0).add(1, FS, 4).add(1, FR, 6).add(1, F, 7, chunk=1)
    built = lane.build()
    assert built.group_of(1, FS, 0) == {(1, FS, 0), (0, FR, 0)}
    assert (0, FR, 0) in built.waits_for(0, F, 1)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ((1, FR), "stage 1: 1 forward-recv ops for 2 forward-compute ops; expected one for each"),
        ((0, FS), "stage 0: 1 forward-send ops for 2 forward-compute ops"),
        ((0, BR), "stage 0: 1 backward-recv ops for 2 backward-compute ops"),
    ],
)
def test_a_transfer_without_its_other_half_is_an_error_that_says_where(missing, message):
    lane = two_stages()
    lane.ops = [op for op in lane.ops if op[:3] != (*missing, 1)]
    with pytest.raises(GraphError, match=message) as raised:
        lane.build()
    assert str(raised.value).startswith("step 7, dp_rank 0")
    assert "--ignore-steps" in str(raised.value)


def test_a_stage_that_computed_less_than_its_neighbour_is_an_error():
    lane = two_stages()
    lane.ops = [op for op in lane.ops if not (op[0] == 1 and op[1] in (F, FR) and op[2] == 1)]
    with pytest.raises(GraphError, match="stage 0 has 2 forward-send ops for stage 1, which has 1 forward-recv"):
        lane.build()


def test_host_work_takes_its_turn_between_computes():
    lane = Lane(stages=1)
    lane.add(0, OpKind.DATA_LOAD, 0).add(0, F, 1).add(0, OpKind.CHECKPOINT, 2).add(0, B, 3)
    built = lane.build()
    assert built.waits_for(0, F, 0) == {(0, OpKind.DATA_LOAD, 0)}
    assert built.waits_for(0, B, 0) == {(0, OpKind.CHECKPOINT, 0)}


def test_all_reduces_of_gradients_take_the_place_of_the_reduce_scatters():
    lane = Lane(stages=1)
    lane.add(0, F, 0).add(0, B, 1).add(0, OpKind.ALL_REDUCE, 2).add(0, OpKind.ALL_REDUCE, 3).add(0, OPTIMIZER, 5)
    built = lane.build()
    assert built.waits_for(0, OpKind.ALL_REDUCE, 0) == {(0, B, 0)}
    assert built.waits_for(0, OPTIMIZER, 0) == {(0, OpKind.ALL_REDUCE, 1)}
    assert built.dp_key(0, OpKind.ALL_REDUCE, 0) >= 0


def test_a_gc_pause_between_computes_holds_them_up_where_it_ran():
    lane = Lane(stages=1).add(0, GC, 0).add(0, F, 1).add(0, GC, 2).add(0, B, 3).add(0, OPTIMIZER, 4)
    built = lane.build()
    assert built.waits_for(0, F, 0) == {(0, GC, 0)}
    assert built.waits_for(0, B, 0) == {(0, GC, 1)}
    assert built.waits_for(0, OPTIMIZER, 0) == {(0, B, 0)}


@pytest.mark.parametrize(("send_start", "held"), [(9.0, True), (7.0, False)])
def test_a_send_behind_the_gradient_reduction_waits_for_it(send_start, held):
    """DistributedDataParallel waits for its buckets inside the last backward, and the stage sends after that."""
    lane = Lane(stages=2)
    lane.add(0, F, 0).add(0, FS, 1).add(0, BR, send_start, 2).add(0, B, 12)
    lane.add(1, FR, 1).add(1, F, 3).add(1, B, 5, 1.9).add(1, ALL_REDUCE, 6.9, 2.1).add(1, BS, send_start)
    waits = lane.build().waits_for(1, BS, 0)
    assert waits == {(1, B, 0), (1, ALL_REDUCE, 0)} if held else waits == {(1, B, 0)}
