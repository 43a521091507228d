"""Keep a watch alive until its last metrics have been scraped.

Unless Prometheus scrapes the end of the job, it cannot distinguish the end of the watch from a kill. In: the address
and the time of each scrape. Out: when every regular client has scraped once more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

#: A client that has not scraped for this many of its intervals has stopped.
INTERVALS = 2.0
#: A client's interval is the longest of its last gaps, this many: one late scrape makes the next one look early.
GAPS = 5
#: The longest wait for all clients, seconds.
LONGEST_WAIT_S = 120.0


@dataclass(slots=True)
class Scrapes:
    """`last`: when each address scraped last, on the monotonic clock; `gaps`: between its last scrapes, seconds."""

    last: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, deque[float]] = field(default_factory=dict)
    _asked: threading.Condition = field(default_factory=threading.Condition)

    def note(self, address: str, asked_at: float) -> None:
        """Note that a scrape of `asked_at` has been answered."""
        with self._asked:
            if address in self.last:
                self.gaps.setdefault(address, deque(maxlen=GAPS)).append(asked_at - self.last[address])
            self.last[address] = asked_at
            self._asked.notify_all()

    def wait_for_all(self, stop: threading.Event) -> None:
        """Wait until every regular client has scraped again or has stopped, or `stop` is set."""
        since = time.monotonic()
        with self._asked:
            while not stop.is_set() and (remaining_s := self._patience(since, time.monotonic())) > 0:
                self._asked.wait(min(remaining_s, 0.5))  # a signal sets `stop` without notifying the condition

    def _patience(self, since: float, now: float) -> float:
        """Longest time that clients without a scrape since `since` may still take, seconds; 0 if there are none."""
        due = [self.last[one] + INTERVALS * max(gaps) for one, gaps in self.gaps.items() if self.last[one] < since]
        return max(0.0, min(max(due, default=now), since + LONGEST_WAIT_S) - now)
