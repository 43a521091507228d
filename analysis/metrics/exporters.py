"""Which metrics the exporters lack, and what to add.

In: samples. Out: `MissingMetric`s.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from tracekit.analysis.metrics.mechanisms import CLOCK, CPU_PRESSURE, ERRORS, LINK
from tracekit.analysis.metrics.samples import Samples
from tracekit.base.text import short
from tracekit.report.metrics import MissingMetric

#: More hosts than this are counted, not listed.
_MOST_LISTED = 4


class _Needed(Struct, frozen=True):
    """A metric, or others that do as well; the exporter, what to add to it, and what cannot be told without it."""

    metrics: tuple[str, ...]
    exporter: str
    line: str
    why: str


_OF_DCGM = "dcgm-exporter"
_OF_NODE = "node_exporter"
_NEEDED = (
    _Needed(
        CLOCK.metrics,
        _OF_DCGM,
        "DCGM_FI_DEV_SM_CLOCK, gauge, SM clock frequency (in MHz).",
        "slow computing cannot be confirmed or refuted",
    ),
    _Needed(
        ("DCGM_FI_DEV_POWER_VIOLATION",),
        _OF_DCGM,
        "DCGM_FI_DEV_POWER_VIOLATION, counter, Throttling duration due to power constraints (in ns).",
        "whether a low clock is due to power is unknown; the default file has the line as a comment",
    ),
    _Needed(
        ("DCGM_FI_DEV_THERMAL_VIOLATION",),
        _OF_DCGM,
        "DCGM_FI_DEV_THERMAL_VIOLATION, counter, Throttling duration due to thermal constraints (in ns).",
        "whether a low clock is due to heat is unknown; the default file has the line as a comment",
    ),
    _Needed(
        LINK.metrics,
        _OF_NODE,
        "--collector.infiniband (the default, if there is such a card), or --collector.netclass on Ethernet",
        "a slow network card cannot be confirmed or refuted",
    ),
    _Needed(
        (ERRORS,),
        _OF_NODE,
        "--collector.infiniband (the default)",
        "a slow network card cannot be refuted: errors slow it, too",
    ),
    _Needed(
        CPU_PRESSURE.metrics,
        _OF_NODE,
        "--collector.pressure (the default), and psi=1 on the kernel's command line",
        "a process that waits for a CPU cannot be confirmed or refuted",
    ),
)
#: What a server is asked for where all metrics of a fleet are wanted.
FLEET = (
    *(metric for needed in _NEEDED for metric in needed.metrics),
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "ipmi_dcmi_power_consumption_watts",
)


def line_for(metric: str) -> str:
    """What to add where to have a metric: "add to dcgm-exporter: DCGM_FI_DEV_SM_CLOCK, gauge, ..."."""
    needed = next(each for each in _NEEDED if metric in each.metrics)
    return f"add to {needed.exporter}: {needed.line}"


def lacking(samples: Samples) -> Iterator[MissingMetric]:
    """Yield the metrics that no host has, or not all hosts."""
    for needed in _NEEDED:
        having = samples.series.filter(samples.series["metric"].is_in(list(needed.metrics)))
        without = sorted(samples.hosts - set(having["host"]))
        if without:
            hosts = ", ".join(map(short, without)) if len(without) <= _MOST_LISTED else f"{len(without)} hosts"
            where = "on all hosts" if len(without) == len(samples.hosts) else f"on {hosts}"
            yield MissingMetric(needed.metrics[0], needed.exporter, needed.line, f"{where}, {needed.why}")
