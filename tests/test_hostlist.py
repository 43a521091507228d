"""Hostlists: what Slurm expands them to is the names that went in."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import case
from tests.properties import examples
from tracekit.report.conclusions import hostlist, is_node_name


def expanded(text: str) -> list[str]:
    """The names of a hostlist, as `scontrol show hostnames` prints them: `[08-10]` keeps its zeros."""
    names = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", text):
        prefix, _, numbers = part.rstrip("]").partition("[")
        for run in numbers.split(",") if numbers else [""]:
            first, _, last = run.partition("-")
            count = int(last or first or 0) - int(first or 0) + 1
            names += [f"{prefix}{int(first) + at:0{len(first)}}" if first else prefix for at in range(count)]
    return names


def test_neighbours_share_brackets_and_digits_stay_as_they_are() -> None:
    for names, shown in (
        (["node-1", "node-3", "node-4"], "node-[1,3-4]"),
        (["node-0002", "node-0001", "node-0001"], "node-[0001-0002]"),
        (["node-9", "node-10", "node-11"], "node-[9-11]"),
        (["node-08", "node-09", "node-10"], "node-[08-10]"),
        (["node-09", "node-9"], "node-9,node-09"),
        (["login", "gpu7", "gpu8.cluster"], "gpu8.cluster,login,gpu7"),
        (["ip-10-0-0-12", "ip-10-0-1-12"], "ip-10-0-0-12,ip-10-0-1-12"),
        (["7", "8"], "7,8"),
        (["a1234567890123456789", "a1234567890123456790"], "a1234567890123456789,a1234567890123456790"),
        ([], ""),
    ):
        assert hostlist(names) == shown


@pytest.mark.slow
@examples(100)
@given(st.lists(st.from_regex(r"(a|rack-|n1x)?[0-9]{1,4}|[a-c]{1,3}", fullmatch=True)))
def test_slurm_reads_back_the_names(names: list[str]) -> None:
    found = expanded(hostlist(names))
    assert sorted(found) == sorted(set(names))


def test_what_a_shell_or_slurm_reads_otherwise_is_no_node() -> None:
    for name in ("", "a b", "a;reboot", "$(x)", "-n", "a[1-2]", "a,b", "n\u00f6de", "<b>", "a\n"):
        assert not is_node_name(name), name
        with case(name), pytest.raises(ValueError, match="is not a valid node name"):
            hostlist([name])
