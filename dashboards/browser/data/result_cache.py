"""Results that were read, each once: reading twice at a time takes twice the time and memory.

In: keys, and functions that read. Out: the results of the last keys, to callers in any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Result = TypeVar("_Result")


class ResultCache:
    """The last `most` results, each read once: reading twice at a time takes twice the time and memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keeping = threading.Lock()
        self._results: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._under_way: dict[tuple[Any, ...], threading.Lock] = {}

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        with self._keeping:
            return key in self._results

    def get(self, key: tuple[Any, ...], read: Callable[[], _Result]) -> _Result:
        """Return the result of `read`; read again only after eviction. Callers wait for a read in progress."""
        with self._keeping:
            if key in self._results:
                self._results.move_to_end(key)
                return cast("_Result", self._results[key])
            reading = self._under_way.setdefault(key, threading.Lock())
        with reading:
            if key in self:
                return self.get(key, read)
            try:
                result = read()
            finally:
                with self._keeping:
                    self._under_way.pop(key, None)
            with self._keeping:
                self._results[key] = result
                while len(self._results) > self._most:
                    self._results.popitem(last=False)
        return result
