"""A training loop that keeps one GPU busy and never waits for it, run by `benchmarks.gpu` as a script.

python gpu_train.py STEPS [FIRST LAST TRACE]   profiles steps FIRST to LAST into TRACE

DEVICE, WIDTH, DEPTH and TOKENS are taken from the environment.
"""

import os
import sys

import torch
from torch import nn

DEVICE = os.environ.get("DEVICE", "cuda")
WIDTH, DEPTH = int(os.environ.get("WIDTH", "8192")), int(os.environ.get("DEPTH", "6"))
TOKENS = int(os.environ.get("TOKENS", "8192"))
MICROBATCHES = 2


def main() -> None:
    """Train for as many steps as asked."""
    steps = int(sys.argv[1])
    first, last = (int(sys.argv[2]), int(sys.argv[3])) if len(sys.argv) > 2 else (steps, steps)
    torch.manual_seed(0)
    layers = [module for _ in range(DEPTH) for module in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers).to(DEVICE, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(TOKENS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    profiler = torch.profiler.profile()
    for step in range(steps):
        if step == first:
            _wait()
            profiler.start()
        for _ in range(MICROBATCHES):
            nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == last:
            _wait()
            profiler.stop()
            profiler.export_chrome_trace(sys.argv[4])
    _wait()


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
