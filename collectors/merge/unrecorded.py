"""Report what a run could not record, and why: hooks that do not fit this torch, failed hooks, stopped recordings.

In: an `AttemptRecording`. Out: `Unrecorded`, for the closing lines of `tracekit collect` and the trace's metadata.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tracekit.base.text import listed, ranks_text
from tracekit.collectors.run_directory.segments import AttemptRecording, RankRecording

#: Name at most this many ranks in a line.
MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """The missing parts of an attempt.

    `lost`: hooks that could not be installed: `hook`, `reason`, `lacks` (what the trace lacks as a result), `torch`
    (its version), `ranks`. `failed`: hooks that failed while the job ran and have been off since: `hook`, `calls` (over
    all ranks, including missed ones), `ranks`. `stopped`: rank -> last step (-1: none), where a recording stopped
    before its rank ended. `unused_device`: the GPU platform that torch could have used (`CUDA 13.0`) if no rank used
    a GPU.
    """

    lost: list[dict[str, Any]]
    failed: list[dict[str, Any]]
    stopped: dict[int, int]
    unused_device: str | None

    def metadata(self) -> dict[str, Any]:
        """Entries of the trace's metadata; empty if nothing is missing."""
        stopped = {str(rank): step for rank, step in self.stopped.items()}
        entries = {"lost_hooks": self.lost, "failed_hooks": self.failed, "stopped_ranks": stopped}
        return {name: value for name, value in entries.items() if value}

    def stopped_line(self) -> str | None:
        """A line about recordings that stopped before their ranks ended; None if there are none."""
        if not self.stopped:
            return None
        shown = [f"{rank} (step {step})" for rank, step in self.stopped.items()]
        where = f"{'rank' if len(shown) == 1 else 'ranks'} {listed(shown, MOST_SHOWN)}"
        return f"the recording stops early on {where}: killed, out of disk space, or still running"

    def lines(self) -> list[str]:
        """Closing lines for the user. They omit failed hooks, which are reported per rank elsewhere."""
        lines = [
            f"WARNING: {one['hook']} of torch {one['torch']} cannot be hooked ({one['reason']}) on"
            f" {ranks_text(one['ranks'])}; the trace lacks {one['lacks']}"
            for one in self.lost
        ]
        if self.unused_device is not None:
            lines.append(f"torch is built for {self.unused_device}, but no GPU was used: ops have host times")
        return lines


def find_unrecorded(recording: AttemptRecording) -> Unrecorded:
    """Gather the reports of all ranks."""
    ranks = list(recording.ranks.values())
    off = [one for one in ranks if (one.summary or {"off": "no summary"}).get("off")]
    stopped = {one.rank: int(one.records["step"].max(initial=-1)) for one in off}
    return Unrecorded(_lost(ranks), _failed(ranks), stopped, _unused_device(ranks))


def _lost(ranks: Iterable[RankRecording]) -> list[dict[str, Any]]:
    where: defaultdict[tuple[str, str, str, str], set[int]] = defaultdict(set)
    for rank in ranks:
        version = rank.facts.get("torch", [{"version": "?"}])[-1]["version"]
        for fact in rank.facts.get("lost-hook", []):
            where[fact["hook"], fact["reason"], fact["lacks"], version].add(rank.rank)
    names = ("hook", "reason", "lacks", "torch")
    return [{**dict(zip(names, key, strict=True)), "ranks": sorted(members)} for key, members in where.items()]


def _failed(ranks: Iterable[RankRecording]) -> list[dict[str, Any]]:
    calls: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for rank in ranks:
        for hook, count in (rank.summary or {}).get("failures", {}).items():
            calls[hook][rank.rank] = int(count)
    return [{"hook": hook, "calls": sum(of.values()), "ranks": sorted(of)} for hook, of in sorted(calls.items())]


def _unused_device(ranks: Iterable[RankRecording]) -> str | None:
    """The GPU platform that torch could have used, if every rank ended without using a GPU; else None."""
    versions = set()
    for rank in ranks:
        version = rank.facts.get("torch", [{}])[-1].get("device")
        if version is None or rank.facts.get("device-clock") or (rank.summary or {}).get("gpu_used", True):
            return None
        versions.add(str(version))
    return ", ".join(sorted(versions)) or None
