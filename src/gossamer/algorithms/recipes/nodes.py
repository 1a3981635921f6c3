"""Nodes of a recipe: compression between nodes, written in the topology, becomes the recipe's compressor."""

from __future__ import annotations

from typing import cast

from gossamer.algorithms.compressors import Compressor, Dense, Hierarchical
from gossamer.algorithms.strategies import Strategy
from gossamer.algorithms.topologies import Topology
from gossamer.errors import RecipeError


def compress_between_nodes(
    strategy: Strategy, compressor: Compressor, topology: Topology
) -> tuple[Compressor, Topology]:
    """A recipe's compressor and topology as written, then as used. Raises RecipeError where the strategy has no group
    that could be divided into nodes."""
    if strategy.resends_losses and topology.crossing is not None:
        raise RecipeError(
            f"{topology!r} compresses the means of nodes, and with {strategy!r} every worker tells its neighbours by "
            "itself how far it is from their copies of it (CHOCO), within a node as between nodes. Write "
            f"{strategy!r} + {topology.crossing.by!r} + {topology.plain!r}."
        )
    alone = compressor.held() if strategy.resends_losses or not strategy.agrees_on_means else ()
    for term in (*strategy.held(), *alone):
        if isinstance(term, Hierarchical):
            raise RecipeError(
                f"{term!r} averages over a node before it compresses, and with {strategy!r} every message goes from "
                f"one to another. Write {term.between!r} in its place."
            )
    if topology.crossing is None or not strategy.agrees_on_means:
        return compressor, topology
    between, per_node = topology.crossing
    if compressor != Dense():
        raise RecipeError(
            f"{topology!r} sends numbers as they are within a node, and {compressor!r} beside it would compress "
            f"them there, too. Write {strategy!r} + {topology!r} alone, or {strategy!r} + {compressor!r} + "
            f"{topology.plain!r}."
        )
    return Hierarchical(cast(Compressor, between), per_node=per_node), topology.plain


def sharing_workers(strategy: Strategy, compressor: Compressor, world: int | None) -> int | None:
    """How many of `world` workers could each average a part for all, if any: nodes share within themselves."""
    nodes = any(isinstance(term, Hierarchical) for term in compressor.held())
    return world if strategy.agrees_on_means and not nodes else None
