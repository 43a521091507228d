"""What is known of a run besides its ops: what ranks sampled of their GPUs and hosts, and said of their steps with
`tracekit.log`, for the trace's metadata; what recording it cost, and what could not be recorded, and why.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.base.text import listed, ranks_text
from tracekit.collectors.merge.placement import Placement
from tracekit.collectors.record.wire_format import GPU_SUFFIX, HOST_SUFFIX, Category, Flag, rank_stem
from tracekit.collectors.run_directory.segments import AttemptRecording, RankRecording
from tracekit.trace.facts import (
    SAMPLED,
    SM_CLOCK,
    STEP_VALUES,
    THROTTLED,
    WAITED_FOR_CPU,
    WAITED_FOR_IO,
    WAITED_FOR_MEMORY,
)

#: Samples of a metric that the metadata keeps: of a machine, at most and at least; of all machines together.
MOST_OF_ONE, FEWEST_OF_ONE, MOST_SAMPLES = 720, 60, 40_000
#: Host time, ns, and four values.
_WIDTH = 5
Sample = list["int | None"]
#: Reads the samples of a rank from its file with that suffix.
Read = Callable[[int, str], list[Sample]]
#: Comparisons needed between steps that all ran without hooks; fewer do not show how much such comparisons vary.
FEWEST_PLACEBOS = 5
#: Do not compare longer blocks of steps: the job may drift within them.
LONGEST_BLOCK = 50
#: The standard deviation of a normal distribution in median absolute deviations, and the standard error of a median in
#: standard errors of a mean.
_SIGMA_PER_MAD, _MEDIAN_ERROR = 1.4826, 1.2533

_Floats = npt.NDArray[np.float64]


class _Column(NamedTuple):
    """A metric in column `column` of the samples, times `scale`. `identity`: what names its machine in `fact`."""

    metric: str
    suffix: str
    column: int
    scale: float
    fact: str
    identity: tuple[str, ...]


_COLUMNS = (
    _Column(SM_CLOCK, GPU_SUFFIX, 1, 1.0, "device", ("uuid", "pci_bus_id")),
    _Column(WAITED_FOR_CPU, HOST_SUFFIX, 1, 1e-6, "host-state", ("pressure",)),
    _Column(WAITED_FOR_IO, HOST_SUFFIX, 2, 1e-6, "host-state", ("pressure",)),
    _Column(WAITED_FOR_MEMORY, HOST_SUFFIX, 3, 1e-6, "host-state", ("pressure",)),
    _Column(THROTTLED, HOST_SUFFIX, 4, 1e-6, "host-state", ("limit",)),
)


def read_samples(directory: Path, rank: int, suffix: str) -> list[Sample]:
    """Read a rank's samples: host time, ns, and values. Stops at a torn or damaged line; no file is no error."""
    samples: list[Sample] = []
    try:
        lines = (Path(directory) / (rank_stem(rank) + suffix)).read_bytes().split(b"\n")
    except OSError:
        return samples
    for line in lines[:-1]:
        try:
            sample = json.loads(line)
        except ValueError:
            break
        well_formed = isinstance(sample, list) and len(sample) == _WIDTH and isinstance(sample[0], int)
        if not (well_formed and all(isinstance(value, int | None) for value in sample)):
            break
        samples.append(sample)
    return samples


def sampled_series(recording: AttemptRecording, read: Read) -> dict[str, Any]:
    """The series of an attempt as metadata; empty if nothing was sampled."""
    sampled = {column.metric: dict(_machines(recording, read, column)) for column in _COLUMNS}
    if not any(series["value"][-1] for series in sampled[THROTTLED].values()):
        del sampled[THROTTLED]  # a kernel that counts for a limit that is not set
    measured = {metric: machines for metric, machines in sampled.items() if machines}
    return {SAMPLED: measured} if measured else {}


