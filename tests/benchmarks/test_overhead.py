"""The figures of the benchmark of overhead, by hand."""

from benchmarks import overhead


def test_a_row_has_medians_of_differences_within_pairs():
    """Added: 10, 20 and 60 us, so 20; deviations of 10, 0 and 40 us, so 1.2533 * 1.4826 * 10 us / sqrt(3) = 10.7 us."""
    alone, added = (1e-3, 2e-3, 4e-3), (10e-6, 20e-6, 60e-6)
    pairs = [((wall, 2 * wall), (wall + more, 2 * wall)) for wall, more in zip(alone, added, strict=True)]
    row = overhead._row("2 ms", pairs)
    assert row[:3] == ["2 ms", "2.00 ms", "20 +- 11 us"]
    assert row[3] == "1.0% +- 0.0%"
    assert row[4:] == ["4.00 ms", "0 +- 0 us", "0.0% +- 0.0%"]
