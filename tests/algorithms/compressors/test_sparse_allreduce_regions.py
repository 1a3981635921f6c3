"""Index regions: every index has one owner, any pattern is spread evenly, indices are integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gossamer.algorithms.compressors import sparse_allreduce
from gossamer.algorithms.compressors.sparse_allreduce import Regions
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout

CPU = torch.device("cpu")


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("numel", [8, 15, 16, 129, 1000, 1024])
def test_every_place_is_in_one_region_under_one_row(numel: int, world: int) -> None:
    drawn = Regions(numel, world, key=12345678901234567)
    owners, rows = drawn.locate(torch.arange(numel))
    members = [drawn.members(rank, CPU) for rank in range(world)]
    assert torch.equal(torch.cat(members).sort().values, torch.arange(numel))
    for rank, places in enumerate(members):
        assert (owners[places] == rank).all()
        assert torch.equal(rows[places], torch.arange(len(places)))
        assert (places.diff() > 0).all()
        assert drawn.least_members <= len(places) <= drawn.rows
        assert torch.equal(drawn.places(rank, rows[places]), places)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("numel", [8, 15, 16, 129, 1000, 1024])
def test_a_region_reads_and_writes_exactly_its_members(numel: int, world: int) -> None:
    drawn = Regions(numel, world, key=12345678901234567)
    for rank in range(world):
        region, places, flat = drawn.of(rank, CPU), drawn.members(rank, CPU), torch.rand(numel)
        values = torch.rand(len(places))
        assert torch.equal(region.read(flat), flat[places])
        cleared, written = flat.clone(), flat.clone()
        region.clear(cleared)
        assert torch.equal(cleared, flat.index_fill(0, places, 0))
        region.write(written, values)
        assert torch.equal(written, flat.index_copy(0, places, values))


# -- balance -----------------------------------------------------------------------------------------------------------

WORLD = 8
SPAN = WORLD * sparse_allreduce.BLOCK
SIDE = 8 * SPAN  # a matrix whose columns lie in the same block of every group
PATTERNS: dict[str, Callable[[], Tensor]] = {
    "a range": lambda: torch.arange(5000, 9000),
    "a column": lambda: torch.arange(7, 1024 * SIDE, SIDE),
    "columns": lambda: (torch.arange(1024)[:, None] * SIDE + torch.arange(16)).view(-1),
    "a group's first": lambda: torch.arange(0, 1000 * SPAN, SPAN),
    "one in three": lambda: torch.arange(0, 9000, 3),
}


class Still(Regions):
    """Turns nothing: every block in its column."""

    def turns(self, groups: Tensor) -> Tensor:
        return torch.zeros_like(groups)


class Ranges(Regions):
    """Gives every worker one range, as Sharded's parts are."""

    def locate(self, places: Tensor) -> tuple[Tensor, Tensor]:
        size = -(-self.numel // self.world)
        return places // size, places % size


def check_balance(kind: type[Regions], pattern: str) -> None:
    """No region has many more entries of a pattern than one would have by chance, in none of several draws."""
    places = PATTERNS[pattern]()
    clumps = len(places) / len((places // sparse_allreduce.BLOCK).unique())
    for key in range(8):
        owners, _ = kind(1024 * SIDE, WORLD, key * 0x9E3779B97F4A7C15 % 2**63).locate(places)
        fullest, fair = int(owners.bincount(minlength=WORLD).amax()), len(places) / WORLD
        assert fullest <= fair + 5 * (clumps * fair) ** 0.5, f"{fullest} of {len(places)} in one region"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_pattern_fills_one_region(pattern: str) -> None:
    check_balance(Regions, pattern)


@pytest.mark.parametrize(("twin", "pattern"), [(Still, "a column"), (Still, "a group's first"), (Ranges, "a range")])
def test_the_check_catches_regions_that_patterns_fill(twin: type[Regions], pattern: str) -> None:
    with pytest.raises(AssertionError, match="in one region"):
        check_balance(twin, pattern)


def test_regions_are_drawn_again_and_alike_on_every_rank() -> None:
    x = FlatTensors(torch.empty(4096), Layout.of({"w": (4096,)}))
    first = Regions.drawn(x, AggregationContext(step=0, world=4))
    assert all(
        Regions.drawn(x, AggregationContext(step=sparse_allreduce.STEPS - 1, rank=rank, world=4)) == first
        for rank in range(4)
    )
    for other in (AggregationContext(step=sparse_allreduce.STEPS, world=4), AggregationContext(seed=1, world=4)):
        moved = Regions.drawn(x, other).locate(torch.arange(4096))[0] != first.locate(torch.arange(4096))[0]
        assert 0.5 < float(moved.float().mean()) < 1


# -- integers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounded(Regions):
    """Sends places as float32."""

    def places(self, owners: Tensor | int, rows: Tensor) -> Tensor:
        return super().places(owners, rows).float().long()


def check_places(kind: type[Regions]) -> None:
    drawn = kind(2**31 - 1, 3, key=5)
    for power in (24, 25, 30):
        places = torch.arange(2**power - 40, 2**power + 40)
        owners, rows = drawn.locate(places)
        assert torch.equal(drawn.places(owners, rows), places), f"places around 2^{power} are others now"
    last = torch.arange(2**31 - 40, 2**31 - 1)
    assert torch.equal(drawn.places(*drawn.locate(last)), last)


def test_places_are_exact_above_24_bits() -> None:
    check_places(Regions)
    with pytest.raises(AssertionError, match="around 2"):
        check_places(Rounded)
