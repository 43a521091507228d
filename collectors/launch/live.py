"""`tracekit collect --live`: a `tracekit watch` of the run, in a separate process.

In: options of both commands. Out: a process that cuts the run into windows and ends with it. The process is separate
because the launcher must forward signals at once and the analysis must never end the run. If it is killed, it is
restarted once, and continues after the last stored window.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tracekit.base.errors import ExitCode
from tracekit.base.stderr import say
from tracekit.base.text import printable
from tracekit.collectors.launch.launcher import release

if TYPE_CHECKING:
    from tracekit.collectors.merge.placement import LayoutOptions

#: Niceness of the watch, so that ranks have priority.
NICENESS = 5
#: Names the webhook if --notify does not, and the source of metrics: everybody on the machine can read a command line.
NOTIFY_VARIABLE, METRICS_VARIABLE = "TRACEKIT_NOTIFY", "TRACEKIT_METRICS"
_SECRET = {"notify": NOTIFY_VARIABLE, "metrics": METRICS_VARIABLE}

_Command = TypeVar("_Command", bound=Callable[..., Any])
_OPTIONS = (
    click.option("--window-steps", type=click.IntRange(min=1), metavar="N", help="A window is N recorded steps."),
    click.option(
        "--window-seconds",
        type=click.FloatRange(min=0.1),
        metavar="T",
        help="A window is the steps that end within T seconds, at least 5 [default: 60].",
    ),
    click.option(
        "--late-after",
        type=click.FloatRange(min=0),
        default=10.0,
        show_default=True,
        metavar="SECONDS",
        help="Analyse a window without ranks that are this far behind the first one.",
    ),
    click.option(
        "--metrics",
        metavar="SOURCE",
        envvar=METRICS_VARIABLE,
        help=f"Ask metrics about culprits, such as Prometheus at its base URL [default: ${METRICS_VARIABLE}].",
    ),
    click.option("--metrics-port", type=click.IntRange(0, 65535), help="Port of Prometheus metrics; 0: a free one."),
    click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Address for --metrics-port."),
    click.option(
        "--notify",
        metavar="URL",
        envvar=NOTIFY_VARIABLE,
        help=f"Post incidents to this webhook, or to an address that Apprise knows [default: ${NOTIFY_VARIABLE}].",
    ),
    click.option(
        "--log", metavar="TRACKER", help="Log windows to wandb[:PROJECT], mlflow[:URI] or tensorboard[:FOLDER]."
    ),
    click.option("--dashboard-url", default="", metavar="URL", help="Address of `tracekit dashboard`, for links."),
)


def watch_options(command: _Command) -> _Command:
    """The options that `tracekit watch` and `tracekit collect --live` share."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Values of the options above: how to cut the run, and whom to notify."""

    window_steps: int | None = None
    window_seconds: float | None = None
    late_after: float = 10.0
    metrics: str | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    notify: str | None = None
    log: str | None = None
    dashboard_url: str = ""

    def arguments(self) -> list[str]:
        """The options as command-line arguments, without those whose addresses may hold a secret."""
        stated = [(name, value) for name, value in asdict(self).items() if value not in (None, "")]
        return [f"--{name.replace('_', '-')}={value}" for name, value in stated if name not in _SECRET]

    def given(self) -> list[str]:
        """Options that differ from their defaults."""
        given = [argument for argument in self.arguments() if argument not in WatchOptions().arguments()]
        typed = [name for name, variable in _SECRET.items() if getattr(self, name) and variable not in os.environ]
        return [*given, *(f"--{name}" for name in typed)]

    def environment(self) -> dict[str, str]:
        """The environment of a watch with these options."""
        secret = {variable: getattr(self, name) for name, variable in _SECRET.items()}
        return {**os.environ, **{variable: value for variable, value in secret.items() if value is not None}}


@dataclass(slots=True)
class WatchProcess:
    """`tracekit watch` of a run directory, which `start` starts. `consume`: it removes stored segments."""

    options: WatchOptions
    directory: Path
    store: Path
    name: str
    layout: LayoutOptions
    consume: bool
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _begun: int = field(default=0, init=False)
    _failed: bool = field(default=False, init=False)

    def start(self) -> None:
        """Start it."""
        self._begun += 1
        consume = ["--consume"] if self.consume else []
        self._process = subprocess.Popen(  # noqa: S603 - no shell; tracekit itself
            [*(sys.executable, "-P", "-m"), *self._words(), *consume, "--", str(self.directory)],
            env=self.options.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is meant for the command
            preexec_fn=_beside,  # noqa: PLW1509 - the launcher has one thread yet
        )

    def tick(self) -> None:
        """Report a watch that ended before the run; restart it if it was killed for the first time."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            self._ended(code)

    def wait(self) -> str | None:
        """Wait for the last window. Returns the command that stores missing windows, None if there are none."""
        while self._process is not None:
            if self._process.wait() == ExitCode.DONE:
                self._process = None
            else:
                self.tick()
        return self._by_hand() if self._failed else None

    def terminate(self) -> None:
        """Stop it, because the run could not be started."""
        if self._process is not None:
            self._process.terminate()

    def _ended(self, code: int) -> None:
        why = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if code not in (ExitCode.DONE, ExitCode.BAD_INPUT) and self._begun == 1:  # an error would only repeat
            say(f"tracekit: the watch of this run {why}; restarting it after the last stored window")
            self.start()
            return
        self._failed = True
        say(
            f"tracekit: the watch of this run {why}; the run continues without windows and alerts until you run"
            f" {printable(self._by_hand())}"
        )

    def _by_hand(self) -> str:
        return shlex.join([*self._words(), str(self.directory)])

    def _words(self) -> list[str]:
        sizes = {"--dp": self.layout.dp, "--pp": self.layout.pp, "--tp": self.layout.tp}
        stated = [f"{option}={size}" for option, size in sizes.items() if size is not None]
        job = (f"--store={self.store}", f"--name={self.name}")
        return ["tracekit", "watch", *job, *self.options.arguments(), *stated]


def _beside() -> None:
    release()
    os.nice(NICENESS)
