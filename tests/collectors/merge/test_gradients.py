"""Sizes of gradients and the time of their reductions, from records written by hand."""

from tests.collectors.merge.test_ops import GROUP, compute, merged, rank
from tracekit.collectors.record.wire_format import Category

MIB = 1 << 20


def _bucket(start, end, size):
    return (Category.COLLECTIVE, "allreduce", start, end, {"peer": 0, "extra": size})


def _recorded(late, *, gradients=True):
    rows = [compute("forward-compute", 10, 100), compute("backward-compute", 110, 300)]
    ranks = []
    for number in range(2):
        start = 150 + late * number
        one = rank(
            number,
            [*rows, _bucket(start, 200, 10 * MIB), _bucket(start + 100, 290, 2 * MIB)],
            mesh={"names": ["dp"], "ranks": [0, 1]},
            groups=[GROUP],
        )
        if gradients:
            one.facts["gradients"] = [{"bytes": [2 * MIB, 10 * MIB], "bucket_cap_mb": 5.0, "first_bucket_mb": 1.0}]
        ranks.append(one)
    return merged(*ranks).trace.metadata


def test_a_reduction_lasts_from_the_last_rank_on() -> None:
    figures = _recorded(late=10)["gradients"]
    assert figures["bytes"] == [[2 * MIB, 10 * MIB]]
    assert figures["bucket_cap_mb"] == 5.0
    assert sorted((size, round(seconds, 6)) for size, seconds in figures["reductions"]) == [
        (2 * MIB, 0.03),
        (10 * MIB, 0.04),
    ]


def test_without_sizes_there_are_no_figures() -> None:
    assert "gradients" not in _recorded(late=0, gradients=False)
