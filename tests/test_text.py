"""Words for durations and costs."""

from __future__ import annotations

import pytest

from tracekit.text import cost, seconds


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0.00 s"), (2e-6, "2 us"), (-0.0123, "-12.3 ms"), (0.9999, "999.9 ms"), (12.345, "12.35 s")],
)
def test_a_duration_is_in_a_unit_that_keeps_three_digits_readable(value, shown):
    assert seconds(value) == shown


@pytest.mark.parametrize(
    ("saved_s", "alone_s", "shown"),
    [
        (0.1, 0.1, "costs 100.0 ms a step"),
        (0.06, 0.1, "costs 60.0 ms a step"),
        (0.01, 0.1, "costs 100.0 ms a step once the others are gone"),
        (-0.01, 0.1, "costs 100.0 ms a step once the others are gone"),
    ],
)
def test_a_cause_behind_another_one_costs_what_it_does_without_it(saved_s, alone_s, shown):
    assert cost(saved_s, alone_s) == shown
