"""Gossamer trains PyTorch models across machines that talk less."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gossamer.version import __version__

if TYPE_CHECKING:
    from gossamer.algorithms.compressors import Codec, Compressor, Dense, Feedback, PowerSGD, Route, TopK
    from gossamer.algorithms.compressors.int8 import Int8
    from gossamer.algorithms.recipes.recipe import Recipe
    from gossamer.algorithms.strategies import EveryStep
    from gossamer.algorithms.topologies import Complete
    from gossamer.train.sampler import Shard
    from gossamer.train.session.attach import attach
    from gossamer.train.session.average import average_
    from gossamer.train.session.ddp_hook import ddp_hook
    from gossamer.train.session.metrics import gather, mean
    from gossamer.train.session.session import Session
    from gossamer.train.world import World, init

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
    MODULES = {
        "algorithms.compressors": ("Codec", "Compressor", "Dense", "Feedback", "PowerSGD", "Route", "TopK"),
        "algorithms.compressors.int8": ("Int8",),
        "algorithms.recipes.recipe": ("Recipe",),
        "train.sampler": ("Shard",),
        "train.session.attach": ("attach",),
        "train.session.average": ("average_",),
        "train.session.ddp_hook": ("ddp_hook",),
        "train.session.metrics": ("gather", "mean"),
        "train.session.session": ("Session",),
        "algorithms.strategies": ("EveryStep",),
        "algorithms.topologies": ("Complete",),
        "train.world": ("World", "init"),
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
        return sorted({*globals(), *__all__})
