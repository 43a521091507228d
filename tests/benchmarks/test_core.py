"""The figures of the speed benchmark."""

from benchmarks.core import _exponents


def test_growth_is_between_the_smallest_and_the_largest_job_of_a_kind() -> None:
    """From 10 to 1,000 ops, 1 to 10 s: a power of log 10 / log 100. Others do not count."""
    grown = {"steps": [(1000, 10.0), (100, 2.0), (10, 1.0)], "": [(10, 1.0), (1000, 1.0)]}
    assert _exponents(grown).endswith("with this power of the ops: with steps 0.50.")
