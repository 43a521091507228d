"""Who asks for metrics, and how often: so that the last figures of a watch are fetched before it ends.

Prometheus cannot tell a watch that ended with its job from one that was killed, unless it has fetched that the job has
ended. In: the address and the time of each answer. Out: when all who ask have asked once more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

#: Who has not asked again after so many of its intervals has stopped asking.
INTERVALS = 2.0
#: Its interval is the longest of so many: one late answer makes the next one look early.
GAPS = 5
#: The longest wait for all of them, seconds.
LONGEST_WAIT_S = 120.0


@dataclass(slots=True)
class Scrapes:
    """`last`: when each address asked last, on the monotonic clock; `gaps`: between its last times, seconds."""

    last: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, deque[float]] = field(default_factory=dict)
    _asked: threading.Condition = field(default_factory=threading.Condition)

    def note(self, address: str, asked_at: float) -> None:
        """Somebody who asked at `asked_at` has been answered."""
        with self._asked:
            if address in self.last:
                self.gaps.setdefault(address, deque(maxlen=GAPS)).append(asked_at - self.last[address])
            self.last[address] = asked_at
            self._asked.notify_all()

    def wait_for_all(self, stop: threading.Event) -> None:
        """Wait until everybody who asks regularly has asked since now, or has stopped asking, or `stop` is set."""
        since = time.monotonic()
        with self._asked:
            while not stop.is_set() and (left := self._patience(since, time.monotonic())) > 0:
                self._asked.wait(min(left, 0.5))  # a signal sets `stop`, and wakes nobody

    def _patience(self, since: float, now: float) -> float:
        """How long somebody who has not asked since may still take, seconds; 0 where nobody is awaited."""
        due = [self.last[one] + INTERVALS * max(gaps) for one, gaps in self.gaps.items() if self.last[one] < since]
        return max(0.0, min(max(due, default=now), since + LONGEST_WAIT_S) - now)
