"""A few steps of training that start in half the time: for what the launcher is to do, whatever the training.

The optimizer is one of its own, as many users have one: those of torch import its compiler, which takes longer than all
the rest. Several ranks reduce their gradients; with SPAWN the script starts its two itself. END: how step 5 ends, by
`raise` or by waiting for an `interrupt`. READY: the step in which it says so, and goes on.
"""

import os
import select
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

STEPS = int(os.environ.get("STEPS", "6"))
END = os.environ.get("END")
READY = int(os.environ.get("READY", "-1"))


class Descent(torch.optim.Optimizer):
    """Plain gradient descent."""

    add_param_group = torch.optim.Optimizer.add_param_group.__wrapped__  # around it, torch imports the compiler

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad)
                parameter.grad = None


def main():
    many = "MASTER_ADDR" in os.environ
    if many:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = Descent(model.parameters())
    for step in range(STEPS):
        x = torch.randn(8, 16)
        nn.functional.mse_loss(model(x), x).backward()
        if many:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        if step == READY:
            print("ready", flush=True)
        if END == "raise" and step == 4:
            raise ValueError("the loss is not to my liking")
        if END == "interrupt" and step == 4:
            print("ready", flush=True)
            while True:
                select.select([], [], [], 0.1)  # signal.pause() would miss a signal that comes just before it
        optimizer.step()
    if many:
        del model, optimizer  # torch can hang or abort where they outlive the process group
        dist.destroy_process_group()


def rank_of_two(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    main()


if __name__ == "__main__":
    if "SPAWN" in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        torch.multiprocessing.spawn(rank_of_two, args=(port,), nprocs=2)
    else:
        main()
