"""`tracekit metrics`: what metrics of hosts and GPUs say, without a trace; rules for alerts.

In: a SOURCE of metrics and suspicions. Out: verdicts, alarms or missing metrics, as lines or one JSON object.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click
import msgspec
from msgspec import Struct

from tracekit.base.arguments import OUT
from tracekit.base.errors import SelectionError
from tracekit.base.stderr import progress
from tracekit.base.text import counted, printable
from tracekit.commands.options import AS_JSON, made_folder
from tracekit.report.hardware import Alarm, MetricsInReport, MissingMetric

if TYPE_CHECKING:
    from tracekit.analysis.metrics.guided import Suspicion
    from tracekit.analysis.metrics.samples import MetricSource, Samples, TimeSpan

#: The files, and the text that identifies ours among files of that name.
_MARKS = {"tracekit.rules.yml": b"TracekitIncident", "tracekit.grafana.json": b'"uid": "tracekit-jobs"'}

_SUSPECT = "HOST:part=compute,excess=0.3,from=T,to=T, times as seconds since 1970 or ISO"


@click.command("alerts")
@click.argument("folder", type=OUT)
def alerts_command(folder: Path) -> None:
    """Write alert rules for Prometheus and a dashboard for Grafana into FOLDER.

    docs/live.md says where they go, and what to do about each alert.
    """
    from tracekit.base.atomic_write import Kind, check_writable, write_text

    made_folder(folder)
    kinds = {
        folder / name: Kind("a file of `tracekit metrics alerts`", partial(_contains, mark))
        for name, mark in _MARKS.items()
    }
    for path, kind in kinds.items():
        check_writable(path, kind)
    for path, kind in kinds.items():
        write_text(path, (files("tracekit.live") / "alerts" / path.name).read_text(encoding="utf-8"), kind)
        click.echo(f"Wrote {printable(str(path))}")


def _contains(mark: bytes, file: BinaryIO) -> bool:
    return mark in file.read()


class ScanOutput(Struct, frozen=True):
    """What `tracekit metrics scan --json` prints."""

    alarms: list[Alarm]


class DoctorOfMetricsOutput(Struct, frozen=True):
    """What `tracekit metrics doctor --json` prints."""

    missing: list[MissingMetric]


@click.group("metrics")
def metrics_command() -> None:
    """Do clocks, links and CPU pressure confirm a culprit? Tests a suspicion, scans a fleet, says what exporters lack,
    writes rules for alerts.

    SOURCE is a Parquet file (time, host, device, metric, value), OpenMetrics text with timestamps, a saved answer of
    Prometheus' range API, or the base URL of Prometheus.
    """


metrics_command.add_command(alerts_command)
_SOURCE = click.argument("source")


@metrics_command.command("test")
@_SOURCE
@click.option(
    "--suspect",
    "suspects",
    multiple=True,
    required=True,
    metavar="HOST:...",
    help=f"What was seen of a host: {_SUSPECT}. Repeatable.",
)
@AS_JSON
def test_command(source: str, suspects: tuple[str, ...], as_json: bool) -> None:
    """Does a metric of a suspected host show what was seen?"""
    from tracekit.analysis.metrics.guided import verdicts_on
    from tracekit.analysis.metrics.samples import TimeSpan, metrics_of

    suspicions = [_parse_suspicion(text) for text in suspects]
    windows = [suspicion.window for suspicion in suspicions]
    window = TimeSpan(min(span.since for span in windows), max(span.until for span in windows))
    name, samples = _open(source, metrics_of(suspicion.part for suspicion in suspicions), window)
    tests = verdicts_on(samples, suspicions)
    if as_json:
        click.echo(msgspec.json.encode(MetricsInReport(name, tests, samples.dropped)))
        return
    for test in tests:
        click.echo(printable(f"{test.host}, {test.part}: {test.sentence}"))
    if samples.dropped:
        click.echo(f"{counted(samples.dropped, 'sample')} dropped: no numbers, or twice")


@metrics_command.command("scan")
@_SOURCE
@click.option(
    "--baseline", "baselines", multiple=True, metavar="SOURCE", help="A healthy run of these nodes. Repeatable."
)
@AS_JSON
def scan_command(source: str, baselines: tuple[str, ...], as_json: bool) -> None:
    """Which hosts depart from their peers for minutes?"""
    from tracekit.analysis.metrics.effects import scanned
    from tracekit.analysis.metrics.samples import is_counter

    alarms = list(scanned(_open(source)[1], [_open(path)[1] for path in baselines]))
    if as_json:
        click.echo(msgspec.json.encode(ScanOutput(alarms)))
        return
    for alarm in alarms:
        device = "" if alarm.device is None else f" {alarm.device}"
        change = f"{alarm.change:+.3g} a second" if is_counter(alarm.metric) else f"{alarm.change:+.2%}"
        since, until = (
            datetime.fromtimestamp(time_s, UTC).isoformat(" ", "seconds") for time_s in (alarm.from_s, alarm.to_s)
        )
        click.echo(printable(f"{alarm.host}{device}: {alarm.metric} {change} from {since} to {until}"))
    if not alarms:
        click.echo("No host departs from its peers.")


@metrics_command.command("doctor")
@_SOURCE
@AS_JSON
def doctor_of_metrics_command(source: str, as_json: bool) -> None:
    """What do the exporters lack, and which line adds it?"""
    from tracekit.analysis.metrics.samples import lacking

    missing = list(lacking(_open(source)[1]))
    if as_json:
        click.echo(msgspec.json.encode(DoctorOfMetricsOutput(missing)))
        return
    for metric in missing:
        click.echo(printable(f"{metric.metric}: {metric.why}"))
        click.echo(printable(f"  add to {metric.exporter}: {metric.line}"))
    if not missing:
        click.echo("All metrics that tests read are there.")


def _open(text: str, metrics: tuple[str, ...] | None = None, window: TimeSpan | None = None) -> tuple[str, Samples]:
    """The name of a source, and its samples. Raises FormatError for what is none, or has no metrics."""
    from tracekit.analysis.metrics.samples import Samples
    from tracekit.base.errors import FormatError
    from tracekit.collectors.importers.metrics import open_metrics

    with progress() as show_stage:
        show_stage("reading metrics")
        source: MetricSource = open_metrics(text)
        samples = Samples.of(source.samples(metrics, window, None))
        if samples.series.is_empty():
            wanted = "any metric that tracekit reads" if metrics is None else ", ".join(metrics)
            raise FormatError(f"{source.name}: no samples of {wanted}, or no label Hostname or instance")
        return source.name, samples


def _parse_suspicion(text: str) -> Suspicion:
    """A suspicion as it is typed. Raises SelectionError."""
    from tracekit.analysis.metrics.guided import Suspicion
    from tracekit.analysis.metrics.samples import MECHANISMS, TimeSpan

    host, _, rest = text.rpartition(":part=")
    try:
        fields = dict(field.partition("=")[::2] for field in f"part={rest}".split(","))
        part, excess = fields.pop("part"), float(fields.pop("excess"))
        window = TimeSpan(_seconds(fields.pop("from")), _seconds(fields.pop("to")))
    except (KeyError, ValueError):
        raise SelectionError(f"--suspect {text!r:.120}: expected {_SUSPECT}") from None
    if part not in MECHANISMS:
        raise SelectionError(f"--suspect: no metric shows the part {part!r:.40}; one of {', '.join(MECHANISMS)} does")
    if fields or not host or not 0 < excess < math.inf or not window.since < window.until < math.inf:
        raise SelectionError(f"--suspect {text!r:.120}: expected {_SUSPECT}; excess above 0, and from before to")
    return Suspicion(host, part, excess, window)


def _seconds(text: str) -> float:
    """A time as seconds since 1970. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
