"""Known losses, put at random into real traces of one GPU, and what `tracekit whatif` says about them.

python -m benchmarks one-gpu FOLDER [--seed N] [--count M] [--keep NEW] [--tracekit COMMAND]

FOLDER has traces of torch.profiler, as FOLDER/*/*.json[.gz] or FOLDER/*.json[.gz]; NEW gets the changed ones. Knows
tracekit by its command only. A changed trace is simulated again (judges/onegpusim.py); the trace without the loss is
the fix.

A loss is found if it is among the first three findings. Its price may be wrong by 10 % or by 0.5 % of the recording, or
by what TOLERANCE says; what is said about the unchanged trace may be subtracted. A loss of less than 1 % of the
recording must not be shown as more than that, and an unchanged trace must not have a loss that it has no time for. On
every trace, idle_s must be right.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.measure import table, tracekit
from judges.onegpuinject import SMALL, drawn
from judges.onegpusim import CALLS, GPU, HOST, Event, Recording, events_of, reach

#: Of each kind, the reason and the name that its finding must have.
EXPECTED = {
    "loader": ("loader", "DataLoader"), "sync": ("synchronise", r"aten::item|_local_scalar_dense|train\.py\(88\)"),
    "python": ("python", "log_metrics"), "gc": ("gc", "(?i)gc|garbage"),
    "allocation": ("allocation", "Malloc|Free|aten::empty"), "slow": ("kernel", "aten::(add)?mm|ampere_sgemm"),
    "tiny": ("launch-bound", "aten::add_"), "pageable": ("transfer", "Pageable|HtoD|aten::copy_"),
    "checkpoint": ("checkpoint", "save"),
}  # fmt: skip
KINDS = (*EXPECTED, "none", "small")
TOLERANCE = {"slow": 0.20, "tiny": 0.30, "pageable": 0.30}
_ALLOCATES = r"^(cuda|hip|cu)(Mem)?(Malloc|Alloc|Free|Host|Create|Map|Unmap|Release)"
_NEVER = float("-inf")


def judged(loss: str, true: float, events: Sequence[Event], report: Event, bare: Event) -> tuple[list[str], list[bool]]:
    """What a report says of a trace, as cells, and whether loss, price and idle time are right in it.

    `bare` is the report of the trace without the loss, `true` the true saving in seconds.
    """
    begin, end = reach(events)
    length, idle = (end - begin) * 1e-6, sum(_gaps(events)) * 1e-6
    reason, names = EXPECTED.get(loss, ("", ""))
    rank, said, without = None, None, 0.0
    if loss == "none":
        most = _most(events, length)
        over = [_saves(f) for f in _findings(report) if _saves(f) > most.get(f["reason"], length) + 2 * SMALL * length]
        is_found = price = bool(report) and not over
        said = max(over, default=None)
    else:
        hits = [(at, _saves(f)) for at, f in enumerate(_findings(report), 1) if _is(f, reason, names)]
        if hits:  # all launches are one finding, which is named after the longest
            without = max((_saves(f) for f in _findings(bare) if _is(f, reason, names * (loss != "tiny"))), default=0.0)
        if true < SMALL * length:
            rank, said = max(hits, key=lambda pair: pair[1], default=(None, None))
            is_found = price = bool(report) and (said or 0.0) - without <= true + SMALL * length
        else:
            rank, said = hits[0] if hits else (None, None)
            is_found = rank is not None and rank <= 3
            slack = TOLERANCE[loss] * true if loss in TOLERANCE else max(0.1 * true, 0.005 * length)
            price = said is not None and min(abs(said - true), abs(said - without - true)) <= slack
    right = [is_found, price, abs(report.get("idle_s", _NEVER) - idle) <= max(0.01 * idle, 2e-5)]
    saying = ("nothing" if said is None else f"{said * 1e3:.2f}") + (
        f", {without * 1e3:.2f} without" if without else ""
    )
    yes = ["yes" if one else "**no**" for one in right]
    return [f"{true * 1e3:.2f} ({true / length:.1%})", saying, str(rank or ""), *yes], right


def _most(events: Sequence[Event], length: float) -> dict[str, float]:
    """The most that a fix of a reason can save: all the time that has to do with it, seconds."""

    def spent(pattern: str, categories: Sequence[str]) -> float:
        return sum(e["dur"] for e in events_of(events, categories) if re.search(pattern, e["name"])) * 1e-6

    busy = sum(e["dur"] for e in events_of(events, GPU)) * 1e-6
    launches = len({e["args"].get("correlation") for e in events_of(events, GPU)}) * 0.5e-3  # none takes longer
    return {
        "loader": spent("DataLoader", HOST), "gc": spent("", ["python_gc"]) + spent("Python GC", ["python_function"]),
        "checkpoint": spent("save", ("python_function", "user_annotation")),
        "allocation": spent(_ALLOCATES, CALLS), "launch-bound": min(length - busy, launches),
        "transfer": spent("", ["gpu_memcpy"]) + spent("Memcpy|StreamSynchronize", CALLS),
    }  # fmt: skip


def section(folder: Path, seed: int, count: int, keep: Path, command: str) -> str:
    """The Markdown of the outcomes and their totals."""
    recordings = [
        Recording(path)
        for pattern in ("*.json", "*.json.gz", "*/*.json", "*/*.json.gz")
        for path in sorted(folder.glob(pattern))
    ]
    bare: dict[str, Event] = {}
    rows, took = [], []
    right: dict[str, list[list[bool]]] = {kind: [] for kind in (*KINDS, "all")}
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        loss, recording, document, true = drawn(recordings, kind, f"{seed} {number}")
        name = recording.name
        if name not in bare:
            bare[name] = _report(recording.document, keep / f"without_{name}", command)
        report = _report(document, keep / f"{number:03d}", command)
        cells, verdicts = judged(loss, true, document["traceEvents"], report, bare[name])
        took.append(report.get("took_s", 0.0))
        rows.append([f"{number:03d}", f"small {loss}" if kind == "small" else kind, name, *cells, f"{took[-1]:.2f}"])
        right[kind].append(verdicts)
        right["all"].append(verdicts)
    head = ["", "kind", "trace", "true ms", "said ms", "rank", "found", "price", "idle", "s"]
    totals = [
        [kind, str(len(of)), *(str(sum(column)) for column in zip(*of, strict=True))]
        for kind, of in right.items()
        if of
    ]
    seconds = f"Seconds per trace: median {median(took):.2f}, mean {mean(took):.2f}, most {max(took):.2f}."
    return "\n\n".join([table(head, rows), table(["kind", "traces", "found", "price", "idle"], totals), seconds])


def _report(document: dict[str, Any], folder: Path, command: str) -> Event:
    """What a command of tracekit says about the GPU of a trace, and how long it took; empty if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / "trace.json.gz", "wt", compresslevel=1) as file:
        json.dump(document, file)
    began = time.perf_counter()
    done = subprocess.run([command, "whatif", folder, "--json"], capture_output=True, text=True, check=False)
    took_s = time.perf_counter() - began
    try:
        return {**json.loads(done.stdout)["gpu"], "took_s": took_s}
    except (ValueError, KeyError, TypeError):
        print(f"{folder}: {done.stderr[-300:] or 'no report of a GPU'}", file=sys.stderr)
        return {}


def _findings(report: Event) -> list[Event]:
    return report.get("findings") or []


def _is(finding: Event, reason: str, names: str) -> bool:
    said = json.dumps([finding.get("name"), finding.get("where"), finding.get("names")])
    return finding.get("reason") == reason and re.search(names, said) is not None


def _saves(finding: Event) -> float:
    return float(finding.get("saves_s") or 0.0)


def _gaps(events: Iterable[Event]) -> list[float]:
    """Between the first and the last GPU op, the times without one."""
    gaps, reach = [], float("inf")
    for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events_of(events, GPU)):
        gaps.append(max(start - reach, 0.0))
        reach = max(reach, end) if reach < float("inf") else end
    return gaps


def main(arguments: list[str]) -> None:
    """Print the outcomes of the draws that the command line asks for."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks one-gpu", description=__doc__, formatter_class=form)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--keep", type=Path, help="where the changed traces stay")
    parser.add_argument("--tracekit", default=tracekit()[0], help="the command that is judged")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        print(section(asked.folder, asked.seed, asked.count, asked.keep or Path(folder), asked.tracekit))


if __name__ == "__main__":
    main(sys.argv[1:])
