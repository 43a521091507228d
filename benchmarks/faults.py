"""Break the recorder: every fault of the tests, and each of its functions in turn. The training must be unaffected.

Each fault gets a training of its own under `tracekit collect`. Exit code and final weights are compared with those of
the same training without `collect`.
"""

import ast
import tempfile
from pathlib import Path

from tests.collectors.conftest import Run, several
from tests.collectors.sabotage.faults import FAULTS, SIGNALS

RUNTIME = Path(__file__).parents[1] / "collectors" / "record"
#: Called by torch and Python directly and guarded inside, where an exception raised in their place does not pass.
OUTERMOST = frozenset(
    {
        *("hooks_compute:LoopHooks._before_forward", "hooks_compute:LoopHooks._after_forward"),
        *("hooks_host:HostHooks._before_optimizer", "hooks_host:HostHooks._after_optimizer"),
        *("hooks_reducer:HostReduction._has_gradient", "patches:_ImportWatcher.find_spec"),
        "session:Session.in_main_thread",  # compares two numbers
        "hooks_compute:UncopiedHook.__call__",  # calls the hook, which guards itself
        "guard:Guard.attempt_hook",  # the guard itself
    }
)
#: Modules that these trainings do not use: GPUs, hangs, profilers, RL.
LEFT_OUT = frozenset({"gpu_state", "hang_watch", "nvml", "profiler", "plain_pickle", "rl", "spans"})


#: Faults and functions to try; None for all.
MOST: int | None = None
QUICK = {"MOST": 1}


def section() -> str:
    """The Markdown of this section."""
    faults = {**dict.fromkeys([*FAULTS][:MOST], "fault"), **dict.fromkeys(_functions()[:MOST], "function")}
    with tempfile.TemporaryDirectory() as folder:
        by_itself = _run(Path(folder) / "alone", SIGNALS, under_collect=False)
        under = _run(Path(folder) / "collect", faults, under_collect=True)
    changed = [name for name in under if _ends(under[name]) != _ends(by_itself.get(name, by_itself["none"]))]
    kinds = {kind: [name for name in faults if faults[name] == kind] for kind in ("fault", "function")}
    lines = [
        f"{title}: exit code and weights unchanged in {sum(name not in changed for name in kinds[kind])} of"
        f" {len(kinds[kind])}"
        for title, kind in (("Faults", "fault"), ("Functions of the recorder that raise, one at a time", "function"))
    ]
    named = f" Changed: {', '.join(changed)}." if changed else ""
    return (
        "## Faults of the recorder\n\n"
        "A training on one rank (DistributedDataParallel, AdamW, DataLoader, an evaluation, a checkpoint, a fork) under"
        f" `tracekit collect`, whose recorder is broken in another way each time. {lines[0]}. {lines[1]}.{named}"
    )


def _run(folder: Path, names: object, *, under_collect: bool) -> dict[str, Run]:
    folder.mkdir()
    runs = {"none": "trains.py", **{name: f"SABOTAGE={name} trains.py" for name in names}}
    return several(folder, runs, under_collect=under_collect)


def _ends(run: Run) -> tuple[list[int], str]:
    return run.exit_codes, run.said


def _functions() -> list[str]:
    """`module:function` and `module:Class.method` of the recorder."""
    functions = []
    for path in sorted(RUNTIME.glob("[a-z]*.py")):
        for node in ast.parse(path.read_text()).body if path.stem not in LEFT_OUT else ():
            if isinstance(node, ast.FunctionDef):
                functions.append(f"{path.stem}:{node.name}")
            elif isinstance(node, ast.ClassDef):
                methods = (part for part in node.body if isinstance(part, ast.FunctionDef) and not part.decorator_list)
                functions += [f"{path.stem}:{node.name}.{method.name}" for method in methods]
    return [name for name in functions if name not in OUTERMOST]
