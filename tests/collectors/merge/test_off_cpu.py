"""Time in which a training thread should have worked, and neither ran nor was ready to."""

import polars as pl

from tracekit.collectors.merge.off_cpu import with_off_cpu
from tracekit.schema import OFF_CPU


def ops(*rows):
    """(step, rank, kind, duration)."""
    return pl.DataFrame(rows, ("step", "rank", "kind", "duration"), orient="row")


def steps(*rows):
    """(step, rank, waited_us, ran_us)."""
    numbers = pl.DataFrame(rows, ("step", "rank", "peer", "chunk"), orient="row", schema_overrides={"chunk": pl.Int32})
    return numbers.with_columns(category=pl.lit("step"))


RECORDED = ops(
    (1, 0, "forward-compute", 0.010),
    (1, 0, "all-reduce", 0.500),
    (1, 0, "backward-compute", 0.050),
    (1, 1, "forward-compute", 0.010),
    (1, 1, "backward-compute", 0.020),
)


def test_it_is_what_the_thread_s_own_ops_lasted_beyond_running_and_being_ready():
    """Rank 0 worked for 60 ms, of which it ran for 25 and was ready for 5; that it waits in all-reduce is no news."""
    found = with_off_cpu(RECORDED, steps((1, 0, 5_000, 25_000), (1, 1, 0, 31_000)), {})
    assert rounded(found) == [[0.030], None, None, [0.0], None]
    assert found.drop(OFF_CPU).equals(RECORDED)


def test_a_rank_of_which_the_kernel_says_nothing_has_none():
    found = with_off_cpu(RECORDED, steps((1, 0, -1, 25_000), (1, 1, 0, 10_000)), {})
    assert rounded(found) == [None, None, None, [0.020], None]
    assert with_off_cpu(RECORDED, steps((1, 0, -1, 25_000), (1, 1, 0, -1)), {}).equals(RECORDED)


def test_ranks_of_a_worker_have_one_each_without_what_they_wait_for_each_other():
    """Rank 1 waited 30 ms inside the forward for rank 0, which did not run for 30 of the 60 ms that it took."""
    recorded = ops((1, 0, "forward-compute", 0.060), (1, 0, "optimizer", 0.010)).with_columns(
        lasted=pl.Series([[0.060, 0.060], [0.010, 0.020]]), waited=pl.Series([[0.0, 0.030], None])
    )
    counted = steps((1, 0, 0, 40_000), (1, 1, 0, 50_000))
    assert rounded(with_off_cpu(recorded, counted, {0: [0, 1]})) == [[0.030, 0.0], None]
    assert with_off_cpu(recorded, counted.head(1), {0: [0, 1]}).equals(recorded)


def rounded(ops):
    """The column."""
    return [None if one is None else [round(seconds, 9) for seconds in one] for one in ops[OFF_CPU].to_list()]
