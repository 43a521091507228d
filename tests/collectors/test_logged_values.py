"""What a loop says with `tracekit.log`, from its processes to the store and the screens."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.collectors.conftest import Runs
from tests.handmade import run
from tracekit.collectors.merge.placement import MeshPlace, Placement
from tracekit.collectors.merge.run_facts import logged_values
from tracekit.store import Store
from tracekit.trace.facts import STEP_VALUES, step_values
from tracekit.trace.model import Layout


def test_the_store_has_what_two_ranks_wrote(runs: Runs, tmp_path: Path) -> None:
    """Rank r trains on 1,000 (r + 1) + step tokens; garbage is told once, and changes nothing."""
    ran = runs["logs"]
    assert ran.exit_codes == [0, 0]
    assert ran.complained.count("tracekit.log(") == 1
    assert re.search(
        r"rank [01]: tracekit.log\(tokens=...\) in step 0: ValueError: nan; expected a count from 0 to 2\^53; such"
        r" values are left out; training continues",
        ran.complained,
    )
    said = re.findall(r"step (\d+) loss (0x[0-9a-f.]+p[+-]\d+)", ran.said)
    losses = [np.mean([float.fromhex(loss) for at, loss in said if int(at) == step]) for step in range(8)]
    values = step_values(ran.trace.metadata)
    assert values["tokens"] == {step: 3000 + 2 * step for step in range(1, 8)}
    assert list(values["loss"]) == list(range(1, 8))
    assert list(values["loss"].values()) == pytest.approx(losses[1:], rel=1e-12)
    assert run("import", ran.attempt["out"], "--store", tmp_path / "s.store", "--name", "job").code == 0
    (newest,) = Store(tmp_path / "s.store").history("job").to_dicts()
    assert newest["tokens_per_s"] == pytest.approx(3008 / newest["recorded_s"])  # the mean of steps 1 to 7
    assert newest["loss"] == pytest.approx(losses[7])


def records(*told: tuple[int, int, str, float]) -> pl.DataFrame:
    """Records of (rank, step, name, value), in the order in which they were made."""
    frame = pl.DataFrame(told, ["rank", "step", "name", "value"], orient="row").cast(
        {"rank": pl.Int32, "step": pl.Int32}
    )
    bits = pl.Series(frame["value"].to_numpy().view(np.int64))
    return frame.select(
        "rank", "step", "name", extra=bits, number=pl.int_range(1, pl.len() + 1), category=pl.lit("value")
    )


#: Two replicas of two ranks each.
FOUR = Placement(Layout(dp=2, tp=2), {rank: MeshPlace(dp=rank // 2, tp=rank % 2) for rank in range(4)}, "test")


def test_ranks_of_a_replica_count_their_tokens_once_and_the_loss_is_the_mean_over_ranks() -> None:
    """Step 2 lacks the second replica, step 3 all tokens; step 9 is not in the trace; rank 0 corrects itself in 1."""
    told = records(
        *((0, 1, "tokens", 5.0), (1, 1, "tokens", 70.0), (0, 1, "tokens", 70.0), (2, 1, "tokens", 30.0)),
        *((0, 2, "tokens", 70.0), (1, 2, "loss", 2.0), (3, 2, "loss", 3.0), (3, 2, "loss", 4.0)),
        *((0, 9, "tokens", 7.0), (0, 9, "loss", 7.0), (0, 3, "tokens", float("nan"))),
    )
    assert logged_values(told, FOUR, [1, 2, 3]) == {STEP_VALUES: {"tokens": {"1": 100.0}, "loss": {"2": 3.0}}}
    assert logged_values(told, FOUR, [5]) == {}


def test_one_rank_may_say_the_tokens_of_the_whole_job() -> None:
    told = records((0, 1, "tokens", 800.0), (0, 2, "tokens", 900.0))
    assert logged_values(told, FOUR, [1, 2])[STEP_VALUES]["tokens"] == {"1": 800.0, "2": 900.0}


@pytest.mark.parametrize(
    "told",
    [
        *(None, 7, [], {"tokens": 7}, {"tokens": [1]}, {"tokens": {"one": 1}}, {"tokens": {"1": "x"}}),
        *({"tokens": {"1": float("nan")}}, {"tokens": {"9" * 99: 1}}, {"loss": {"1": 10**400}}, {"loss": {"-1": 2}}),
    ],
)
def test_metadata_of_strangers_is_no_value(told: object) -> None:
    assert step_values({STEP_VALUES: told}) == {}


def test_a_number_that_no_step_can_have_is_no_value() -> None:
    tokens = {"1": 2.0**53, "2": 2.0**53 + 2, "3": -1.0, "4": float("inf"), "5": 0.0}
    assert step_values({STEP_VALUES: {"tokens": tokens, "loss": {"1": -2.0}}}) == {
        "tokens": {1: 2.0**53, 5: 0.0},
        "loss": {1: -2.0},
    }
