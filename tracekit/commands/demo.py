"""`tracekit demo`: the dashboard with simulated jobs that each show one cause.

In: nothing. Out: a running dashboard over a store that is removed when it ends.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import webbrowser
from collections.abc import Callable
from pathlib import Path

import click

from tracekit.base.stderr import progress


@click.command("demo")
@click.option("--port", default=8050, show_default=True, help="Port of the dashboard; 0 takes a free one.")
@click.option("--browser/--no-browser", default=True, help="Open the dashboard in the browser  [default: yes].")
def demo_command(port: int, browser: bool) -> int:
    """Look around: simulate a few jobs, each slowed down by one cause, and open them in the dashboard.

    Everything is removed when the dashboard ends, with Ctrl-C.
    """
    with tempfile.TemporaryDirectory(prefix="tracekit-demo-") as folder:
        store = Path(folder) / "demo.store"
        with progress() as tell:
            _fill(store, tell)
        return _serve(store, port, browser=browser)


def _fill(store: Path, tell: Callable[[str], None]) -> None:
    """Simulate the jobs, analyse them, and put them into a store."""
    from tracekit.job.pipeline import PipelineJob
    from tracekit.store import Incoming, Store
    from tracekit.synth import synthesize
    from tracekit.synth.samples import DEMO

    incoming = []
    for spec in DEMO:
        tell(f"simulating {spec.name}")
        trace = synthesize(spec)
        incoming.append(Incoming(trace, trace.name, "tracekit demo", PipelineJob(trace).stored()))
    Store(store).add(incoming)


def _serve(store: Path, port: int, *, browser: bool) -> int:
    """Serve the store in a separate process until that ends; return its exit code."""
    command = [sys.executable, "-P", "-m", "tracekit", "dashboard", str(store), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 - tracekit itself
        assert server.stdout is not None
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        try:
            address = server.stdout.readline()
            click.echo(address, nl=False)
            url = next((word for word in address.split() if word.startswith("http://")), None)
            if browser and url is not None:
                webbrowser.open(url)
            return server.wait()
        except KeyboardInterrupt:  # the terminal has also interrupted the server
            return server.wait()
