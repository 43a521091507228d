"""Windows of a watched job for an experiment tracker, through a process of its own.

In: windows as they are stored. Out: their numbers to `tracekit.dashboards.trackers`, one at a time. A tracker that
hangs or fails costs its process only: the number of waiting windows is limited, and those that are lost are counted.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tracekit.base.errors import SelectionError

#: Limit of waiting windows; beyond it, the oldest is dropped.
MOST_WAITING = 100
#: What `--log` can name: each is also the name of its package.
TRACKERS = ("wandb", "mlflow", "tensorboard")


class TrackerProcess:
    """A tracker of one job. `where`: as for `tracekit.dashboards.trackers.opened`.

    Raises SelectionError for a tracker that is unknown or not installed. `logged`, `dropped`: how many windows arrived,
    and, once closed, how many did not.
    """

    def __init__(self, where: str, store: Path | str, job: str) -> None:
        kind = where.partition(":")[0]
        if kind not in TRACKERS:
            raise SelectionError(f"--log {where!r:.200}; expected {', '.join(TRACKERS)}, or one of them with :WHERE")
        if find_spec(kind) is None:
            raise SelectionError(f"--log {kind}: not installed; pip install {kind}")
        self.kind, self.logged, self.dropped, self._unconfirmed = kind, 0, 0, 0
        self._waiting: queue.Queue[int | None] = queue.Queue(MOST_WAITING)
        self._process = subprocess.Popen(  # noqa: S603 - no shell; tracekit itself
            [sys.executable, "-P", "-m", "tracekit.dashboards.trackers", where, str(store), job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C ends the watch, which ends this
        )
        self._thread = threading.Thread(target=self._run, name="tracekit-tracker", daemon=True)
        self._thread.start()

    def tell(self, windows: Sequence[dict[str, Any]]) -> None:
        """Queue windows, as `Changes` has them; never blocks."""
        for window in windows:
            if self._waiting.full():
                with suppress(queue.Empty):  # it has just been logged
                    self._waiting.get_nowait()
                    self.dropped += 1
            self._waiting.put_nowait(window["number"])  # only this thread adds windows

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for the windows and the page; then end the process. What is left is lost."""
        until = time.monotonic() + timeout_s
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout_s)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(until - time.monotonic(), 0.0))
        self._process.kill()
        self._process.wait()
        with suppress(queue.Empty):
            while True:
                self.dropped += self._waiting.get_nowait() is not None
        self._waiting.put_nowait(None)
        self._thread.join()
        self.dropped += self._unconfirmed

    def losses(self) -> Iterator[str]:
        """A line with the number of windows that did not arrive, if there are any, or that the page did not."""
        if self.dropped:
            yield f"--log: {self.dropped} window{'s' * (self.dropped > 1)} did not reach {self.kind}"
        elif self._process.returncode:
            yield f"--log: the report did not reach {self.kind}"

    def _run(self) -> None:
        """Hand over a window at a time, until the process confirms it."""
        to, confirmed = self._process.stdin, self._process.stdout
        assert to is not None
        assert confirmed is not None
        with confirmed, suppress(OSError), to:
            while (number := self._waiting.get()) is not None:
                with suppress(OSError):  # it has ended
                    to.write(f"{number}\n")
                    to.flush()
                if confirmed.readline():
                    self.logged += 1
                else:
                    self._unconfirmed += 1
