"""Hooks of modules: copies of a module and files with it have none."""

import copy
import io
import pickle
import threading

import pytest


class Body:
    """What a hook does: it counts its arguments, and cannot be copied."""

    def __init__(self, calls):
        self.calls, self.lock = calls, threading.Lock()

    def __call__(self, *args):
        self.calls.append(len(args))


@pytest.fixture
def module():
    """A module with hooks, and what they were called with."""
    import torch

    from tracekit.collectors.record.hooks_compute import UncopiedHook

    calls, module = [], torch.nn.Linear(2, 2)
    module.register_forward_pre_hook(UncopiedHook(Body(calls)))
    module.register_forward_hook(UncopiedHook(Body(calls)))
    return module, calls


def test_a_module_can_be_copied_and_saved_and_its_copies_record_nothing(module):
    """As by averaged weights, by those who keep the best model, and by checkpoints of whole modules."""
    import torch

    original, calls = module
    file = io.BytesIO()
    torch.save(original, file)
    file.seek(0)
    copies = [copy.deepcopy(original), pickle.loads(pickle.dumps(original)), torch.load(file, weights_only=False)]  # noqa: S301
    value = torch.ones(1, 2)
    for one in copies:
        assert torch.equal(one(value), torch.nn.functional.linear(value, original.weight, original.bias))
    assert calls == []
    original(value)
    assert calls == [2, 3]


def test_a_file_with_a_module_is_read_without_tracekit(module):
    assert b"tracekit" not in pickle.dumps(module[0])
