"""Whatever text about a hang holds, `tracekit hang` ends in a report or in one error."""

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.collectors.importers.test_nccl_text import MISMATCH, signalled, timed_out
from tests.handmade import run
from tests.properties import examples

WATCHDOG = timed_out(1, 78) + timed_out(2, 78, "ALLREDUCE") + signalled(0, 77, 77)
RAS = (
    f"{MISMATCH}  7 ranks have launched up to operation 64\n"
    "  2 ranks have launched up to operation 60\n  Rank 7 -- GPU 3 managed by process 16 on node node1\n"
)
numbers = st.integers(-(2**70), 2**70).map(str) | st.sampled_from(["0", "1", "-1", "4194303", "9" * 18, "9" * 400])


@examples(60)
@given(
    st.sampled_from([WATCHDOG, RAS, RAS + WATCHDOG]),
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 9), st.text(max_size=4) | numbers), max_size=3),
)
def test_damaged_text(text, damage):
    for place, length, put in damage:
        text = text[:place] + put + text[place + length :]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "log").write_bytes(text.encode("utf-8", "replace"))
        ran = run("hang", Path(folder) / "log", "--json")
        assert ran.code in (0, 2, 3), ran.err
        if ran.code == 2:
            assert 0 < len(ran.err) < 2000
            return
        report = json.loads(ran.out)
        named = {one["rank"] for one in report["culprits"]}
        assert named.isdisjoint(one["rank"] for one in report["waiting"])
