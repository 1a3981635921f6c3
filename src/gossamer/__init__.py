"""Gossamer trains models across machines that communicate less.

The public API: `init`, `attach` and the session that it returns; every term of a recipe; `gossamer.federated` for
devices that keep their data; `gossamer.parallel` for layers on several workers; `gossamer.engine` for arrays of other
frameworks; `gossamer.extend` for terms of your own; `gossamer.errors`; the adapters in `gossamer.integrations`. All
other modules are internal and may change.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gossamer.version import __version__

if TYPE_CHECKING:
    from gossamer.algorithms.compressors import (
        DGC,
        QSGD,
        AdamUpdate,
        Adaptive,
        ARCTopK,
        Chain,
        Codec,
        CompressedAdam,
        Compressor,
        DeMo,
        Dense,
        Feedback,
        Float4,
        Hierarchical,
        Int8,
        MicroAdam,
        OneBit,
        OneBitAdam,
        PowerSGD,
        RandomK,
        RandomProjection,
        Rotated,
        Route,
        Sharded,
        SharedMask,
        SignMagnitude,
        SparseSum,
        TernGrad,
        Threshold,
        TopK,
        TwoBit,
        Warmup,
    )
    from gossamer.algorithms.recipes.recipe import Recipe, recipe
    from gossamer.algorithms.recipes.registry import register
    from gossamer.algorithms.strategies import (
        SCAFFOLD,
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
        ParameterServer,
        PostLocalSGD,
        Strategy,
    )
    from gossamer.algorithms.strategies.federated import Median, MultiKrum, SecureAggregation, TrimmedMean, WeightedMean
    from gossamer.algorithms.topologies import (
        Complete,
        Exponential,
        Hierarchy,
        RandomPeers,
        Ring,
        Topology,
        Torus,
    )
    from gossamer.train.sampler import Shard
    from gossamer.train.session.attach import attach
    from gossamer.train.session.average import average_
    from gossamer.train.session.ddp_hook import ddp_hook
    from gossamer.train.session.metrics import gather, mean
    from gossamer.train.session.session import Session
    from gossamer.train.world import World, init

__all__ = [
    "DGC",
    "QSGD",
    "SCAFFOLD",
    "ARCTopK",
    "AdamUpdate",
    "Adaptive",
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
    "Hierarchical",
    "Hierarchy",
    "Int8",
    "LocalPrivacy",
    "LocalSGD",
    "Median",
    "MicroAdam",
    "MultiKrum",
    "OneBit",
    "OneBitAdam",
    "ParameterServer",
    "PostLocalSGD",
    "PowerSGD",
    "RandomK",
    "RandomPeers",
    "RandomProjection",
    "Recipe",
    "Ring",
    "Rotated",
    "Route",
    "SecureAggregation",
    "Session",
    "Shard",
    "Sharded",
    "SharedMask",
    "SignMagnitude",
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
    "mean",
    "recipe",
    "register",
]
PACKAGES = ("engine", "errors", "extend", "federated", "integrations", "parallel")  # public ones

if not TYPE_CHECKING:  # or every misspelled name would have a type
    MODULES = {
        "algorithms.compressors": (
            "ARCTopK",
            "AdamUpdate",
            "Adaptive",
            "Chain",
            "Codec",
            "CompressedAdam",
            "Compressor",
            "DGC",
            "DeMo",
            "Dense",
            "Feedback",
            "Float4",
            "Hierarchical",
            "Int8",
            "MicroAdam",
            "OneBit",
            "OneBitAdam",
            "PowerSGD",
            "QSGD",
            "RandomK",
            "RandomProjection",
            "Rotated",
            "Route",
            "Sharded",
            "SharedMask",
            "SignMagnitude",
            "SparseSum",
            "TernGrad",
            "Threshold",
            "TopK",
            "TwoBit",
            "Warmup",
        ),
        "algorithms.recipes.recipe": (
            "Recipe",
            "recipe",
        ),
        "algorithms.recipes.registry": ("register",),
        "algorithms.strategies": (
            "CentralPrivacy",
            "DelayedAveraging",
            "DiLoCo",
            "DistributedPrivacy",
            "EveryStep",
            "FedAvg",
            "FedBuff",
            "FedNova",
            "FedOpt",
            "FedProx",
            "Gossip",
            "LocalPrivacy",
            "LocalSGD",
            "ParameterServer",
            "PostLocalSGD",
            "SCAFFOLD",
            "Strategy",
        ),
        "algorithms.strategies.federated": (
            "Median",
            "MultiKrum",
            "SecureAggregation",
            "TrimmedMean",
            "WeightedMean",
        ),
        "algorithms.topologies": (
            "Complete",
            "Exponential",
            "Hierarchy",
            "RandomPeers",
            "Ring",
            "Topology",
            "Torus",
        ),
        "train.sampler": ("Shard",),
        "train.session.attach": ("attach",),
        "train.session.average": ("average_",),
        "train.session.ddp_hook": ("ddp_hook",),
        "train.session.metrics": (
            "gather",
            "mean",
        ),
        "train.session.session": ("Session",),
        "train.world": (
            "World",
            "init",
        ),
    }
    PLACES = {name: f"gossamer.{module}" for module, names in MODULES.items() for name in names}

    def __getattr__(name: str) -> Any:
        """Public names, and packages such as gossamer.federated, are imported with their first use.

        torch takes seconds to import, and the command line often does without.
        """
        place = PLACES.get(name, f"gossamer.{name}")
        try:
            module = import_module(place)
        except ModuleNotFoundError as error:
            if error.name != place:
                raise
            raise AttributeError(f"module 'gossamer' has no attribute {name!r}") from None
        found = getattr(module, name) if name in PLACES else module
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        """The public names and packages, without internal modules."""
        return sorted([*__all__, *PACKAGES])
