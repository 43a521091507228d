"""Items that a thread hands over one after the other, without keeping the watch waiting.

In: messages, or windows. Out: calls of `deliver` from another thread. If it is slow, the oldest items are dropped and
counted.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

#: Limit of waiting items; beyond it, the oldest is dropped.
MOST_WAITING = 100

_Item = TypeVar("_Item")


class Outbox(Generic[_Item]):
    """Calls `deliver` for each item from a thread called `name`. `closing` is set once nothing is to be retried.

    `dropped`: items that were not delivered because others came, or because the outbox was closed.
    """

    def __init__(self, deliver: Callable[[_Item], None], name: str) -> None:
        self.dropped, self.closing = 0, threading.Event()
        self._deliver, self._on_its_way = deliver, False
        self._waiting: queue.Queue[_Item | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: _Item) -> None:
        """Queue an item; never blocks. For one thread only."""
        if self._waiting.full():
            with suppress(queue.Empty):  # it has just been delivered
                self._waiting.get_nowait()
                self.dropped += 1
        self._waiting.put_nowait(item)

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for queued items to be delivered. What is left counts as dropped, including an
        item on its way.
        """
        self.closing.set()
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout_s)
        self.dropped += sum(item is not None for item in list(self._waiting.queue)) + self._on_its_way

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._on_its_way = True
            self._deliver(item)
            self._on_its_way = False
            if self.closing.is_set() and self._waiting.empty():  # the queue had no room for the None
                return
