"""The hook of docs/plans.md logs the tokens of each expert, whichever router chooses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tracekit.analysis.experts.loads import Loads

PAGE = Path(__file__).parents[3] / "docs" / "plans.md"


@pytest.mark.slow
def test_it_counts_each_token_once(tmp_path: Path) -> None:
    """Two layers, three tokens and two experts; the forward of the first is computed again in the backward."""
    import torch
    import torch.distributed as dist
    from torch.utils.checkpoint import checkpoint

    class TopKRouter(torch.nn.Module):
        """As Megatron-LM's and NeMo's: probabilities, and which token goes to which expert."""

        def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return scores, scores > 0

    class TokenChoiceTopKRouter(torch.nn.Module):
        """As torchtitan's: scores, experts, tokens of each expert."""

        def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return scores, scores.argmax(1), (scores > 0).sum(0).float()

    (code,) = [block for block in PAGE.read_text("utf-8").split("```python\n")[1:] if "class TokensPerExpert" in block]
    names: dict[str, Any] = {}
    exec(code.split("```")[0], names)  # noqa: S102  the documentation's own code
    model = torch.nn.ModuleList([TopKRouter(), TokenChoiceTopKRouter()])
    counter = names["TokensPerExpert"](model)
    for step in (3, 4):
        scores = torch.tensor([[1.0, -1.0], [1.0, -1.0], [-1.0, 1.0]], requires_grad=True)
        first = checkpoint(lambda one: model[0](one)[0], scores, use_reentrant=False)
        model[1](-first)[0].sum().backward()
        counter.step(step)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        counter.write(tmp_path / "loads.jsonl")
    finally:
        dist.destroy_process_group()
    found = Loads.read(tmp_path / "loads.jsonl")
    assert (found.steps.tolist(), found.layers.tolist()) == ([3, 4], [0, 1])
    assert found.tokens.tolist() == [[[2.0, 1.0], [1.0, 2.0]]] * 2
