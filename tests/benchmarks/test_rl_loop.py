"""The engines of the real loop: no token is lost or decoded twice, also if a rollout cuts requests off."""

import json
from collections import Counter
from queue import SimpleQueue
from threading import Event

import pytest

from benchmarks import rl_loop
from tracekit.collectors.record import rl_recorder as recorder

TOKENS = {"a": 2, "b": 3, "c": 9, "d": 5, "e": 1}


class Stop:
    """Set once three requests have ended."""

    def __init__(self, ended):
        self.ended = ended

    def is_set(self):
        return self.ended.qsize() >= 3


@pytest.mark.parametrize("cut", [False, True])
def test_every_token_is_decoded_once(tmp_path, monkeypatch, cut):
    """Two slots: c follows a, d follows b, and e follows d."""
    monkeypatch.setattr(recorder, "_recorder", None)
    for name, value in (("SLOTS", 2), ("BASE_S", 0.0), ("PER_REQUEST_S", 0.0)):
        monkeypatch.setattr(rl_loop, name, value)
    todo, ended = SimpleQueue(), SimpleQueue()
    todo.put([rl_loop.Request(name, tokens, step=4) for name, tokens in TOKENS.items()])
    todo.put(None)
    rl_loop.engine("engine-0", str(tmp_path), todo, ended, Stop(ended) if cut else Event(), lag=1)
    recorder._recorder.close()
    (file,) = tmp_path.iterdir()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    decoded, completed = Counter(), [one["trajectory"] for one in records if one["status"] == "completed"]
    for one in records:
        decoded[one["trajectory"]] += one["tokens"]
    messages = [ended.get() for _ in range(len(completed) + 1)]
    left = {one.name: one.tokens for one in messages.pop()}
    assert messages == [True] * len(completed)
    assert ended.empty()
    assert {name: decoded[name] + left.get(name, 0) for name in TOKENS} == TOKENS
    assert {one["version"] for one in records} == {3}
    # After 2, 3, 8, 9 and 11 decoding steps.
    assert completed == (["a", "b", "d"] if cut else ["a", "b", "d", "e", "c"])
