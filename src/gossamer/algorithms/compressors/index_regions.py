"""Index regions: which worker adds up which entries, a part of every neighborhood for each worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors

BLOCK = 16  # neighbors that stay together: a cache line
STEPS = 64  # until regions are drawn anew
LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Regions:
    """The regions: in every group of `world` blocks each worker has one, turned by a draw of the group's own.

    Block b of group g is in the region of worker (b + turn(g)) % world. A row is a place's number in its region, block
    behind block. So neighbors are spread evenly, and so are columns, whatever their distance. The last group may be
    cut short.
    """

    numel: int
    world: int
    key: int = 0

    @classmethod
    def drawn(cls, x: FlatTensors, at: AggregationContext) -> Regions:
        """The same on every rank, for as many steps."""
        key = rng.address(at.seed, at.step // STEPS, x.layout.names[0], "regions")
        return cls(x.layout.numel, at.world, key)

    @property
    def block(self) -> int:
        return max(1, min(BLOCK, self.numel // self.world))

    @property
    def span(self) -> int:
        """Places in a group."""
        return self.world * self.block

    @property
    def rows(self) -> int:
        """Room for the largest region's rows."""
        return -(-self.numel // self.span) * self.block

    @property
    def least_members(self) -> int:
        """How many places every region has, whatever is drawn."""
        return self.numel // self.span * self.block

    def turns(self, groups: Tensor) -> Tensor:
        """A number in [0, world) for each group, in any order; both int64. Mixes 32 bits, as counter_rng does."""
        mixed = (groups * 0x9E3779B9 + (self.key & LOW)) & LOW ^ (self.key >> 32)
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D & LOW
        return ((mixed ^ (mixed >> 13)) * self.world) >> 32

    def locate(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """(region, row) of each place; all (k,) int64. Integers throughout: float32 has none of its own above 2^24."""
        groups, within = places // self.span, places % self.span
        owners = (within // self.block + self.turns(groups)) % self.world
        return owners, groups * self.block + within % self.block

    def members(self, rank: int, device: torch.device) -> Tensor:
        """The places of a worker's region, in the order of their rows: int64, ascending."""
        groups = torch.arange(self.rows // self.block, device=device)
        first = self.places(rank, groups * self.block)
        places = (first[:, None] + torch.arange(self.block, device=device)).view(-1)
        full = self.rows - self.block  # the last group may be cut short
        last = int(self.places(rank, torch.tensor(full, device="cpu")))
        return places[: full + min(max(self.numel - last, 0), self.block)]

    def places(self, owners: Tensor | int, rows: Tensor) -> Tensor:
        """The place of each row of a region, int64; where the last group is cut short, some are beyond the last."""
        groups = rows // self.block
        blocks = (owners - self.turns(groups)) % self.world
        return groups * self.span + blocks * self.block + rows % self.block
