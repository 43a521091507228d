"""What recording a run cost, and what it could not record, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.base.text import listed, ranks_text
from tracekit.collectors.record.wire_format import Category, Flag
from tracekit.collectors.run_directory.segments import AttemptRecording, RankRecording

#: Comparisons needed between steps that all ran without hooks; fewer do not show how much such comparisons vary.
FEWEST_PLACEBOS = 5
#: Do not compare longer blocks of steps: the job may drift within them.
LONGEST_BLOCK = 50
#: The standard deviation of a normal distribution in median absolute deviations, and the standard error of a median in
#: standard errors of a mean.
_SIGMA_PER_MAD, _MEDIAN_ERROR = 1.4826, 1.2533

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RecordingCost:
    """Extra time of steps with recording, as a share of a step, and its standard error.

    The error is the scatter of comparisons between steps that all ran without recording.
    """

    share: float
    error: float
    off_s: float
    on_steps: int
    off_steps: int

    def sentence(self) -> str:
        """The message for the user."""
        return (
            f"recording costs {self.share:.1%} +- {self.error:.1%} of a step of {self.off_s * 1e3:.2f} ms"
            f" ({self.on_steps} recorded step{'s' * (self.on_steps != 1)} against those before and after, of"
            f" {self.off_steps} without)"
        )


def recording_cost(recording: AttemptRecording) -> RecordingCost | str:
    """The cost, or a sentence with the reason why it is unknown.

    Each run of recorded steps is compared with as many steps without recording on both sides of it. The first step
    after each switch is left out.
    """
    steps, seconds, on = _step_times(recording)
    switched = np.diff(on, prepend=~on[:1]) | (np.diff(steps, prepend=-2) != 1)
    usable = ~switched & (steps > 0)
    on_at, off_at = np.flatnonzero(usable & on), np.flatnonzero(usable & ~on)
    starts = np.flatnonzero(np.diff(on_at, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(on_at))
    if not len(on_at):
        return (
            "the cost of recording is unknown: no two steps in a row were recorded (with `--every N`, use"
            " `--for 2` or more)"
        )
    size = min(int(np.median(lengths)), len(off_at) // (FEWEST_PLACEBOS + 2), LONGEST_BLOCK)
    if size < 1:
        return (
            f"the cost of recording is unknown: {len(off_at)} steps ran without it, {FEWEST_PLACEBOS + 2} are needed"
            " (use `--overhead`, `--every N --for 2` or `--idle`)"
        )
    off = np.log(seconds[off_at])
    blocks = [on_at[start : start + size] for start, length in zip(starts, lengths, strict=True) if length >= size]
    effects = np.array(
        [_effect(np.log(seconds[block]), off, int(np.searchsorted(off_at, block[0]))) for block in blocks]
    )
    placebos = _placebos(off, size)
    error = _SIGMA_PER_MAD * float(np.median(np.abs(placebos))) * (_MEDIAN_ERROR / len(effects) ** 0.5)
    return RecordingCost(
        share=float(np.expm1(np.median(effects))),
        error=error,
        off_s=float(np.median(seconds[off_at])),
        on_steps=len(on_at),
        off_steps=len(off_at),
    )


def _step_times(recording: AttemptRecording) -> tuple[npt.NDArray[np.int64], _Floats, npt.NDArray[np.bool_]]:
    """Steps in order, the duration of each (median over the ranks, seconds), and whether it was recorded."""
    ends = np.concatenate([one.records[one.records["category"] == Category.STEP] for one in recording.ranks.values()])
    ends = ends[np.argsort(ends["step"], kind="stable")]
    steps, first = np.unique(ends["step"], return_index=True)
    took = (ends["end_ns"] - ends["start_ns"]) / 1e9
    seconds = np.array([np.median(times) for times in np.split(took, first[1:])])
    recorded = (ends["flags"] & Flag.RECORDING) != 0
    return steps.astype(np.int64), np.maximum(seconds, 1e-9), np.logical_or.reduceat(recorded, first)


def _effect(block: _Floats, off: _Floats, position: int) -> float:
    """Extra time of a block's steps over the steps without recording around `position`, as a logarithm."""
    beside = np.concatenate([off[max(0, position - len(block)) : position], off[position : position + len(block)]])
    return float(np.median(block) - np.median(beside))


def _placebos(off: _Floats, size: int) -> _Floats:
    """The same comparison for blocks that were not recorded."""
    blocks = off[: len(off) // size * size].reshape(-1, size)
    beside = np.concatenate([blocks[:-2], blocks[2:]], axis=1)
    return np.asarray(np.median(blocks[1:-1], axis=1) - np.median(beside, axis=1), np.float64)


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