def _machines(recording: AttemptRecording, read: Read, column: _Column) -> Iterator[tuple[str, dict[str, Any]]]:
    """The series of each machine by its name: its host, with its ranks if the host has several."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, of_rank in sorted(recording.ranks.items()):
        facts = of_rank.facts.get(column.fact)
        if facts:
            host = str(of_rank.facts["process"][0]["host"])
            ranks.setdefault((host, *(str(facts[-1].get(name)) for name in column.identity)), []).append(rank)
    hosts = [host for host, *_ in ranks]
    most = min(max(MOST_SAMPLES // max(len(ranks), 1), FEWEST_OF_ONE), MOST_OF_ONE)
    for (host, *_), members in ranks.items():
        process = recording.ranks[members[0]].facts["process"][0]
        begun_ns = int(process["time_ns"]) - int(process["monotonic_ns"])
        time, values = thinned(read(members[0], column.suffix), column.column, begun_ns, most)
        if time:
            name = host if hosts.count(host) == 1 else f"{host}:{ranks_text(members)}"
            yield name, {"ranks": members, "time": time, "value": [round(column.scale * value, 6) for value in values]}


def thinned(samples: Sequence[Sample], column: int, begun_ns: int, most: int) -> tuple[list[float], list[int]]:
    """One column over time, at most so many samples: times in seconds since 1970, and values.

    `begun_ns`: when the monotonic clock of the host was 0, ns since 1970.
    """
    present = [(sample[0] or 0, value) for sample in samples if (value := sample[column]) is not None]
    chosen = present[:: max(1, -(-len(present) // most))]
    return [round((at_ns + begun_ns) / 1e9, 3) for at_ns, _ in chosen], [value for _, value in chosen]


class ClockReason(IntFlag):
    """The reasons NVML gives for lowered clocks, as far as they slow the work down; apart, because a power cap may be
    intended, and a thermal slowdown never is.
    """

    SW_POWER_CAP = 0x4
    HW_SLOWDOWN = 0x8
    SW_THERMAL_SLOWDOWN = 0x20
    HW_THERMAL_SLOWDOWN = 0x40
    HW_POWER_BRAKE = 0x80

    @property
    def text(self) -> str:
        """The reason in readable form."""
        return (self.name or "").lower().replace("_", "-")


def summarize_gpu(facts: Mapping[str, Any], samples: Sequence[Sequence[int | None]]) -> dict[str, Any]:
    """What is known about one rank's GPU: `facts`, and `sm_mhz`, `temperature_c`, `power_w`, None if nothing was
    sampled; `throttled`: share of the samples with any reason; `reasons`: reason -> share of the samples.
    """
    bits = [sample[4] for sample in samples if sample[4] is not None]
    slowed = [ClockReason(value & sum(ClockReason)) for value in bits]
    return {
        **facts,
        "samples": len(samples),
        "sm_mhz": _spread([sample[1] for sample in samples]),
        "temperature_c": _spread([sample[2] for sample in samples]),
        "power_w": _spread([None if sample[3] is None else sample[3] / 1000 for sample in samples]),
        "throttled": sum(map(bool, slowed)) / len(slowed) if slowed else None,
        "reasons": {
            reason.text: sum(reason in reasons for reasons in slowed) / len(slowed)
            for reason in ClockReason
            if any(reason in reasons for reasons in slowed)
        },
    }


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """The smallest, median and largest sample."""
    present = [value for value in values if value is not None]
    return {"min": min(present), "median": statistics.median(present), "max": max(present)} if present else None


def logged_values(records: pl.DataFrame, placement: Placement, steps: Collection[int]) -> dict[str, Any]:
    """The values of these steps, for `tracekit.trace.facts`; empty if nobody logged any.

    The last value of a rank in a step counts. Ranks of a replica say the same of its tokens, so the most counts; a step
    in which fewer replicas say it than in others has no sum.
    """
    logged = records.filter((pl.col("category") == "value") & pl.col("step").is_in(list(steps)))
    if logged.is_empty():
        return {}
    replicas = {rank: place.dp for rank, place in placement.places.items()}
    by_rank = (
        logged.with_columns(value=pl.Series(logged["extra"].to_numpy().view(np.float64)))
        .filter(pl.col("value").is_finite())
        .with_columns(replica=pl.col("rank").replace_strict(replicas, return_dtype=pl.Int32))
        .sort("number")
        .group_by("name", "step", "replica", "rank", maintain_order=True)
        .agg(pl.col("value").last())
    )
    tokens = by_rank.filter(name="tokens").group_by("step", "replica").agg(pl.col("value").max())
    sums = tokens.group_by("step").agg(pl.col("value").sum(), replicas=pl.len())
    whole = sums.filter(pl.col("replicas") == pl.col("replicas").max())
    loss = by_rank.filter(name="loss").group_by("step").agg(pl.col("value").mean())
    rows = {"tokens": whole.sort("step"), "loss": loss.sort("step")}
    return {
        STEP_VALUES: {name: dict(zip(row["step"].cast(str), row["value"], strict=True)) for name, row in rows.items()}
    }


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
    steps, seconds, is_recorded = _step_times(recording)
    switched = np.diff(is_recorded, prepend=~is_recorded[:1]) | (np.diff(steps, prepend=-2) != 1)
    usable = ~switched & (steps > 0)
    on_at, off_at = np.flatnonzero(usable & is_recorded), np.flatnonzero(usable & ~is_recorded)
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
    records = [rank.records for rank in recording.ranks.values()]
    ends = np.concatenate([of_rank[of_rank["category"] == Category.STEP] for of_rank in records])
    ends = ends[np.argsort(ends["step"], kind="stable")]
    steps, first = np.unique(ends["step"], return_index=True)
    took = (ends["end_ns"] - ends["start_ns"]) / 1e9
    seconds = np.array([np.median(times) for times in np.split(took, first[1:])])
    recorded = (ends["flags"] & Flag.RECORDING) != 0
    return steps.astype(np.int64), np.maximum(seconds, 1e-9), np.logical_or.reduceat(recorded, first)


def _effect(block: _Floats, off: _Floats, position: int) -> float:
    """Extra time of a block's steps over the steps without recording around `position`, as a logarithm."""
    neighbours = np.concatenate([off[max(0, position - len(block)) : position], off[position : position + len(block)]])
    return float(np.median(block) - np.median(neighbours))


