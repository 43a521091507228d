"""`make durations`: the slowest tests of a JUnit file."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.durations import durations

SUITE = """
<testsuite tests="2" time="12.4">
  <testcase classname="tests.test_a" name="test_quick" time="0.5">
    <properties><property name="cpu_s" value="0.400"/><property name="target" value="test"/></properties>
  </testcase>
  <testcase classname="tests.test_b" name="test_job[a|b]" time="11.25">
    <properties>
      <property name="fixture job" value="10.500 4.000"/>
      <property name="cpu_s" value="4.250"/>
      <property name="target" value="test-all"/>
    </properties>
  </testcase>
</testsuite>
"""
QUICK_SUITE = '<testsuite tests="4469" time="214.9"/>'


def test_the_slowest_come_first_with_wall_and_cpu_time_the_target_that_runs_them_and_their_fixtures() -> None:
    every_push, everything = (ElementTree.fromstring(suite) for suite in (QUICK_SUITE, SUITE))  # noqa: S314 - as above
    shown = durations(every_push, everything).splitlines()
    assert shown[2].startswith("`make test` ran 4,469 tests in 215 s, `make test-all` 2 tests in 12 s. ")
    assert [line for line in shown if line.startswith("| `")] == [
        r"| `test_b::test_job[a\|b]` | test-all | 11.2 | 4.2 | job 10.5 |",
        "| `test_a::test_quick` | test | 0.5 | 0.4 |  |",
    ]
