"""`tracekit metrics alerts`: alert rules for Prometheus and a dashboard for Grafana, as files.

In: a folder. Out: the files that come with tracekit, copied there.
"""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import BinaryIO

import click

from tracekit.base.text import printable
from tracekit.commands.options import OUT, made_folder

#: The files, and the text that identifies ours among files of that name.
_MARKS = {"tracekit.rules.yml": b"TracekitIncident", "tracekit.grafana.json": b'"uid": "tracekit-jobs"'}


@click.command("alerts")
@click.argument("folder", type=OUT)
def alerts_command(folder: Path) -> None:
    """Write alert rules for Prometheus and a dashboard for Grafana into FOLDER.

    docs/live.md says where they go, and what to do about each alert.
    """
    from tracekit.base.atomic_write import Kind, check_writable, write_text

    made_folder(folder)
    kinds = {
        folder / name: Kind("a file of `tracekit metrics alerts`", partial(_holds, mark))
        for name, mark in _MARKS.items()
    }
    for path, kind in kinds.items():
        check_writable(path, kind)
    for path, kind in kinds.items():
        write_text(path, (files("tracekit.live") / "alerts" / path.name).read_text(encoding="utf-8"), kind)
        click.echo(f"Wrote {printable(str(path))}")


def _holds(mark: bytes, file: BinaryIO) -> bool:
    return mark in file.read()
