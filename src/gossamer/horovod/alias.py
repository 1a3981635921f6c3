"""Alias: makes `import horovod` find gossamer.horovod, in this process only."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from gossamer.horovod import UNAVAILABLE

HOME = "gossamer.horovod"
MOVED = {  # of Horovod's modules, where their names are here
    "horovod.common": HOME,
    "horovod.torch.mpi_ops": f"{HOME}.torch",
    "horovod.torch.compression": f"{HOME}.torch.ops",
    "horovod.torch.elastic.state": f"{HOME}.torch.elastic",
    "horovod.torch.elastic.sampler": f"{HOME}.torch.elastic",
    "horovod.tensorflow.mpi_ops": f"{HOME}.tensorflow",
    "horovod.tensorflow.compression": f"{HOME}.tensorflow.ops",
    "horovod.common.process_sets": f"{HOME}.basics",
    "horovod.common.util": f"{HOME}.basics",
}


class HorovodFinder(MetaPathFinder, Loader):
    """Finds `horovod` and its modules in gossamer.horovod: the same module objects."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "horovod" and not fullname.startswith("horovod."):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        """An empty module, until exec_module puts another in its place."""

    def exec_module(self, module: ModuleType) -> None:
        found = sys.modules[module.__name__] = _module(module.__name__)
        for name in MOVED:  # parts of a package that is one module here, whose parts Python does not look for
            owner, _, part = name.rpartition(".")
            if owner == module.__name__ and not hasattr(found, "__path__"):
                sys.modules[name] = found
                setattr(found, part, found)


def _module(name: str) -> ModuleType:
    """Raises ImportError for a module that is not available, with the alternative."""
    if (reason := UNAVAILABLE.get(name.removeprefix("horovod."))) is not None:
        raise ImportError(f"{name} is not available: {reason}")
    place = MOVED.get(name) or HOME + name.removeprefix("horovod").replace(".common", "", 1)
    try:
        return import_module(place)
    except ModuleNotFoundError as error:
        if error.name != place:
            raise
        raise ModuleNotFoundError(
            f'{name} is not available in gossamer.horovod. All names: "Horovod scripts" in the documentation.',
            name=name,
        ) from None


def install() -> None:
    """Let `import horovod` find gossamer.horovod from now on, and set the variables of horovodrun."""
    if not any(isinstance(finder, HorovodFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, HorovodFinder())
    from gossamer.comm.environment import here  # needs torch

    job = here()
    places = {
        "RANK": job.rank,
        "SIZE": job.world,
        "LOCAL_RANK": job.local_rank,
        "LOCAL_SIZE": job.local_world,
        "CROSS_RANK": job.rank // job.local_world,
        "CROSS_SIZE": -(-job.world // job.local_world),
    }
    for name, value in places.items():
        os.environ.setdefault(f"HOROVOD_{name}", str(value))
