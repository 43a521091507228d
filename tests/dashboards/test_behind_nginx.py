"""The dashboard behind a reverse proxy: nginx from Debian, with TLS, at a prefix, as docs/dashboard.md says."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser
from werkzeug.serving import make_server

from tests.dashboards.conftest import Serving
from tests.dashboards.web.test_tokens import NEW, write
from tracekit.dashboards.browser.web.access import read_access, read_auth

pytestmark = pytest.mark.slow

NGINX = Path("/usr/sbin/nginx")
PAGE = Path(__file__).parents[2] / "docs" / "dashboard.md"


@dataclass(frozen=True)
class Proxied:
    """Where browsers find the dashboard."""

    url: str


def server_block(port: int, dashboard_port: int, folder: Path) -> str:
    """The block of the page with the ports and files of this test."""
    found = re.search(r"```nginx\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    block = found[1]
    for wanted, here in {
        "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        "http://127.0.0.1:8050/": f"http://127.0.0.1:{dashboard_port}/",
        "/etc/ssl/tracekit.crt": str(folder / "crt"),
        "/etc/ssl/private/tracekit.key": str(folder / "key"),
        "server_name tracekit.example.com": "server_name localhost",
    }.items():
        assert wanted in block
        block = block.replace(wanted, here)
    return block


@pytest.fixture
def proxied(sample_store: Path, tmp_path: Path, serve: Callable[..., Serving]) -> Iterator[Proxied]:
    if not NGINX.exists():
        pytest.fail("no nginx: apt-get install -y --no-install-recommends nginx-light")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1",
         "-keyout", tmp_path / "key", "-out", tmp_path / "crt"],
        check=True, capture_output=True,
    )  # fmt: skip
    write(tmp_path / "tokens", f"ann: {NEW}\n")
    free = make_server("127.0.0.1", 0, lambda *_: [])  # a port that nobody has, for nginx
    free.server_close()
    url = f"https://localhost:{free.server_port}/tracekit/"
    access = read_access(read_auth(f"token:{tmp_path / 'tokens'}"), [], url)
    port = urlsplit(serve(sample_store, access).url).port
    assert port is not None
    config = tmp_path / "nginx.conf"
    temporary = "".join(
        f"{name}_temp_path {tmp_path / name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config.write_text(
        f"{'user root;' if os.getuid() == 0 else ''} pid {tmp_path / 'pid'}; error_log {tmp_path / 'log'};\n"
        f"events {{}}\nhttp {{ access_log off; {temporary}\n{server_block(free.server_port, port, tmp_path)}\n}}\n"
    )
    nginx = [NGINX, "-c", config, "-e", tmp_path / "log"]
    started = subprocess.run(nginx, capture_output=True, text=True, check=False)  # returns once it listens
    assert (started.returncode, started.stderr) == (0, "")
    yield Proxied(url)
    subprocess.run([*nginx, "-s", "stop"], check=True)
    assert " [error] " not in (tmp_path / "log").read_text()


def test_a_person_logs_in_and_sees_every_kind_of_page(proxied: Proxied, browser: Browser) -> None:
    context = browser.new_context()
    page, noise = context.new_page(), list[str]()
    page.on("console", lambda said: noise.append(said.text) if said.type in ("error", "warning") else None)
    page.on("request", lambda asked: None if asked.url.startswith(proxied.url) else noise.append(asked.url))
    page.goto(f"{proxied.url}job?job=slow-worker")
    page.fill("[name=token]", NEW)
    page.click("button")
    page.wait_for_selector(".hero")
    assert page.url == f"{proxied.url}job?job=slow-worker"
    (cookie,) = (one for one in context.cookies() if one["name"] == "tracekit_session")
    assert (cookie["secure"], cookie["httpOnly"], cookie["path"]) == (True, True, "/tracekit/")
    page.click(".cells a[tabindex='0']")
    page.wait_for_selector("#workers-detail >> text=Rank 9 on host-0001")
    page.click("text=Timeline of this worker")
    page.wait_for_selector("#timeline-slowest tbody tr")
    page.click(".brand")
    page.click("#jobs a.job")
    page.wait_for_selector(".hero")
    with page.expect_download() as download:
        page.click("text=About this job, and its tables as CSV")
        page.click("text=causes.csv")
    assert "slow" in Path(download.value.path()).read_text()
    page.click("text=Log out")
    page.wait_for_selector("[name=token]")
    assert page.url == proxied.url
    page.goto(f"{proxied.url}workers?token={NEW}&job=slow-worker")
    page.wait_for_selector("#workers-detail")
    assert page.url.startswith(f"{proxied.url}workers?job=slow-worker")
    assert NEW not in page.url
    assert [line for line in noise if "401" not in line] == []
    context.close()
