"""Elastic training of torch models: TorchState, ElasticSampler and run."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sized
from itertools import cycle, islice
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Sampler

from gossamer.horovod.basics import init, rank, shutdown, size
from gossamer.horovod.elastic import ObjectState, PartsState, State, StatePart, run, run_fn
from gossamer.horovod.objects import broadcast_object
from gossamer.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "run_fn", "shutdown"]


class ElasticSampler(Sampler[int]):
    """Shards the indices of a dataset over the ranks. After a reset, an epoch continues with the unprocessed indices.

    Args:
        dataset: of constant size, the same on every rank.
        shuffle: Whether to draw a new order in each epoch.
        seed: of the order, the same on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch, self.processed_num = 0, 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; call it at the end of the one before."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch as processed, on every rank."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Shard the remaining indices of the epoch over the current ranks."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        padded = list(islice(cycle(left), self.total_size))  # also where fewer indices are left than ranks
        return iter(padded[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


class _TorchPart(StatePart):
    """A model, optimizer or sampler. broadcast: Gives every rank the values of rank 0."""

    def __init__(self, value: Any, broadcast: Callable[[Any], None]) -> None:
        self.value, self.broadcast = value, broadcast

    def save(self) -> None:
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        self.broadcast(self.value)


def _part(value: Any) -> _TorchPart | None:
    if isinstance(value, nn.Module):
        return _TorchPart(value, lambda model: broadcast_parameters(model.state_dict(), root_rank=0))
    if isinstance(value, Optimizer):
        return _TorchPart(value, lambda optimizer: broadcast_optimizer_state(optimizer, root_rank=0))
    if isinstance(value, ElasticSampler):
        return _TorchPart(value, lambda sampler: sampler.load_state_dict(broadcast_object(sampler.state_dict())))
    return None


class TorchState(PartsState):
    """State of models, optimizers, samplers and plain objects, which are attributes.

    Args:
        model, optimizer: None for none.
        kwargs: More of them by name, ElasticSampler among them; all other values are objects, as for ObjectState.
    """

    _parts: dict[str, _TorchPart]  # type: ignore[assignment]

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **kwargs: Any) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        parts = {name: part for name, value in given.items() if (part := _part(value)) is not None}
        self.__dict__.update({name: part.value for name, part in parts.items()})
        super().__init__(parts, {name: value for name, value in given.items() if name not in parts})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._parts:
            self._parts[name].value = value
            self._parts[name].save()
        super().__setattr__(name, value)

    def on_reset(self) -> None:
        for part in self._parts.values():
            if isinstance(part.value, ElasticSampler):
                part.value.reset()
        super().on_reset()
