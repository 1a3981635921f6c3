"""State transfer: values reach whoever has none, in parts from all donors; what describes no value is refused."""

from __future__ import annotations

import json

import pytest
import torch
from support.standalone_group import StandaloneGroup

from gossamer.comm.elastic.value_transfer import broadcast_value, hand_over_value
from gossamer.errors import MalformedError

STATE = ["text", None, (torch.arange(7), [torch.full((2, 3), 0.5, dtype=torch.float16)]), torch.empty(0)]


def check_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, list | tuple):
        for mine, theirs in zip(found, expected, strict=True):
            check_same(mine, theirs)
    else:
        assert found == expected


@pytest.mark.parametrize("donors", [1, 2, 3])
def test_newcomers_get_what_all_donors_have(donors):
    members, newcomers = list(range(donors)), list(range(donors, 4))

    def act(rank):
        return hand_over_value(group.transports[rank], members, newcomers, STATE if rank < donors else None)

    with StandaloneGroup(4) as group:
        for found in group.all(act):
            check_same(found, STATE)


def test_all_get_the_value_of_one_rank():
    with StandaloneGroup(3) as group:
        for found in group.all(lambda rank: broadcast_value(group.transports[rank], 1, STATE if rank == 1 else None)):
            check_same(found, STATE)


class Telling:
    """Rank 1 of a group whose rank 0 tells a text."""

    rank, world = 1, 2

    def __init__(self, text):
        self._text = text

    def all_gather_text(self, text):
        return [self._text, text]


def tensor(**changes):
    return {"tensor": 0, "shape": [2], "dtype": "float32"} | changes


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[" * 2000 + "]" * 2000,
        *map(
            json.dumps,
            [
                tensor(shape=[-1, -1]),
                tensor(shape=[True]),
                tensor(shape=["a"]),
                tensor(shape=[0, 2**70]),
                tensor(shape=[2**40, 2**40]),
                tensor(dtype="nn"),
                tensor(dtype="float33"),
                tensor(tensor=1),
                5,
            ],
        ),
    ],
    ids=lambda text: text[:40],
)
def test_what_describes_no_value_is_refused(text):
    with pytest.raises(MalformedError, match="another rank's state"):
        broadcast_value(Telling(text), 0, None)


@pytest.mark.parametrize("view", [torch.conj, lambda each: each.conj().imag], ids=["conjugate", "negative"])
def test_lazily_conjugated_and_negated_tensors_arrive_with_their_values(view):
    value = view(torch.tensor([1 + 2j, 3 - 4j]))
    assert value.is_conj() or value.is_neg()

    def act(rank):
        return hand_over_value(group.transports[rank], [0], [1], value if rank == 0 else None)

    with StandaloneGroup(2) as group:
        assert torch.equal(group.all(act)[1], value.resolve_conj().resolve_neg())
