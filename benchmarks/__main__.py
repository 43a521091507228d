"""Run benchmarks and write their sections of benchmarks/RESULTS.md.

python -m benchmarks                    all benchmarks; takes hours
python -m benchmarks core store         these; other sections stay as they are
python -m benchmarks core --quick       small sizes, printed only: shows that a benchmark still runs
python -m benchmarks eventsim --help    options of eventsim, clocks, hang_live and frameworks; printed only
python -m benchmarks compatibility      tries the versions of this environment, see benchmarks/compatibility.py
python -m benchmarks one-gpu FOLDER     puts losses into real traces of one GPU, see benchmarks/one_gpu.py
python -m benchmarks gate-live ...      judges real runs, see benchmarks/gate_live.py
python -m benchmarks tracker-live ...   runs a job beside a tracker that hangs, see benchmarks/tracker_live.py
python -m benchmarks rl-published FILE  compares `tracekit rl` with published figures, see benchmarks/rl_published.py
python -m benchmarks profiler-cost     measures what recording costs a host, see benchmarks/profiler_cost.py
python -m benchmarks side-by-side      the same trainings under other tools, see benchmarks/side_by_side.py
"""

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from benchmarks.measure import commit, machine

RESULTS = Path(__file__).with_name("RESULTS.md")
SECTIONS = (
    "core", "against", "causes", "eventsim", "clocks", "collect", "overhead", "faults", "gpu", "kineto", "dashboard",
    "store", "killed", "windows", "hang", "hang_live", "fleet", "frameworks", "rl", "rl_live", "gate", "durations",
)  # fmt: skip
#: Benchmarks with a command line of their own, which prints instead of writing RESULTS.md.
WITH_OPTIONS = ("eventsim", "clocks", "hang_live", "frameworks")
ALWAYS_WITH_OPTIONS = (
    "compatibility", "one-gpu", "rl-published", "gate-live", "tracker-live", "profiler-cost", "side-by-side",
)  # fmt: skip
_SECTION = "<!-- section {} -->\n"


def main(arguments: list[str]) -> None:
    if arguments in (["--help"], ["-h"]):
        print(f"{__doc__}\nSections: {', '.join(SECTIONS)}")
        return
    first = arguments[0] if arguments else ""
    if first in ALWAYS_WITH_OPTIONS or (first in WITH_OPTIONS and _has_options(arguments[1:])):
        _module(first.replace("-", "_")).main(arguments[1:])
        return
    quick = "--quick" in arguments
    wanted = [name for name in arguments if name != "--quick"] or SECTIONS
    if unknown := set(wanted) - set(SECTIONS):
        sys.exit(f"unknown section {unknown.pop()!r}; sections are {', '.join(SECTIONS)}")
    for name in wanted:
        module = _module(name)
        if quick:
            vars(module).update(module.QUICK)
        body = module.section()
        if body is None:  # it printed why it cannot run here; figures from elsewhere stay
            continue
        print(body)
        if not quick:
            provenance = f"Machine: {machine()}. Commit {commit()}. Command: `python -m benchmarks {name}`."
            RESULTS.write_text(updated(RESULTS.read_text(), name, f"{body}\n\n{provenance}"))
            print(f"Wrote {name} into {RESULTS}")


def updated(text: str, name: str, body: str) -> str:
    """RESULTS.md with a new body for one section, which is added at the end if it is not there."""
    head = _SECTION.format(name)
    section = f"{head}{body.rstrip()}\n"
    section_match = re.search(rf"{re.escape(head)}.*?(?=\n<!-- section|\Z)", text, re.DOTALL)
    if section_match is None:
        return f"{text.rstrip()}\n\n{section}"
    return text[: section_match.start()] + section + text[section_match.end() :]


def _has_options(arguments: list[str]) -> bool:
    return any(one.startswith("-") and one != "--quick" for one in arguments)


def _module(name: str) -> ModuleType:
    return import_module(f"benchmarks.{name}")


if __name__ == "__main__":
    main(sys.argv[1:])
