"""Catalog of terms: all terms by name, the presets, and an example of each."""

from __future__ import annotations

from abc import ABC
from dataclasses import MISSING, is_dataclass
from inspect import isabstract

from gossamer.algorithms import compressors, strategies, topologies
from gossamer.algorithms.compressors import Codec, Compressor, Float4, OneBit, TopK
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.topk import Sparse
from gossamer.algorithms.recipes.fields import fields_of, hints_of, positional_count
from gossamer.algorithms.strategies import EveryStep, FedAvg, LocalSGD, ParameterServer, federated_rules
from gossamer.algorithms.topologies import Topology
from gossamer.base.term import Term, Terms, default_of

NOUNS: dict[str, type[Term]] = {
    name: noun
    for module in (strategies, compressors, topologies, federated_rules)
    for name, noun in ((name, getattr(module, name)) for name in module.__all__)
    if isinstance(noun, type)
    and issubclass(noun, Term)
    and is_dataclass(noun)
    and not isabstract(noun)
    and ABC not in noun.__bases__
}

# Kinds of terms that are arguments of a federated strategy, by the argument's name, with its default.
NESTED = {
    item.name: item.default for item in fields_of(FedAvg) if any(noun.kind == item.name for noun in NOUNS.values())
}

# About 1/4, 1/7 and 1/250 of the bytes, with terms that work with any optimizer, selected by docs/benchmarks/ladder.md.
PRESETS = {
    "lan": Terms((Int8(),)),
    "wan": Terms((Float4(),)),
    "home": Terms((LocalSGD(period=8), OneBit())),
    # the types of MXNet's KVStore; `dist_sync + TwoBit(threshold=0.5)` is its 2-bit compression
    "local": Terms((ParameterServer("sync", shards=1),)),
    "device": Terms((EveryStep(),)),
    "dist_sync": Terms((ParameterServer("sync"),)),
    "dist_sync_device": Terms((ParameterServer("sync"),)),
    "dist_async": Terms((ParameterServer("async"),)),
}


def describe(kind: str | None = None) -> list[tuple[str, str]]:
    """Return an example to copy and one sentence for every term, or for every term of one kind."""
    return [
        (_pasted(noun), (noun.__doc__ or "").partition("\n")[0])
        for noun in NOUNS.values()
        if kind is None or noun.kind == kind
    ]


_sparse = TopK(density=0.01)
EXAMPLES: dict[type, object] = {float: 0.01, int: 4, Compressor: _sparse, Sparse: _sparse, Codec: Int8()}


def _pasted(noun: type[Term]) -> str:
    """Return its example, with a strategy that can use it: not all topologies have a mean over all ranks."""
    if noun.kind in NESTED:
        return within(example_of(noun), noun)
    return "Gossip() + " * (issubclass(noun, Topology) and not noun().agrees) + example_of(noun)


def within(text: str, noun: type[Term]) -> str:
    """Return a nested term's text within a strategy."""
    return f"{FedAvg.__name__}({', '.join(filter(None, (f'{noun.kind}={text}', noun.needs_arguments)))})"


def example_of(noun: type[Term]) -> str:
    """Return the text of a term with its required and its numeric arguments."""
    shown: list[str] = []
    for place, item in enumerate(fields_of(noun)):
        default = default_of(item)
        required = default is MISSING
        value = EXAMPLES[hints_of(noun)[item.name][0]] if required else default
        if place < positional_count(noun) and isinstance(value, Term):
            shown.append(repr(value))
        elif required or type(value) in (int, float):
            shown.append(f"{item.name}={value!r}")
    if noun.kind not in NESTED and noun.needs_arguments:
        shown.append(noun.needs_arguments)
    return f"{noun.__name__}({', '.join(shown)})"
