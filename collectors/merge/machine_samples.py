"""What ranks sampled of their GPUs and hosts, and said of their steps with `tracekit.log`, for the trace's metadata."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import IntFlag
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from tracekit.analysis.metrics.samples import CLOCK, CPU_LIMIT, CPU_PRESSURE, IO_PRESSURE, MEMORY_PRESSURE
from tracekit.base.text import ranks_text
from tracekit.collectors.merge.placement import Placement
from tracekit.collectors.record.wire_format import GPU_SUFFIX, HOST_SUFFIX, rank_stem
from tracekit.collectors.run_directory.segments import AttemptRecording
from tracekit.trace.facts import SAMPLED, STEP_VALUES

#: Samples of a metric that the metadata keeps: of a machine, at most and at least; of all machines together.
MOST_OF_ONE, FEWEST_OF_ONE, MOST_SAMPLES = 720, 60, 40_000
_LIMIT = CPU_LIMIT.metrics[0]
#: Host time, ns, and four values.
_WIDTH = 5
Sample = list["int | None"]
#: Reads the samples of a rank from its file with that suffix.
Read = Callable[[int, str], list[Sample]]


class _Column(NamedTuple):
    """A metric in column `column` of the samples, times `scale`. `identity`: what names its machine in `fact`."""

    metric: str
    suffix: str
    column: int
    scale: float
    fact: str
    identity: tuple[str, ...]


_COLUMNS = (
    _Column(CLOCK.metrics[0], GPU_SUFFIX, 1, 1.0, "device", ("uuid", "pci_bus_id")),
    _Column(CPU_PRESSURE.metrics[0], HOST_SUFFIX, 1, 1e-6, "host-state", ("pressure",)),
    _Column(IO_PRESSURE.metrics[0], HOST_SUFFIX, 2, 1e-6, "host-state", ("pressure",)),
    _Column(MEMORY_PRESSURE.metrics[0], HOST_SUFFIX, 3, 1e-6, "host-state", ("pressure",)),
    _Column(_LIMIT, HOST_SUFFIX, 4, 1e-6, "host-state", ("limit",)),
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
    if not any(series["value"][-1] for series in sampled[_LIMIT].values()):
        del sampled[_LIMIT]  # a kernel that counts for a limit that is not set
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
        time, value = thinned(read(members[0], column.suffix), column.column, begun_ns, most)
        if time:
            name = host if hosts.count(host) == 1 else f"{host}:{ranks_text(members)}"
            yield name, {"ranks": members, "time": time, "value": [round(column.scale * each, 6) for each in value]}


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
            reason.text: sum(reason in one for one in slowed) / len(slowed)
            for reason in ClockReason
            if any(reason in one for one in slowed)
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
        STEP_VALUES: {name: dict(zip(one["step"].cast(str), one["value"], strict=True)) for name, one in rows.items()}
    }
