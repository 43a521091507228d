"""A job with experts on simulated GPUs: recordings with known loads, and the same job with other loads.

Each layer runs attention, a dispatch, the experts and a combine, then the same backward in twice the time. The experts
of a rank take 100 us + 0.5 us a token, a transfer 50 us + 0.1 us for each row of the rank with most. Times in us.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.kineto_files import COMM, document, event, kernel, launch, write

ATTENTION, BASE, PER_TOKEN, TRANSFER, PER_ROW, ALL_REDUCE, ADAM = 300.0, 100.0, 0.5, 50.0, 0.1, 200.0, 100.0
RANKS, EXPERTS = 4, 8
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def on_ranks(tokens: np.ndarray) -> np.ndarray:
    """Tokens of experts, [..., experts], as those of ranks, two experts each in order."""
    return tokens.reshape(*tokens.shape[:-1], RANKS, -1).sum(axis=-1)


@dataclass
class Recorder:
    """The events of one rank: everything is launched early, 2 us apart."""

    rank: int
    events: list[dict[str, Any]]
    host: float = 0.0
    launched: int = 0

    def op(self, name: str, start: float, end: float, phase: str = "", stream: int = 7, **args: Any) -> None:
        """Launch an op; with `args`, the arguments of a collective."""
        self.host, self.launched = self.host + 20, self.launched + 1
        number, at = self.launched, self.host
        if phase:
            self.events.append(event("user_annotation", phase, at - 1, 12))
        if args:
            self.events.append(event("cpu_op", "record_param_comms", at, 8, **args))
        self.events += [
            event("cuda_runtime", "cudaStreamWaitEvent", at + 0.5, 0.5),
            launch(at + 2, number),
            kernel(name, start, end - start, stream=stream, correlation=number, grid=[20 if args else 528, 1, 1],
                   block=[256, 1, 1], **args),
        ]  # fmt: skip


def simulate(
    tokens: np.ndarray, folder: Path | None = None, *, slow: float = 1.0, late: float = 1.0, lists: str = "all"
) -> list[float]:
    """Run steps with these tokens, of experts or of ranks, [steps, layers, either]; return step times, us.

    Rank 1 computes experts `slow` times, attention `late` times as long. `folder`: write a recording there. `lists`:
    "all" rows to and from each rank are recorded, "cut" ones, "none", no "numbers", too many
    "digits", those of "others", or too "few".
    """
    received = on_ranks(tokens) if tokens.shape[-1] == EXPERTS else tokens
    files = [Recorder(rank, []) for rank in range(RANKS)]
    begin, times = 1000.0, []
    for step, layers in enumerate(received):
        for one in files:
            one.host = begin - 400
        now = np.full(RANKS, begin)
        passes = [("F", 1.0, row) for row in layers] + [("B", 2.0, row) for row in layers[::-1]]
        for number, (letter, factor, row) in enumerate(passes):
            slower = np.where(np.arange(RANKS) == 1, late, 1.0)
            now = _each(files, "flash_kernel", now, now + factor * ATTENTION * slower, f"attn({letter})")
            now = _exchange(files, now, row, f"dispatch({letter})", lists, 2 * number, mirrored=False)
            took = factor * (BASE + PER_TOKEN * row) * np.where(np.arange(RANKS) == 1, slow, 1.0)
            now = _each(files, "grouped_gemm_kernel", now, now + took, f"mlp({letter})")
            now = _exchange(files, now, row, f"combine({letter})", lists, 2 * number + 1, mirrored=True)
        end = now.max() + ALL_REDUCE
        said = _said("allreduce", 2 * len(passes), files[0].rank)
        for one, start in zip(files, now, strict=True):
            one.op("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", start, end, "", COMM, **said)
            one.op("multi_tensor_apply_kernel<adam>", end, end + ADAM, "Optimizer.step#Adam.step")
            one.events.append(
                event(
                    "cuda_runtime",
                    "cudaDeviceSynchronize",
                    one.host + 20,
                    end + ADAM - one.host - 20,
                    correlation=-1 - step,
                )
            )
            one.events.append(
                event("user_annotation", f"ProfilerStep#{step + 3}", begin - 405, end + ADAM - begin + 406)
            )
        times.append(float(end + ADAM - begin + 420))
        begin = end + ADAM + 420
    if folder is not None:
        head = {"deviceProperties": [{"id": 0, "name": "GPU", "numSms": 132}]}
        for one in files:
            write(folder / f"rank{one.rank}.json", document(one.events, one.rank, world=RANKS, **head))
    return times


def log(path: Path, tokens: np.ndarray, first: int = 3) -> Path:
    """Write tokens of experts, [steps, layers, experts], as the job logs them."""
    lines = [
        json.dumps({"step": first + step, "layer": layer, "tokens_per_expert": row.tolist()})
        for step, layers in enumerate(tokens)
        for layer, row in enumerate(layers)
    ]
    path.write_text("\n".join(lines))
    return path


def varied(weights: Sequence[Sequence[float]], steps: int = 3, total: int = 8000, seed: int = 1) -> np.ndarray:
    """Tokens of experts, [steps, layers, experts], by weights for each layer, which vary by 20 % between steps."""
    rng = np.random.default_rng(seed)
    drawn = np.array(weights) * rng.uniform(0.9, 1.1, (steps, len(weights), EXPERTS))
    return np.floor(drawn / drawn.sum(axis=-1, keepdims=True) * total / 4) * 4


def _each(files: Sequence[Recorder], name: str, start: np.ndarray, end: np.ndarray, phase: str) -> np.ndarray:
    for one in files:
        one.op(name, start[one.rank], end[one.rank], phase)
    return end


def _exchange(
    files: Sequence[Recorder],
    start: np.ndarray,
    row: np.ndarray,
    phase: str,
    lists: str,
    number: int,
    *,
    mirrored: bool,
) -> np.ndarray:
    sent = np.full(RANKS, row.sum() / RANKS)
    end = start.max() + TRANSFER + PER_ROW * max(row.max(), sent.max())
    for one in files:
        out, into = [int(each) // RANKS for each in row], [int(row[one.rank]) // RANKS] * RANKS
        said = {"In split size": _text(out, lists), "Out split size": _text(into, lists)}
        if mirrored:
            said = dict(zip(said, reversed(said.values()), strict=True))
        one.op(SEND_RECV, start[one.rank], end, phase, COMM, **_said("all_to_allv", number, one.rank), **said)
    return np.full(RANKS, end)


def _text(rows: list[int], lists: str) -> str:
    texts = {"few": "[5, 5]", "all": str(rows), "cut": f"{str(rows)[:-1]}, ...]", "none": "[]", "numbers": "[many]"}
    return (texts | {"digits": f"[{'9' * 5000}]", "others": str([len(rows) + rows[0] % 7] * RANKS)})[lists]


def _said(name: str, number: int, rank: int) -> dict[str, Any]:
    return {
        "Collective name": name, "In msg nelems": 1024, "Out msg nelems": 1024, "dtype": "BFloat16", "Seq": number,
        "Group size": RANKS, "Process Group Name": "3", "Process Group Description": "EXPERT_MODEL_PARALLEL_GROUP",
        "Process Group Ranks": str(list(range(RANKS))), "Rank": rank,
    }  # fmt: skip
