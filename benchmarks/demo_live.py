"""`make demo-live`: a small real job, a rank that becomes slow, the message about it, and the dashboard.

Needs torch but no GPU. Two ranks train under `tracekit collect --live`. From the third window on, one takes twice as
long until the message arrives, then it recovers. All files are in a temporary folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "tests" / "collectors" / "scripts" / "slow_on_demand.py"
SLOW_FROM_WINDOW = 2
DASHBOARD = "http://127.0.0.1:8050"


class Webhook(HTTPServer):
    """Print incidents; `opened` and `closed` are set once an incident of rank 1 was."""

    def __init__(self) -> None:
        self.opened, self.closed = threading.Event(), threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        for incident in message["incidents"]:
            print(f"\n  >>> webhook: incident {incident['incident']} {incident['status']}")
            for key in ("what", "who", "fix", "check", "page"):
                print(f"      {key:<6} {incident[key]}")
            print(flush=True)
            if incident["ranks"] == "1":
                (self.server.opened if incident["status"] == "opened" else self.server.closed).set()

    def log_message(self, *_: object) -> None:
        """Log nothing: incidents are printed above."""


def main() -> None:
    """Run the demonstration; in a terminal, end with the dashboard until Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="tracekit-demo-") as folder, Webhook() as webhook:
        threading.Thread(target=webhook.serve_forever, daemon=True).start()
        store = Path(folder) / "demo.store"
        _train(Path(folder), store, webhook)
        webhook.shutdown()
        tracekit = [sys.executable, "-P", "-m", "tracekit"]
        subprocess.run([*tracekit, "store", "incidents", "--store", store], check=True)
        subprocess.run([*tracekit, "store", "top", "demo", "--once", "--store", store], check=True)
        if sys.stdout.isatty():
            print(f"\nThe page: {DASHBOARD}/job?job=demo   (Ctrl-C ends the demonstration)", flush=True)
            subprocess.run([*tracekit, "dashboard", store], check=False)


def _train(folder: Path, store: Path, webhook: Webhook) -> None:
    slow, stop = folder / "slow", folder / "stop"
    url = f"http://127.0.0.1:{webhook.server_port}/"
    live = ["--window-steps", "20", "--notify", url, "--dashboard-url", DASHBOARD]
    job = subprocess.Popen(
        [
            *(
                sys.executable,
                "-P",
                "-m",
                "tracekit",
                "collect",
                "--live",
                *live,
                "--name",
                "demo",
                "--store",
                store,
                "--",
            ),
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", SCRIPT),
        ],
        cwd=folder,
        env={**os.environ, "SLOW": str(slow), "STOP": str(stop), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stderr is not None
    with job.stderr:
        for line in job.stderr:
            if "demo, window" in line:
                print(line, end="", flush=True)
            if f"demo, window {SLOW_FROM_WINDOW}," in line:
                print("\n  >>> rank 1 takes twice as long from now on\n", flush=True)
                slow.touch()
            if webhook.opened.is_set() and slow.exists():
                print("\n  >>> rank 1 is as fast as before\n", flush=True)
                slow.unlink()
            if webhook.closed.is_set():
                stop.touch()
    job.wait()


if __name__ == "__main__":
    main()
