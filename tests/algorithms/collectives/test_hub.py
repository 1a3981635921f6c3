"""Hub collectives: bytes of each rank, and the results of all-gathers and broadcasts."""

from __future__ import annotations

import pytest
from support.collective_tables import check_form, check_partners, rounds_of, run, tables_of

from gossamer.algorithms.collectives import Collective, Does, Hop, HubAllGather, HubAllReduce, HubBroadcast

SEND, ADD, KEEP = Does.SEND, Does.ADD, Does.KEEP
WORLDS = [2, 3, 4, 7, 16]
hubs = pytest.mark.parametrize("hub", [0, 1, 5])


def check_gathered(table: Collective, world: int) -> None:
    """Each rank ends with the piece of every rank, and sends its own once, unless it is the hub."""
    tables = tables_of(table, world)
    check_form(tables, world)
    check_partners(tables)
    hold: list[list[int | None]] = [
        [rank if piece == rank else None for piece in range(world)] for rank in range(world)
    ]
    assert run(tables, world, hold, None) == [list(range(world))] * world
    sent = sorted(table.bytes_sent(rank, world, world, 1) for rank in range(world))
    assert sent == [1] * (world - 1) + [(world - 1) ** 2]


def check_copied(table: HubBroadcast, world: int) -> None:
    """Each rank ends with the bytes of the source, and only the source and the hub send."""
    tables, source, hub = tables_of(table, world), table.source % world, table.hub % world
    check_form(tables, 1)
    check_partners(tables)
    assert run(tables, 1, [[rank] for rank in range(world)], None) == [[source]] * world
    sent = [table.bytes_sent(rank, world, 1, 1) for rank in range(world)]
    assert sum(sent) == world - 1
    assert sent[source] == (world - 1 if source == hub else 1)
    assert sent[hub] == (world - 1 if source == hub else world - 2)


def test_small_worlds() -> None:
    assert tables_of(HubAllReduce(), 2) == [
        (Hop(0, ADD, 1, 0, 1), Hop(1, SEND, 1, 0, 1)),
        (Hop(0, SEND, 0, 0, 1), Hop(1, KEEP, 0, 0, 1)),
    ]
    assert HubAllGather(hub=1).hops(0, 3) == (Hop(0, SEND, 1, 0, 1), Hop(1, KEEP, 1, 1, 2), Hop(1, KEEP, 1, 2, 3))
    assert HubBroadcast(source=2, hub=1).hops(1, 3) == (Hop(0, KEEP, 2, 0, 1), Hop(1, SEND, 0, 0, 1))
    for table in (HubAllReduce(), HubAllGather(), HubBroadcast()):
        assert table.hops(0, 1) == ()


@hubs
@pytest.mark.parametrize("world", WORLDS)
def test_each_rank_but_the_hub_sends_its_tensor_once(world: int, hub: int) -> None:
    table = HubAllReduce(hub=hub)
    sent = [table.bytes_sent(rank, world, 720, 4) for rank in range(world)]
    assert sent.pop(hub % world) == 4 * 720 * (world - 1)
    assert sent == [4 * 720] * (world - 1)
    assert table.busiest(world) == hub % world
    assert rounds_of(tables_of(table, world)) == [0, 1]


@hubs
@pytest.mark.parametrize("world", WORLDS)
def test_an_all_gather_sends_each_payload_once_to_the_hub(world: int, hub: int) -> None:
    check_gathered(HubAllGather(hub=hub), world)


@pytest.mark.parametrize("source", [0, 1, 6])
@hubs
@pytest.mark.parametrize("world", WORLDS)
def test_a_broadcast_is_sent_once_to_the_hub(world: int, hub: int, source: int) -> None:
    check_copied(HubBroadcast(source=source, hub=hub), world)


class Forgets(HubAllGather):
    """The hub does not pass on the last piece."""

    def _hops(self, rank, world):  # type: ignore[no-untyped-def]
        hops = list(super()._hops(rank, world))
        yield from hops[:-1]


class Echoes(HubBroadcast):
    """The hub returns the bytes to the source."""

    def _hops(self, rank, world):  # type: ignore[no-untyped-def]
        yield from super()._hops(rank, world)
        if rank == self.hub != self.source:
            yield Hop(1, SEND, self.source, 0, 1)
        if rank == self.source != self.hub:
            yield Hop(1, KEEP, self.hub, 0, 1)


def test_wrong_tables_are_detected() -> None:
    with pytest.raises((AssertionError, KeyError)):
        check_gathered(Forgets(), 4)
    with pytest.raises(AssertionError):
        check_copied(Echoes(source=1), 4)


def test_a_negative_hub_is_rejected() -> None:
    with pytest.raises(ValueError, match="hub must be a rank, 0 or more, got -1"):
        HubAllReduce(hub=-1)
