"""What a running collection knows so far: steps seen, the slowest rank, the cost of recording.

In: segments while they grow. Out: a progress line, and at the end the overhead of recording.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tracekit.collectors.run_directory.segments import RECORD_DTYPE, AttemptRecording
from tracekit.collectors.runtime.wire_format import HEADER, Category, Flag
from tracekit.stderr import say

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
            except FileNotFoundError:  # sealed under another name between listing and opening: the next call finds it
                continue

    def _read_on(self, path: Path, key: str, rank: int) -> None:
        offset = self._read.get(key, HEADER.size)
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read()
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
        """Update, and draw the line where somebody looks at a terminal."""
        if sys.stderr is not None and sys.stderr.isatty():
            self.update()
            say(f"\r\033[K{self.line()}\r", end="")


@dataclass(frozen=True, slots=True)
class Overhead:
    """What recording costs: the ratio of median step times with recording on and off, and how sure that is.

    `noise`: the same ratio between alternate off-blocks, minus 1, as a size; an effect below it is not seen.
    """

    ratio: float
    noise: float
    on_s: float
    off_s: float
    on_steps: int
    off_steps: int


def measure_overhead(recording: AttemptRecording, block: int) -> Overhead | None:
    """Compare blocks with recording on and off; None where there are fewer than two of each.

    Per step, the median over the ranks; the first step after each switch is left out.
    """
    table: defaultdict[int, list[float]] = defaultdict(list)
    for one in recording.ranks.values():
        steps = one.records[one.records["category"] == Category.STEP]
        for record in steps:
            table[int(record["step"])].append((int(record["end_ns"]) - int(record["start_ns"])) / 1e9)
    blocks: defaultdict[int, list[float]] = defaultdict(list)
    for step, times in table.items():
        if step % block:
            blocks[step // block].append(float(np.median(times)))
    on = [blocks[number] for number in sorted(blocks) if number % 2 == 0 and number > 0]
    off = [blocks[number] for number in sorted(blocks) if number % 2 == 1]
    if len(on) < 2 or len(off) < 2:
        return None
    on_s, off_s = _median(on), _median(off)
    return Overhead(
        ratio=on_s / off_s,
        noise=abs(_median(off[::2]) / _median(off[1::2]) - 1),
        on_s=on_s,
        off_s=off_s,
        on_steps=sum(map(len, on)),
        off_steps=sum(map(len, off)),
    )


def _median(blocks: list[list[float]]) -> float:
    values: npt.NDArray[np.float64] = np.concatenate([np.asarray(block, np.float64) for block in blocks])
    return float(np.median(values))
