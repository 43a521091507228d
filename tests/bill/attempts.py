"""Run directories written by hand: attempts of ranks on one host, with every time chosen by the test."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.writtenrun import EPOCH_S, WrittenRun
from tracekit.collectors.record.wire_format import Category, Flag
from tracekit.collectors.run_directory.segments import RECORD_DTYPE

_NAMES = {"checkpoint": Category.CHECKPOINT, "evaluation": Category.EVALUATION, "data-load": Category.DATA_LOAD}
_NUMBERS = {"step": 0, "forward-compute": 1, "backward-compute": 2, "allreduce": 3, "optimizer": 4, "checkpoint": 5,
            "evaluation": 6, "data-load": 7}  # fmt: skip
#: Work of a rank: what, and from when to when in seconds.
Work = tuple[str, float, float]


class Attempt(WrittenRun):
    """An attempt of `ranks` whose processes begin at `begins_s` on the monotonic clock; the wall clock of the host is
    then `EPOCH_S + begins_s + ahead_s`.
    """

    def __init__(
        self,
        directory: Path,
        ranks: int = 2,
        *,
        attempt: int = 0,
        begins_s: float = 0.0,
        ahead_s: float = 0.0,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.begins_s, self.ahead_s, self.labels = begins_s, ahead_s, dict(labels or {})
        super().__init__(directory, ranks, attempt=attempt)
        self._names()

    def _facts(self, rank: int, world_size: int) -> list[tuple[str, object]]:
        (kind, process), *rest = super()._facts(rank, world_size)
        begun_ns = round(self.begins_s * 1e9)
        wall_ns = round((EPOCH_S + self.ahead_s) * 1e9) + begun_ns
        times = {"monotonic_ns": begun_ns, "time_ns": wall_ns, "scheduler": self.labels}
        return [(kind, {**process, **times}), *rest]

    def _names(self) -> None:
        for rank in range(self.ranks):
            self.tell(rank, [("name", [_NUMBERS[name], name]) for name in _NAMES])

    def step(
        self,
        number: int,
        start_s: float,
        end_s: float,
        work: Mapping[int, Sequence[Work]] | None = None,
        *,
        slow: Mapping[int, float] | None = None,
        recorded: bool = True,
        idle_s: float = 0.0,
    ) -> None:
        """A step of all ranks. Each computes forward and backward from its start, or the end of work that begins there,
        or `idle_s` later, until 0.2 s before its end, of which 0.1 s are the gradients' reduction and 0.1 s the
        optimizer; a rank in `slow` that many seconds longer, while the others wait.
        """
        late = max((slow or {}).values(), default=0.0)
        planned = [ends for ops in (work or {}).values() for _, starts, ends in ops if starts == start_s]
        for rank in range(self.ranks):
            begun, more = max(planned, default=start_s) + idle_s, (slow or {}).get(rank, 0.0)
            reduced = end_s - 0.2 - late + more
            turned = begun + (reduced - begun) * 0.3
            ops = [
                ("forward-compute", Category.COMPUTE, 0, begun, turned),
                ("backward-compute", Category.COMPUTE, int(Flag.LAST_BACKWARD), turned, reduced),
                ("allreduce", Category.COLLECTIVE, 0, reduced, end_s - 0.1),
                ("optimizer", Category.OPTIMIZER, 0, end_s - 0.1, end_s),
            ]
            ops = ops if recorded else []
            ops += [(name, _NAMES[name], 0, start, end) for name, start, end in (work or {}).get(rank, ())]
            flags = int(Flag.COMPLETE) | (int(Flag.RECORDING) if recorded else 0)
            self.records(rank, number, [*ops, ("step", Category.STEP, flags, start_s, end_s)])

    def records(self, rank: int, step: int, ops: Sequence[tuple[str, Category, int, float, float]]) -> None:
        """Records of a rank, in order of their ends."""
        rows = np.zeros(len(ops), RECORD_DTYPE)
        rows["microbatch"], rows["chunk"], rows["peer"], rows["step"] = -1, -1, -1, step
        for row, (name, category, flags, start_s, end_s) in zip(rows, sorted(ops, key=lambda op: op[4]), strict=True):
            row["category"], row["flags"], row["name"] = category, flags, _NUMBERS[name]
            row["start_ns"], row["end_ns"] = round(start_s * 1e9), round(end_s * 1e9)
            if category is Category.COMPUTE:
                row["microbatch"] = 0
            if category is Category.COLLECTIVE:
                row["peer"] = 0
        rows["number"] = self._written[rank] + 1 + np.arange(len(rows))
        self._written[rank] += len(rows)
        self.write(rank, rows.tobytes())


def command(directory: Path, start_s: float, end_s: float | None) -> None:
    """State when the command started and ended, seconds after `EPOCH_S`."""
    path = directory / "run.json"
    run = json.loads(path.read_text()) | {"started_ns": round((EPOCH_S + start_s) * 1e9)}
    path.write_text(json.dumps(run if end_s is None else run | {"ended_ns": round((EPOCH_S + end_s) * 1e9)}))
