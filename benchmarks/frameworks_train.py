"""Small training jobs in the style of several frameworks; one rank can be slow in one part.

    torchrun --nproc-per-node 2 benchmarks/frameworks_train.py ROW

SLOW_IN is the part (forward, backward, optimizer, data, host, gc, pause), SLOW_RANK the rank, SLOW_MS the delay per
step, STEPS the number of steps. Prints a digest of each rank's weights and one of its losses. Does not import tracekit.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))  # not on the path if tests import this module

import frameworks_libraries
import frameworks_parallel
from frameworks_parts import (
    LOSSES,
    SLOW_IN,
    SLOW_MS,
    SLOW_RANK,
    Garbage,
    batches,
    loop,
    optimizer_of,
    seen,
    slow,
    stack,
)

#: Stops the rank's process for a fifth of the time; with SLOW_MS at 12, for 30 ms in 150.
PAUSER = """
import os, signal, sys, time
process, pause_s = int(sys.argv[1]), float(sys.argv[2])
try:
    while True:
        time.sleep(4 * pause_s)
        os.kill(process, signal.SIGSTOP)
        time.sleep(pause_s)
        os.kill(process, signal.SIGCONT)
except ProcessLookupError:
    pass
"""


def ddp() -> nn.Module:
    return loop(nn.parallel.DistributedDataParallel(stack()))


def accumulation() -> nn.Module:
    """Two microbatches a step, the first without reducing, clipping, evaluation every tenth step."""
    model = nn.parallel.DistributedDataParallel(stack())
    optimizer, garbage = optimizer_of(model.parameters()), Garbage()
    for step, x in enumerate(batches()):
        if step % 10 == 5:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
        with model.no_sync():
            seen(model(x[::2]).square().mean()).backward()
        seen(model(x[1::2]).square().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        slow("host")
        garbage.collect()
    return model


def activation_checkpointing() -> nn.Module:
    """Every block runs again in the backward."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    blocks = [checkpoint_wrapper(block) for block in stack()]
    return loop(nn.parallel.DistributedDataParallel(nn.Sequential(*blocks)))


def grad_scaler() -> nn.Module:
    """Mixed precision: losses are scaled, gradients unscaled and clipped."""
    model, scaler = nn.parallel.DistributedDataParallel(stack()), torch.amp.GradScaler("cpu")
    optimizer, garbage = optimizer_of(model.parameters()), Garbage()
    for x in batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = seen(model(x).float().square().mean())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        slow("host")
        garbage.collect()
    return model


def compiled() -> nn.Module:
    model = nn.parallel.DistributedDataParallel(stack())
    return loop(model, torch.compile(model, backend="aot_eager"))


def saving() -> nn.Module:
    """Rank 0 writes a checkpoint in every fifth step, while the others continue to their next reduction."""
    model = nn.parallel.DistributedDataParallel(stack())
    optimizer, garbage = optimizer_of(model.parameters()), Garbage()
    path = Path(os.environ.get("OUT", ".")) / "checkpoint.pt"
    for step, x in enumerate(batches()):
        seen(model(x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4 and dist.get_rank() == 0:
            for _ in range(10):
                torch.save([model.state_dict(), optimizer.state_dict()], path)
        slow("host")
        garbage.collect()
    return model


ROWS: dict[str, Callable[[], nn.Module]] = {
    row.__name__: row
    for row in (
        *(ddp, accumulation, activation_checkpointing, grad_scaler, compiled, saving),
        *(*frameworks_parallel.ROWS, *frameworks_libraries.ROWS),
    )
}


def _bytes_of(parameter: Any) -> bytes:
    """A parameter, or this rank's shard of a DTensor or a DeepSpeed parameter, as bytes."""
    for shard in ("_local_tensor", "ds_tensor"):
        parameter = getattr(parameter, shard, parameter)
    return parameter.detach().float().numpy().tobytes()


def main() -> None:
    """Train the row named on the command line."""
    row = ROWS[next(word for word in sys.argv[1:] if not word.startswith("--"))]  # `deepspeed` puts --local_rank first
    if SLOW_IN == "pause" and int(os.environ.get("RANK", "0")) == SLOW_RANK:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        subprocess.Popen([sys.executable, "-S", "-c", PAUSER, str(os.getpid()), str(2.5 * SLOW_MS / 1e3)])
    if row not in frameworks_libraries.ROWS:  # those join the process group themselves
        dist.init_process_group("gloo")
    model = row()
    rank = os.environ.get("RANK", "0")
    weights = hashlib.sha256(b"".join(_bytes_of(parameter) for parameter in model.parameters())).hexdigest()
    losses = hashlib.sha256(repr(LOSSES).encode()).hexdigest()
    print(f"rank {rank} weights {weights}\nrank {rank} losses {losses} of {len(LOSSES)}", flush=True)
    del model
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
