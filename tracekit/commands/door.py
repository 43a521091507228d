"""`tracekit PATH` and `tracekit open [PATH]`: show a path of any kind, in the terminal or in the browser.

In: a path, or nothing for simulated jobs. Out: the arguments of a command, a running dashboard, or an error with a
suggestion.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from tracekit.base.arguments import STORE_PATH
from tracekit.base.errors import ExitCode, FormatError, SelectionError
from tracekit.base.paths import ADDRESSES, Look, command
from tracekit.base.stderr import progress
from tracekit.base.text import nearest, printable, short
from tracekit.commands.options import JobArguments
from tracekit.sources.load import is_a, jobs_in, source_of, wrong_source
from tracekit.sources.source import Content


def looks_like_path(word: str) -> bool:
    """True if the first word of a command line is a path rather than a misspelt command."""
    return word.startswith(ADDRESSES) or os.path.lexists(word) or os.sep in word or bool(Path(word).suffix)


def arguments_for(word: str) -> list[str]:
    """The command that shows the path, and its arguments. Raises FormatError if there is no such path."""
    look = Look(Path(word))
    source = source_of(look)
    if source is not None:
        return [*source.command, word]
    if not word.startswith(ADDRESSES) and not look.exists:
        raise wrong_source(look, Content.TRACE) or FormatError(f"{word}: no such file or folder")
    are_several = len(jobs_in(look.path)) > 1
    return ["store", "list", word] if are_several else ["whatif", word]


def nearest_command(word: str, names: Iterable[str]) -> str:
    """Error text for a word that is neither a command nor a path."""
    files = [path.name for path in Path().iterdir()] if os.access(".", os.R_OK) else []
    similar = nearest(word, [*names, *files])
    suggestion = f"; did you mean `{command(similar)}`?" if similar else ""
    return f"no such command or path {short(word)!r}{suggestion}"


def report_page(path: Path) -> Path:
    """Write a report as a page into a temporary folder, which stays. Raises FormatError."""
    from tracekit.dashboards.documents.page import page

    target = Path(tempfile.mkdtemp(prefix="tracekit-report-")) / f"{path.stem}.html"
    target.write_text(page(JobArguments((path,)).report()), encoding="utf-8")
    return target


@click.command("open")
@click.argument("path", type=STORE_PATH, required=False)
@click.option("--port", default=8050, show_default=True, help="Port; 0 takes a free one.")
@click.option("--browser/--no-browser", default=True, help="Open the page in the browser  [default: yes].")
def open_command(path: Path | None, port: int, browser: bool) -> int:
    """Open a trace, a folder of traces, a store, a study or a report in the browser.

    Without PATH, simulates a healthy job and some with one cause each, and removes them when it ends. Serves the
    dashboard on this machine until Ctrl-C; `tracekit dashboard` has more options. A report that `whatif --json` printed
    becomes a page of its own, which needs no server.
    """
    if path is not None and is_a(Content.REPORT, path):
        address = report_page(path).as_uri()
        click.echo(f"Wrote {printable(address)}")
        _show(address, browser=browser)
        return ExitCode.DONE
    if path is not None:
        return _serve(_dashboard_arguments(path), port, browser=browser)
    with tempfile.TemporaryDirectory(prefix="tracekit-demo-") as folder:
        store = Path(folder) / "demo.store"
        with progress() as show_stage:
            _fill(store, show_stage)
        return _serve([str(store)], port, browser=browser)


def _dashboard_arguments(path: Path) -> list[str]:
    """The arguments of `tracekit dashboard` for a path. Raises FormatError for what it does not show."""
    look = Look(path)
    source = source_of(look)
    if source is not None and source.content is Content.STUDY:
        return ["--study", str(path)]
    if source is not None and source.content is Content.DUMPS:
        raise wrong_source(look, Content.TRACE) or SelectionError(f"{path}: {source.title}")
    return [str(path)]


def _fill(store: Path, show_stage: Callable[[str], None]) -> None:
    """Simulate the jobs, analyse them, and put them into a store."""
    from tracekit.analysis.job.pipeline import PipelineJob
    from tracekit.store import Incoming, Store
    from tracekit.synth import synthesize
    from tracekit.synth.simulate import DEMO

    incoming = []
    for spec in DEMO:
        show_stage(f"simulating {spec.name}")
        trace = synthesize(spec)
        incoming.append(Incoming(trace, trace.name, "tracekit open", PipelineJob(trace).stored()))
    Store(store).add(incoming)


def _serve(arguments: list[str], port: int, *, browser: bool) -> int:
    """Run `tracekit dashboard` in a process of its own until that ends, and show its page; return its exit code."""
    serving = [sys.executable, "-P", "-m", "tracekit", "dashboard", f"--port={port}", *arguments]
    with subprocess.Popen(serving, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 - tracekit itself
        assert server.stdout is not None
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        try:
            address = server.stdout.readline()
            click.echo(address, nl=False)
            url = next((word for word in address.split() if word.startswith("http://")), None)
            if url is not None:
                _show(url, browser=browser)
            return server.wait()
        except KeyboardInterrupt:  # the terminal has also interrupted the server
            return server.wait()


def _show(address: str, *, browser: bool) -> None:
    """Open an address in the browser; without a screen, one in the terminal would hide the address."""
    if browser and ("DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ):
        webbrowser.open(address)
