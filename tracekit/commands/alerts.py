"""`tracekit alerts`: alert rules for Prometheus and a dashboard for Grafana, as files.

In: a folder. Out: the files that come with tracekit, in it.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from tracekit.atomic_write import Kind, write_text
from tracekit.commands.options import PATH
from tracekit.errors import OutputError
from tracekit.text import printable

_KINDS = {
    "tracekit.rules.yml": Kind("alert rules of tracekit", lambda file: b"TracekitIncident" in file.read()),
    "tracekit.grafana.json": Kind("a dashboard of tracekit", lambda file: b'"uid": "tracekit-jobs"' in file.read()),
}


@click.command("alerts")
@click.argument("folder", type=PATH)
def alerts_command(folder: Path) -> None:
    """Write alert rules for Prometheus and a dashboard for Grafana into FOLDER.

    docs/live.md says where they go, and what to do about each alert.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error.strerror or error}; choose another folder") from None
    for name, kind in _KINDS.items():
        write_text(folder / name, (files("tracekit.live") / "alerts" / name).read_text(encoding="utf-8"), kind)
        click.echo(f"Wrote {printable(str(folder / name))}")
