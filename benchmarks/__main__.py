"""Run every benchmark and write benchmarks/RESULTS.md.

python -m benchmarks            all
python -m benchmarks core       one section, the others stay as they are
python -m benchmarks fleet      all sections whose names begin with fleet_
python -m benchmarks eventsim --seed 1 --case P3    chosen jobs of one simulator, printed only
"""

import re
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.measure import machine

RESULTS = Path(__file__).with_name("RESULTS.md")
#: Imported one by one: what a section imports would count as memory of the processes that another one starts.
SECTIONS = (
    "core", "graphs", "against", "causes", "eventsim", "clocks", "collect", "faults", "live", "device", "gpu", "nccl",
    "kineto", "dashboard", "store", "windows", "alerting", "killed", "hang", "hang_live", "fleet_runs",
    "fleet_scaling", "fleet_faults", "fleet_reports", "frameworks",
)  # fmt: skip
#: Where a section is made, if not in the module of its name: `eventsim` is the simulator, which knows no tracekit.
MODULES = {
    "eventsim": "verdicts",
    **{f"fleet_{part}": f"fleet.{part}" for part in ("runs", "scaling", "faults", "reports")},
}
TITLE = "# Benchmark results\n\nMade by `make bench`; each section names its machine. Medians unless said.\n"


def main() -> None:
    if sys.argv[1:2] in (["eventsim"], ["clocks"], ["hang_live"], ["frameworks"]) and len(sys.argv) > 2:
        import_module(f"benchmarks.{MODULES.get(sys.argv[1], sys.argv[1])}").main(sys.argv[2:])
        return
    wanted = [name for asked in sys.argv[1:] for name in _named(asked)] or SECTIONS
    if unknown := set(wanted) - set(SECTIONS):
        sys.exit(f"unknown section {unknown.pop()!r}; there are {', '.join(SECTIONS)}")
    for name in wanted:
        body = import_module(f"benchmarks.{MODULES.get(name, name)}").section()
        if body is None:  # it cannot run here, and has said why: what was measured elsewhere stays
            continue
        print(body)
        text = RESULTS.read_text() if RESULTS.exists() else ""  # now: another section may have been written meanwhile
        kept = dict(re.findall(r"<!-- section (\w+) -->\n(.*?)(?=<!-- section|\Z)", text, re.DOTALL))
        kept[name] = f"{body}\n\nMachine: {machine()}. Command: `python -m benchmarks {name}`.\n\n"
        parts = [f"<!-- section {key} -->\n{kept[key]}" for key in SECTIONS if key in kept]
        RESULTS.write_text(TITLE + "\n" + "".join(parts).rstrip() + "\n")
        print(f"Wrote {name} into {RESULTS}")


def _named(asked: str) -> list[str]:
    """The section of that name, or the parts of what has several."""
    return [name for name in SECTIONS if asked not in SECTIONS and name.startswith(f"{asked}_")] or [asked]


if __name__ == "__main__":
    main()
