"""`tracekit PATH`: choose the command that shows PATH, for any kind of path.

In: a path. Out: the arguments of a command, or an error with a suggestion.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import click

from tracekit.base.command_line import command
from tracekit.base.errors import FormatError, SelectionError
from tracekit.base.object_storage import ADDRESSES
from tracekit.base.text import nearest, printable, short
from tracekit.commands.options import PATH
from tracekit.commands.recognise import is_dumps, is_hang_log, is_store, jobs_in, what_it_is
from tracekit.report.report import is_report, read_report

#: Least similarity of a suggested name, from 0 to 1.
_ALIKE = 0.6


def looks_like_path(word: str) -> bool:
    """True if the first word of a command line is a path rather than a misspelt command."""
    return word.startswith(ADDRESSES) or os.path.lexists(word) or os.sep in word or bool(Path(word).suffix)


def arguments_for(word: str) -> list[str]:
    """The command that reads the path, and its arguments. Raises FormatError if there is no such path."""
    from tracekit.fleet.sources import is_study

    path = Path(word)
    if is_study(path):
        return ["fleet", "report", word]
    if is_store(path):
        return ["info", "--store", word]
    if is_dumps(path) or is_hang_log(path):
        return ["hang", word]
    if not word.startswith(ADDRESSES) and not os.path.lexists(path):
        raise FormatError(f"{word}: {what_it_is(path)}")
    return ["info" if len(jobs_in(path)) > 1 else "whatif", word]


def nearest_command(word: str, names: Iterable[str]) -> str:
    """Error text for a word that is neither a command nor a path."""
    files = [path.name for path in Path().iterdir()] if os.access(".", os.R_OK) else []
    found = nearest(word, [*names, *files], _ALIKE)
    meant = f"; did you mean `{command(found)}`?" if found else ""
    return f"no such command or path {short(word)!r}{meant}"


def report_page(path: Path) -> Path:
    """Write a report as a page into a temporary folder, which stays. Raises FormatError."""
    from tracekit.show.documents.page import page

    target = Path(tempfile.mkdtemp(prefix="tracekit-report-")) / f"{path.stem}.html"
    target.write_text(page(read_report(path)), encoding="utf-8")
    return target


@click.command("open")
@click.argument("path", type=PATH)
@click.option("--port", default=8050, show_default=True, help="Port; 0 takes a free one.")
@click.pass_context
def open_command(context: click.Context, path: Path, port: int) -> None:
    """Open a trace, a folder of traces, a store, a study or a report in the browser.

    Serves the dashboard on this machine; `tracekit dashboard` has more options. A report that `whatif --json` printed
    becomes a page of its own, which needs no server.
    """
    if is_report(path):
        page = report_page(path)
        click.echo(f"Wrote {printable(str(page))}")
        click.launch(page.as_uri())
        return
    from tracekit.dashboards.web.command import dashboard_command
    from tracekit.fleet.sources import is_study

    if is_dumps(path):
        raise SelectionError(f"{path}: {what_it_is(path)}")
    source = {"study": path} if is_study(path) else {"sources": tuple(jobs_in(path)) or (path,)}
    context.invoke(dashboard_command, port=port, **source)
