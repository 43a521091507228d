"""What ranks sampled of their GPUs and hosts while a job was recorded, as series of metrics for the trace's metadata.

In: the files of samples of an attempt, and the facts that name what was sampled. Out: metric -> machine -> its series.
A machine is what the ranks with that series share: a GPU, the cgroup that the kernel counts for, or the host.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tracekit.analysis.metrics.mechanisms import CLOCK, CPU_LIMIT, CPU_PRESSURE, IO_PRESSURE, MEMORY_PRESSURE
from tracekit.base.text import ranks_text
from tracekit.collectors.record.wire_format import GPU_SUFFIX, HOST_SUFFIX, rank_stem
from tracekit.collectors.run_directory.segments import AttemptRecording
from tracekit.trace.canonical import SAMPLED

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
