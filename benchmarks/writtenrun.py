"""Write a run directory without ranks: a data-parallel job of any size, its steps written on demand.

Writes segments and facts as `tracekit watch` finds them while a job runs. Microbatches of 10 ms forward and 20 ms
backward, gradients reduced in 5 ms once the last rank arrives, an optimizer of 5 ms: a healthy step of 2 microbatches
takes 70 ms.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np

from tracekit.collectors.record.wire_format import (
    HEADER,
    MAGIC,
    OPEN_SUFFIX,
    RECORD,
    SEALED_SUFFIX,
    VERSION,
    Category,
    Flag,
)
from tracekit.collectors.run_directory.launchers import announce_end
from tracekit.collectors.run_directory.segments import RECORD_DTYPE

MS = 1_000_000
FORWARD_MS, BACKWARD_MS, REDUCE_MS, OPTIMIZER_MS = 10, 20, 5, 5
NAMES = ("step", "forward-compute", "backward-compute", "allreduce", "optimizer")
EPOCH_S = 1_700_000_000


class WrittenRun:
    """A data-parallel run of `ranks`, `per_host` of them on a host, in `directory`."""

    def __init__(
        self, directory: Path, ranks: int, *, microbatches: int = 2, per_host: int = 8, attempt: int = 0
    ) -> None:
        self.directory, self.ranks, self.microbatches = directory, ranks, microbatches
        self._per_host, self._attempt = per_host, attempt
        self._written = [0] * ranks
        self._now_ms, self._segments = 0.0, 0
        self.attempt_directory = directory / f"attempt-{attempt:03d}"
        self.attempt_directory.mkdir(parents=True, exist_ok=True)
        run = {"command": ["torchrun", "train.py"], "options": {"first_step": 1}}
        (directory / "run.json").write_text(json.dumps(run))
        (directory / "launcher-elsewhere-1.running").touch()
        for rank in range(ranks):
            self.tell(rank, self._facts(rank, ranks))

    def _facts(self, rank: int, world_size: int) -> list[tuple[str, object]]:
        host = f"node-{rank // self._per_host:04d}"
        process = {"rank": rank, "world_size": world_size, "host": host, "time_ns": EPOCH_S * 1000 * MS}
        everyone = list(range(world_size))
        return [
            ("process", {**process, "monotonic_ns": 0, "process_id": 1000 + rank, "attempt": self._attempt}),
            ("mesh", {"names": ["dp"], "ranks": everyone}),
            ("group", {"number": 0, "name": "0", "description": "dp", "ranks": everyone}),
            *(("name", [number, name]) for number, name in enumerate(NAMES)),
        ]

    def tell(self, rank: int, facts: Iterable[tuple[str, object]]) -> None:
        """Append facts of a rank."""
        with (self.attempt_directory / f"rank-{rank:06d}.facts").open("a") as file:
            file.writelines(json.dumps({"kind": kind, "value": value}) + "\n" for kind, value in facts)

    def segment(self, rank: int) -> Path:
        """The open segment of a rank."""
        return self.attempt_directory / f"rank-{rank:06d}-{self._segments:04d}{OPEN_SUFFIX}"

    def seal(self) -> None:
        """Continue every rank in a new segment."""
        for rank in range(self.ranks):
            self.segment(rank).rename(self.segment(rank).with_suffix(SEALED_SUFFIX))
        self._segments += 1

    def write(self, rank: int, content: bytes) -> None:
        """Append bytes to the segment of a rank, which starts with its header."""
        path = self.segment(rank)
        if not path.exists():
            path.write_bytes(HEADER.pack(MAGIC, VERSION, RECORD.size, rank, self._attempt, 1000 + rank))
        with path.open("ab") as file:
            file.write(content)

    def run(
        self, steps: Iterable[int], *, slow: Mapping[int, float] | None = None, without: Collection[int] = ()
    ) -> None:
        """Run steps: ranks compute `slow` times as long; ranks in `without` write nothing and delay nobody."""
        slower = slow or {}
        for step in steps:
            computing_ms = {
                rank: self.microbatches * (FORWARD_MS + BACKWARD_MS) * slower.get(rank, 1.0)
                for rank in range(self.ranks)
                if rank not in without
            }
            reduced_ms = self._now_ms + max(computing_ms.values()) + REDUCE_MS
            for rank in computing_ms:
                self.write(rank, self._step(rank, step, slower.get(rank, 1.0), reduced_ms).tobytes())
            self._now_ms = reduced_ms + OPTIMIZER_MS

    def _step(self, rank: int, step: int, factor: float, reduced_ms: float) -> np.ndarray:
        rows = []
        at_ms = self._now_ms
        for name, length_ms in ((1, FORWARD_MS), (2, BACKWARD_MS)) * self.microbatches:
            end_ms = at_ms + length_ms * factor
            rows.append((Category.COMPUTE, 0, name, len(rows) // 2, at_ms, end_ms))
            at_ms = end_ms
        rows[-1] = (Category.COMPUTE, int(Flag.LAST_BACKWARD), *rows[-1][2:])
        rows.append((Category.COLLECTIVE, 0, 3, 0, at_ms, reduced_ms))
        rows.append((Category.OPTIMIZER, 0, 4, -1, reduced_ms, reduced_ms + OPTIMIZER_MS))
        whole = int(Flag.COMPLETE | Flag.RECORDING)
        rows.append((Category.STEP, whole, 0, -1, self._now_ms, reduced_ms + OPTIMIZER_MS))
        records = np.zeros(len(rows), RECORD_DTYPE)
        records["microbatch"], records["chunk"], records["peer"], records["step"] = -1, -1, -1, step
        for record, (category, flags, name, microbatch, start_ms, end_ms) in zip(records, rows, strict=True):
            record["category"], record["flags"], record["name"] = category, flags, name
            record["start_ns"], record["end_ns"] = round(start_ms * MS), round(end_ms * MS)
            if category is Category.COMPUTE:
                record["microbatch"] = microbatch
            if category is Category.COLLECTIVE:
                record["peer"] = 0
        records["number"] = self._written[rank] + 1 + np.arange(len(rows))
        self._written[rank] += len(rows)
        return records

    def end(self, code: int | None = None) -> None:
        """Mark the end of the launcher's command: exit code, negative for a signal; None: as older launchers did."""
        announce_end(self.directory / "launcher-elsewhere-1.running", code)
