"""`tracekit watch`: windows of a running job, analysed as they end, and alerts.

In: what a running job writes, or a store. Out: windows in a store, lines on stderr, metrics, notifications.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tracekit.base.arguments import STORE_PATH
from tracekit.base.errors import FormatError, SelectionError
from tracekit.base.paths import Look
from tracekit.base.stderr import say
from tracekit.base.text import listed, printable
from tracekit.collectors.launch.live import WatchOptions, watch_options
from tracekit.commands.options import layout_sizes
from tracekit.sources.load import source_of, wrong_source
from tracekit.sources.registry import to_get
from tracekit.sources.source import Content

if TYPE_CHECKING:
    from tracekit.collectors.merge.placement import LayoutOptions
    from tracekit.live.run import LiveOptions

#: A window given in seconds has at least this many steps: fewer show little.
_FEWEST_STEPS = 5
_DEFAULT_SECONDS = 60.0


@click.command("watch")
@click.argument("source", type=STORE_PATH, metavar="DIR|LOG|STORE")
@click.option(
    "--store", type=STORE_PATH, help="Store for the windows of DIR [default: $TRACEKIT_STORE, else ./tracekit.store]."
)
@click.option("--name", help="Name of the job in the store [default: that of DIR]; with STORE, the only job to report.")
@watch_options
@layout_sizes
@click.option("--consume", is_flag=True, help="Remove segments in DIR once their steps are stored.")
def watch_command(
    source: Path,
    store: Path | None,
    name: str | None,
    layout: LayoutOptions,
    consume: bool,
    **watching: Any,
) -> None:
    """Analyse a running job window by window, and report the incidents that open and close.

    DIR is the folder that ranks write to (`tracekit collect --segments DIR`), on this machine or on a shared disk; it
    need not exist yet. The watch ends with the job. DIR may be the folder that tracekit.rl records into, LOG a growing
    log of RL post-training (docs/rl.md). With a STORE to which others add windows, it reports until Ctrl-C.
    """
    from contextlib import ExitStack

    from tracekit.collectors.run_directory.segments import is_run_directory
    from tracekit.live.run import LiveOptions, LiveRun
    from tracekit.live.watch import POLL_S, Watch, stopped_by_signals
    from tracekit.live.windows import WindowSize
    from tracekit.store import Store, default_store

    chosen = WatchOptions(**watching)
    steps, seconds = chosen.window_steps, chosen.window_seconds
    if steps is not None and seconds is not None:
        raise SelectionError("--window-steps and --window-seconds cannot be combined; choose one")
    if Store(source).is_store():
        typed = click.get_current_context().get_parameter_source("metrics") is ParameterSource.COMMANDLINE
        if store is not None or steps is not None or seconds is not None or consume or typed:
            raise SelectionError(
                "a store already holds windows: --store, --window-steps, --window-seconds, --metrics and --consume are"
                " for the folder that ranks write to"
            )
        watched, run = Store(source), None
    else:
        seconds = None if steps is not None else seconds or _DEFAULT_SECONDS
        metrics = None
        if chosen.metrics is not None:
            from tracekit.collectors.importers.metrics import open_metrics

            metrics = open_metrics(chosen.metrics)
        options = LiveOptions(
            directory=source,
            store=store or default_store(),
            name=name or source.absolute().name,
            size=WindowSize(steps, seconds, _FEWEST_STEPS),
            late_after_s=chosen.late_after,
            layout=layout,
            consume=consume,
            metrics=metrics,
        )
        _check_directory(options)
        name = options.name
        watched, run = Store(options.store), LiveRun(options, _log)
    with ExitStack() as stack:
        stop = stack.enter_context(stopped_by_signals())
        deliveries = notifier = tracker = None
        if chosen.notify is not None:
            from tracekit.live.receivers import DeliveryLog, Notifier

            deliveries = DeliveryLog(watched, chosen.notify)
            notifier = Notifier(chosen.notify, chosen.dashboard_url, arrived=deliveries.note)
        if chosen.log is not None:
            from tracekit.live.receivers import TrackerProcess

            if name is None:
                raise SelectionError("--log is for one job: name it with --name")
            tracker = TrackerProcess(chosen.log, watched.path, name)
        watch = Watch(watched, run, name, _log, notifier, deliveries, tracker)
        scrapes = None
        if chosen.metrics_port is not None:
            from tracekit.live.metrics import serving_metrics

            serving = serving_metrics(chosen.metrics_host, chosen.metrics_port, watched, watch, chosen.dashboard_url)
            port, scrapes = stack.enter_context(serving)
            _log(f"metrics: http://{chosen.metrics_host}:{port}/metrics")
        if run is not None and not is_run_directory(source):
            if not _is_post_training(source):
                _log(f"{source}: no recording there yet; waiting")
            while not (_is_post_training(source) or is_run_directory(source) or stop.wait(POLL_S)):
                pass
            if _is_post_training(source):
                from tracekit.live.post_training import LivePostTraining

                watch.run = LivePostTraining(options, _log)
        watch.until_ended(stop)
        if scrapes is not None:
            scrapes.wait_for_all(stop)  # otherwise Prometheus takes the end of the job for a killed watch


def _is_post_training(source: Path) -> bool:
    """Whether this is a recording of post-training, or a file that may become one."""
    from tracekit.collectors.importers.rl_logs import looks_like_rl

    return looks_like_rl(Look(source)) or _is_growing(source)


def _is_growing(source: Path) -> bool:
    from tracekit.live.run import QUIET_S

    return source.is_file() and time.time() < source.stat().st_mtime + QUIET_S


def _check_directory(options: LiveOptions) -> None:
    """Raise FormatError for what cannot become a recording of a running job, with the command that shows it."""
    from tracekit.collectors.importers.rl_logs import looks_like_rl
    from tracekit.collectors.run_directory.segments import is_run_directory
    from tracekit.store import Store

    look = Look(options.directory)
    if look.path.exists() and not (is_run_directory(look.path) or looks_like_rl(look)):
        if logs := [str(file.path) for file in look.files() if looks_like_rl(file)]:
            raise FormatError(
                f"{look.path}: a folder with logs of RL post-training; watch one of them: {listed(logs, 3)}"
            )
        if source_of(look) is not None or not (look.is_folder or _is_growing(look.path)):
            other = FormatError(f"{look.path}: not {Content.RUN}; {to_get(Content.RUN)}")
            raise wrong_source(look, Content.RUN) or other
    Store(options.store).check_new(None)


def _log(line: str) -> None:
    say(f"tracekit: {printable(line)}")
