"""Nodes of a recipe: compression between nodes, an argument of the topology, becomes the recipe's compressor."""

from __future__ import annotations

from typing import cast

from gossamer.algorithms.compressors import Compressor, Dense, Hierarchical
from gossamer.algorithms.strategies import Strategy
from gossamer.algorithms.topologies import Topology
from gossamer.errors import RecipeError


def compress_between_nodes(
    strategy: Strategy, compressor: Compressor, topology: Topology
) -> tuple[Compressor, Topology]:
    """Return the compressor and topology to use for those written.

    Raises RecipeError if the strategy has no group that could be divided into nodes.
    """
    if strategy.resends_losses and topology.crossing is not None:
        raise RecipeError(
            f"{topology!r} compresses the means of nodes, and with {strategy!r} every worker sends its neighbors "
            "differences to their copies (CHOCO), within and between nodes. Write "
            f"{strategy!r} + {topology.crossing.by!r} + {topology.plain!r}."
        )
    alone = compressor.held() if strategy.resends_losses or not strategy.agrees_on_means else ()
    for term in (*strategy.held(), *alone):
        if isinstance(term, Hierarchical):
            raise RecipeError(
                f"{term!r} averages over a node before it compresses, and with {strategy!r} every message has a single "
                f"sender and receiver. Write {term.between!r} instead."
            )
    if topology.crossing is None or not strategy.agrees_on_means:
        return compressor, topology
    between, per_node = topology.crossing
    if compressor != Dense():
        raise RecipeError(
            f"{topology!r} sends uncompressed tensors within a node, and {compressor!r} next to it would compress "
            f"them there, too. Write {strategy!r} + {topology!r} alone, or {strategy!r} + {compressor!r} + "
            f"{topology.plain!r}."
        )
    return Hierarchical(cast(Compressor, between), per_node=per_node), topology.plain


def sharing_workers(strategy: Strategy, compressor: Compressor, world: int | None) -> int | None:
    """Return the number of `world` workers that could each average a part for all, or None; nodes shard within
    themselves.
    """
    nodes = any(isinstance(term, Hierarchical) for term in compressor.held())
    return world if strategy.agrees_on_means and not nodes else None
