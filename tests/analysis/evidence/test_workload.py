"""Which places in the step are slow."""

from __future__ import annotations

import numpy as np
import pytest

from tracekit.analysis.evidence.workload import position_factor

#: [kinds, stages, chunks, microbatches, steps, dp_ranks]
SHAPE = (2, 1, 1, 4, 12, 2)


def relative(**slower: float) -> np.ndarray:
    """Computes with noise of 1 %; `slower`: "p<microbatch>" on both DP ranks, "w<microbatch>" on the first only."""
    values = 1 + 0.01 * np.random.default_rng(1).standard_normal(SHAPE)
    for name, factor in slower.items():
        ranks = slice(None) if name[0] == "p" else 0
        values[:, :, :, int(name[1]), :, ranks] *= factor
    return values


def test_a_place_that_is_slow_on_all_ranks_is_slow() -> None:
    assert position_factor(relative(p0=1.3)) == pytest.approx(np.array([[1.3, 1, 1, 1]] * 2), rel=0.02)


@pytest.mark.parametrize("places", [("w1",), ("w1", "w2"), ("w0", "w3")])
def test_what_slows_some_microbatches_of_one_rank_is_not_their_place(places: tuple[str, ...]) -> None:
    """With half of them, its others must not look fast, and those of the other rank slow beside them."""
    assert (position_factor(relative(**dict.fromkeys(places, 1.5))) == 1).all()
