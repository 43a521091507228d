"""Workers that become slower, slower halves, and long sequences: each has its name, at the price of its truth."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

import tracekit
from judges.eventsim.causes import Part, Rise, SlowSteps, SlowWorkers, When
from judges.eventsim.model import Job, Noise, Shape
from judges.eventsim.run import simulate
from judges.eventsim.truth import mean_step_s, truths
from judges.eventsim.uneven import Lengths, UnequalSequences
from judges.judging import judge
from tests.analysis.causes.simulated import costs, job, named, report

#: Of the step.
LARGEST_PRICE_ERROR = 0.01
RISING = Shape(dp=4, pp=2, microbatches=4, steps=12)


def places(of: Job) -> set[tuple[str, str]]:
    return {(str(cause.kind), str(cause.where)) for cause in named(of)}


class TestBecomingSlower:
    @pytest.mark.parametrize("rise", [Rise.LINEAR, Rise.EXPONENTIAL, Rise.SATURATING])
    def test_a_worker_that_becomes_slower_step_by_step_is_named_at_its_price(self, rise: Rise) -> None:
        cause = SlowWorkers(frozenset({(2, 1)}), 1.5, rise=rise)
        slow = job(cause, shape=RISING)
        (found,) = named(slow)
        assert (found.kind, str(found.where)) == ("bad-worker", "worker (2,1)")
        assert found.time.shape == "drifting"
        error_s = found.saved_s - costs(slow, cause)
        assert abs(error_s) < LARGEST_PRICE_ERROR * mean_step_s(slow)

    def test_it_is_named_since_the_step_in_which_it_begins(self) -> None:
        begin = When(since=6)
        (found,) = named(job(SlowWorkers(frozenset({(1, 0)}), 1.6, begin, rise=Rise.LINEAR), shape=RISING))
        assert found.since_step in (106, 107)

    def test_forwards_that_become_slower_are_no_pauses_of_the_process(self) -> None:
        """In the last steps they are far above the usual forward of the worker, as if something stopped it there."""
        cause = SlowWorkers(frozenset({(2, 1)}), 1.7, part=Part.FORWARD, rise=Rise.EXPONENTIAL)
        slow = job(cause, shape=Shape(dp=4, pp=2, microbatches=16, steps=20))
        assert places(slow) == {("bad-worker", "worker (2,1)")}

    def test_a_host_that_becomes_slower_is_one_cause(self) -> None:
        shape = Shape(dp=8, pp=1, tp=4, microbatches=4, steps=12)
        slow = job(SlowWorkers(shape.cells_of_host(1), 1.4, rise=Rise.LINEAR), shape=shape)
        assert [(cause.kind, cause.where.host) for cause in named(slow)] == [("slow-host", "host-0001")]

    def test_when_all_become_slower_nobody_is(self) -> None:
        everybody = SlowWorkers(frozenset(RISING.cells), 1.5, rise=Rise.LINEAR)
        assert not any(cause.where.workers for cause in named(job(everybody, shape=RISING)))


class TestHalf:
    """Half of the DP ranks are slower by one factor in all steps: one kind of machine, wherever they are."""

    @pytest.mark.parametrize("ranks", [(0, 2, 4, 6), (1, 2, 4, 7), (4, 5, 6, 7)])
    def test_a_slower_half_is_one_group_at_one_price(self, ranks: tuple[int, ...]) -> None:
        shape = Shape(dp=8, pp=1, tp=4, microbatches=4, steps=12)
        cause = SlowWorkers(frozenset((rank, 0) for rank in ranks), 1.12)
        slow = job(cause, shape=shape)
        (found,) = named(slow)
        assert (found.kind, found.where.dp_ranks) == ("slow-rank-group", ranks)
        assert abs(found.saved_s - costs(slow, cause)) < LARGEST_PRICE_ERROR * mean_step_s(slow)

    def test_noise_of_single_steps_does_not_make_the_mean_of_both_halves_usual(self) -> None:
        """The slow half is 18 % slower, but in single steps noise hides who belongs to it."""
        shape = Shape(dp=16, pp=1, tp=2, microbatches=4, steps=24)
        cause = SlowWorkers(frozenset((rank, 0) for rank in range(8)), 1.18)
        slow = job(cause, shape=shape, noise=Noise(op=0.05, worker=0.006))
        (found,) = named(slow)
        assert (found.kind, found.where.dp_ranks) == ("slow-rank-group", tuple(range(8)))
        assert abs(found.saved_s - costs(slow, cause)) < 2 * LARGEST_PRICE_ERROR * mean_step_s(slow)


class TestMost:
    """Most DP ranks are slower by one factor in all steps. The mean of all is the speed of no machine."""

    @pytest.mark.parametrize(
        ("shape", "fast"),
        [
            (Shape(dp=4, pp=1, microbatches=4, steps=12), {1}),
            (Shape(dp=8, pp=1, tp=4, microbatches=4, steps=12), {2, 6}),
            (Shape(dp=4, pp=4, microbatches=4, steps=12), {3}),
        ],
    )
    def test_they_are_one_group_that_is_compared_with_the_faster_ones(self, shape: Shape, fast: set[int]) -> None:
        cause = SlowWorkers(frozenset(cell for cell in shape.cells if cell[0] not in fast), 1.3)
        slow = job(cause, shape=shape)
        (found,) = named(slow)
        assert (found.kind, set(found.where.dp_ranks)) == ("slow-rank-group", set(range(shape.dp)) - fast)
        assert "30% slower than the other DP ranks" in found.effect
        assert abs(found.saved_s - costs(slow, cause)) < LARGEST_PRICE_ERROR * mean_step_s(slow)

    def test_noise_does_not_blur_the_factor(self) -> None:
        shape = Shape(dp=4, pp=1, microbatches=4, steps=24)
        cause = SlowWorkers(frozenset(cell for cell in shape.cells if cell[0] != 1), 1.3)
        slow = job(cause, shape=shape, noise=Noise(op=0.06, worker=0.006))
        (found,) = named(slow)
        assert found.where.dp_ranks == (0, 2, 3)
        assert abs(found.saved_s - costs(slow, cause)) < 2 * LARGEST_PRICE_ERROR * mean_step_s(slow)

    def test_beside_a_single_fast_one_of_five_the_usual_ones_are_not_slow(self) -> None:
        shape = Shape(dp=5, pp=1, microbatches=4, steps=12)
        slow = job(SlowWorkers(frozenset(cell for cell in shape.cells if cell[0] != 1), 1.3), shape=shape)
        assert not any(cause.where.workers or cause.where.dp_ranks for cause in named(slow))


class TestLongSequences:
    def test_long_ones_that_one_rank_gets_for_some_steps_are_sequences_without_a_pipeline(self) -> None:
        """A worker that computes twice as long for two steps has long sequences, if its optimizer does not."""
        uneven = UnequalSequences(1, packed=False, sigma=0.6, documents=4, shards=2)
        assert places(job(uneven, shape=Shape(dp=8, pp=1, microbatches=6, steps=16))) == {
            ("sequence-length-imbalance", "whole job")
        }

    def test_steps_in_which_chance_gives_a_rank_the_long_ones_are_no_slow_machine(self) -> None:
        """Two documents in each microbatch, one of five is twelve times as long; four microbatches in a step."""
        uneven = UnequalSequences(5, packed=False, documents=2, lengths=Lengths.BIMODAL)
        found = places(job(uneven, shape=Shape(dp=4, pp=4, microbatches=4, steps=22)))
        assert found == {("sequence-length-imbalance", "whole job")}

    def test_a_slow_worker_among_them_is_still_named(self) -> None:
        uneven = UnequalSequences(7, packed=False, sigma=0.5, documents=4)
        slow = SlowWorkers(frozenset({(3, 0)}), 1.6)
        assert places(job(uneven, slow, shape=Shape(dp=6, pp=1, microbatches=8, steps=16))) == {
            ("sequence-length-imbalance", "whole job"),
            ("bad-worker", "worker (3,0)"),
        }

    def test_dealing_them_anew_is_priced_as_a_sampler_deals_them(self) -> None:
        """The longest first, each to the DP rank with the least work that has room. Swaps would save 4 % more."""
        uneven = UnequalSequences(1, packed=False, documents=1, lengths=Lengths.BIMODAL)
        slow = job(uneven, shape=Shape(dp=16, pp=1, tp=2, microbatches=12, steps=8))
        judged = judge(slow, tuple(truths(slow)), report(slow).to_dict())
        (fix,) = [fix for fix in judged.fixes if fix.kind == "balance-sequences"]
        assert abs(fix.priced_s - fix.truth_s) < LARGEST_PRICE_ERROR * mean_step_s(slow)

    def test_long_ones_since_a_step_are_sequences_if_the_optimizer_is_as_fast_as_before(self) -> None:
        """Three stretches of four steps: one DP rank gets the longest sequences in the last two."""
        uneven = UnequalSequences(6, packed=False, sigma=0.5, documents=1, lengths=Lengths.PARETO, shards=4)
        slow = job(uneven, shape=Shape(dp=4, pp=1, microbatches=16, steps=12))
        (found,) = named(slow)
        assert found.kind == "sequence-length-imbalance"
        assert abs(found.saved_s - costs(slow, uneven)) < LARGEST_PRICE_ERROR * mean_step_s(slow)

    def test_long_ones_throughout_may_be_a_slower_machine_so_the_report_is_not_trusted(self) -> None:
        """One DP rank gets the longest sequences in both stretches."""
        uneven = UnequalSequences(1, packed=False, sigma=0.5, documents=1, lengths=Lengths.PARETO, shards=4)
        trust = report(job(uneven, shape=Shape(dp=4, pp=1, microbatches=16, steps=8))).trust
        assert not trust.trustworthy
        assert "(3,0)" in trust.reasons[0]

    @pytest.mark.parametrize("cell", [(0, 0), (1, 1), (0, 1)])
    def test_of_two_stages_on_two_dp_ranks_the_optimizers_show_which_worker_is_slow(
        self, cell: tuple[int, int]
    ) -> None:
        """The diagonally opposite worker would explain the computes as well, and so would a stage with more work."""
        uneven, slow = UnequalSequences(0, packed=False, sigma=0.6, documents=1), SlowWorkers(frozenset({cell}), 1.5)
        both = job(uneven, slow, shape=Shape(dp=2, pp=2, microbatches=8, steps=10))
        assert places(both) == {
            ("sequence-length-imbalance", "whole job"),
            ("bad-worker", f"worker ({cell[0]},{cell[1]})"),
        }
        for found in named(both):
            cause = slow if found.kind == "bad-worker" else uneven
            assert abs(found.saved_s - costs(both, cause)) < LARGEST_PRICE_ERROR * mean_step_s(both)

    def test_without_optimizers_nobody_knows_which_one_it_is(self) -> None:
        uneven = UnequalSequences(0, packed=False, sigma=0.6, documents=1)
        slow = SlowWorkers(frozenset({(0, 0)}), 1.5)
        trace = simulate(job(uneven, slow, shape=Shape(dp=2, pp=2, microbatches=8, steps=10))).trace
        without = replace(trace, ops=trace.ops.filter(pl.col("kind") != "optimizer"))
        trust = tracekit.job_of(without).whatif().trust
        assert not trust.trustworthy
        assert "(0,0) and (1,1)" in trust.reasons[0]

    def test_a_slower_half_whose_computes_hide_among_them_shows_in_its_optimizers(self) -> None:
        shape = Shape(dp=4, pp=4, microbatches=8, steps=10)
        uneven = UnequalSequences(0, packed=False, sigma=0.8)
        half = SlowWorkers(frozenset(cell for cell in shape.cells if cell[0] < 2), 1.12)
        both = job(uneven, half, shape=shape)
        assert places(both) == {("sequence-length-imbalance", "whole job"), ("slow-rank-group", "dp 0 1")}
        (found,) = [cause for cause in named(both) if cause.kind == "slow-rank-group"]
        assert abs(found.saved_s - costs(both, half)) < LARGEST_PRICE_ERROR * mean_step_s(both)

    def test_a_slow_optimizer_alone_makes_no_machine_slow_among_them(self) -> None:
        shape = Shape(dp=4, pp=4, microbatches=8, steps=10)
        slow = SlowWorkers(frozenset(cell for cell in shape.cells if cell[0] < 2), 1.5, part=Part.OPTIMIZER)
        found = {kind for kind, _ in places(job(UnequalSequences(0, packed=False, sigma=0.8), slow, shape=shape))}
        assert not found & {"slow-rank-group", "bad-worker", "slow-host"}

    def test_two_long_steps_among_few_may_be_machines_or_sequences_so_the_report_is_not_trusted(self) -> None:
        shape = Shape(dp=4, pp=2, microbatches=12, steps=8)
        uneven = UnequalSequences(1, packed=False, sigma=0.8)
        assert report(job(uneven, shape=shape)).trust.trustworthy
        trust = report(job(uneven, SlowSteps(1.5, When(since=6)), shape=shape)).trust
        assert not trust.trustworthy
        assert "steps 106 to 107" in trust.reasons[0]