def _placebos(off: _Floats, size: int) -> _Floats:
    """The same comparison for blocks that were not recorded."""
    blocks = off[: len(off) // size * size].reshape(-1, size)
    neighbours = np.concatenate([blocks[:-2], blocks[2:]], axis=1)
    return np.asarray(np.median(blocks[1:-1], axis=1) - np.median(neighbours, axis=1), np.float64)


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
            f"WARNING: {hook['hook']} of torch {hook['torch']} cannot be hooked ({hook['reason']}) on"
            f" {ranks_text(hook['ranks'])}; the trace lacks {hook['lacks']}"
            for hook in self.lost
        ]
        if self.unused_device is not None:
            lines.append(f"torch is built for {self.unused_device}, but no GPU was used: ops have host times")
        return lines


def find_unrecorded(recording: AttemptRecording) -> Unrecorded:
    """Gather the reports of all ranks."""
    ranks = list(recording.ranks.values())
    off = [recorded for recorded in ranks if (recorded.summary or {"off": "no summary"}).get("off")]
    stopped = {recorded.rank: int(recorded.records["step"].max(initial=-1)) for recorded in off}
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
    return [{"hook": hook, "calls": sum(by.values()), "ranks": sorted(by)} for hook, by in sorted(calls.items())]


def _unused_device(ranks: Iterable[RankRecording]) -> str | None:
    """The GPU platform that torch could have used, if every rank ended without using a GPU; else None."""
    versions = set()
    for rank in ranks:
        version = rank.facts.get("torch", [{}])[-1].get("device")
        if version is None or rank.facts.get("device-clock") or (rank.summary or {}).get("gpu_used", True):
            return None
        versions.add(str(version))
    return ", ".join(sorted(versions)) or None
