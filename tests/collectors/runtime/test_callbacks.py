"""The callbacks of trainers, driven as their trainers drive them; the frameworks' base classes are played."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tracekit.collectors.runtime import spans


class Sink:
    """Keeps what it is told, in order."""

    def __init__(self):
        self.told = []

    def begin_span(self, name):
        self.told.append(f"{name} begins")
        return 1

    def end_span(self, name, _):
        self.told.append(f"{name} ends")

    def set_step(self, step):
        self.told.append(step)


@pytest.fixture
def told(monkeypatch):
    """What a collector is told, in a process that `tracekit collect` started."""
    sink = Sink()
    monkeypatch.setattr(spans, "_under_collect", True)
    monkeypatch.setattr(spans, "_sink", sink)
    return sink.told


def step_trace(monkeypatch, module, framework, base):
    """The callback of a module of ours, whose framework has nothing but that base class."""
    played = ModuleType(framework)
    setattr(played, base, type(base, (), {}))
    monkeypatch.setitem(sys.modules, framework, played)
    monkeypatch.delitem(sys.modules, f"tracekit.callbacks.{module}", raising=False)
    found = importlib.import_module(f"tracekit.callbacks.{module}").StepTrace()
    monkeypatch.delitem(sys.modules, f"tracekit.callbacks.{module}")
    return found


def test_the_trainer_of_transformers_numbers_steps_and_says_when_it_evaluates_and_saves(monkeypatch, told):
    """Resumed at 7: one step, one with a checkpoint, one with both, one with an evaluation; an epoch that saves."""
    callback = step_trace(monkeypatch, "transformers", "transformers", "TrainerCallback")
    state, control = SimpleNamespace(global_step=7), SimpleNamespace(should_evaluate=False, should_save=False)
    callback.on_train_begin(None, state, control, model=None)
    for evaluates, saves in ((0, 0), (0, 1), (1, 1), (1, 0)):
        state.global_step += 1
        control.should_evaluate, control.should_save = bool(evaluates), bool(saves)
        callback.on_step_end(None, state, control, model=None)
        if evaluates:
            callback.on_evaluate(None, state, control, metrics={})
        if saves:
            callback.on_save(None, state, control)
    control.should_evaluate, control.should_save = False, True
    callback.on_epoch_end(None, state, control)
    callback.on_save(None, state, control)
    saved, evaluated = ["checkpoint begins", "checkpoint ends"], ["evaluation begins", "evaluation ends"]
    assert told == [7, 8, 9, *saved, 10, *evaluated, *saved, 11, *evaluated, *saved]


def test_the_trainer_of_lightning_numbers_steps_where_its_optimizer_has_stepped(monkeypatch, told):
    """Resumed at 7, with an optimizer step every other batch."""
    callback = step_trace(monkeypatch, "lightning", "lightning.pytorch", "Callback")
    trainer = SimpleNamespace(global_step=7)
    callback.on_train_start(trainer, None)
    for batch in range(4):
        trainer.global_step += batch % 2
        callback.on_train_batch_end(trainer, None, {}, None, batch)
    assert told == [7, 8, 9]
