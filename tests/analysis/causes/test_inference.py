"""Jobs with forwards alone, as in inference and evaluation."""

import numpy as np
import polars as pl
import pytest

from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout, Worker

FORWARD_S, SEND_S, STEPS, MICROBATCHES = 0.020, 0.001, 12, 6


def inference(dp, pp, slow=None, factor=2.0, kind="forward-compute"):
    """Forwards of 20 ms, one after the other on each stage, that vary by 1 %; the worker `slow` takes `factor` as
    long. A job without a pipeline sends nothing.
    """
    chance, rows = np.random.default_rng(0), []
    for step in range(STEPS):
        for dp_rank in range(dp):
            free = np.zeros(pp)
            for _ in range(MICROBATCHES):
                for stage in range(pp):
                    place = step, dp_rank + dp * stage, dp_rank, stage
                    start = free[stage]
                    if stage:
                        sent = free[stage - 1]
                        rows.append(
                            (step, dp_rank + dp * (stage - 1), dp_rank, stage - 1, "forward-send", sent, SEND_S)
                        )
                        rows.append((*place, "forward-recv", sent, SEND_S))
                        start = max(start, sent + SEND_S)
                    length = FORWARD_S * chance.normal(1, 0.01) * (factor if slow == (dp_rank, stage) else 1.0)
                    rows.append((*place, kind, start, length))
                    free[stage] = start + length
    columns = ["step", "rank", "dp_rank", "pp_rank", "kind", "start", "duration"]
    ops = pl.DataFrame(rows, columns, orient="row").sort("step", "rank", "start")
    count = pl.int_range(pl.len()).over("step", "rank", "kind")
    ops = ops.with_columns(count.alias("seq"), count.alias("microbatch"))
    return Trace.from_frame(ops, Layout(dp=dp, pp=pp), name="inference")


@pytest.mark.parametrize(("dp", "pp", "slow"), [(4, 1, (1, 0)), (2, 1, (1, 0)), (4, 2, (2, 1))])
def test_a_rank_twice_as_slow_is_named_with_what_it_costs(dp, pp, slow):
    """6 forwards of 20 ms too long, on the path of each step."""
    (found,) = causes(inference(dp, pp, slow))
    assert (found.kind, found.where.workers) == ("bad-worker", (Worker(*slow),))
    assert found.saved_s == pytest.approx(MICROBATCHES * FORWARD_S, rel=0.03)


@pytest.mark.parametrize(("dp", "pp"), [(4, 1), (4, 2)])
def test_nobody_is_named_where_all_are_alike(dp, pp):
    assert [found.kind for found in causes(inference(dp, pp))] == ["healthy"]


def test_a_job_with_backwards_alone_is_taken_apart_too():
    (found,) = causes(inference(4, 1, (1, 0), kind="backward-compute"))
    assert (found.kind, found.where.workers) == ("bad-worker", (Worker(1, 0),))


def causes(trace):
    return PipelineJob(trace).whatif().findings
