"""A single-process training loop in many styles; the first argument chooses one.

plain, scaler, compile, compile-in-place, checkpointing, fork, spawn, spans, set-step, steps, misuse, eval,
closure, two-modules, module-in-data, autograd-grad, functional, compile-many
"""

import functools
import hashlib
import multiprocessing
import os
import sys
import tempfile
import types

import torch
from quick import Descent
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, default_collate

import tracekit
from tracekit.collectors import set_step, span

STYLE = sys.argv[1]
STEPS = int(os.environ.get("STEPS", "6"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        if STYLE == "checkpointing":
            return self.second(checkpoint(lambda y: torch.relu(self.first(y)), x, use_reentrant=False))
        return self.second(torch.relu(self.first(x)))


class Augment(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, batch):
        return batch


def child():
    """What another process of the script does: train a little of its own."""
    model = nn.Linear(2, 2)
    optimizer = Descent(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def backward(call, x):
    """The closure of an optimizer, as Lightning and L-BFGS call it."""
    loss = nn.functional.mse_loss(call(x), x)
    loss.backward()
    return loss


def watch_forward(self, x):
    return x + 1


def watch(number):
    """A module of a class, and with code, of its own."""
    code = watch_forward.__code__.replace(co_name=f"forward_{number}")
    return type(f"Watch{number}", (nn.Module,), {"forward": types.FunctionType(code, globals())})()


def compile_and_count(compilations, graph, _inputs):
    compilations.append(graph)
    return graph.forward


def functional_loss(parameters, model, x):
    return nn.functional.mse_loss(torch.func.functional_call(model, parameters, (x,)), x)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    call = model
    if STYLE == "compile":
        call = torch.compile(model, backend="eager", fullgraph=True)
    if STYLE == "two-modules":
        call = lambda x: model.second(torch.relu(model.first(x)))  # noqa: E731
    if STYLE == "compile-in-place":
        model.compile(backend="eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compilations = []
    if STYLE == "compile-many":  # behind the optimizer, so that the hooks are there
        backend = functools.partial(compile_and_count, compilations)
        call = torch.compile(model, backend=backend, fullgraph=True)
        watches = [torch.compile(watch(number), backend=backend, fullgraph=True) for number in range(12)]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", enabled=STYLE == "scaler")
    data = TensorDataset(torch.randn(8 * STEPS, 16))
    augment = Augment() if STYLE == "module-in-data" else nn.Identity()
    loader = DataLoader(data, batch_size=8, collate_fn=lambda rows: augment(default_collate(rows)))
    for step, (x,) in enumerate(loader):
        if STYLE == "set-step":
            set_step(100 + step)
        if STYLE == "steps":
            tracekit.step()
        if STYLE == "misuse" and step == 3:
            set_step("three")
            for number in range(5000):
                with span(f"span {number}"):
                    pass
        if STYLE == "fork" and step == 2:
            pid = os.fork()
            if pid == 0:
                child()
                os._exit(0)
            os.waitpid(pid, 0)
        if STYLE == "spawn" and step == 2:
            process = multiprocessing.get_context("spawn").Process(target=child)
            process.start()
            process.join()
        if STYLE == "spans":
            with span("tokenize"):
                x.clone()
        if STYLE == "eval" and step % 2:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
        if STYLE == "compile-many":
            for one in watches:
                one(x)
        if STYLE == "closure":
            optimizer.step(lambda x=x: backward(call, x))
            scheduler.step()
            optimizer.zero_grad()
            continue
        if STYLE == "autograd-grad":
            grads = torch.autograd.grad(nn.functional.mse_loss(call(x), x), list(model.parameters()))
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad
        elif STYLE == "functional":
            for name, grad in torch.func.grad(functional_loss)(dict(model.named_parameters()), model, x).items():
                model.get_parameter(name).grad = grad.detach()
        else:
            scaler.scale(nn.functional.mse_loss(call(x), x)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        if step == 3:
            with tempfile.TemporaryFile() as file:
                torch.save(model.state_dict(), file)
    if STYLE == "compile-many":
        print(f"compiled {len(compilations)}")
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
    print(f"rank 0 weights {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
