"""Words for durations and costs."""

from __future__ import annotations

from tracekit.base.text import cost, nearest, seconds, with_error


def test_a_duration_is_in_a_unit_that_keeps_three_digits_readable():
    shown = [seconds(value) for value in (0, 2e-6, -0.0123, 0.9999, 0.99999, 9.996e-4, 12.345, -1e-9, -0.0)]
    assert shown == ["0.00 s", "2 us", "-12.3 ms", "999.9 ms", "1.00 s", "1.0 ms", "12.35 s", "0 us", "0.00 s"]


def test_a_cause_behind_another_one_costs_what_it_does_without_it():
    for saved_s, alone_s, shown in (
        (0.1, 0.1, "costs 100.0 ms a step"),
        (0.06, 0.1, "costs 60.0 ms a step"),
        (0.01, 0.1, "costs 100.0 ms a step once the others are gone"),
        (-0.01, 0.1, "costs 100.0 ms a step once the others are gone"),
    ):
        assert cost(saved_s, alone_s) == shown
    assert cost(0.1, 0.1, "recording") == "costs 100.0 ms of the recording"
    assert cost(0.1, 0.1, on_average=True) == "costs 100.0 ms a step on average"
    assert cost(0.0, 0.1, on_average=True) == "costs 100.0 ms a step on average once the others are gone"


def test_an_error_is_in_the_unit_of_what_it_belongs_to():
    for value, error, shown in (
        (0.1116, 0.000884, "111.6 ms \u00b1 0.9 ms"),
        (0.0366, 0.0127, "36.6 ms \u00b1 12.7 ms"),
        (0.0366, 0.00002, "36.6 ms \u00b1 20 us"),  # 0.0 ms would say that there is none
        (0.00012, 0.00003, "120 us \u00b1 30 us"),
        (1.5, 0.004, "1.50 s \u00b1 4.0 ms"),
        (0.5, 2.0, "500.0 ms \u00b1 2.00 s"),
        (0.0366, 0.0, "36.6 ms"),
    ):
        assert with_error(value, error) == shown


def test_the_nearest_name_is_found_among_many_and_however_long() -> None:
    others = [f"{letter}{number}" * 40 for letter in "ab" for number in range(3000)]
    assert nearest("slow-workr", [*others, "slow-worker"]) == "slow-worker"
    assert nearest("q" * 100_000, others) is None
    assert nearest("slow-worker-" + "x" * 300, ["slow-worker-" + "x" * 299]) == "slow-worker-" + "x" * 299
    assert nearest("x", []) is None
