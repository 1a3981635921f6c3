"""Wrapping: adds Feedback, Sharded, SparseSum and Route around a compressor that needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any, cast

import torch

from gossamer.algorithms.compressors import (
    Codec,
    Compressor,
    Dense,
    Feedback,
    Hierarchical,
    PerWorker,
    Route,
    Sharded,
    SparseSum,
)
from gossamer.algorithms.compressors.topk import Sparse
from gossamer.algorithms.strategies import Strategy
from gossamer.algorithms.topologies import Topology
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.runner import price
from gossamer.base.term import Term
from gossamer.errors import RecipeError

SAMPLE = Layout.of({"weight": (1024, 1024)})
SUMS_SAVE = 2.0  # factor of the bytes that SparseSum must save


def wrapped(compressor: Compressor, world: int | None, *, resends_losses: bool = False) -> Compressor:
    """Wrap a compressor as a recipe does.

    Args:
        compressor: As written. Its own wrappers are kept.
        world: Number of workers that could each average a part for all; None: unknown, or not possible.
        resends_losses: Whether the strategy sends compression errors again. Then Route is the only wrapper.
    """
    if resends_losses:
        return compressor if compressor.handles_every_shape else Route(compressor)
    completed = compressor.completed(partial(_fed_back, world=world))
    return completed if completed.handles_every_shape else Route(cheapest(completed, world))


def _fed_back(compressor: Compressor, world: int | None) -> Compressor:
    return Feedback(cheapest(compressor, world)) if compressor.wants_feedback else compressor


def cheapest(compressor: Compressor, world: int | None) -> Compressor:
    """Return the compressor, wrapped in Sharded or SparseSum if that sends fewer bytes; world None: unknown.

    A sparse sum has k entries, while the messages of n workers together have up to n k: for equal bytes both carry
    about as much information, and for equal entries the sum carries less. So SparseSum must send less than half of the
    bytes.
    """
    if world is None:
        return compressor
    ways = [(1.0, compressor)]
    if isinstance(compressor, Sparse) and compressor.wants_feedback:
        ways.append((SUMS_SAVE, SparseSum(compressor)))
    if isinstance(compressor, Codec | PerWorker) and compressor.reencodable:
        ways.append((1.0, Sharded(compressor)))
    return min(ways, key=lambda way: way[0] * bytes_sent(way[1], world))[1]


@lru_cache(maxsize=256)
def bytes_sent(compressor: Compressor, world: int) -> float:
    """Return the bytes that each of `world` workers sends for a matrix of a million entries."""
    x, at = FlatTensors.zeros(SAMPLE, dtype=torch.float32, device=torch.device("meta")), AggregationContext(world=world)
    return sum(op.bytes_sent for op in price(compressor.aggregate(x, compressor.init(x, at), at), world))


# -- compression between nodes -----------------------------------------------------------------------------------------


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


# -- a codec per worker ------------------------------------------------------------------------------------------------


def tables_of(compressor: Compressor) -> list[PerWorker]:
    """Return the compressor's terms with a codec per worker, except those within another one."""
    found = [term for term in compressor.held() if isinstance(term, PerWorker)]
    return [term for term in found if not any(term is other.usual for other in found)]


def replace_tables(compressor: Compressor, change: Callable[[PerWorker], Codec | PerWorker]) -> Compressor:
    """Return the compressor with `change(term)` in place of each term with a codec per worker."""

    def changed(term: Any) -> Any:
        if isinstance(term, PerWorker):
            return change(term)
        held = {item.name: getattr(term, item.name) for item in fields(term)}
        return replace(term, **{name: changed(value) for name, value in held.items() if isinstance(value, Term)})

    return cast(Compressor, changed(compressor)) if tables_of(compressor) else compressor
