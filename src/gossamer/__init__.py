"""Gossamer trains PyTorch models across machines that talk less."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gossamer.version import __version__

if TYPE_CHECKING:
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
    MODULES = {
        "compressors": ("Codec", "Compressor", "Dense", "Feedback", "PowerSGD", "Route", "TopK"),
        "compressors.int8": ("Int8",),
        "recipes.recipe": ("Recipe",),
        "sampler": ("Shard",),
        "session.attach": ("attach",),
        "session.average": ("average_",),
        "session.ddp_hook": ("ddp_hook",),
        "session.metrics": ("gather", "mean"),
        "session.session": ("Session",),
        "strategies": ("EveryStep",),
        "topologies": ("Complete",),
        "world": ("World", "init"),
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
