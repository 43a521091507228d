"""Recognise logs of training that tracekit does not read, and name what it does read instead.

In: the first bytes of a file. Out: what it is and what to do, None for anything else. What each framework prints is
checked in its sources.
"""

from __future__ import annotations

import re
from pathlib import Path

from tracekit.base.command_line import command
from tracekit.base.look import Look

#: Colours of a console.
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
_RECORD = "record a trace with torch.profiler"
_PHASES = "which says nothing of what is within a step"
_WATCHDOG = (
    rb"Watchdog caught collective operation timeout|failure detected by watchdog|"
    rb"Received a dump signal due to a collective|Timeout at NCCL work: \d+"
)
_RAS = (
    rb"ranks? ha(?:ve|s) launched up to operation \d|Communicator ranks have different \w+ operation counts|"
    rb"^\s*Group\s+Comms\s+Nodes\s+Ranks\s+Ranks"
)
_COMPILED = {
    "watchdog": re.compile(_WATCHDOG),
    "ras": re.compile(_RAS, re.MULTILINE),
}
#: What is in a log -> what it is, and what to do.
_LOGS = (
    (
        re.compile(rb"\biteration\s+\d+/\s*\d+\s*\|.{0,300}elapsed time per iteration"),
        (
            f"a log of Megatron, {_PHASES}; {_RECORD} (Megatron: --profile --use-pytorch-profiler), or give the folder"
            " of its tracer, MegaScan"
        ),
    ),
    (
        re.compile(rb"\bstep:\s*\d+\s+loss:\s*\S+.{0,300}\b(?:tps|mfu):"),
        f"a log of torchtitan, {_PHASES}; {_RECORD} (torchtitan: --profiling.enable_profiling)",
    ),
    (
        re.compile(rb"(?:Started|Finished): '[\w ./-]+'(?:, time cost: [\d.]+s)?"),
        (
            "lines of SkyRL's timers, which do not name their step; with trainer.logger=console, SkyRL prints `Step 3:`"
            " and all timings of that step, which `tracekit rl` reads"
        ),
    ),
    (
        re.compile(rb"Reward Mean: \S+.{0,300}Completion Length Mean:"),
        f"a log of cosmos-rl, {_PHASES}; record phases with tracekit.rl (docs/rl.md), or {_RECORD}",
    ),
    (
        re.compile(rb"\{'loss': '?[-\d.e]+.{0,2000}'(?:learning_rate|step_time)': "),
        (
            f"a log of the Hugging Face Trainer (or TRL), {_PHASES}; {_RECORD}, or record phases of TRL with"
            " tracekit.rl (docs/rl.md)"
        ),
    ),
    (
        re.compile(rb"\[Rank \d+\] step=\d+, skipped=\d+, lr="),
        f"a log of DeepSpeed, {_PHASES}; {_RECORD}",
    ),
)
#: Binary files have a zero in so many bytes; logs may have some where a node died.
_MAGIC = 64
#: What is in the first record of a file of TensorBoard's events.
_EVENTS = b"brain.Event:"
_EVENTS_ARE = (
    "scalars of TensorBoard, not a trace: they time whole steps and the loading of data at most; "
    + _RECORD
    + ", or give"
    " the log of a trainer that prints its phases (docs/rl.md)"
)


def is_hang_log(look: Look) -> bool:
    """Whether a file holds what NCCL's watchdogs have printed, or a report of its RAS."""
    return is_hang_text(look.head) or is_hang_text(look.tail)


def is_hang_text(head: bytes) -> bool:
    """Whether text has messages of NCCL's watchdog, or is a report of NCCL's RAS."""
    return b"\0" not in head[:_MAGIC] and any(pattern.search(head) for pattern in _COMPILED.values())


def other_log(head: bytes, path: str | Path = "FILE") -> str | None:
    """What a file is that begins with these bytes, and what to do; None if unknown. `path`: its name, for commands."""
    if _EVENTS in head[:64]:
        return _EVENTS_ARE
    if b"\0" in head[:_MAGIC]:
        return None
    text = _COLOUR.sub(b"", head)
    if _COMPILED["ras"].search(text):
        return f"a report of NCCL's RAS (ncclras); type `{command('hang', path)}`"
    if _COMPILED["watchdog"].search(text):
        return f"messages of NCCL's watchdog about ranks of a hung job; type `{command('hang', path)}`"
    return next((what for pattern, what in _LOGS if pattern.search(text)), None)
