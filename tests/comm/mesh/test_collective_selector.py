"""Collective selection: which table a mean takes, and what is said of it."""

import threading

import pytest
from support import virtual_workers

from gossamer import events
from gossamer.algorithms.collectives import DirectAllReduce, HierarchicalAllReduce, RingAllReduce, TreeAllReduce
from gossamer.comm.mesh import collective_selector
from gossamer.comm.mesh.collective_selector import CollectivePrices, CollectiveSelector, check_requested
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
        pick, silent = picker(wish, LINKS), picker(wish, LINKS, gives_notice=False)
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
        check_requested(wish)
    for wish in ("rign", "hierarchical(0)", "ring(4)", ""):
        with pytest.raises(ValueError, match="unknown collective"):
            CollectiveSelector(wish, LINKS)


# -- choices that are computed in advance ------------------------------------------------------------------------------

BIG = (4_000_000, 4)


class Simulated:
    """Chooses a ring, and records the threads that waited for a simulation."""

    def __init__(self):
        self.threads = []

    def __call__(self, mean, links):
        self.threads.append(threading.current_thread().name)
        return RingAllReduce()

    @property
    def waited(self):
        return [each for each in self.threads if each != "gossamer-prices"]


def uneven(world):
    """Links with a different network after each loss."""
    round_trips = tuple(tuple(0.01 * (1 + a) * (1 + b) if a != b else 0.0 for b in range(world)) for a in range(world))
    return Links.alike(round_trips, 1e8)


def check_no_wait_after_a_loss(simulated, pause=0.0):
    """After any loss, the choices of the remaining ranks are known."""
    prices, links = CollectivePrices(simulated, pause=pause), uneven(4)
    prices.prepare(links)
    assert CollectiveSelector("auto", links, prices=prices, provisional=True)(*BIG, ALL) == DirectAllReduce()
    prices.wait()
    for lost in range(4):
        remaining = links.among([rank for rank in ALL if rank != lost])
        assert prices.covers(remaining)
        assert CollectiveSelector("auto", remaining, prices=prices)(*BIG, (0, 1, 2)) == RingAllReduce()
    assert not simulated.waited


def test_no_mean_waits_for_a_simulation_after_a_loss():
    check_no_wait_after_a_loss(Simulated())


def test_a_table_without_the_losses_is_noticed(monkeypatch):
    monkeypatch.setattr(collective_selector, "LARGEST_AHEAD", 3)
    with pytest.raises(AssertionError):
        check_no_wait_after_a_loss(Simulated())


def test_provisional_choices_end_when_they_are_settled():
    simulated, links = Simulated(), uneven(3)
    prices = CollectivePrices(simulated)
    prices.prepare(links)
    pick = CollectiveSelector("auto", links, prices=prices, provisional=True)
    assert pick(*BIG, (0, 1, 2)) == pick(*BIG, (0, 1, 2)) == DirectAllReduce()
    pick.settle()
    assert pick(*BIG, (0, 1, 2)) == RingAllReduce()


def test_a_requested_algorithm_is_never_provisional():
    pick = CollectiveSelector("tree", uneven(3), prices=CollectivePrices(Simulated()), provisional=True)
    assert pick(*BIG, (0, 1, 2)) == TreeAllReduce()


def test_links_of_a_checkpoint_decide_at_once():
    """A resumed run must have the sums of the original, to the last bit."""
    pick = CollectiveSelector("auto", uneven(3), prices=CollectivePrices(Simulated()), provisional=True)
    pick.links = uneven(3)
    assert pick(*BIG, (0, 1, 2)) == RingAllReduce()


def test_choices_are_kept_for_one_more_view():
    """Newcomers are connected, and their links measured, while a previous view trains that may lose a member."""
    prices, views = CollectivePrices(Simulated(), pause=0.0), [uneven(4), near_links(1e8), near_links(1e9)]
    prices.note(BIG)
    for links in views:
        prices.prepare(links)
        prices.wait()
    assert [prices.covers(links) for links in views] == [False, True, True]


def near_links(bits_per_second):
    return Links.alike(((0.0001,) * 4,) * 4, bits_per_second)
