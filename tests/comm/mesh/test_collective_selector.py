"""Collective selection: which table a mean takes, and what is said of it."""

import pytest
from support import virtual_workers

from gossamer import events
from gossamer.algorithms.collectives import DirectAllReduce, HierarchicalAllReduce, RingAllReduce
from gossamer.comm.mesh.collective_selector import CollectiveSelector, check_wish
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.network.cost.cheapest_collective import fastest

LINKS = Links.alike(((0.0,) * 4,) * 4, 1e9)
ALL = (0, 1, 2, 3)


@pytest.fixture
def heard():
    with virtual_workers.heard() as found:
        yield found


def told(heard, kind):
    return [event for event in heard if isinstance(event, kind)]


def test_it_picks_once_for_each_size_and_group(heard):
    pick = CollectiveSelector("auto", LINKS)
    assert pick(40, 4, ALL) == pick(40, 4, ALL) == fastest(40, 4, LINKS.network)
    pick(40, 4, (0, 1))
    assert [event.nbytes for event in told(heard, events.CollectivePicked)] == [40, 40]
    assert not told(heard, events.Noticed)


def check_halves(heard, picker):
    """Half precision goes straight, as the record says; what was asked for and cannot be is said once, by one rank."""
    for wish in ("ring", "hierarchical(2)", RingAllReduce(order=(0, 2, 1, 3))):
        heard.clear()
        pick, silent = picker(wish, LINKS), picker(wish, LINKS, says=False)
        assert [pick(nbytes, 2, ALL) for nbytes in (40, 80)] == [DirectAllReduce()] * 2
        assert silent(40, 2, ALL) == DirectAllReduce()
        assert [event.collective for event in told(heard, events.CollectivePicked)] == [repr(DirectAllReduce())] * 3
        (noticed,) = told(heard, events.Noticed)
        assert noticed.message.startswith(
            f"{wish} was requested, but means of elements of 2 bytes use a direct exchange"
        )
        assert 'Dense(dtype="float32")' in noticed.message
        assert pick(40, 4, ALL) != DirectAllReduce()


def test_half_precision_goes_straight_and_is_said_to(heard):
    check_halves(heard, CollectiveSelector)


class Silent(CollectiveSelector):
    def _explain(self, itemsize, picked):
        pass


class Obedient(CollectiveSelector):
    def __call__(self, nbytes, itemsize, ranks):
        return super().__call__(nbytes, 4, ranks)


@pytest.mark.parametrize("broken", [Silent, Obedient])
def test_other_pickers_are_noticed(heard, broken):
    with pytest.raises((AssertionError, ValueError)):
        check_halves(heard, broken)


@pytest.mark.parametrize("wish", ["auto", "direct", DirectAllReduce()], ids=repr)
def test_whoever_asked_for_nothing_else_is_told_nothing(heard, wish):
    assert CollectiveSelector(wish, LINKS)(40, 2, ALL) == DirectAllReduce()
    assert not told(heard, events.Noticed)


def test_a_table_may_be_asked_for():
    assert CollectiveSelector(HierarchicalAllReduce(per_node=2), LINKS)(40, 8, ALL) == HierarchicalAllReduce(per_node=2)


def test_wishes_are_checked():
    for wish in ("auto", "engine", "ring", "hierarchical(4)"):
        check_wish(wish)
    for wish in ("rign", "hierarchical(0)", "ring(4)", ""):
        with pytest.raises(ValueError, match="unknown collective"):
            CollectiveSelector(wish, LINKS)
