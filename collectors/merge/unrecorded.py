"""What a run could not record, and why: hooks this torch has no place for, hooks that failed, GPUs nobody used.

In: an `AttemptRecording`. Out: `Unrecorded`, for the closing lines of `tracekit collect` and the trace's metadata.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tracekit.collectors.run_directory.segments import AttemptRecording, RankRecording


@dataclass(frozen=True, slots=True)
class LostHook:
    """A hook that could not be put in place. `lacks`: what the trace therefore has not; `torch`: its version."""

    hook: str
    reason: str
    lacks: str
    torch: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FailedHook:
    """A hook that failed while the job ran, and is off since. `calls`: over all ranks, those it missed included."""

    hook: str
    calls: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """What an attempt lacks. `unused_device`: what torch could use a GPU with (`CUDA 13.0`) where no rank did."""

    lost: tuple[LostHook, ...]
    failed: tuple[FailedHook, ...]
    unused_device: str | None

    def metadata(self) -> dict[str, Any]:
        """What the trace says of it; nothing where nothing is lacking."""
        found: dict[str, Any] = {}
        if self.lost:
            found["lost_hooks"] = [asdict(one) for one in self.lost]
        if self.failed:
            found["failed_hooks"] = [asdict(one) for one in self.failed]
        return found

    def lines(self) -> list[str]:
        """What to tell the user at the end, a line each. Failed hooks are told rank by rank elsewhere."""
        lines = [
            f"WARNING: {one.hook} of torch {one.torch} cannot be hooked ({one.reason}) on {_ranks(one.ranks)}; the"
            f" trace lacks {one.lacks}"
            for one in self.lost
        ]
        if self.unused_device is not None:
            lines.append(f"torch is built for {self.unused_device}, but no GPU was used: ops have host times")
        return lines


def find_unrecorded(recording: AttemptRecording) -> Unrecorded:
    """Gather what the ranks told."""
    ranks = list(recording.ranks.values())
    return Unrecorded(_lost(ranks), _failed(ranks), _unused_device(ranks))


def _lost(ranks: Iterable[RankRecording]) -> tuple[LostHook, ...]:
    where: defaultdict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for one in ranks:
        version = str(_told(one, "torch").get("version", "?"))
        for fact in one.facts.get("lost-hook", []):
            told = fact if isinstance(fact, dict) else {}
            key = (str(told.get("hook")), str(told.get("reason")), str(told.get("lacks")), version)
            if one.rank not in where[key]:
                where[key].append(one.rank)
    return tuple(LostHook(*key, tuple(sorted(members))) for key, members in where.items())


def _failed(ranks: Iterable[RankRecording]) -> tuple[FailedHook, ...]:
    calls: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for one in ranks:
        for hook, count in (one.summary or {}).get("failures", {}).items():
            calls[hook][one.rank] = int(count)
    return tuple(FailedHook(hook, sum(of.values()), tuple(sorted(of))) for hook, of in sorted(calls.items()))


def _unused_device(ranks: Iterable[RankRecording]) -> str | None:
    """What torch could use a GPU with, where every rank ended without having used one; else None."""
    versions = set()
    for one in ranks:
        version = _told(one, "torch").get("device")
        if version is None or one.facts.get("device-clock") or (one.summary or {}).get("gpu_used", True):
            return None
        versions.add(str(version))
    return ", ".join(sorted(versions)) or None


def _told(one: RankRecording, kind: str) -> dict[str, Any]:
    """The last fact of a kind that is an object."""
    facts = one.facts.get(kind, [])
    return facts[-1] if facts and isinstance(facts[-1], dict) else {}


def _ranks(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
