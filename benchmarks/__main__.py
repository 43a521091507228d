"""Run every benchmark and write benchmarks/RESULTS.md.

python -m benchmarks            all
python -m benchmarks core       one section, the others stay as they are
"""

import re
import sys
from pathlib import Path

from benchmarks import causes, collect, core
from benchmarks.measure import machine

RESULTS = Path(__file__).with_name("RESULTS.md")
SECTIONS = {"core": core.section, "causes": causes.section, "collect": collect.section}
TITLE = "# Benchmark results\n\nMade by `make bench`; each section names its machine. Medians unless said.\n"


def main() -> None:
    wanted = sys.argv[1:] or list(SECTIONS)
    if unknown := set(wanted) - set(SECTIONS):
        sys.exit(f"unknown section {unknown.pop()!r}; there are {', '.join(SECTIONS)}")
    text = RESULTS.read_text() if RESULTS.exists() else ""
    kept = dict(re.findall(r"<!-- section (\w+) -->\n(.*?)(?=<!-- section|\Z)", text, re.DOTALL))
    for name in wanted:
        body = SECTIONS[name]()
        print(body)
        kept[name] = f"{body}\n\nMachine: {machine()}. Command: `python -m benchmarks {name}`.\n\n"
        parts = [f"<!-- section {key} -->\n{kept[key]}" for key in SECTIONS if key in kept]
        RESULTS.write_text(TITLE + "\n" + "".join(parts).rstrip() + "\n")
    print(f"Wrote {RESULTS}")


if __name__ == "__main__":
    main()
