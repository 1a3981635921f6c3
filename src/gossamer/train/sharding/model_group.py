"""Model group: the ranks that hold one replica of a model together, skip the same steps and clip by one norm."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from gossamer import events
from gossamer.base.ops import AllGather
from gossamer.base.transport import Transport
from gossamer.errors import GossamerError
from gossamer.train.engine.sparse_gradients import entries
from gossamer.train.engine.step_decision import NonFiniteOrigin
from gossamer.train.sharding.local_shards import WholeParameters

ELSEWHERE: NonFiniteOrigin = None, "another part of the model"


@dataclass
class ModelGroup:
    """A replica of the model that is divided among the ranks of `training`.

    training, rounds, job: transports of those ranks for the training thread and for the communication thread, and one
    of all ranks of the job. shards: the ranks that hold the same part, as text that checkpoints compare.
    """

    training: Transport
    rounds: Transport
    job: Transport
    shards: str
    staged: bool = field(init=False, default=False)  # whether some ranks hold other layers
    _copies: dict[int, int] = field(init=False, default_factory=dict)  # by id of a parameter

    def hold(self, views: WholeParameters) -> None:
        """Set this rank's part of the model. Collective."""
        gathered = self.training.all_gather_text(
            json.dumps([_ranks(each) for each in views.own.values() if _ranks(each)])
        )
        own = _connected(self.training.rank, _job_ranks(self.training, self.job), map(json.loads, gathered))
        self.staged = own < self.training.world
        self._copies = {
            id(views.parameters[name]): own * _replicated(each) // (len(_ranks(each)) or 1)
            for name, each in views.own.items()
        }

    def agree(self, blame: NonFiniteOrigin | None) -> NonFiniteOrigin | None:
        """On the training thread: the non-finite origin here or on another rank of the replica; None without one."""
        return _agreed(self.training, blame)

    def agree_in_round(self, blame: NonFiniteOrigin | None) -> NonFiniteOrigin | None:
        """The same on the communication thread."""
        return _agreed(self.rounds, blame)

    def total_norm(self, graded: Iterable[Any]) -> Tensor:
        """The norm of the whole model's gradients; a parameter that several ranks hold counts once."""
        squared = sum(
            float(torch.linalg.vector_norm(entries(each.grad), dtype=torch.float64)) ** 2 / self._copies[id(each)]
            for each in graded
        )
        received = self.training.answer(AllGather((torch.tensor([squared], dtype=torch.float64),)))
        return torch.tensor(sqrt(sum(float(remote) for (remote,) in received)))

    def whole(self, closed: events.Closed) -> events.Closed:
        """Add a digest of all parts of the replica, which replicas compare."""
        if closed.ended == "finished":
            with suppress(GossamerError):
                return replace(closed, digest=" ".join(self.training.all_gather_text(closed.digest)))
        return closed

    @property
    def transports(self) -> Sequence[Transport]:
        return self.training, self.rounds, self.job


def _agreed(transport: Transport, blame: NonFiniteOrigin | None) -> NonFiniteOrigin | None:
    received = transport.answer(AllGather((torch.tensor([blame is not None], dtype=torch.uint8),)))
    return blame if blame is not None or not any(bool(remote) for (remote,) in received) else ELSEWHERE


def _job_ranks(training: Transport, job: Transport) -> list[int]:
    """The ranks in the job of the replica's ranks, by their rank in it."""
    return [int(text) for text in training.all_gather_text(str(job.rank))]


def _connected(rank: int, job_ranks: Sequence[int], meshes: Iterable[Sequence[Sequence[int]]]) -> int:
    """Number of ranks of the replica that are connected to `rank` by the meshes of parameters. They share parameters
    without a mesh, as with tensor parallelism; other ranks hold other layers."""
    found, joined = {job_ranks[rank]}, [{*ranks} for remote in meshes for ranks in remote]
    while more := [ranks for ranks in joined if ranks & found and not ranks <= found]:
        found = found.union(*more)
    return len(found & {*job_ranks})


def _ranks(parameter: Any) -> list[int]:
    """The ranks of a parameter's mesh; empty for a parameter that is not a DTensor."""
    mesh = getattr(parameter, "device_mesh", None)
    return [] if mesh is None else sorted(mesh.mesh.flatten().tolist())


def _replicated(parameter: Any) -> int:
    """Number of ranks of its own mesh that hold each entry of a parameter."""
    placements: Mapping[int, Any] = dict(enumerate(getattr(parameter, "placements", ())))
    return prod(parameter.device_mesh.size(dim) for dim, placement in placements.items() if placement.is_replicate())
