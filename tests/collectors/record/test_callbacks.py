"""The callbacks of trainers, driven as their trainers drive them; the frameworks' base classes are played."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tracekit.collectors.record import spans


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

    def log(self, values, ended):
        of = {"ended": True} if ended else {}
        self.told.append({name: value for name, value in values.items() if value is not None} | of)


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


def test_the_trainer_of_transformers_says_the_tokens_of_a_step_and_its_loss_where_it_has_them(monkeypatch, told):
    """Four ranks, resumed after 1,000 tokens; the trainer counts those of all ranks, and logs a loss every other step.
    A trainer that counts none stays at 0, one of an old version does not have the number. It logs a loss after the
    callbacks of the end of the step, when step 9 has begun: the loss is that of step 8.
    """
    control, args = SimpleNamespace(should_evaluate=False, should_save=False), SimpleNamespace(world_size=4)
    for counts in (True, False, None):
        callback = step_trace(monkeypatch, "transformers", "transformers", "TrainerCallback")
        state = SimpleNamespace(global_step=7)
        if counts is not None:
            state.num_input_tokens_seen = 1000 * counts
        callback.on_train_begin(args, state, control)
        for tokens in (400, 200):
            state.global_step += 1
            if counts:
                state.num_input_tokens_seen += tokens
            callback.on_step_end(args, state, control)
        callback.on_log(args, state, control, logs={"loss": 2.5, "learning_rate": 0.1})
        callback.on_log(args, state, control, logs={"eval_loss": 2.5})
        callback.on_log(args, state, control)
    losses = [9, {"loss": 2.5, "ended": True}, {"ended": True}, {"ended": True}]
    assert told == [7, {"tokens": 100.0}, 8, {"tokens": 50.0}, *losses, *2 * [7, 8, *losses]]


def test_the_trainer_of_lightning_says_a_loss_that_is_on_the_host(monkeypatch, told):
    """One on a GPU stays there, without a word."""
    callback = step_trace(monkeypatch, "lightning", "lightning.pytorch", "Callback")
    trainer = SimpleNamespace(global_step=0, callback_metrics={})
    callback.on_train_start(trainer, None)
    here, there = SimpleNamespace(is_cpu=True), SimpleNamespace(is_cpu=False)
    for metrics in ({"train_loss": here}, {"train_loss": there}, {"val_loss": here}):
        trainer.global_step += 1
        trainer.callback_metrics = metrics
        callback.on_train_batch_end(trainer, None, {}, None, 0)
    assert told == [0, {"loss": here}, 1, 2, 3]


def test_the_trainer_of_lightning_numbers_steps_where_its_optimizer_has_stepped(monkeypatch, told):
    """Resumed at 7, with an optimizer step every other batch."""
    callback = step_trace(monkeypatch, "lightning", "lightning.pytorch", "Callback")
    trainer = SimpleNamespace(global_step=7, callback_metrics={})
    callback.on_train_start(trainer, None)
    for batch in range(4):
        trainer.global_step += batch % 2
        callback.on_train_batch_end(trainer, None, {}, None, batch)
    assert told == [7, 8, 9]
