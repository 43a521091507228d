"""`tracekit collect --live`: a `tracekit watch` beside the run, in a process of its own.

In: options of both commands. Out: a process that cuts the run into windows and ends with it. It is another process
because the launcher must hand on signals at once, and nothing that the analysis does may end the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tracekit.collectors.launch.signals import release

if TYPE_CHECKING:
    from tracekit.collectors.merge.placement import LayoutOptions

#: The watch gives way to the ranks.
NICENESS = 5

_Command = TypeVar("_Command", bound=Callable[..., Any])
_OPTIONS = (
    click.option("--window-steps", type=click.IntRange(min=1), metavar="N", help="A window is N recorded steps."),
    click.option(
        "--window-seconds",
        type=click.FloatRange(min=0.1),
        metavar="T",
        help="A window is what ends within T seconds, 5 steps at least [default: 60].",
    ),
    click.option(
        "--late-after",
        type=click.FloatRange(min=0),
        default=10.0,
        show_default=True,
        metavar="SECONDS",
        help="Analyse a window without the ranks that are so far behind the first.",
    ),
    click.option("--metrics-port", type=click.IntRange(0, 65535), help="Answer Prometheus here; 0 takes a free port."),
    click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Address for --metrics-port."),
    click.option(
        "--notify", metavar="URL", help="Post incidents to this webhook, in Slack's format where it is Slack's."
    ),
    click.option("--dashboard-url", default="", metavar="URL", help="Where `tracekit dashboard` answers, for links."),
)


def watch_options(command: _Command) -> _Command:
    """The options that `tracekit watch` and `tracekit collect --live` share."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Values of the options above: how the run is cut, and who hears of it."""

    window_steps: int | None = None
    window_seconds: float | None = None
    late_after: float = 10.0
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    notify: str | None = None
    dashboard_url: str = ""

    def arguments(self) -> list[str]:
        """The same for a command line."""
        values = {
            "--window-steps": self.window_steps,
            "--window-seconds": self.window_seconds,
            "--late-after": self.late_after,
            "--metrics-port": self.metrics_port,
            "--metrics-host": self.metrics_host,
            "--notify": self.notify,
            "--dashboard-url": self.dashboard_url or None,
        }
        return [f"{name}={value}" for name, value in values.items() if value is not None]

    def given(self) -> list[str]:
        """What is not as it is by default."""
        return [argument for argument in self.arguments() if argument not in WatchOptions().arguments()]


def start_watch(
    options: WatchOptions, directory: Path, store: Path, name: str, layout: LayoutOptions, *, consume: bool
) -> subprocess.Popen[bytes]:
    """Start `tracekit watch` of a run directory. `consume`: it removes segments that are stored."""
    sizes = {"--dp": layout.dp, "--pp": layout.pp, "--tp": layout.tp}
    return subprocess.Popen(  # noqa: S603 - no shell; tracekit itself
        [
            *(sys.executable, "-P", "-m", "tracekit", "watch", f"--store={store}", f"--name={name}"),
            *options.arguments(),
            *(f"{option}={size}" for option, size in sizes.items() if size is not None),
            *(["--consume"] if consume else []),
            *("--", str(directory)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is the command's
        preexec_fn=_beside,  # noqa: PLW1509 - the launcher has one thread yet
    )


def _beside() -> None:
    release()
    os.nice(NICENESS)
