"""Rules by which a study leaves out jobs, entirely or in part.

In: a row of `jobs`, or the error of reading or analysing a trace. Out: a rule, its scope and the reason. The rules are
those of the paper (docs/fleet.md): traces that cannot be analysed, too few steps, many restarts, a replay that misses
the recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tracekit.analysis.attribution.attribution import LARGEST_DISCREPANCY

#: With fewer traced steps, one slow step can hardly be distinguished from a slow job.
FEWEST_STEPS = 3
#: A job that restarted more often than this is failing, not slow.
MOST_RESTARTS = 15
#: Starts before 2000 or from 2100 on come from a clock that was never set, or that counts from another origin.
EARLIEST_START_S, LATEST_START_S = 946_684_800.0, 4_102_444_800.0


class Rule(StrEnum):
    """Reasons for leaving out a job. A job counts under the first rule that applies, in this order.

    The first four may be temporary: nothing lasting is known about such a source, and the next run tries it again.
    """

    UNREADABLE = "unreadable"  #: the source cannot be read: permission, network, gone
    CHANGED = "changed-while-read"  #: another trace took its place meanwhile
    CRASHED = "crashed"  #: its analysis ended the process, twice
    NOT_STORED = "not-stored"  #: its rows could not be written: the disk is full
    NO_TRACE = "no-trace"  #: not of a format that tracekit reads, or damaged
    INVALID = "failed-validation"  #: the ops do not fit together
    FEW_STEPS = "too-few-steps"
    RESTARTS = "many-restarts"
    DISCREPANCY = "discrepancy"  #: launch delays that nothing explains add more than 5 %
    REPLAY_ERROR = "replay-error"  #: the replay misses the recording by more than 5 %
    DOUBTFUL = "doubtful"  #: the report cannot be trusted for another reason
    CLOCK = "clock"  #: the job counts, but not by time


#: A job is left out of everything, or only of figures over time.
EVERYWHERE, BY_TIME = "everywhere", "by-time"


@dataclass(frozen=True, slots=True)
class Exclusion:
    """The reason why one job is left out. `reason`: with the figure, and the expected value."""

    rule: Rule
    reason: str

    @property
    def scope(self) -> str:
        """The figures that the job is left out of."""
        return BY_TIME if self.rule is Rule.CLOCK else EVERYWHERE


def exclusions_of(job: Mapping[str, Any], first_start_s: float | None) -> Iterator[Exclusion]:
    """Every rule that applies to a row of `jobs`. `first_start_s`: as recorded, by any clock."""
    if job["steps"] < FEWEST_STEPS:
        yield Exclusion(Rule.FEW_STEPS, f"{job['steps']} steps; expected {FEWEST_STEPS} or more")
    if (job["restarts"] or 0) > MOST_RESTARTS:
        yield Exclusion(Rule.RESTARTS, f"{job['restarts']} restarts; expected {MOST_RESTARTS} at most")
    if not abs(job["unexplained"]) <= LARGEST_DISCREPANCY:
        yield Exclusion(Rule.DISCREPANCY, f"{job['unexplained']:.1%} of the step is unexplained; expected at most 5%")
    elif not job["replay_error"] <= LARGEST_DISCREPANCY:
        yield Exclusion(Rule.REPLAY_ERROR, f"the replay misses the recording by {job['replay_error']:.1%}")
    elif not job["trustworthy"]:
        yield Exclusion(Rule.DOUBTFUL, job["doubts"] or "the report cannot be trusted")
    if first_start_s is not None and usable_start(first_start_s) is None:
        yield Exclusion(Rule.CLOCK, f"its clock shows {first_start_s:.0f} s since 1970: the time of the job is unknown")


def usable_start(start_s: float | None) -> float | None:
    """A start that a clock with the time of day can show, else None."""
    return start_s if start_s is not None and EARLIEST_START_S <= start_s < LATEST_START_S else None
