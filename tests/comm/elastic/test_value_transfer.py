"""State transfer: values reach whoever has none, in parts from all donors; what describes no value is refused."""

from __future__ import annotations

import json

import pytest
import torch
from support.standalone_group import StandaloneGroup

from gossamer.comm.elastic.value_transfer import Outgoing, broadcast_value, receive_values, send_values
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
    members = list(range(donors))
    with StandaloneGroup(4) as group:
        for found in transfer(group, members, STATE)[donors:]:
            check_same(found.values, [STATE])


def transfer(group, donors, value, before=None, kept=()):
    """Send a value from the donors to all others. before: the result of an earlier transfer."""
    receivers = [rank for rank in range(len(group.transports)) if rank not in donors]

    def act(rank):
        mesh, earlier = group.transports[rank], before and before[rank]
        if rank in receivers:
            about, found = receive_values(mesh, rank, [donors], earlier)
        else:
            found = Outgoing(rank, [(value, donors)], earlier, kept)
            about = send_values(mesh, rank, found, receivers, earlier)
        assert about == list(range(len(group.transports)))
        return found

    return group.all(act)


LARGE = [torch.arange(70_001.0), (torch.arange(9, dtype=torch.uint8), torch.full((5, 3), 0.5, dtype=torch.float16))]


def changed(value):
    return [value[0] * (1 + 1e-5), value[1]]


@pytest.mark.parametrize("donors", [[0], [0, 1, 2]])
def test_a_second_transfer_sends_what_changed(donors):
    sent = []

    def count(mesh):
        deliver = mesh.deliver

        def counted(outgoing, incoming):
            sent.extend(map(len, outgoing.values()))
            return deliver(outgoing, incoming)

        mesh.deliver = counted

    with StandaloneGroup(4) as group:
        for rank in donors:
            count(group.transports[rank])
        first = transfer(group, donors, LARGE)
        full, sent[:] = sum(sent), []
        second = transfer(group, donors, changed(LARGE), first)
        check_same(second[3].values, [changed(LARGE)])
        assert 0 < sum(sent) < 0.75 * full
        sent.clear()
        third = transfer(group, donors, changed(LARGE), second)
        check_same(third[3].values, [changed(LARGE)])
        assert sum(sent) < 0.02 * full


def test_values_of_another_layout_are_sent_again():
    with StandaloneGroup(3) as group:
        first = transfer(group, [0, 1], LARGE)
        other = [torch.arange(50.0), torch.arange(7)]
        check_same(transfer(group, [0, 1], other, first)[2].values, [other])


def test_a_kept_value_is_that_of_the_earlier_transfer():
    with StandaloneGroup(2) as group:
        first = transfer(group, [0], LARGE)
        second = transfer(group, [0], changed(LARGE), first, kept=(0,))
        check_same(second[1].values, [LARGE])


def test_a_part_is_copied_before_training_changes_it():
    value = [torch.zeros(100)]
    with StandaloneGroup(2) as group:
        sent = Outgoing(0, [(value, [0])])
        value[0] += 1

        def act(rank):
            if rank:
                return receive_values(group.transports[1], None, [[0]])[1].values
            return send_values(group.transports[0], None, sent, [1])

        check_same(group.all(act)[1], [[torch.zeros(100)]])


class Damaged:
    """Rank 1 of a group whose rank 0 sends a damaged description, and no bytes."""

    rank, world = 1, 2

    def __init__(self, head):
        self._head = head

    def all_gather_text(self, text):
        return [self._head if isinstance(self._head, str) else json.dumps(self._head), text]

    def deliver(self, outgoing, incoming):
        assert all(size <= 8 for size in incoming.values()), "more than the value has"
        return {rank: torch.zeros(size, dtype=torch.uint8) for rank, size in incoming.items()}


HEAD = {
    "about": None,
    "lengths": [[8]],
    "kept": [],
    "texts": [json.dumps({"tensor": 0, "shape": [2], "dtype": "float32"})],
}


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": [[-1]]},
        {"lengths": [[2**60]]},
        {"lengths": [[2**40]]},
        {"lengths": [[9]]},
        {"lengths": [[]]},
        {"lengths": []},
        {"lengths": [[4]]},
        {"lengths": [[2, 2, 2, 2, 0]]},
        {"kept": [0]},
        {"texts": 5},
        {"texts": ["5"]},
    ],
    ids=repr,
)
def test_damaged_descriptions_of_a_transfer_are_rejected(changes):
    receive_values(Damaged(HEAD), None, [[0]])
    for head in ("no JSON", HEAD | changes):
        with pytest.raises(MalformedError):
            receive_values(Damaged(head), None, [[0]])


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

    with StandaloneGroup(2) as group:
        (found,) = transfer(group, [0], value)[1].values
        assert torch.equal(found, value.resolve_conj().resolve_neg())
