"""Index regions: the worker that sums each entry, with a part of every neighborhood for each worker."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors

BLOCK = 16  # adjacent entries of one region: a cache line
STEPS = 64  # between assignments of regions
LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Regions:
    """The assignment of entries to workers: in every group of `world` blocks each worker has one, at a random offset.

    Block b of group g is in the region of worker (b + turn(g)) % world. A row is the index of an entry in its region,
    block after block. So adjacent entries are distributed evenly, and so are columns, at any distance. The last group
    may be truncated.
    """

    numel: int
    world: int
    key: int = 0

    @classmethod
    def drawn(cls, x: FlatTensors, at: AggregationContext) -> Regions:
        """Return the regions of a step; equal on every rank and for `STEPS` steps."""
        key = rng.address(at.seed, at.step // STEPS, x.layout.names[0], "regions")
        return cls(x.layout.numel, at.world, key)

    @property
    def block(self) -> int:
        return max(1, min(BLOCK, self.numel // self.world))

    @property
    def span(self) -> int:
        """Entries in a group."""
        return self.world * self.block

    @property
    def rows(self) -> int:
        """Rows of the largest region."""
        return -(-self.numel // self.span) * self.block

    @property
    def least_members(self) -> int:
        """The fewest entries of a region, for any assignment."""
        return self.numel // self.span * self.block

    def turns(self, groups: Tensor) -> Tensor:
        """Return a number in [0, world) for each group, in any order; both int64.

        Mixes 32 bits, as counter_rng does.
        """
        mixed = (groups * 0x9E3779B9 + (self.key & LOW)) & LOW ^ (self.key >> 32)
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D & LOW
        return ((mixed ^ (mixed >> 13)) * self.world) >> 32

    def locate(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return (region, row) of each entry; all (k,) int64. float32 could not represent integers above 2^24."""
        groups, within = places // self.span, places % self.span
        owners = (within // self.block + self.turns(groups)) % self.world
        return owners, groups * self.block + within % self.block

    def of(self, rank: int, device: torch.device) -> Region:
        """Return a worker's region. Its entries, in ascending order, are in the order of their rows."""
        groups = torch.arange(self.rows // self.block, device=device)
        blocks = self.places(rank, groups * self.block) // self.block
        last = int(self.places(rank, torch.tensor(self.rows - self.block, device="cpu")))
        if last + self.block <= self.numel:
            return Region(blocks, self.block, slice(0, 0))
        return Region(blocks[:-1], self.block, slice(min(last, self.numel), self.numel))  # the last group is truncated

    def members(self, rank: int, device: torch.device) -> Tensor:
        """Return the entries of a worker's region, in the order of their rows: int64, ascending."""
        return self.of(rank, device).read(torch.arange(self.numel, device=device))

    def places(self, owners: Tensor | int, rows: Tensor) -> Tensor:
        """Return the entry of each row of a region, int64; those of a truncated last group may be beyond the end."""
        groups = rows // self.block
        blocks = (owners - self.turns(groups)) % self.world
        return groups * self.span + blocks * self.block + rows % self.block


@dataclass(frozen=True)
class Region:
    """One worker's entries: whole blocks, by number, and the entries of a truncated last block."""

    blocks: Tensor  # (m,) int64
    block: int
    tail: slice

    def read(self, flat: Tensor) -> Tensor:
        """Return the region's entries of flat: (n,), by row."""
        whole = self._blocks(flat).index_select(0, self.blocks).view(-1)
        return whole if self.tail.start == self.tail.stop else torch.cat([whole, flat[self.tail]])

    def write(self, flat: Tensor, values: Tensor) -> None:
        """Overwrite the region's entries of flat: (n,), by row."""
        whole = len(self.blocks) * self.block
        self._blocks(flat).index_copy_(0, self.blocks, values[:whole].view(-1, self.block))
        flat[self.tail] = values[whole:]

    def clear(self, flat: Tensor) -> None:
        """Set the region's entries of flat: (n,) to zero."""
        self._blocks(flat).index_fill_(0, self.blocks, 0)
        flat[self.tail] = 0

    def _blocks(self, flat: Tensor) -> Tensor:
        return flat[: len(flat) // self.block * self.block].view(-1, self.block)
