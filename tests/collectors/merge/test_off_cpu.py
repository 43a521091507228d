"""Time in which a training thread should have worked and did not run."""

import polars as pl

from tracekit.collectors.merge.lockstep import with_thread_waits
from tracekit.trace.schema import OFF_CPU, QUEUED


def ops(*rows):
    """(step, rank, kind, duration)."""
    return pl.DataFrame(rows, ("step", "rank", "kind", "duration"), orient="row")


def steps(*rows):
    """(step, rank, waited_us, ran_us)."""
    numbers = pl.DataFrame(rows, ("step", "rank", "peer", "chunk"), orient="row", schema_overrides={"chunk": pl.Int32})
    return numbers.with_columns(category=pl.lit("step"), start_ns=pl.lit(0), end_ns=pl.lit(0), name=pl.lit("step"))


def with_collectives(counted, *rows):
    """Records of steps and of collectives: (step, rank, group, start_ns, end_ns)."""
    described = [(step, one, group, -1, "collective", begin, end, "reduce") for step, one, group, begin, end in rows]
    return pl.concat([counted, pl.DataFrame(described, counted.schema, orient="row")])


#: Process group 7 has ranks of one worker, 8 does not.
GROUPS = pl.DataFrame(
    {
        "rank": [0, 1, 0, 1],
        "peer": [7, 7, 8, 8],
        "members": ["0-1"] * 4,
        "within_worker": [True, True, False, False],
    }
)


RECORDED = ops(
    (1, 0, "forward-compute", 0.010),
    (1, 0, "all-reduce", 0.500),
    (1, 0, "backward-compute", 0.050),
    (1, 1, "forward-compute", 0.010),
    (1, 1, "backward-compute", 0.020),
)


def test_it_is_what_the_thread_s_own_ops_lasted_beyond_running_and_being_ready():
    """Rank 0 worked for 60 ms, of which it ran for 25 and was ready for 5; that it waits in all-reduce is no news."""
    found = with_thread_waits(RECORDED, steps((1, 0, 5_000, 25_000), (1, 1, 0, 31_000)), GROUPS, {})
    assert rounded(found) == [[0.030], None, None, [0.0], None]
    assert found.drop(OFF_CPU, QUEUED).equals(RECORDED)


def test_a_rank_of_which_the_kernel_says_nothing_has_none():
    found = with_thread_waits(RECORDED, steps((1, 0, -1, 25_000), (1, 1, 0, 10_000)), GROUPS, {})
    assert rounded(found) == [None, None, None, [0.020], None]
    assert with_thread_waits(RECORDED, steps((1, 0, -1, 25_000), (1, 1, 0, -1)), GROUPS, {}).equals(RECORDED)


def test_ranks_of_a_worker_have_one_each_without_what_they_do_together():
    """Both took 60 ms for the forward. Of these, rank 1 was in a collective of theirs for 31, rank 0 for 1."""
    recorded = ops((1, 0, "forward-compute", 0.060), (1, 0, "optimizer", 0.010)).with_columns(
        lasted=pl.Series([[0.060, 0.060], [0.010, 0.020]])
    )
    counted = steps((1, 0, 0, 40_000), (1, 1, 0, 49_000))
    within = [(1, 0, 7, 30_000_000, 31_000_000), (1, 1, 7, 0, 31_000_000)]
    records = with_collectives(counted, *within, (1, 0, 8, 0, 500_000_000))
    assert rounded(with_thread_waits(recorded, records, GROUPS, {0: [0, 1]})) == [[0.029, 0.0], None]
    assert with_thread_waits(recorded, records[1:], GROUPS, {0: [0, 1]}).equals(recorded)


def test_a_rank_that_leaves_a_collective_long_after_the_others_was_stopped_in_it():
    """They work for 50 ms. Rank 0 waits 19 ms in a collective, 10 of them for rank 1, which waits 10: it leaves 1 ms
    later, as always. In the third step it stays for 30 ms more.
    """
    numbers = range(1, 6)
    counted = steps(*((step, rank, 0, 50_000) for step in numbers for rank in (0, 1)))
    more_ms = {step: 30 if step == 3 else 0 for step in numbers}
    rank_0 = [(step, 0, 7, 10_000_000, 29_000_000) for step in numbers]
    rank_1 = [(step, 1, 7, 20_000_000, (30 + more_ms[step]) * 1_000_000) for step in numbers]
    recorded = ops(*((step, 0, "forward-compute", 0.069) for step in numbers)).with_columns(
        lasted=pl.Series([[0.069, 0.060 + more_ms[step] / 1e3] for step in numbers])
    )
    found = with_thread_waits(recorded, with_collectives(counted, *rank_0, *rank_1), GROUPS, {0: [0, 1]})
    assert rounded(found) == [[0.0, 0.030] if step == 3 else [0.0, 0.0] for step in numbers]


def test_what_a_thread_always_runs_in_other_ops_does_not_hide_its_stops():
    """It loads data for 10 ms in every step, and its forward of 50 ms lasts 80 in the third."""
    recorded = ops(*((step, 0, "forward-compute", 0.080 if step == 3 else 0.050) for step in range(1, 5)))
    found = with_thread_waits(recorded, steps(*((step, 0, 0, 60_000) for step in range(1, 5))), GROUPS, {})
    assert rounded(found) == [[0.0], [0.0], [0.030], [0.0]]


def test_what_a_thread_runs_in_other_ops_now_and_then_is_no_stop():
    """In six of ten steps it runs for 2.7 ms less in other ops. In the last, its forward of 50 ms lasts 100, too."""
    lasted_s = {step: 0.1 if step == 10 else 0.05 for step in range(1, 11)}
    recorded = ops(*((step, 0, "forward-compute", seconds) for step, seconds in lasted_s.items()))
    active_us = (60_000, 57_300, 57_300, 60_000, 57_300, 60_000, 57_300, 57_300, 60_000, 57_300)
    found = with_thread_waits(recorded, steps(*((step, 0, 0, us) for step, us in enumerate(active_us, 1))), GROUPS, {})
    assert rounded(found) == [[0.0]] * 9 + [[0.0527]]


def test_waits_for_a_processor_count_as_far_as_they_are_within_own_ops():
    """Own ops of 50 ms are 20 ms longer in three steps: the thread waited in them, elsewhere as well, or not."""
    lasted_s, waited_us = (0.05, 0.07, 0.07, 0.07), (0, 20_000, 90_000, 0)
    recorded = ops(*((step, 0, "forward-compute", seconds) for step, seconds in enumerate(lasted_s, 1)))
    ran_us = (50_000, 50_000, 50_000, 70_000)
    counted = steps(*((step, 0, *each) for step, each in enumerate(zip(waited_us, ran_us, strict=True), 1)))
    assert rounded(with_thread_waits(recorded, counted, GROUPS, {}), QUEUED) == [[0.0], [0.02], [0.02], [0.0]]


def rounded(ops, name=OFF_CPU):
    """The column."""
    return [None if one is None else [round(seconds, 9) for seconds in one] for one in ops[name].to_list()]
