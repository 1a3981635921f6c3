"""First batch: a hash of what each rank trains on first, so that ranks with the same data are noticed."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gossamer.base import rng
from gossamer.events import notice
from gossamer.train.checkpoint import digest

NOT_SEEN, NO_BATCH = 0, -1
MOST_OBJECTS = 10_000  # of a batch are looked at: one may lead to all that a program has


class FirstBatch:
    """A hash of the first batch: ranks that train on the same data learn nothing from each other."""

    def __init__(self) -> None:
        self.hash, self._pid = NOT_SEEN, os.getpid()
        self.hook: RemovableHandle | None = None

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Look at the first batch that `model` is given."""
        self.hook = model.register_forward_pre_hook(self.see, with_kwargs=True)
        return self.hook

    def see(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward pre-hook that looks at the first batch only.

        A compiler that follows the model in here finds nothing: reading bytes would break its graph in two.
        """
        if torch.compiler.is_compiling():
            return
        if self.hash == NOT_SEEN and model.training and os.getpid() == self._pid:
            inputs = tensors_in(*args, *kwargs.values())
            self.hash = rng.address(digest(inputs)) if inputs else NO_BATCH
            if self.hook is not None:
                self.hook.remove()

    @staticmethod
    def compare(batches: Sequence[tuple[int, float]]) -> None:
        """Notice equal hashes among all ranks' (hash, weight)."""
        hashes = [batch for batch, weight in batches if weight > 0 and batch not in (NOT_SEEN, NO_BATCH)]
        if len(set(hashes)) < len(hashes):
            notice(
                "several workers gave the model equal inputs in their first pass. If their losses are of the same "
                "samples, they compute one gradient several times: give each worker its own part of the data, "
                "DataLoader(dataset, sampler=world.shard(dataset), ...). If each loss takes other parts of equal "
                "inputs, as other nodes of one graph, nothing is to be changed."
            )


def tensors_in(*batch: object) -> list[Tensor]:
    """All tensors of a batch: also those in mappings, lists, tuples, dataclasses, and attributes of other objects."""
    found: list[Tensor] = []
    seen: dict[int, object] = {}  # held, so that no other object gets an identity that was seen
    waiting = deque(batch)
    while waiting and len(seen) < MOST_OBJECTS:
        value = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            found.append(value)
        else:
            waiting.extend(islice(_parts(value), MOST_OBJECTS))
    return found


def _parts(value: object) -> Iterable[object]:
    """What is kept in an object. Computes nothing: what properties and generators would give is not looked at."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (nn.Module, type, ModuleType)):
        return ()  # no data, and they lead far
    slots = (name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()))
    return chain(getattr(value, "__dict__", {}).values(), (getattr(value, name, None) for name in slots))
