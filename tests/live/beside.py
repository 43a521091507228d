"""A live run beside a written one, whose clock the test turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tracekit.live.run import LiveOptions, LiveRun
from tracekit.live.windows import WindowSize
from tracekit.store import Store


class Beside:
    """A live run whose clock the test turns; `said`: the lines it told."""

    def __init__(
        self,
        folder: Path,
        clock: list[float],
        *,
        late_after_s: float = 5.0,
        store: Path | None = None,
        **more: Any,
    ) -> None:
        self.said: list[str] = []
        self.store = Store(store or folder / "jobs.store")
        options = LiveOptions(
            folder / "run", self.store.path, "job", WindowSize(steps=10), late_after_s=late_after_s, **more
        )
        self.run, self._clock = LiveRun(options, self.said.append), clock

    def look(self, after_s: float = 1.0) -> None:
        """Look now and again after some time."""
        self.run.poll()
        self._clock[0] += after_s
        self.run.poll()

    def windows(self) -> list[tuple[int, int]]:
        return [(one.first_step, one.last_step) for one in self.store.windows("job")]
