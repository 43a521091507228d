"""Trains with modules named and shaped as Megatron-LM's: its parallel state and its timers."""

import sys
import time
import types

import torch
import torch.distributed as dist


def pretend_megatron(folder):
    """Write the two modules the collector knows, so that they are imported the way the real ones are."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (folder / "megatron" / "__init__.py").write_text("")
    (core / "__init__.py").write_text("")
    (core / "parallel_state.py").write_text(
        "import torch.distributed as dist\n"
        "model_parallel_is_initialized = lambda: True\n"
        "get_data_parallel_rank = lambda: dist.get_rank()\n"
        "get_data_parallel_world_size = lambda: dist.get_world_size()\n"
        "get_pipeline_model_parallel_rank = lambda: 0\n"
        "get_pipeline_model_parallel_world_size = lambda: 1\n"
        "get_tensor_model_parallel_rank = lambda: 0\n"
        "get_tensor_model_parallel_world_size = lambda: 1\n"
        "get_virtual_pipeline_model_parallel_world_size = lambda: None\n"
    )
    (core / "timers.py").write_text(
        "class Timer:\n"
        "    def __init__(self, name):\n"
        "        self.name = name\n"
        "    def start(self, barrier=False):\n"
        "        pass\n"
        "    def stop(self, barrier=False):\n"
        "        pass\n"
    )
    sys.path.insert(0, str(folder))


def main(folder):
    dist.init_process_group("gloo")
    pretend_megatron(folder)
    import megatron.core.parallel_state
    from megatron.core.timers import Timer

    assert isinstance(megatron.core.parallel_state, types.ModuleType)
    clip = Timer("optimizer-clip-main-grad")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        clip.start()
        time.sleep(0.001)
        clip.stop()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
