"""Checks if collecting works here: checks torch, GPUs, NCCL, writable places and the clock, then tries it.

In: the interpreter of the training. Out: `Check`s. The trial is a real one: two ranks under `tracekit collect`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tracekit.base.errors import OutputError, StoreError
from tracekit.base.text import short
from tracekit.collectors.launch.launcher import INJECTED
from tracekit.collectors.nccl.launching import find_plugin, hazards, installed_version
from tracekit.collectors.record.wire_format import DEFAULT_MASK, RECORD
from tracekit.store import Store, default_store

#: Kernel clock sources that take a microsecond or more to read, twice for each op.
SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "jiffies"})
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
#: Ops of one rank per second, to state how long the disk space lasts.
OPS_PER_SECOND = 1000
#: Less space than this is a warning, bytes.
SMALL_DISK = 1 << 30
#: Time limit of a probe or trial, seconds.
PROBE_TIMEOUT_S, TRIAL_TIMEOUT_S = 120, 300
#: Op kinds that the trial must record.
EXPECTED = ("forward-compute", "backward-compute", "all-reduce", "optimizer", "data-load")
_TRIAL = Path(__file__).with_name("trial.py")
_PROBE = """
import json, platform, sys
found = {"python": platform.python_version(), "lacks": None}
sys.path[:] = filter(None, sys.path)  # the training's script is elsewhere
import torch
import torch.distributed as dist
found |= {"torch": torch.__version__, "distributed": dist.is_available(), "cuda": torch.version.cuda,
          "hip": getattr(torch.version, "hip", None), "gpus": []}
if dist.is_available():
    found |= {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
if torch.cuda.is_available():
    found["gpus"] = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
sys.path.append(sys.argv[1])
try:
    import _tracekit_recorder
    _tracekit_recorder.load("collectors.record.bootstrap")
except Exception as error:
    found["lacks"] = str(error)[:200]
print(json.dumps(found))
"""


class CheckOutcome(StrEnum):
    """Result of a check. A note restricts what is recorded; a failure means that nothing can be recorded."""

    OK = "ok"
    NOTE = "note"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its subject, its result, and what was found or what to do."""

    subject: str
    outcome: CheckOutcome
    detail: str


def checks(python: str = sys.executable, store: Path | None = None) -> Iterator[Check]:
    """All checks, the trial last. `python`: the interpreter of the training."""
    yield _system()
    probe = _probe(python)
    if problem := probe.get("problem"):
        lacking = "torch"
        yield Check("torch", CheckOutcome.FAILS, f"{problem}; name the training's interpreter with --python")
        for subject in ("recorder", "GPUs", "NCCL plugin"):
            yield Check(subject, CheckOutcome.NOTE, "not known without torch")
    else:
        yield _torch(probe, python)
        lacking = "" if probe["lacks"] is None else "the recorder"
        outcome = CheckOutcome.FAILS if lacking else CheckOutcome.OK
        yield Check(
            "recorder", outcome, f"{python} cannot load it: {probe['lacks']}" if lacking else f"loads in {python}"
        )
        yield _gpus(probe)
        yield _nccl(probe)
    yield _place(store or default_store())
    yield _temporary()
    yield _clock()
    yield Check("trial", CheckOutcome.FAILS, f"not run without {lacking}") if lacking else _trial(python)


def _system() -> Check:
    linux = sys.platform == "linux"
    description = f"{platform.system()} {platform.release()}, tracekit on Python {platform.python_version()}"
    return Check(
        "system",
        CheckOutcome.OK if linux else CheckOutcome.FAILS,
        description if linux else f"{description}; only Linux works",
    )


def _probe(python: str) -> dict[str, Any]:
    """Facts about the interpreter and its torch; `problem` if they cannot be found out."""
    try:
        ran = subprocess.run(  # noqa: S603  the user names the interpreter
            [python, "-c", _PROBE, str(INJECTED)], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
        facts: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"problem": f"importing torch took more than {PROBE_TIMEOUT_S} s"}
    except OSError as error:
        return {"problem": f"{python}: cannot be started: {error.strerror or error}"}
    except (IndexError, ValueError):
        return {"problem": (ran.stderr.strip().splitlines() or [f"{python} printed nothing"])[-1]}
    return facts


def _torch(probe: dict[str, Any], python: str) -> Check:
    builds = [
        f"{platform_name} {probe[key]}" for platform_name, key in (("CUDA", "cuda"), ("ROCm", "hip")) if probe[key]
    ]
    build = builds[0] if builds else "CPU only"
    description = f"{probe['torch']} ({build}) on Python {probe['python']}, {python}"
    if not probe["distributed"]:
        return Check(
            "torch", CheckOutcome.NOTE, f"{description}; built without torch.distributed: records single processes only"
        )
    backends = [name for name in ("gloo", "nccl") if probe[name]]
    return Check("torch", CheckOutcome.OK, f"{description}; {' and '.join(backends) or 'no backend'}")


def _gpus(probe: dict[str, Any]) -> Check:
    gpus: list[str] = probe["gpus"]
    if gpus:
        kinds = ", ".join(f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus))
        return Check("GPUs", CheckOutcome.OK, f"{kinds}; ops are timed by CUDA events")
    why = "torch is built for GPUs but finds none: check the driver" if probe["cuda"] else "none"
    return Check("GPUs", CheckOutcome.NOTE, f"{why}; ops are timed on the host")


