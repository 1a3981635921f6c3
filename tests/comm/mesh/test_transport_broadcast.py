"""Broadcast over the mesh: one op for any number of tensors."""

import pytest
import torch
from support.mesh_group import Group

from gossamer.base.kernels.library import library
from gossamer.comm.mesh.program import broadcast_program, segments
from gossamer.errors import MismatchError

pytestmark = pytest.mark.skipif(library() is None, reason="the compiled loops are not there")


def tensors(rank):
    """Of any shape, dtype and layout; some are smaller than there are ranks, one is larger than a message."""
    source = torch.Generator().manual_seed(rank)
    large = torch.randn(300, 501, generator=source)
    return [
        *(torch.full((), rank), torch.empty(0), torch.full((3,), rank, dtype=torch.uint8)),
        *(large, torch.randn(8, 6, generator=source).t(), torch.full((5,), 1.0 + rank, dtype=torch.bfloat16)),
        torch.tensor([True, False, rank % 2 == 0]),
    ]


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_everyone_has_what_the_source_had_and_the_source_keeps_it(world):
    for source in (0, world - 1):
        given = [tensors(rank) for rank in range(world)]
        with Group(world) as group:
            group.all(lambda rank, given=given, source=source: group.transports[rank].broadcast_(given[rank], source))
        for mine in given:
            assert all(torch.equal(a, b) for a, b in zip(mine, tensors(source), strict=True))


def test_ranks_that_send_other_sizes_are_told():
    with Group(2) as group, pytest.raises(MismatchError, match="another collective"):
        group.all(lambda rank: group.transports[rank].broadcast_([torch.zeros(3 + rank)]))


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (5, 0, 1, 7), (1, 1, 1), (100, 3), (0, 0, 9)])
@pytest.mark.parametrize("pieces", [1, 2, 3, 8])
def test_segments_are_every_byte_once_and_in_order(sizes, pieces):
    parts = segments(sizes, pieces)
    found = [(each.tensor, each.offset + i) for part in parts for each in part for i in range(each.nbytes)]
    assert found == [(tensor, i) for tensor, size in enumerate(sizes) for i in range(size)]
    lengths = [sum(each.nbytes for each in part) for part in parts]
    assert max(lengths) - min(lengths) <= 1


def test_no_two_messages_between_two_ranks_have_one_name():
    for rank in range(4):
        program, _ = broadcast_program((7, 900, 0, 3), 1, rank, (0, 1, 2, 3))
        rows = [tuple(program.rows[i : i + 5]) for i in range(0, len(program.rows), 5)]
        names = [(does == 0, peer, tag) for does, peer, _, _, tag in rows]
        assert len({*names}) == len(names)
