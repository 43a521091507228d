"""What watching for hangs costs a rank while nothing hangs. Run as a module, in a process of its own; prints JSON.

The watch's own code is timed: its look at the flight recorder, and what its hooks add to a transfer and to a wait. A
job's step varies by a thousand times as much as that, so two runs with and without the watch would show nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Groups of a rank in a job with tensor, pipeline, data, context and expert parallelism; operations that fill its
#: recorder; steps and groups change nothing else.
GROUPS, OPERATIONS = 12, 5000
LOOKS, CALLS = 400, 200_000


class Session:
    """What the watch asks of a session: it hands over its look and its hooks, and runs nothing by itself."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.step, self.process_id = 0, os.getpid()
        self.wraps: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {}
        self.look: Callable[[], Any] = lambda: None
        self.handed_over = threading.Event()

    def patch(self, _owner: object, name: str, wrap: Callable[..., Any], **_lacks: str) -> None:
        """Keep a hook."""
        self.wraps[name] = wrap

    def attempt_hook(self, hook: str, body: Callable[[], Any]) -> None:
        """Keep what the watch's thread does again and again, and end the thread."""
        if hook == "hang-watch":
            self.look = body
            self.handed_over.set()


def measured() -> dict[str, float]:
    """Microseconds of a look, of a transfer with its wait, and of the wait of a collective; looks a second."""
    import torch
    import torch.distributed as dist

    from tracekit.collectors.runtime import hang_watch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(GROUPS):
        dist.new_group([0])
    for _ in range(OPERATIONS):
        dist.all_reduce(torch.ones(1))
    session: Any = Session()
    with tempfile.TemporaryDirectory() as folder:
        hang_watch.HangWatch(session, Path(folder)).start()
        session.handed_over.wait()

        def look() -> None:
            session.step += 1  # so that each finds something new
            session.look()

        looked = _each_us(look, LOOKS)
    work = object()
    wait = session.wraps["wait"](_nothing)
    send = session.wraps["send"](lambda *_: work)
    bare = _each_us(lambda: _nothing(work), CALLS)
    waited = _each_us(lambda: wait(work), CALLS) - bare

    def transfer() -> None:
        send(None, None, 1)
        wait(work)

    transferred = _each_us(transfer, CALLS) - 2 * bare
    dist.destroy_process_group()
    return {"look_us": looked, "transfer_us": transferred, "wait_us": waited, "looks_per_s": 1 / hang_watch.PERIOD_S}


def _nothing(_work: object) -> None:
    return None


def _each_us(body: Callable[[], object], times: int) -> float:
    """Processor time of one call, microseconds: the best of five rounds."""
    best = float("inf")
    for _ in range(5):
        began = time.thread_time()
        for _ in range(times // 5):
            body()
        best = min(best, (time.thread_time() - began) / (times // 5))
    return 1e6 * best


if __name__ == "__main__":
    print(json.dumps(measured()))
