"""Whatever a log of post-training holds, `tracekit rl` ends in a report of finite numbers or in one error."""

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.rl.logs import lines, write
from tests.handmade import run
from tests.properties import examples

RUN = lines()
WHAT_IFS = ("staleness=1", "staleness=2,partial=0.5", "engines=3", "split=3:1", "longest-first,partial=0.9", "train=2")
numbers = st.floats() | st.integers(-(2**70), 2**70) | st.sampled_from([0, 1, 2, 1e-9, 1e9, 1e15])
anything = st.none() | st.booleans() | numbers | st.text(max_size=5)
keys = st.sampled_from(
    ["trajectory", "phase", "step", "engine", "submit", "start", "end", "tokens", "tool_s", "version"]
)
edits = st.lists(st.tuples(st.integers(0, len(RUN) - 1), keys, anything | st.just("remove")), max_size=4)
LOGS = (
    '{"step": 1, "data": {"timing_s/gen": 3.0, "timing_s/update_actor": 2.0, "timing_s/step": 6.0}}\n',
    "step:1 - timing_s/gen:3.0 - timing_s/update_actor:np.float64(2.0) - timing_s/step:6.0\n",
    "Global step 1: {'timing/generation': 3.0, 'timing/ppo_train': 2.0, 'timing/step_total': 5.0}\n",
    "perf 1: {'perf/rollout_time': 3.0}\nperf 1: {'perf/step_time': 6.0, 'perf/train_wait_time': 3.5}\n",
    "Total step time: 6.00s\n  generation: 3.00s\n  policy_training: 2.00s\n",
    "Step 1: \n{'timing/step': '6.0000',\n 'timing/generate': '3.0000',\n 'timing/eval': '1.0000'}\n",
    "step:1 - timing_s/gen:3.0 - timi\nng_s/step:6.0 - timing_s/testing:2.\n0\n",
    "timing_s/gen: 3.0\ntiming_s/step: 6.0\n",
    (
        "step:1 - timing_s/gen:3.0 - timing_s/step:6.0 - fully_async/trainer/idle_ratio:0.4"
        " - fully_async/rollouter/idle_ratio:0.1\n"
    ),
    (
        "step:1 - timing_s/gen:3.0 - timing_s/step:6.0 - timing_s/agent_loop/slowest/tool_calls:2.0"
        " - timing_s/agent_loop/slowest/generate_sequences:1.0 - timing_s/agent_loop/generate_sequences/max:1.5\n"
    ),
)


def ask(path, *options):
    """Run the command; its JSON holds no null for a number that must be there."""
    ran = run("rl", path, *options, *(word for one in WHAT_IFS for word in ("--what-if", one)), "--json")
    assert ran.code in (0, 2), ran.err
    if ran.code == 2:
        assert 0 < len(ran.err) < 2000
        return
    report = json.loads(ran.out)
    assert report["step_s"] > 0
    figures = [one["seconds"] for one in report["phases"]] + [one["lost_s"] for one in report["losses"]]
    figures += [
        one[key] for one in report["what_if"] if one["step_s"] is not None for key in ("low_s", "high_s", "saved_s")
    ]
    assert None not in figures  # as which NaN and infinity are written
    assert run("rl", path, *options).code == 0


@examples(30)
@given(edits, st.sampled_from([(), ("--slots", "1"), ("--slots", "2", "--gpus", "rollout=2,trainer=2")]))
def test_edited_trajectories(changes, options):
    edited = [dict(line) for line in RUN]
    for at, key, value in changes:
        edited[at].pop(key, None)
        if value != "remove":
            edited[at][key] = value
    with tempfile.TemporaryDirectory() as folder:
        ask(write(Path(folder) / "log", edited), "--gpus", "rollout=2,trainer=2", *options)


@examples(60)
@given(
    st.sampled_from(LOGS), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 9), st.text(max_size=4)), max_size=3)
)
def test_damaged_logs(log, damage):
    text = log * 3
    for at, length, put in damage:
        text = text[:at] + put + text[at + length :]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "log").write_bytes(text.encode("utf-8", "replace"))
        ask(Path(folder) / "log", "--gpus", "rollout=2,trainer=2")
