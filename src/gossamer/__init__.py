"""Gossamer trains PyTorch models across machines that talk less."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gossamer.compressors import Codec, Compressor, Dense, Feedback, PowerSGD, Route, TopK
from gossamer.compressors.int8 import Int8
from gossamer.recipes.recipe import Recipe
from gossamer.sampler import Shard
from gossamer.session.attach import attach
from gossamer.session.average import average_
from gossamer.session.ddp_hook import ddp_hook
from gossamer.session.metrics import gather, mean
from gossamer.session.session import Session
from gossamer.strategies import EveryStep
from gossamer.topologies import Complete
from gossamer.version import __version__
from gossamer.world import World, init

__all__ = [
    "Codec",
    "Complete",
    "Compressor",
    "Dense",
    "EveryStep",
    "Feedback",
    "Int8",
    "PowerSGD",
    "Recipe",
    "Route",
    "Session",
    "Shard",
    "TopK",
    "World",
    "__version__",
    "attach",
    "average_",
    "ddp_hook",
    "gather",
    "init",
    "mean",
]

if not TYPE_CHECKING:  # or every misspelled name would have a type

    def __getattr__(name: str) -> Any:
        """gossamer.federated and gossamer.parallel: packages that few runs need, imported with their first use."""
        if name in ("federated", "parallel"):
            return import_module(f"gossamer.{name}")
        raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
