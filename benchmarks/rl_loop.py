"""A real loop of RL post-training that `tracekit.rl` records; only its work is sleep.

Each engine is a process that batches requests continuously: one decoding step gives every running request a token and
takes longer the more of them run. A thread trains. `--staleness 1` generates the next step's samples while this step
trains; `--share 0.9` ends a rollout once nine of ten requests have ended and resumes the others in the next one.

    python -m benchmarks.rl_loop FOLDER --staleness 1
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tracekit import rl

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue
    from multiprocessing.synchronize import Event

#: A decoding step takes the first, and the second for each running request, seconds.
BASE_S, PER_REQUEST_S = 0.050, 0.002
TRAIN_S, SYNC_S = 2.2, 0.1
ENGINES, SLOTS, BATCH = 2, 16, 24


@dataclass(frozen=True)
class Request:
    """A trajectory, or what is left of one that was cut off."""

    name: str
    tokens: int
    step: int = 0
    submit: float = 0.0
    start: float = 0.0


def requests(seed: int) -> Request:
    """Requests without an end; their lengths have a tail."""
    draw, number = random.Random(seed), 0
    while True:
        yield Request(str(number), max(3, min(90, int(draw.lognormvariate(2.7, 0.7)))))
        number += 1


def engine(name: str, folder: str, todo: SimpleQueue, ended: SimpleQueue, stop: Event, lag: int) -> None:
    """Decode batches until None; for each request that ends, put True, and after each batch what is left of it."""
    rl.record(folder)

    def record(request: Request, tokens: int, status: str) -> None:
        rl.trajectory(
            request.name,
            step=request.step,
            engine=name,
            submit=request.submit,
            start=request.start,
            tokens=tokens,
            status=status,
            version=max(0, request.step - lag),
        )

    while (waiting := todo.get()) is not None:
        running: dict[Request, int] = {}  # tokens to decode
        while (waiting or running) and not stop.is_set():
            while waiting and len(running) < SLOTS:
                request = replace(waiting.pop(0), start=rl.now())
                running[request] = request.tokens
            time.sleep(BASE_S + PER_REQUEST_S * len(running))
            for request in list(running):
                running[request] -= 1
                if running[request] == 0:
                    del running[request]
                    record(request, request.tokens, "completed")
                    ended.put(True)
        for request, remaining in running.items():
            record(request, request.tokens - remaining, "aborted")
        ended.put([replace(one, tokens=left) for one, left in running.items()] + waiting)


def loop(folder: str, staleness: int, share: float, steps: int, seed: int) -> None:
    """Train `steps` steps, and leave their records in `folder`."""
    spawn = multiprocessing.get_context("spawn")
    todo, ended, stop = [spawn.SimpleQueue() for _ in range(ENGINES)], spawn.SimpleQueue(), spawn.Event()
    engines = [
        spawn.Process(target=engine, args=(f"engine-{number}", folder, queue, ended, stop, staleness))
        for number, queue in enumerate(todo)
    ]
    for process in engines:
        process.start()
    rl.record(folder)
    generated = [threading.Event() for _ in range(steps)]
    synced = [threading.Event() for _ in range(steps)]

    def train() -> None:
        for step in range(steps):
            generated[step].wait()
            with rl.phase("train", step=step):
                time.sleep(TRAIN_S)
            with rl.phase("sync", step=step):
                time.sleep(SYNC_S)
            synced[step].set()

    trainer = threading.Thread(target=train)
    trainer.start()
    stream, carried = requests(seed), []
    for step in range(steps):
        if step > staleness:
            synced[step - 1 - staleness].wait()
        batch = carried + [next(stream) for _ in range(BATCH - len(carried))]
        with rl.phase("generate", step=step):
            stop.clear()
            submitted = [replace(one, step=step, submit=rl.now()) for one in batch]
            for number, queue in enumerate(todo):
                queue.put(submitted[number::ENGINES])
            carried, busy, missing = [], ENGINES, math.ceil(share * BATCH)
            while busy:
                if (message := ended.get()) is True:
                    missing -= 1
                    if missing == 0:
                        stop.set()
                else:
                    busy -= 1
                    carried += message
        generated[step].set()
    trainer.join()
    for queue in todo:
        queue.put(None)
    for process in engines:
        process.join()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder")
    options.add_argument("--staleness", type=int, default=0)
    options.add_argument("--share", type=float, default=1.0)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--seed", type=int, default=1)
    loop(**vars(options.parse_args()))
