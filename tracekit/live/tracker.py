"""Windows of a watched job for an experiment tracker, through a process of its own.

In: windows as they are stored. Out: their numbers to `tracekit.dashboards.trackers`, one at a time. A tracker that
hangs or fails costs its process only: the number of waiting windows is limited, and those that are lost are counted.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from tracekit.base.errors import SelectionError
from tracekit.live.outbox import Outbox

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
        self._process = subprocess.Popen(  # noqa: S603 - no shell; tracekit itself
            [sys.executable, "-P", "-m", "tracekit.dashboards.trackers", where, str(store), job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C ends the watch, which ends this
        )
        self._outbox = Outbox[int](self._log, "tracekit-tracker")

    def tell(self, windows: Sequence[dict[str, Any]]) -> None:
        """Queue windows, as `Changes` has them; never blocks."""
        for window in windows:
            self._outbox.put(window["number"])

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for the windows and the page; then end the process. What is left is lost."""
        until, (to, confirmed) = time.monotonic() + timeout_s, self._pipes()
        self._outbox.close(timeout_s)
        self.dropped = self._outbox.dropped + self._unconfirmed
        with suppress(OSError):  # it has ended
            to.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(until - time.monotonic(), 0.0))
        self._process.kill()
        self._process.wait()
        confirmed.close()

    def losses(self) -> Iterator[str]:
        """A line with the number of windows that did not arrive, if there are any, or that the page did not."""
        if self.dropped:
            yield f"--log: {self.dropped} window{'s' * (self.dropped > 1)} did not reach {self.kind}"
        elif self._process.returncode:
            yield f"--log: the report did not reach {self.kind}"

    def _log(self, number: int) -> None:
        """Hand over a window, and wait until the process confirms it."""
        (to, confirmed), answer = self._pipes(), ""
        with suppress(OSError, ValueError):  # it has ended, or the watch has
            to.write(f"{number}\n")
            to.flush()
            answer = confirmed.readline()
        self.logged += bool(answer)
        self._unconfirmed += not answer

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout
