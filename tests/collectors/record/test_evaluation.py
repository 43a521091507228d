"""Evaluation between training steps is one op, however a loop or a framework goes back to training."""

from types import ModuleType

import pytest

from tests.collectors.record.test_clipping import MS, Loop
from tracekit.collectors.record.wire_format import Category


class Iterator:
    """What a loader iterates with."""


def sequential(*modules):
    """A module of these, or of a layer. Whoever only collects the tests is spared the import."""
    from torch import nn

    return nn.Sequential(*(modules or (nn.Linear(2, 2),)))


class Evaluating(Loop):
    """A loop that also loads, evaluates and saves; what each takes is in the names of its methods."""

    def __init__(self, monkeypatch):
        from tracekit.collectors.record import hooks_host

        super().__init__(monkeypatch)
        monkeypatch.setattr(hooks_host, "now_ns", lambda: self.now_ns)
        self.model = sequential()
        self.session.evaluation.install()
        self.training_loader = Iterator()
        self._load = self.hooks._timed(
            Category.DATA_LOAD, "data-load", self.session.evaluation.loads, lambda _iterator: self.takes(3)
        )
        self._save = self.hooks._timed(Category.CHECKPOINT, "checkpoint", self.hooks._saves, lambda: self.takes(7))

    def load_3(self, iterator=None):
        self._load(iterator or self.training_loader)

    def save_7(self):
        self._save()

    def train_10(self):
        self.load_3()
        self.takes(2)
        self.step()

    def evaluate_8(self):
        """Two batches of a loader of its own, 2 ms each beside their data."""
        self.model.eval()
        batches = Iterator()
        for _ in range(2):
            self.load_3(batches)
            self.takes(1)

    def ops_ms(self, category):
        """Start and end of each op of a category since the loop began."""
        return [((at[7] - 10**9) / MS, (at[8] - 10**9) / MS) for at in self.sink.records if at[0] == category]


@pytest.fixture
def loop(monkeypatch):
    loop = Evaluating(monkeypatch)
    yield loop
    loop.session.patches.remove()
    module = type(loop.model)
    assert module.train.__module__ == module.eval.__module__ == "torch.nn.modules.module"


def test_it_lasts_until_the_model_trains_again(loop):
    """Step 0 takes 10 ms, the evaluation 8; it is of the step that follows, and its data is part of it."""
    loop.train_10()
    loop.evaluate_8()
    loop.model.train()
    loop.takes(4)
    loop.train_10()
    assert loop.ops_ms(Category.EVALUATION) == [(10, 18)]
    assert loop.ops_ms(Category.DATA_LOAD) == [(0, 3), (22, 25)]
    assert [at[3] for at in loop.sink.records if at[0] == Category.EVALUATION] == [1]


def test_a_framework_that_sets_the_mode_itself_has_evaluated_until_it_loads_for_training(loop):
    """As Lightning's evaluation loop does, without a call of `train`."""
    loop.train_10()
    loop.evaluate_8()
    for module in loop.model.modules():
        module.training = True
    loop.train_10()
    assert loop.ops_ms(Category.EVALUATION) == [(10, 18)]
    assert loop.ops_ms(Category.DATA_LOAD) == [(0, 3), (18, 21)]


def test_a_wrapper_that_stays_in_evaluation_mode_is_evaluated_again(loop):
    """Lightning puts the wrapper of a model into evaluation mode, and only what is inside back into training."""
    inner = loop.model
    loop.model = sequential(inner)
    for _ in range(2):
        loop.train_10()
        loop.evaluate_8()
        for module in inner.modules():
            module.training = True
    loop.train_10()
    assert not loop.model.training
    assert loop.ops_ms(Category.EVALUATION) == [(10, 18), (28, 36)]


def test_a_checkpoint_behind_it_is_none_of_it(loop):
    """As Hugging Face's Trainer does, which sets the mode at its next step."""
    loop.train_10()
    loop.evaluate_8()
    loop.save_7()
    loop.model.train()
    loop.train_10()
    assert loop.ops_ms(Category.EVALUATION) == [(10, 18)]
    assert loop.ops_ms(Category.CHECKPOINT) == [(18, 25)]


def test_an_optimizer_ends_it_where_nothing_else_tells(loop):
    loop.train_10()
    loop.evaluate_8()
    loop.step()
    assert loop.ops_ms(Category.EVALUATION) == [(10, 18)]
    assert loop.optimizers_ms == [(5, 10), (18, 23)]


def test_a_module_that_does_not_train_is_not_evaluated(loop):
    """A teacher, frozen and put into evaluation mode for good."""
    teacher = sequential().requires_grad_(False)
    loop.train_10()
    teacher.eval()
    loop.train_10()
    assert loop.ops_ms(Category.EVALUATION) == []
    assert loop.ops_ms(Category.DATA_LOAD) == [(0, 3), (10, 13)]


def test_iterators_of_torch_can_be_told_apart():
    """By weak references, which every class of them allows."""
    from torch.utils.data import DataLoader, dataloader

    batches = iter(DataLoader([1, 2]))
    assert isinstance(batches, dataloader._BaseDataLoaderIter)
    assert "__weakref__" in dir(batches)


def test_a_span_named_after_an_evaluation_or_a_checkpoint_is_all_of_it(loop):
    """An evaluation of 8 ms and a checkpoint of 2 + 7 ms: the batches, the model and the file inside are no ops."""
    loop.train_10()
    for name, runs in (("evaluation", [loop.evaluate_8]), ("checkpoint", [lambda: loop.takes(2), loop.save_7])):
        start = loop.session.begin_span(name)
        for run in runs:
            run()
        loop.session.end_span(name, start)
    loop.model.train()
    loop.train_10()
    assert loop.ops_ms(Category.SPAN) == [(10, 18), (18, 27)]
    assert loop.ops_ms(Category.EVALUATION) == loop.ops_ms(Category.CHECKPOINT) == []
    assert loop.ops_ms(Category.DATA_LOAD) == [(0, 3), (27, 30)]


def test_a_span_named_checkpoint_ends_an_evaluation(loop):
    loop.train_10()
    loop.evaluate_8()
    loop.session.end_span("checkpoint", loop.session.begin_span("checkpoint"))
    loop.save_7()
    assert loop.ops_ms(Category.EVALUATION) == [(10, 18)]
    assert loop.ops_ms(Category.CHECKPOINT) == [(18, 25)]


@pytest.mark.parametrize("name", ["torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict_saver"])
@pytest.mark.parametrize("saves", ["save", "async_save"])
def test_a_save_of_torchs_distributed_checkpoints_is_an_op(loop, monkeypatch, name, saves):
    """Hooked when the job imports the module."""
    from tracekit.collectors.record import install

    awaited = {}
    monkeypatch.setattr(install, "_later", lambda _, module, hook, **_lacks: awaited.setdefault(module, hook))
    monkeypatch.setattr(loop.session, "install", lambda *_, **__: None)
    install.install_hooks(loop.session)
    module = ModuleType(name)
    module.save = module.async_save = lambda: loop.takes(7)
    awaited[name](module)
    getattr(module, saves)()
    assert loop.ops_ms(Category.CHECKPOINT) == [(0.0, 7.0)]
