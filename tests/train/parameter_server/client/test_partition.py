"""Which rows live where, as literal tables."""

from __future__ import annotations

from math import prod

import pytest
import torch
from support.server_runs import SHAPES, parameters, whole
from torch.nn import Parameter
from torch.optim import SGD

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.peer_ops import Stamp
from gossamer.train.parameter_server import ShardSlice, gather, scatter, split
from gossamer.train.parameter_server.client.partition import servers_for
from gossamer.train.parameter_server.client.shard_client import shard_clients
from gossamer.train.parameter_server.from_recipe import push_pull_codecs

TABLES = [
    ({"a": (4, 2), "b": (4, 2)}, 2, [[("a", 0, 4)], [("b", 0, 4)]]),
    ({"a": (8, 2)}, 3, [[("a", 0, 3)], [("a", 3, 5)], [("a", 5, 8)]]),
    ({"big": (90, 10), "small": (100,)}, 2, [[("big", 0, 50)], [("big", 50, 90), ("small", 0, 100)]]),
    # a share is 500, and what has less than 62 of them stays whole
    ({"a": (480,), "b": (40,), "c": (480,)}, 2, [[("a", 0, 480), ("b", 0, 40)], [("c", 0, 480)]]),
    ({"a": (470,), "b": (40,), "c": (490,)}, 2, [[("a", 0, 470), ("b", 0, 40)], [("c", 0, 490)]]),
    ({"a": (450,), "b": (100,), "c": (450,)}, 2, [[("a", 0, 450), ("b", 0, 50)], [("b", 50, 100), ("c", 0, 450)]]),
    ({"one": (), "none": (0, 3), "two": (2,)}, 3, [[("one", 0, 1)], [("two", 0, 1)], [("two", 1, 2)]]),
    ({"one": (1, 100), "two": (1, 100)}, 5, [[("one", 0, 1)], [("two", 0, 1)]]),
    ({"a": (3, 2)}, 1, [[("a", 0, 3)]]),
]


@pytest.mark.parametrize(("shapes", "shards", "expected"), TABLES)
def test_rows_are_consecutive_and_as_even_as_can_be(
    shapes: dict[str, tuple[int, ...]], shards: int, expected: list[list[tuple[str, int, int]]]
) -> None:
    assert [[tuple(part) for part in parts] for parts in split(Layout.of(shapes), shards)] == expected


def test_bytes_count_where_dtypes_differ() -> None:
    layout = Layout.of({"half": (400,), "single": (200,)})
    assert split(layout, 2) == (
        (ShardSlice("half", 0, 300),),
        (ShardSlice("half", 300, 400), ShardSlice("single", 0, 200)),
    )
    assert split(layout, 2, {"half": 2, "single": 4}) == (
        (ShardSlice("half", 0, 400),),
        (ShardSlice("single", 0, 200),),
    )


SIZES = {"a": 4, "b": 4, "row": 4, "one": 4}


@pytest.mark.parametrize(
    ("shapes", "part_bytes", "servers"),
    [
        ({"a": (8, 2)}, 64, 1),
        ({"a": (8, 2)}, 63, 2),
        ({"a": (8, 2)}, 24, 3),
        ({"a": (7, 4), "b": (3, 4)}, 48, 4),  # three would do if rows could be cut: 160 bytes
        ({"a": (8, 2)}, 8, 8),
        ({"a": (8, 2)}, 7, None),
        ({"row": (1, 300), "one": ()}, 1199, None),
        ({}, 5, 1),
    ],
)
def test_as_many_servers_as_it_takes(shapes: dict[str, tuple[int, ...]], part_bytes: int, servers: int | None) -> None:
    layout = Layout.of(shapes)
    assert servers_for(layout, part_bytes, SIZES) == servers
    if servers is not None and servers > 1:
        assert most(layout, servers) <= part_bytes < most(layout, servers - 1)


def most(layout: Layout, servers: int) -> int:
    """The bytes of the largest part."""
    held = split(layout, servers, SIZES)
    return max(sum(4 * prod(each.shape(layout.by_name[each.name].shape)) for each in parts) for parts in held)


@pytest.mark.parametrize("shards", range(1, 9))
def test_every_row_lives_on_one_server(shards: int) -> None:
    layout = Layout.of({"a": (37, 5), "b": (), "c": (64,), "d": (3, 2, 2), "e": (11, 30)})
    rows = [(part.name, row) for parts in split(layout, shards) for part in parts for row in range(*part[1:])]
    assert rows == [(slot.name, row) for slot in layout for row in range(slot.shape[0] if slot.shape else 1)]
    sizes = [
        sum(prod(part.shape(layout.by_name[part.name].shape)) for part in parts) for parts in split(layout, shards)
    ]
    mean_bytes = layout.numel / shards
    assert max(sizes) <= mean_bytes * 1.125 + 30, "more than an eighth and a row beyond an even share"


def test_gathered_and_scattered_it_is_the_same_again() -> None:
    tensors = {**parameters(), "turned": torch.arange(24.0, dtype=torch.float64).view(6, 4).t()}
    copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    layout = Layout.of({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for parts in split(layout, 3):
        packed = FlatTensors(torch.empty(0), Layout.of({p.name: p.shape(tensors[p.name].shape) for p in parts}))
        packed = FlatTensors(torch.empty(packed.layout.numel, dtype=torch.float64), packed.layout)
        gather(tensors, parts, packed)
        scatter(packed, parts, copies)
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor.detach())


def test_a_gradient_that_is_not_there_is_zero() -> None:
    (parts,) = split(Layout.of({"bias": SHAPES["bias"]}), 1)
    packed = FlatTensors.pack(whole({"bias": (5,)}, 0))
    gather({"bias": None}, parts, packed)
    assert packed.flat.tolist() == [0.0] * 5


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_each_servers_piece_of_a_tensor_has_its_own_largest_entries(shards: int) -> None:
    """A tenth of each piece, although the first tenth of the tensor has all of its largest entries."""
    weight = Parameter(torch.zeros(100, 100))
    gradient = torch.arange(10_000.0, 0.0, -1.0).view(100, 100)
    codecs = push_pull_codecs(resolve("ParameterServer(push=TopK(0.1, feedback=False))"))
    clients = shard_clients({"weight": weight}, SGD([weight], 1.0), codecs, recipe="", world=1, seed=0, shards=shards)
    sent = []
    for each in clients:
        each.gather({"weight": gradient})
        (values, *_) = each.encode(Stamp(0, 0)).payload
        sent.append(values.tolist())
    rows = 100 // shards
    assert sent == [gradient[rows * n :].flatten()[: 1000 // shards].tolist() for n in range(shards)]
