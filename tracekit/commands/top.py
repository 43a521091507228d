"""`tracekit store top`: a running job on one screen, redrawn as its windows arrive.

In: a store to which `tracekit watch` or `tracekit collect --live` adds windows. Out: a screen of 80 columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tracekit.base.errors import NotStoredError
from tracekit.commands.complete import job_names
from tracekit.commands.options import STORE, console, store_at

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tracekit.store import Store


@click.command("top")
@click.argument("job", required=False, shell_complete=job_names)
@STORE
@click.option("--every", type=click.FloatRange(min=0.2), default=1.0, show_default=True, help="Seconds between looks.")
@click.option("--once", is_flag=True, help="Print one screen and leave.")
def top_command(job: str | None, store: Path | None, every: float, once: bool) -> None:
    """Show a running JOB: verdict, culprit, what to check, loss over its windows, map of workers.

    JOB is by default the one whose newest window was added last. Ctrl-C ends it.
    """
    from rich.live import Live
    from rich.text import Text

    from tracekit.live.first_window import await_store
    from tracekit.live.watch import stopped_by_signals

    opened = store_at(store)
    if once:
        console().print(_frame(opened, job))
        return
    await_store(opened)
    screen = console()
    with stopped_by_signals() as stop, Live(console=screen, screen=screen.is_terminal, auto_refresh=False) as live:
        while not stop.is_set():
            try:
                live.update(_frame(opened, job), refresh=True)
            except NotStoredError as error:
                live.update(Text(str(error)), refresh=True)
            stop.wait(every)


def _frame(store: Store, job: str | None) -> RenderableType:
    from tracekit.dashboards.terminal.top import TopState, frame

    return frame(TopState.of(store, store.newest() if job is None else job))
