"""Losses of one GPU, drawn at random and put into real recordings.

In: recordings, a kind of loss, a seed. Out: the changed trace, and what the loss costs: the trace without it is the
fix, so the true saving is how much later the changed trace ends.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

from judges.onegpusim import Changed, PlantedLoss, Play, Recording, reach

LOSSES = ("loader", "sync", "python", "gc", "allocation", "slow", "tiny", "pageable", "checkpoint")
#: The share of a recording that a loss of the kind `small` stays below.
SMALL = 0.01


def _hole(us: float, *layers: tuple[str, str]) -> Play:
    def play(run: Changed, now: float) -> float:
        for depth, (category, name) in enumerate(layers):
            run.host(category, name, now + depth * 0.4, now + us - depth * 0.4)
        return now + us

    return play


def _item(stacks: bool, vendor: str) -> Play:
    def play(run: Changed, now: float) -> float:
        done = run.gpu(now + 3.0, "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1.5, bytes=4)
        end = max(done, now + 9.0) + 4.0
        run.host("cuda_runtime", f"{vendor}MemcpyAsync", now + 3.0, now + 8.0, correlation=run.number)
        run.host("cuda_runtime", f"{vendor}StreamSynchronize", now + 9.0, end)
        run.host("cpu_op", "aten::_local_scalar_dense", now + 1.5, end + 1.0)
        run.host("cpu_op", "aten::item", now + 1.0, end + 1.5)
        if stacks:
            run.host("python_function", "train.py(88): log_loss", now, end + 3.0)
        return end + 3.0

    return play


def _allocation(us: float, vendor: str) -> Play:
    def play(run: Changed, now: float) -> float:
        freed = max([now + 1.0, *run.ends.values()]) + 0.6 * us  # to free waits for the GPU
        end = freed + 1.0 + 0.4 * us
        run.host("cuda_runtime", f"{vendor}Free", now + 1.0, freed)
        run.host("cuda_runtime", f"{vendor}Malloc", freed + 1.0, end)
        run.host("cpu_op", "aten::empty", now, end + 1.0)
        return end + 1.5

    return play


def _loop(count: int, us: float, vendor: str) -> Play:
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"

    def play(run: Changed, now: float) -> float:
        for begin in (now + number * us for number in range(count)):
            run.gpu(begin + 1.5, "kernel", name, 2.0, grid=[1, 1, 1], block=[128, 1, 1])
            called = f"{vendor}LaunchKernel"
            run.host("cuda_runtime", called, begin + 1.5, begin + 1.5 + 0.5 * us, correlation=run.number)
            run.host("cpu_op", "aten::add_", begin, begin + us - 0.5)
        return now + count * us

    return play


def _copy(size: int, rate: float, vendor: str) -> Play:
    def play(run: Changed, now: float) -> float:
        done = run.gpu(now + 3.0, "gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", size / rate, bytes=size)
        run.host("cuda_runtime", f"{vendor}MemcpyAsync", now + 3.0, done + 4.0, correlation=run.number)
        run.host("cuda_runtime", f"{vendor}StreamSynchronize", done + 5.0, done + 8.0)
        run.host("cpu_op", "aten::copy_", now, done + 9.0)
        return done + 10.0

    return play


def planned(kind: str, recording: Recording, rng: Random, scale: float) -> PlantedLoss | None:
    """A loss of this kind, `scale` times as large as usual; None if the recording has no place for it."""
    stacks = bool(recording.python)
    vendor = "hip" if recording.calls[0].event["name"].startswith("hip") else "cuda"
    if kind == "slow":
        return _slow(recording, rng, scale)
    if kind == "allocation":
        count = rng.randint(20, 60)
        every = recording.inside[rng.randrange(3) :: max(len(recording.inside) // count, 1)][:count]
        lengths = [rng.uniform(200.0, 2000.0) * scale for _ in every]
        plays = [(one, _allocation(us, vendor)) for one, us in zip(every, lengths, strict=True)]
        return PlantedLoss(plays, sum(lengths)) if len(every) >= 10 else None
    counts = {"loader": (3, 5), "sync": (10, 60), "python": (3, 20), "gc": (2, 12), "tiny": (1, 1), "pageable": (2, 5),
              "checkpoint": (2, 5)}  # fmt: skip
    count = rng.randint(*counts[kind])
    if kind == "sync":
        count = max(1, round(count * scale))
    moments = recording.between if kind in ("gc", "tiny") else recording.in_own_code
    if len(moments) < count:
        return None
    chosen = sorted(rng.sample(moments, count))
    share = rng.uniform(0.03, 0.4) * recording.length / count  # of a hole or a copy
    if kind == "sync":
        return PlantedLoss([(one, _item(stacks, vendor)) for one in chosen], 30.0 * count)
    if kind == "tiny":
        kernels, us = max(1, round(rng.randint(500, 2000) * scale)), rng.uniform(6.0, 9.0)
        return PlantedLoss([(one, _loop(kernels, us, vendor)) for one in chosen], kernels * us)
    if kind == "pageable":
        rate = rng.uniform(2000.0, 4000.0)  # bytes per microsecond
        # Pinned, a copy still has to be launched: of shorter ones, that is the largest part.
        sizes = [int(min(max(share, 300.0) * rate, 4e8) * scale * rng.uniform(0.7, 1.3)) + 4096 for _ in chosen]
        return PlantedLoss(
            [(one, _copy(size, rate, vendor)) for one, size in zip(chosen, sizes, strict=True)], sum(sizes) / rate
        )
    layers = {
        "loader": [("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")],
        "python": [("python_function" if stacks else "user_annotation", "train.py(120): log_metrics")],
        "checkpoint": [
            ("python_function", "train.py(140): keep"),
            ("python_function", "torch/serialization.py(944): save"),
            ("python_function", "<built-in method write_record of PyTorchFileWriter object at 0x7f00>"),
        ]
        if stacks
        else [("user_annotation", "save_checkpoint")],
        # The first is what torch 2.13 writes.
        "gc": [rng.choice([("python_function", "Python GC"), ("python_gc", "Python GC"), ("python_gc", "gc")])],
    }[kind]
    if kind == "loader" and stacks:
        layers.insert(0, ("python_function", "torch/utils/data/dataloader.py(733): __next__"))
    lengths = [max(min(share, 100_000.0) * rng.uniform(0.7, 1.3) * scale, 5.0) for _ in chosen]
    return PlantedLoss([(one, _hole(us, *layers)) for one, us in zip(chosen, lengths, strict=True)], sum(lengths))


def _slow(recording: Recording, rng: Random, scale: float) -> PlantedLoss | None:
    """All kernels of one matrix product of 16-bit numbers become slow ones of 32 bits."""
    products = defaultdict(list)
    for call in recording.calls:
        around = recording.launched_in.get(id(call), {"name": ""})
        product = around["name"] in ("aten::mm", "aten::addmm")
        if product and re.search("Half|BFloat", str(around["args"].get("Input type"))):
            kernels = [(op, around) for op in call.ops if op.call is call and op.event["cat"] == "kernel"]
            products[around["name"]] += kernels
    if not products:
        return None
    chosen, factor = products[rng.choice(sorted(products))], 1 + rng.uniform(3.0, 7.0) * scale
    loss = PlantedLoss([], sum(op.end - op.start for op, _ in chosen) * (factor - 1))
    for op, around in chosen:
        types = ["float" if re.search("Half|BFloat", one) else one for one in around["args"]["Input type"]]
        loss.longer[id(op)] = factor
        loss.renamed[id(op.event)] = {**op.event, "name": "ampere_sgemm_128x64_tn"}
        loss.renamed[id(around)] = {**around, "args": {**around["args"], "Input type": types}}
    return loss


def drawn(recordings: Sequence[Recording], kind: str, seed: str) -> tuple[str, Recording, dict[str, Any], float]:
    """The kind of a loss, the recording without it and the trace with it, and the true saving in seconds."""
    for attempt in range(1000):
        rng = Random(f"{seed} {attempt}")
        recording = rng.choice(recordings)
        if kind == "none":
            return kind, recording, Changed(recording, PlantedLoss()).document(), 0.0
        of, state = rng.choice(LOSSES) if kind == "small" else kind, rng.getstate()
        loss = planned(of, recording, rng, 1.0)
        if loss is not None and kind == "small":
            rng.setstate(state)
            loss = planned(of, recording, rng, Random(seed).uniform(0.002, 0.008) * recording.length / loss.us)
        if loss is not None:
            document = Changed(recording, loss).document()
            begin, end = reach(document["traceEvents"])
            saved = end - begin - recording.length
            # Too little in a long recording is of the kind `small`; kernels that the GPU is busy with are not tiny.
            enough = (saved if kind == "sync" else loss.us) > 2 * SMALL * recording.length
            tiny = kind != "tiny" or saved > 0.5 * loss.us
            if (saved < SMALL * (end - begin)) if kind == "small" else (enough and tiny):
                return of, recording, document, saved * 1e-6
    sys.exit(f"no trace has a place for {kind}")
