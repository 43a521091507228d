"""Run the tests and list the slowest of them, with the fixtures that each set up: where to start if tests are slow.

pytest's JUnit file flows in, with the CPU time that `tests/conftest.py` adds; the Markdown of a section flows out.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.measure import table

#: So many tests are listed.
SLOWEST = 60
#: What pytest is given by `make test` and by `make test-all`.
EVERY_PUSH = ("-n", "3", "-m", "not slow and not fleet and not nightly")
ALL = ("-n", "4", "-m", "not nightly")
QUICK = {"EVERY_PUSH": ("tests/test_text.py",), "ALL": ("tests/test_text.py",)}


@dataclass(frozen=True, order=True)
class Duration:
    """Wall and CPU seconds of a test (set-up, call and teardown), the make target it belongs to, and the fixtures
    that it was the first to need.
    """

    wall_s: float
    cpu_s: float
    name: str
    target: str
    fixtures: tuple[str, ...]


def section() -> str | None:
    """The Markdown of this section; None, and a line, if tests fail."""
    every_push, everything = (_ran(selection, profile) for selection, profile in ((EVERY_PUSH, "short"), (ALL, "")))
    if every_push is None or everything is None:
        print("Tests fail: their durations are not kept.")
        return None
    return durations(every_push, everything)


def _ran(selection: tuple[str, ...], profile: str) -> ElementTree.Element | None:
    """The suite of the JUnit file of these tests; None if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", *selection, f"--junitxml={junit}"]
        environment = os.environ | ({"HYPOTHESIS_PROFILE": profile} if profile else {})
        if subprocess.run(command, env=environment, check=False).returncode:
            return None
        return ElementTree.parse(junit).getroot()[0]  # noqa: S314 - pytest wrote it


def durations(every_push: ElementTree.Element, everything: ElementTree.Element) -> str:
    """The Markdown about the suites of two JUnit files."""
    tests = [_test(case) for case in everything.iter("testcase")]
    rows = [
        [test.name, test.target, f"{test.wall_s:.1f}", f"{test.cpu_s:.1f}", ", ".join(test.fixtures)]
        for test in sorted(tests, reverse=True)[:SLOWEST]
    ]
    return (
        "## Durations of the tests\n\n"
        f"`make test` ran {_words(every_push)}, `make test-all` {_words(everything)}. CPU times include processes that"
        f" a test waited for. The {SLOWEST} slowest tests of `make test-all`, with their set-up and teardown:\n\n"
        f"{table(['test', 'make', 'wall s', 'CPU s', 'sets up, s'], rows)}"
    )


def _words(suite: ElementTree.Element) -> str:
    return f"{int(suite.attrib['tests']):,} tests in {float(suite.attrib['time']):.0f} s"


def _test(case: ElementTree.Element) -> Duration:
    properties = dict(_properties(case))
    fixtures = tuple(
        f"{name.removeprefix('fixture ')} {float(value.split()[0]):.1f}"
        for name, value in properties.items()
        if name.startswith("fixture ")
    )
    return Duration(float(case.attrib["time"]), float(properties["cpu_s"]), _name(case), properties["target"], fixtures)


def _properties(case: ElementTree.Element) -> Iterator[tuple[str, str]]:
    return ((each.attrib["name"], each.attrib["value"]) for each in case.iter("property"))


def _name(case: ElementTree.Element) -> str:
    return f"`{case.attrib['classname'].removeprefix('tests.')}::{case.attrib['name']}`".replace("|", r"\|")
