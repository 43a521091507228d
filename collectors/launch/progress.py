"""The progress of a running collection: steps seen, the slowest rank.

In: segments while they grow. Out: a progress line.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tracekit.base.stderr import say
from tracekit.collectors.run_directory.segments import RECORD_DTYPE
from tracekit.collectors.runtime.small_file import open_regular
from tracekit.collectors.runtime.wire_format import HEADER, Category, Flag

#: Bytes of a segment that are read in one go; the next call reads on.
_AT_ONCE = 8 << 20
_SEGMENT_STEM = re.compile(r"(rank-(\d+)-\d+)\.(?:ops|open)$")


@dataclass(slots=True)
class Progress:
    """Follows the segments of a run directory; `update` reads what is new."""

    directory: Path
    steps: int = 0
    _read: dict[str, int] = field(default_factory=dict)
    _compute_ns: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def update(self) -> None:
        """Read the step records written since the last call."""
        for path in self.directory.glob("attempt-*/rank-*"):
            match = _SEGMENT_STEM.match(path.name)
            if match is None:
                continue
            key = f"{path.parent.name}/{match.group(1)}"
            try:
                self._read_on(path, key, int(match.group(2)))
            except OSError:  # sealed under another name between listing and opening: the next call finds it
                continue

    def _read_on(self, path: Path, key: str, rank: int) -> None:
        offset = self._read.get(key, HEADER.size)
        with open(open_regular(path), "rb") as file:
            file.seek(offset)
            content = file.read(_AT_ONCE)
        whole = len(content) // RECORD_DTYPE.itemsize
        records = np.frombuffer(content, RECORD_DTYPE, whole)
        self._read[key] = offset + whole * RECORD_DTYPE.itemsize
        steps = records[(records["category"] == Category.STEP) & (records["flags"] & Flag.COMPLETE != 0)]
        if len(steps):
            self.steps = max(self.steps, int(steps["step"].max()) + 1)
            self._compute_ns[rank].extend(int(value) for value in steps["extra"] if value)

    def slowest_rank(self) -> tuple[int, float] | None:
        """The rank with the largest median compute time per step, and its ratio to the median rank; None so far."""
        medians = {rank: float(np.median(times[1:])) for rank, times in self._compute_ns.items() if len(times) > 1}
        if not medians:
            return None
        rank = max(medians, key=lambda one: medians[one])
        return rank, medians[rank] / float(np.median(list(medians.values())))

    def line(self) -> str:
        """The progress line."""
        slowest = self.slowest_rank()
        so_far = f"; most compute time: rank {slowest[0]} ({slowest[1]:.2f} x the median rank)" if slowest else ""
        return f"tracekit: {self.steps} steps on {len(self._compute_ns)} ranks{so_far}"

    def show(self) -> None:
        """Update, and draw the line if stderr is a terminal."""
        if sys.stderr is not None and sys.stderr.isatty():
            self.update()
            say(f"\r\033[K{self.line()}\r", end="")
