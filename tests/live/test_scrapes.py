"""The watch ends once everybody who asks for metrics has been answered once more."""

from __future__ import annotations

import pytest

from tracekit.live.metrics import LONGEST_WAIT_S, Scrapes

NOW = 10_000.0


def asked(*seconds_ago: float) -> Scrapes:
    """One address that asked so many seconds before `NOW`."""
    scrapes = Scrapes()
    for ago in seconds_ago:
        scrapes.note("10.0.0.1", NOW - ago)
    return scrapes


def patience_s(scrapes: Scrapes) -> float:
    """How long somebody who has not asked since `NOW` may still take, seconds."""
    return scrapes._patience(since=NOW + 1e-3, now=NOW)


def test_who_asked_once_or_never_is_not_awaited() -> None:
    assert patience_s(asked()) == 0
    assert patience_s(asked(5)) == 0


def test_who_asks_regularly_is_awaited_for_two_intervals_after_the_last_time() -> None:
    assert patience_s(asked(60, 30, 0)) == 60
    assert patience_s(asked(90, 60, 30)) == 30
    assert patience_s(asked(160, 130, 100)) == 0


def test_an_answer_that_came_late_makes_the_next_one_look_early_and_shortens_no_interval() -> None:
    assert patience_s(asked(120, 90, 60, 31, 30, 0)) == 60
    assert patience_s(asked(120, 80, 50, 1, 0)) == 2 * 49


def test_nobody_is_awaited_for_ever() -> None:
    assert patience_s(asked(1000, 0)) == pytest.approx(LONGEST_WAIT_S, abs=0.01)


def test_who_was_asked_for_since_is_not_awaited() -> None:
    assert asked(60, 30, 0)._patience(NOW, NOW) == 0


def test_a_question_from_before_does_not_count_however_late_its_answer() -> None:
    """Its figures may be those from before."""
    assert asked(61, 31, 1)._patience(NOW, NOW) == 59
