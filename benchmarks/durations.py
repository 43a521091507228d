"""Run the tests and list the slowest of them, and the slowest fixtures: where to start when tests are too slow.

pytest's JUnit file flows in, with the CPU time that `tests/conftest.py` adds; the Markdown of a section flows out.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.measure import table

#: So many tests and fixtures are listed.
SLOWEST = 60
#: What pytest is given.
SELECTION = ("-n", "4", "-m", "not nightly")
QUICK = {"SELECTION": ("tests/test_text.py",)}


@dataclass(frozen=True, order=True)
class Duration:
    """Wall and CPU seconds of a test (set-up, call and teardown) or of a fixture, and the make target it belongs to."""

    wall_s: float
    cpu_s: float
    name: str
    target: str


def section() -> str | None:
    """The Markdown of this section; None, and a line, if tests fail."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "tests.xml"
        ran = subprocess.run([sys.executable, "-m", "pytest", "-q", *SELECTION, f"--junitxml={junit}"], check=False)
        if ran.returncode:
            print("Tests fail: their durations are not kept.")
            return None
        return durations(ElementTree.parse(junit).getroot()[0])  # noqa: S314 - pytest wrote it


def durations(suite: ElementTree.Element) -> str:
    """The Markdown about a suite of a JUnit file."""
    tests = [_test(case) for case in suite.iter("testcase")]
    fixtures = [fixture for case in suite.iter("testcase") for fixture in _fixtures(case)]
    return (
        "## Durations of the tests\n\n"
        f"`make test-all` ran {len(tests):,} tests in {float(suite.attrib['time']):.0f} s, of which `make test` runs"
        f" {sum(test.target == 'test' for test in tests):,}. CPU times include processes that a test waited for. The"
        f" {SLOWEST} slowest tests, with their set-up and teardown:\n\n"
        f"{_table('test', tests)}\n\nThe slowest fixtures, and the test that first needed each:\n\n"
        f"{_table('fixture', fixtures)}"
    )


def _table(heading: str, durations: list[Duration]) -> str:
    rows = [
        [duration.name, f"make {duration.target}", f"{duration.wall_s:.1f}", f"{duration.cpu_s:.1f}"]
        for duration in sorted(durations, reverse=True)[:SLOWEST]
    ]
    return table([heading, "run by", "wall s", "CPU s"], rows)


def _test(case: ElementTree.Element) -> Duration:
    properties = dict(_properties(case))
    return Duration(float(case.attrib["time"]), float(properties["cpu_s"]), _name(case), properties["target"])


def _fixtures(case: ElementTree.Element) -> Iterator[Duration]:
    target = dict(_properties(case))["target"]
    for name, value in _properties(case):
        if name.startswith("fixture "):
            wall_s, cpu_s = map(float, value.split())
            yield Duration(wall_s, cpu_s, f"{name.removeprefix('fixture ')}, {_name(case)}", target)


def _properties(case: ElementTree.Element) -> Iterator[tuple[str, str]]:
    return ((each.attrib["name"], each.attrib["value"]) for each in case.iter("property"))


def _name(case: ElementTree.Element) -> str:
    return f"`{case.attrib['classname'].removeprefix('tests.')}::{case.attrib['name']}`".replace("|", r"\|")
