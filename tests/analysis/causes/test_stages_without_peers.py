"""A pipeline of two stages with one DP rank: nobody does the same work, so only the other stage can be compared with.

Two microbatches, 1F1B. Forward 100 ms, backward 200 ms, optimizer 25 ms, no time for transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl
import pytest

from tests.analysis.causes.corpus import found_in
from tests.handmade import frame
from tracekit.report.finding import Place
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout, Worker

STEPS = 20
ON_STAGE_1 = Place(workers=(Worker(0, 1),))
USUAL_S = 0.001


def step(
    data: Sequence[float] = (USUAL_S, USUAL_S),
    host: Sequence[float] = (USUAL_S, USUAL_S),
    within: Sequence[float] = (USUAL_S, USUAL_S),
    factor: Sequence[float] = (1.0, 1.0),
    forwards: Sequence[float] = (1.0, 1.0),
    optimizer: Sequence[float] = (0.025, 0.025),
):
    """The ops of a step; seconds by stage of data loading, host work before and after the first forward, optimizer.

    `factor`: of forwards and backwards; `forwards`: of forwards alone, besides.
    """
    forward = [0.1 * more * alone for more, alone in zip(factor, forwards, strict=True)]
    backward = [0.2 * more for more in factor]
    ready = [host[at] + data[at] for at in range(2)]
    ops = []
    for at in range(2):
        ops += [(at, "host-delay", 0, None, 0.0, host[at]), (at, "data-load", 0, None, host[at], ready[at])]
    now = [0.0, 0.0]

    def run(at: int, kind: str, seq: int, length: float, after: float) -> None:
        start = max(now[at], after)
        now[at] = start + length
        ops.append((at, kind, seq, seq if kind.endswith("compute") else None, start, now[at]))

    def transfer(kind: str, at: int, to: int, seq: int, posted: float) -> None:
        end = max(now[at], posted)
        ops.append((at, f"{kind}-send", seq, seq, now[at], end))
        ops.append((to, f"{kind}-recv", seq, seq, posted, end))

    run(0, "forward-compute", 0, forward[0], ready[0])
    transfer("forward", 0, 1, 0, ready[1])
    run(0, "host-delay", 1, within[0], 0.0)
    run(0, "forward-compute", 1, forward[0], 0.0)
    run(1, "forward-compute", 0, forward[1], max(ready[1], ops[-4][5]))
    run(1, "host-delay", 1, within[1], 0.0)
    transfer("forward", 0, 1, 1, now[1])
    run(1, "backward-compute", 0, backward[1], 0.0)
    transfer("backward", 1, 0, 0, now[0])
    run(0, "backward-compute", 0, backward[0], now[1])
    run(1, "forward-compute", 1, forward[1], 0.0)
    run(1, "backward-compute", 1, backward[1], 0.0)
    transfer("backward", 1, 0, 1, now[0])
    run(0, "backward-compute", 1, backward[0], now[1])
    for at in range(2):
        run(at, "optimizer", 0, optimizer[at], 0.0)
    return ops


def causes(of_step: Callable[[int], list]):
    """What is found where the steps have these ops."""
    ops = pl.concat([frame({0: of_step(number)}, [number]) for number in range(STEPS)])
    return found_in(Trace.from_frame(ops, Layout(dp=1, pp=2, world_size=2), name="by hand"))


def only(**seconds):
    (cause,) = causes(lambda _: step(**seconds))
    return cause


def test_a_stage_whose_data_is_late_is_named():
    cause = only(data=(USUAL_S, 0.2))
    assert (cause.kind, cause.where) == ("late-data-loading", ON_STAGE_1)


def test_an_optimizer_that_takes_ten_times_as_long_as_that_of_the_other_stage_is_named():
    cause = only(optimizer=(0.025, 0.5))
    assert (cause.kind, cause.where) == ("slow-optimizer", ON_STAGE_1)


def test_a_stage_with_more_layers_has_more_parameters_to_update():
    found = causes(lambda _: step(factor=(1.7, 1.0), optimizer=(0.12, 0.05)))
    assert "slow-optimizer" not in {cause.kind for cause in found}


def test_host_code_between_steps_is_compared_with_that_of_the_other_stage():
    cause = only(host=(USUAL_S, 0.2))
    assert (cause.kind, cause.where) == ("slow-host-code", ON_STAGE_1)


def test_stages_launch_more_or_less_by_design():
    """What a schedule does between the ops of a stage says nothing about the other stage's."""
    found = causes(lambda _: step(within=(USUAL_S, 0.06)))
    assert "slow-host-code" not in {cause.kind for cause in found}


@pytest.mark.parametrize(("noise", "named"), [(0.02, True), (0.3, False)])
def test_a_stage_has_more_work_if_the_steps_do_not_vary_by_more(noise, named):
    """Its computes take 15 % longer, beside noise of 2 % and of 30 %."""
    drawn = np.random.default_rng(3).normal(0, noise, (STEPS, 2))
    found = causes(lambda number: step(factor=np.exp(drawn[number]) * (1.0, 1.15)))
    assert ("stage-imbalance" in {cause.kind for cause in found}) == named


def test_a_stage_with_slower_backwards_is_named_however_its_forwards_drift():
    """A quarter more in backwards; the forwards of its machine take 40 % more at first, and 40 % less at the end."""
    drift = np.linspace(0.34, -0.34, STEPS)
    found = causes(lambda number: step(factor=(1.0, 1.25), forwards=(1.0, float(np.exp(drift[number])) / 1.25)))
    assert "stage-imbalance" in {cause.kind for cause in found}


def test_a_stage_that_is_larger_by_less_than_stages_may_differ_is_not_named():
    """Its forwards take 20 % longer in each step: 7 % of what it computes, give or take 3 %."""
    drawn = np.random.default_rng(4).normal(0, 0.03, STEPS)
    found = causes(lambda number: step(factor=(1.0, float(np.exp(drawn[number]))), forwards=(1.0, 1.2)))
    assert [cause for cause in found if cause.priced] == []


def test_a_worker_is_slow_only_if_all_it_computes_is():
    """Forwards half as long again, backwards 2 %, and the optimizer 20 %: 18 % in all, as if it had more to do."""
    found = causes(lambda _: step(factor=(1.0, 1.02), forwards=(1.0, 1.5), optimizer=(0.025, 0.03)))
    assert {cause.kind for cause in found} == {"stage-imbalance"}
