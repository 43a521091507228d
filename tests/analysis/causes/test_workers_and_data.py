"""Workers that become slower, slower halves, and long sequences: each has its name, at the price of its truth."""

from __future__ import annotations

import pytest

from judges.eventsim.causes import Part, Rise, SlowWorkers, When
from judges.eventsim.model import Job, Noise, Shape
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
