"""`tracekit dashboard`: serve the dashboard of a store, or of a few traces.

In: options. Out: a running server; the same one in development and in production: one process with threads, because it
caches results and holds the what-ifs in progress.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import click

from tracekit.base.arguments import PATH, PRICE, STORE_PATH
from tracekit.base.errors import SelectionError
from tracekit.base.paths import absolute, command, shown
from tracekit.base.text import printable

_EXTRAS = ("dash", "flask_compress", "plotly", "waitress")


@click.command("dashboard")
@click.argument("sources", nargs=-1, type=STORE_PATH, metavar="[STORE | TRACE...]")
@click.option("--study", type=PATH, help="A study that `tracekit fleet run` made, for the page Fleet.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8050, show_default=True, help="Port; 0 takes a free one.")
@click.option("--auth", help="Who may look: token[:FILE], the default for any other --host, or proxy:HEADER@ADDRESS.")
@click.option(
    "--allowed-host", "hosts", multiple=True, metavar="NAME", help="A host name browsers may ask by; repeatable."
)
@click.option(
    "--public-url", metavar="URL", help="Where browsers find it behind a reverse proxy: https://HOST/PREFIX/."
)
@click.option("--gpu-hour", type=PRICE, metavar="PRICE", help="State what is lost in money, too.")
@click.option("--threads", default=8, show_default=True, type=click.IntRange(1, 256), help="Requests at once.")
def dashboard_command(
    sources: tuple[Path, ...],
    study: Path | None,
    host: str,
    port: int,
    auth: str | None,
    hosts: tuple[str, ...],
    public_url: str | None,
    gpu_hour: float | None,
    threads: int,
) -> None:
    """Serve the dashboard: what do stragglers cost, who, since when, why, and what would each fix buy?

    Shows a store [default: $TRACEKIT_STORE, else ./tracekit.store], or the traces given. A NAME.store that is not there
    yet is waited for: start the dashboard before the job. Stop it with Ctrl-C.
    """
    if missing := [name for name in _EXTRAS if find_spec(name) is None]:
        raise SelectionError(f"the dashboard needs {', '.join(missing)}: pip install 'tracekit-analysis[dashboard]'")
    from tracekit.dashboards.browser.web.access import ip_address, read_access, read_auth
    from tracekit.dashboards.browser.web.app import make_server

    numeric = ip_address(host)
    is_own = host == "localhost" if numeric is None else numeric.is_loopback
    if auth is None and not is_own:
        auth = "token"
    checked = None if auth is None else read_auth(auth)
    host_names = () if numeric is not None or not host else (host,)  # browsers may then ask by that name
    access = read_access(checked, (*hosts, *host_names), public_url)
    if study is not None:
        from tracekit.fleet.study import Study

        Study(study).check()
    store, clean_up = _store_of(sources, needed=study is None)
    from tracekit.dashboards.browser.web.app import make_app

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        with _listen(host, port) as listening:
            url = public_url or _url(listening)
            token = getattr(checked, "token", None)
            link = f"{url.rstrip('/')}/?token={token}" if token else url
            proxied = f", through a proxy to {_url(listening)}" if public_url else ""
            click.echo(f"tracekit dashboard of {printable(shown(store))}: {link}{proxied}  (Ctrl-C ends it)")
            app = make_app(store, access, study and study.absolute(), gpu_hour)
            make_server(listening, app.server, threads, access.prefix).run()
    finally:
        clean_up()
    sys.stdout.flush()
    os._exit(0)  # a normal exit would wait for threads that read ahead


def _listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises SelectionError if that fails."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise SelectionError(f"cannot listen on {host}, port {port}: {error}; choose another --port") from None
    listening.listen(128)
    return listening


def _url(listening: socket.socket) -> str:
    """Return the address of a listening socket; if it listens on all, the one that leads to other machines."""
    host, port = listening.getsockname()[:2]
    with socket.socket(listening.family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        if ipaddress.ip_address(host).is_unspecified:
            probe.connect(("192.0.2.1" if listening.family == socket.AF_INET else "2001:db8::1", 9))  # sends nothing
            host = probe.getsockname()[0]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def _store_of(sources: tuple[Path, ...], *, needed: bool) -> tuple[Path, Callable[[], None]]:
    """Return the store to show and its clean-up: the given one, the default one, or a temporary one of traces.

    `needed`: raise an error if there is none; with a study, the default store may be missing.
    """
    from tracekit.live.watch import await_store, is_expected
    from tracekit.sources.load import is_a
    from tracekit.sources.source import Content
    from tracekit.store import Store, default_store

    stores = [source for source in sources if is_a(Content.STORE, source)]
    expected = [source for source in sources if is_expected(source)]
    if not sources or (len(sources) == 1 and (stores or expected)):
        store = sources[0] if sources else default_store()
        if sources or needed:
            await_store(Store(store))
            with Store(store).reading():  # a damaged catalogue is an error now, not on every page
                pass
        return absolute(store), lambda: None
    if stores:
        raise SelectionError(
            f"{shown(stores[0])}: a store, not a trace; a dashboard shows one store, or traces: type"
            f" `{command('dashboard', stores[0])}`"
        )
    folder = tempfile.TemporaryDirectory(prefix="tracekit-dashboard-")
    store = Path(folder.name) / "traces.store"
    # In a separate process, which frees its memory when it ends.
    importing = [sys.executable, "-P", "-m", "tracekit.cli", "import", "--store", str(store), "--", *map(str, sources)]
    import_run = subprocess.run(importing, check=False, stdout=subprocess.DEVNULL)  # noqa: S603 - tracekit itself
    if import_run.returncode:
        folder.cleanup()
        sys.exit(import_run.returncode)
    return store, folder.cleanup
