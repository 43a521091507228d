"""Kernels of different ranks are one collective, wherever the windows of their ranks begin."""

import pytest

from tests.analysis.gpu.jobs import load_ranks
from tests.kineto_files import all_reduce, kernel
from tracekit.analysis.gpu.recorded import KEPT, Kept
from tracekit.trace.gpu_activity import KernelClass


def reductions(sizes, first=0, *, at=0.0, **more):
    """One every 100 us, each of 50 us, `first`: how many periods later than `at` they begin."""
    return [all_reduce(at + 100 * (first + n), 50, elements=size, **more) for n, size in enumerate(sizes)]


def pairs(job):
    """(start on rank 0, start on rank 1) of each instance, us."""
    found = {}
    for instance, start in zip(
        job.comparable.matches.instance.tolist(), job.comparable.matches.start.tolist(), strict=True
    ):
        found.setdefault(instance, []).append(round(start * 1e6))
    return sorted(map(tuple, found.values()))


def test_a_rank_whose_window_begins_later_is_shifted_not_matched_from_the_front(tmp_path):
    job = load_ranks(tmp_path, {0: reductions([1, 2, 1, 2, 3]), 1: reductions([2, 1, 2, 3], first=1)})
    assert pairs(job) == [(100, 100), (200, 200), (300, 300), (400, 400)]
    (group,) = job.comparable.matches.groups
    assert (group.shifts, group.unmatched) == ({0: 0, 1: 1}, {0: 1})


def test_windows_that_begin_and_end_a_step_apart_are_matched_by_time(tmp_path):
    """All collectives look the same: only the clock says that the first of rank 1 is the second of rank 0."""
    job = load_ranks(tmp_path, {0: reductions([1] * 5), 1: reductions([1] * 5, first=1, at=3.0)})
    assert pairs(job) == [(100, 103), (200, 203), (300, 303), (400, 403)]


def test_identifiers_decide_where_they_are_there(tmp_path):
    """The order on rank 1 is another one."""
    first = [all_reduce(0, 50, **{"Comms Id": 11, "Seq": 1}), all_reduce(100, 50, **{"Comms Id": 12, "Seq": 2})]
    second = [all_reduce(5, 50, **{"Comms Id": 12, "Seq": 2}), all_reduce(105, 50, **{"Comms Id": 11, "Seq": 1})]
    assert pairs(load_ranks(tmp_path, {0: first, 1: second})) == [(0, 105), (100, 5)]


def test_kernels_before_the_first_identifier_are_matched_by_their_place(tmp_path):
    """Their calls came before the recording. Where no identifier is on both ranks, the place alone matches."""
    for numbers in ((1, 2), (3, 4)):
        ranks = {
            rank: [all_reduce(late, 50)]
            + [all_reduce(late + 100 * place, 50, **{"Comms Id": 9, "Seq": seq}) for place, seq in enumerate(seqs, 1)]
            for rank, late, seqs in ((0, 0, (1, 2)), (1, 5, numbers))
        }
        assert pairs(load_ranks(tmp_path, ranks)) == [(0, 5), (100, 105), (200, 205)]


def test_what_a_trace_keeps_of_a_recording_is_nothing_if_it_is_damaged(tmp_path):
    job = load_ranks(tmp_path, {0: reductions([1, 2]), 1: reductions([1, 2])})
    assert repr(job).endswith(": 2 ranks, 4 GPU ops>")
    written = job.recorded().summary.to_dict()
    assert Kept.read(written).to_dict() == written
    assert Kept.read({}) is None
    assert Kept.read({KEPT: written[KEPT] | {"whats": 7}}) is None


def test_groups_are_matched_each_for_itself(tmp_path):
    def of(group, ranks, at, size=1):
        return all_reduce(at, 5, elements=size, ranks=ranks, **{"Process Group Name": group})

    job = load_ranks(
        tmp_path,
        {
            0: [of("1", (0, 1), 0), of("2", (0, 2), 10), of("1", (0, 1), 20)],
            1: [of("1", (0, 1), 0), of("1", (0, 1), 20)],
            2: [of("2", (0, 2), 10)],
        },
    )
    assert {group.ranks: group.matched for group in job.comparable.matches.groups} == {(0, 1): 2, (0, 2): 1}
    assert job.comparable.matches.unmatched == 0


def test_transfers_are_first_in_first_out_between_each_two_ranks(tmp_path):
    """Rank 1's window begins behind the first transfer; sequence numbers of the two sides have nothing in common."""

    def transfer(way, at, size, sequence, **ends):
        named = {"Collective name": way, "In msg nelems": size, "Process Group Ranks": "[0, 1]", "Group size": 2}
        args = {**named, "Process Group Name": "pp", "dtype": "Float", "Seq": sequence, **ends}
        return kernel("ncclDevKernel_SendRecv(int)", at, 8, stream=20, **args)

    sends = [transfer("send", 100 * n, size, n, **{"Src Rank": 0, "Dst Rank": 1}) for n, size in enumerate((4, 5, 6))]
    recvs = [
        transfer("recv", 100 * n + 2, size, 50 + n, **{"Src Rank": 0, "Dst Rank": 1}) for n, size in ((1, 5), (2, 6))
    ]
    job = load_ranks(tmp_path, {0: sends, 1: recvs})
    assert pairs(job) == [(100, 102), (200, 202)]
    assert [group.group for group in job.comparable.matches.groups] == ["pp: 0 to 1"]


@pytest.mark.parametrize(
    ("name", "synchronising"),
    [("broadcast", False), ("reduce", False), ("gather", False), ("scatter", False), ("allreduce", True),
     ("_allgather_base", True), ("_reduce_scatter_base", True), ("all_to_allv", True)],
)  # fmt: skip
def test_rooted_collectives_are_no_barrier(tmp_path, name, synchronising):
    job = load_ranks(tmp_path, {rank: [all_reduce(0, 5, **{"Collective name": name})] for rank in (0, 1)})
    assert job.comparable.matches.synchronising.tolist() == [synchronising]
    assert job.recording.gpu_ops["kernel_class"].unique().to_list() == [KernelClass.COMMUNICATION]


def test_uneven_all_to_alls_match_though_ranks_send_different_amounts(tmp_path):
    events = {
        rank: [all_reduce(0, 5, elements=10 + rank, **{"Collective name": "all_to_allv"})] for rank in (0, 1)
    }  # fmt: skip
    assert load_ranks(tmp_path, events).comparable.matches.matched == 1
