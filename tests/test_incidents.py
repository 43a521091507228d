"""Incidents across windows: what opens one, what goes on, what closes it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from tracekit.findings import Sighting, WindowVerdict
from tracekit.store.incidents import HANG, Incident, followed

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SLOW = Sighting(
    "bad-worker", "compute", "rank 3: slow", "rank 3", "slow", "look", "replace it", (3,), ("node-a",), (), 0.02, 0.2,
    0.9, None, 5.0,
)  # fmt: skip
LATE = replace(SLOW, kind="late-data-loading", part="data-loading", what="data comes late", ranks=(), hosts=())


def verdict(*sightings: Sighting, kind: str = "straggler", trustworthy: bool = True) -> WindowVerdict:
    return WindowVerdict(kind, "headline", 0.2, 0.9, trustworthy, "why", None, sightings)


HEALTHY = verdict(kind="balanced")


def after(*windows: WindowVerdict) -> list[Incident]:
    """All incidents of a job with these windows, a minute each."""
    known: list[Incident] = []
    for number, window in enumerate(windows):
        still_open = [one for one in known if one.closed_at is None]
        done = [one for one in known if one.closed_at is not None]
        known = done + list(followed(still_open, "job", number, window, NOON + timedelta(minutes=number)))
    return known


def test_a_cause_is_one_incident_from_the_first_window_that_shows_it_to_the_second_that_does_not() -> None:
    worse = replace(SLOW, what="rank 3: slower", ranks=(2, 3))
    (incident,) = after(HEALTHY, verdict(SLOW), verdict(worse), HEALTHY, HEALTHY)
    assert (incident.opened_window, incident.seen_window, incident.closed_window) == (1, 2, 4)
    assert (incident.opened_at, incident.closed_at) == (NOON + timedelta(minutes=1), NOON + timedelta(minutes=4))
    assert incident.cause == worse


def test_a_cause_that_comes_and_goes_is_one_incident() -> None:
    (incident,) = after(verdict(SLOW), HEALTHY, verdict(SLOW), HEALTHY, verdict(SLOW))
    assert (incident.seen_window, incident.clear, incident.closed_at) == (4, 0, None)


def test_another_part_and_other_ranks_are_other_incidents() -> None:
    other = replace(SLOW, ranks=(7,))
    opened = after(verdict(SLOW, LATE), verdict(other, LATE))
    assert [(one.cause.part, one.cause.ranks, one.clear) for one in opened] == [
        ("compute", (3,), 1),
        ("data-loading", (), 0),
        ("compute", (7,), 0),
    ]


def test_a_cause_opens_an_incident_at_5_percent_of_the_step_and_keeps_it_open_at_half_of_that() -> None:
    small, smaller = replace(SLOW, share=0.04), replace(SLOW, share=0.02)
    assert after(verdict(small)) == []
    assert after(verdict(SLOW), verdict(small), verdict(small))[0].seen_window == 2
    assert after(verdict(SLOW), verdict(smaller), verdict(smaller))[0].closed_window == 2


def test_a_window_that_loses_nothing_or_cannot_be_trusted_opens_nothing() -> None:
    assert after(verdict(SLOW, kind="balanced"), verdict(SLOW, kind="contradiction")) == []
    assert after(verdict(SLOW, trustworthy=False)) == []


def test_a_window_that_cannot_be_trusted_closes_nothing() -> None:
    doubtful = verdict(trustworthy=False)
    (incident,) = after(verdict(SLOW), HEALTHY, doubtful, doubtful)
    assert (incident.clear, incident.closed_at) == (1, None)


def test_a_hang_is_over_with_the_first_window_that_ends() -> None:
    hang = Incident(1, "job", replace(SLOW, kind=HANG, part=HANG), NOON, None, None)
    (closed,) = followed([hang], "job", 5, HEALTHY, NOON)
    assert (closed.closed_window, closed.closed_at) == (5, NOON)
