"""`tracekit experts`: where to place experts, from the tokens that they get, without a trace.

In: a log of tokens per expert. Out: a placement for each layer, in the terminal or as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from tracekit.base.command_line import command
from tracekit.base.errors import SelectionError
from tracekit.base.exit_codes import ExitCode
from tracekit.commands.options import PATH
from tracekit.report.experts import PlacedLayer

if TYPE_CHECKING:
    from tracekit.analysis.experts.loads import Loads

_COUNT = click.IntRange(1, 1 << 20)
#: Placing them takes time and memory with the square of their number.
_REPLICAS = click.IntRange(1, 9_999)


class ExpertsOutput(msgspec.Struct, frozen=True):
    """What `tracekit experts --json` prints."""

    layers: list[PlacedLayer]


@click.command("experts")
@click.argument("loads", metavar="LOADS.jsonl", type=PATH)
@click.option("--ranks", type=_COUNT, required=True, help="Ranks to place experts on.")
@click.option("--replicas", type=_REPLICAS, required=True, help="Replicas of all experts, equally many on each rank.")
@click.option("--nodes", type=_COUNT, default=1, show_default=True, help="Nodes that the ranks are on, in order.")
@click.option("--groups", type=_COUNT, default=1, show_default=True, help="Groups of experts that stay on one node.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def experts_command(loads: Path, ranks: int, replicas: int, nodes: int, groups: int, as_json: bool) -> int:
    """Where should experts and their replicas be? Places them so that the heaviest rank has few tokens.

    Each line of LOADS.jsonl is {"step": 0, "layer": 0, "tokens_per_expert": [12, 7, ...]}, the tokens of all source
    ranks (docs/plans.md). The mean over the steps counts.
    """
    from tracekit.analysis.experts.expert_placement import placed_layers
    from tracekit.analysis.experts.loads import Loads

    if nodes > 1 and groups == 1:
        raise SelectionError(f"--nodes {nodes} needs --groups, how many groups of experts stay on one node each")
    tokens = Loads.read(loads)
    layers = placed_layers(tokens, ranks, replicas, nodes, groups)
    if as_json:
        click.echo(msgspec.json.encode(ExpertsOutput(layers)))
        return ExitCode.DONE
    click.echo(_headline(layers, tokens, ranks))
    for layer in layers:
        homes = [" ".join(str(expert) for expert, at in layer.placement if at == rank) for rank in range(ranks)]
        click.echo(f"layer {layer.layer}: the heaviest rank gets {layer.max_over_mean:.3f} times the mean")
        click.echo("\n".join(f"  rank {rank}: experts {named}" for rank, named in enumerate(homes)))
    asked = command("whatif", "TRACE", "--expert-loads", loads, "--rebalance", f"replicas={replicas}")
    click.echo(f"Next: {asked} says what this saves")
    return ExitCode.DONE


def _headline(layers: Sequence[PlacedLayer], tokens: Loads, ranks: int) -> str:
    """The heaviest rank of any layer as placed here and, if experts divide among the ranks, with experts in order."""
    from tracekit.analysis.experts.expert_placement import default_placement, loads_of_ranks

    mean = tokens.tokens.mean(axis=0)
    words = (
        f"The heaviest rank of a layer gets {max(layer.max_over_mean for layer in layers):.3f} times the mean tokens"
    )
    if mean.shape[1] % ranks:
        return f"{words}."
    in_order = loads_of_ranks(mean, default_placement(mean.shape[1], ranks), ranks)
    before = (in_order.max(axis=1) / in_order.mean(axis=1).clip(1e-9)).max()
    return f"{words}; with experts in order, {before:.3f} times."