def _nccl(probe: dict[str, Any]) -> Check:
    """Whether `--nccl` would work; nothing else needs the plugin."""
    if not probe.get("nccl"):
        return Check("NCCL plugin", CheckOutcome.NOTE, "not needed: this torch has no NCCL")
    try:
        plugin = find_plugin()
    except OutputError as error:
        return Check("NCCL plugin", CheckOutcome.NOTE, f"`--nccl` records nothing: {error}")
    troubles = hazards(installed_version(), int(DEFAULT_MASK))
    description = "; ".join(troubles) or f"{plugin.name} is compiled"
    return Check("NCCL plugin", CheckOutcome.NOTE if troubles else CheckOutcome.OK, description)


def _place(store: Path) -> Check:
    try:
        Store(store).check_new(None)
    except StoreError as error:
        return Check("store", CheckOutcome.FAILS, str(error))
    return Check("store", CheckOutcome.OK, f"{short(str(store))} can be written")


def _temporary() -> Check:
    """Check the disk space where the ranks write while the job runs."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    hours = free / RECORD.size / OPS_PER_SECOND / 3600
    description = (
        f"{folder}: {free / 1e9:,.1f} GB free, enough for {hours:,.0f} hours of one rank at {OPS_PER_SECOND:,} ops a"
        " second"
    )
    small = "; choose a larger disk with --segments or TMPDIR" if free < SMALL_DISK else ""
    return Check("segments", CheckOutcome.NOTE if small else CheckOutcome.OK, f"{description}{small}")


def _clock() -> Check:
    try:
        source = CLOCK_SOURCE.read_text(encoding="utf-8").strip()
    except OSError:
        return Check("clock", CheckOutcome.NOTE, "unknown: the kernel does not name its clock source")
    if source in SLOW_CLOCKS:
        return Check("clock", CheckOutcome.NOTE, f"{source} is slow to read, so recording costs more; tsc is usual")
    return Check("clock", CheckOutcome.OK, source)


def _trial(python: str) -> Check:
    """Train two ranks under `tracekit collect`, and check the trace."""
    with tempfile.TemporaryDirectory(prefix="tracekit-") as folder:
        out = Path(folder) / "trial.parquet"
        collect = [sys.executable, "-P", "-m", "tracekit", "collect", "--out", str(out), "--no-store", "--json", "--"]
        try:
            ran = subprocess.run(  # noqa: S603  the user names the interpreter
                [*collect, python, str(_TRIAL)],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=TRIAL_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Check("trial", CheckOutcome.FAILS, f"two ranks on gloo did not finish within {TRIAL_TIMEOUT_S} s")
        return _judged(ran, out)


def _judged(ran: subprocess.CompletedProcess[str], out: Path) -> Check:
    from tracekit.trace.canonical import read_parquet

    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"exit_code"')]
    summary: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    attempt = (summary.get("attempts") or [{}])[-1]
    problem = attempt.get("problem") or summary.get("problem")
    if ran.returncode or problem or not out.exists():
        why = problem or (ran.stderr.strip().splitlines() or ["it printed no error"])[-1]
        return Check("trial", CheckOutcome.FAILS, f"two ranks on gloo: {why!s:.300}")
    recorded = set(read_parquet(out).ops["kind"].cast(str).unique())
    description = f"two ranks on gloo: {attempt['steps']} steps of {attempt['world_size']} ranks, {attempt['ops']} ops"
    lacks = [kind for kind in EXPECTED if kind not in recorded]
    notes = [*(f"no {kind}" for kind in lacks), *attempt["notes"]]
    return Check("trial", CheckOutcome.NOTE if notes else CheckOutcome.OK, "; ".join([description, *notes]))
