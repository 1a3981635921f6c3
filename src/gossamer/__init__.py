"""Gossamer trains models across machines that communicate less.

The public API: `init`, `attach` and the session that it returns; every term of a recipe; `gossamer.federated` for
devices that keep their data; `gossamer.parallel` for layers on several workers; `gossamer.engine` for arrays of other
frameworks, `gossamer.jax`, `gossamer.keras` and `gossamer.tensorflow` for these, `gossamer.horovod` for Horovod
scripts; `gossamer.extend` for terms of your own; `gossamer.errors` and `gossamer.events`; the adapters in
`gossamer.integrations`. All other modules are internal and may change. docs/reference/api.md has the list.
"""

# ruff: noqa: F403, F405 (only type checkers read the star imports)
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gossamer.base.compiled import warn_if_missing
from gossamer.version import __version__

warn_if_missing()

if TYPE_CHECKING:
    from gossamer.algorithms.compressors import *
    from gossamer.algorithms.recipes.recipe import Recipe, recipe
    from gossamer.algorithms.recipes.registry import register
    from gossamer.algorithms.strategies import (
        SCAFFOLD,
        AsyncDiLoCo,
        CentralPrivacy,
        DelayedAveraging,
        DiLoCo,
        DistributedPrivacy,
        EveryStep,
        FedAvg,
        FedBuff,
        FedNova,
        FedOpt,
        FedProx,
        Gossip,
        LocalPrivacy,
        LocalSGD,
        NoLoCo,
        ParameterServer,
        PostLocalSGD,
        Silent,
        Strategy,
    )
    from gossamer.algorithms.strategies.federated_rules import (
        Median,
        MultiKrum,
        SecureAggregation,
        TrimmedMean,
        WeightedMean,
    )
    from gossamer.algorithms.topologies import *
    from gossamer.cli.launch import launch
    from gossamer.observe.saved_record import Record
    from gossamer.train.sampler import Shard
    from gossamer.train.session.attach import attach
    from gossamer.train.session.average import average_
    from gossamer.train.session.ddp_hook import ddp_hook
    from gossamer.train.session.metrics import gather, mean
    from gossamer.train.session.session import Session
    from gossamer.world import World, init

__all__ = [
    "DGC",
    "EDEN",
    "QSGD",
    "SCAFFOLD",
    "ARCTopK",
    "AdamUpdate",
    "Adaptive",
    "AsyncDiLoCo",
    "BinMeans",
    "CentralPrivacy",
    "Chain",
    "Codec",
    "Complete",
    "CompressedAdam",
    "Compressor",
    "DeMo",
    "DelayedAveraging",
    "Dense",
    "DiLoCo",
    "DistributedPrivacy",
    "EveryStep",
    "Exponential",
    "FedAvg",
    "FedBuff",
    "FedNova",
    "FedOpt",
    "FedProx",
    "Feedback",
    "Float4",
    "Gossip",
    "Groups",
    "Hierarchical",
    "Hierarchy",
    "Int8",
    "LocalPrivacy",
    "LocalSGD",
    "Median",
    "MicroAdam",
    "MultiKrum",
    "NoLoCo",
    "OneBit",
    "OneBitAdam",
    "ParameterServer",
    "PerWorker",
    "PostLocalSGD",
    "PowerSGD",
    "RandomK",
    "RandomPeers",
    "RandomProjection",
    "Recipe",
    "Record",
    "Ring",
    "Rotated",
    "Route",
    "SecureAggregation",
    "Session",
    "Shard",
    "Sharded",
    "SharedMask",
    "SignMagnitude",
    "Silent",
    "SparseSum",
    "Strategy",
    "TernGrad",
    "Threshold",
    "TopK",
    "Topology",
    "Torus",
    "TrimmedMean",
    "TwoBit",
    "Warmup",
    "WeightedMean",
    "World",
    "__version__",
    "attach",
    "average_",
    "ddp_hook",
    "gather",
    "init",
    "launch",
    "mean",
    "recipe",
    "register",
]
PACKAGES = (  # public ones
    "engine",
    "errors",
    "events",
    "extend",
    "federated",
    "horovod",
    "integrations",
    "jax",
    "keras",
    "parallel",
    "tensorflow",
)
HOMES = (  # of the names in __all__, those that are imported sooner first
    "algorithms.recipes.recipe",
    "algorithms.recipes.registry",
    "algorithms.compressors",
    "algorithms.strategies",
    "algorithms.strategies.federated_rules",
    "algorithms.topologies",
    "train.sampler",
    "train.session.average",
    "train.session.metrics",
    "train.session.session",
    "world",
    "train.session.ddp_hook",
    "train.session.attach",
    "observe.saved_record",
    "cli.launch",
)

if not TYPE_CHECKING:  # or every misspelled name would have a type

    def __getattr__(name: str) -> Any:
        """Import a public name, or a package such as gossamer.federated, with its first use.

        torch takes seconds to import, and the command line often does without.
        """
        if name == "attach":
            import_module("gossamer.observe.reporter").register()
        if name in __all__:
            modules = (import_module(f"gossamer.{home}") for home in HOMES)
            found = next(getattr(module, name) for module in modules if hasattr(module, name))
        else:
            place = f"gossamer.{name}"
            try:
                found = import_module(place)
            except ModuleNotFoundError as error:
                if error.name != place:
                    raise
                raise AttributeError(f"module 'gossamer' has no attribute {name!r}") from None
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        """The public names and packages, without internal modules."""
        return sorted([*__all__, *PACKAGES])
