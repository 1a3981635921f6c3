"""Laws of every topology, and topologies that break them."""

from dataclasses import dataclass
from math import dist

import pytest
import torch

from gossamer.algorithms import collectives, topologies
from gossamer.algorithms.recipes import parse, resolve
from gossamer.algorithms.topologies import Complete, Exponential, Groups, Hierarchy, RandomPeers, Ring, Topology, Torus
from gossamer.errors import RecipeError

WORLDS = (*range(1, 10), 16)
TOPOLOGIES = [
    Complete(),
    Ring(),
    Torus(),
    Exponential(),
    Exponential(one_peer=True),
    Hierarchy(),
    Hierarchy(per_node=3),
    RandomPeers(),
    RandomPeers(count=3),
    Groups(size=2),
    Groups(size=3),
]
PERIODIC = [topology for topology in TOPOLOGIES if topology.rounds(16) <= 4]
SEED = 5


def rounds_of(topology, world):
    return range(min(topology.rounds(world), 6))


def close(found, wanted, within=1e-12):
    assert torch.allclose(found, torch.as_tensor(wanted, dtype=found.dtype), rtol=0, atol=within)


def check_edges(topology, world):
    """Who is told hears; ascending, nobody twice, nobody itself; peers are all of them."""
    for round_ in rounds_of(topology, world):
        told = [topology.sends_to(rank, world, round_, SEED) for rank in range(world)]
        heard = [topology.receives_from(rank, world, round_, SEED) for rank in range(world)]
        for rank in range(world):
            assert heard[rank] == tuple(peer for peer in range(world) if rank in told[peer])
            assert told[rank] == tuple(sorted({*told[rank]} - {rank}))
            assert {*told[rank], *heard[rank]} <= {*topology.peers(rank, world)} <= {*range(world)} - {rank}
        assert told == heard or not topology.mutual


def check_peers(topology, world):
    every = range(topology.rounds(world))
    for rank in range(world):
        met = {peer for round_ in every for peer in topology.sends_to(rank, world, round_)}
        met |= {peer for round_ in every for peer in topology.receives_from(rank, world, round_)}
        assert topology.peers(rank, world) == tuple(sorted(met))


def check_stochastic(topology, world):
    for round_ in rounds_of(topology, world):
        mixing, pushes = topology.mixing(world, round_, SEED), topology.pushes(world, round_, SEED)
        assert mixing.shape == pushes.shape == (world, world)
        assert mixing.dtype == pushes.dtype == torch.float64
        assert mixing.min() >= 0
        assert pushes.diagonal().min() > 0
        close(mixing.sum(0), torch.ones(world))
        close(mixing.sum(1), torch.ones(world))
        close(pushes.sum(0), torch.ones(world))
        assert not topology.mutual or mixing.equal(mixing.T)


def check_weights(topology, world):
    """A rank's weights are its row, over those it hears and itself, ascending; columns go to those it tells."""
    for round_ in rounds_of(topology, world):
        mixing, pushes = topology.mixing(world, round_, SEED), topology.pushes(world, round_, SEED)
        for rank in range(world):
            heard, told = (each(rank, world, round_, SEED) for each in (topology.receives_from, topology.sends_to))
            peers, weights = zip(*topology.weights(rank, world, round_, SEED), strict=True)
            assert peers == tuple(sorted((*heard, rank)))
            assert mixing[rank, list(peers)].tolist() == list(weights)
            assert mixing[rank].count_nonzero() == len(peers)
            assert pushes[:, rank].nonzero().flatten().tolist() == sorted((*told, rank))
            assert pushes[:, rank].unique().tolist() in ([0, 1 / (1 + len(told))], [1 / (1 + len(told))])


def check_connected(topology, world):
    """What rank 0 knows reaches everyone in the end."""
    told = torch.eye(world, dtype=torch.float64)[0]
    for round_ in range(6 * world):
        told = topology.pushes(world, round_) @ told
    assert told.min() > 0


def check_decay(topology, world):
    """What starts in the second eigenvector shrinks by |lambda_2| a round."""
    period = topology.rounds(world)
    product = torch.eye(world, dtype=torch.complex128)
    for round_ in range(period):
        product = topology.mixing(world, round_).to(torch.complex128) @ product
    values, vectors = torch.linalg.eig(product - torch.ones_like(product) / world)
    start = vectors[:, values.abs().argmax()]
    distance, told = (start - start.mean()).norm(), start
    for round_ in range(3 * period):
        told = topology.mixing(world, round_).to(torch.complex128) @ told
    left = topology.second_eigenvalue(world)
    close((told - told.mean()).norm(), distance * left ** (3 * period))
    assert topology.spectral_gap(world) == 1 - left


EVERYWHERE = [
    (law, each) for law in (check_edges, check_stochastic, check_weights, check_connected) for each in TOPOLOGIES
]
WITH_PERIOD = [(law, each) for law in (check_peers, check_decay) for each in PERIODIC]


def shown(value):
    return getattr(value, "__name__", repr(value))


@pytest.mark.parametrize(("law", "topology"), EVERYWHERE + WITH_PERIOD, ids=shown)
def test_every_topology_keeps_the_law(law, topology):
    for world in WORLDS:
        law(topology, world)


@dataclass(frozen=True, repr=False)
class HalvesItself(Ring):
    """Weighs itself wrongly: rows do not sum to 1."""

    def weights(self, rank, world, round, seed=0):  # noqa: A002
        return tuple(
            (peer, weight / 2 if peer == rank else weight) for peer, weight in super().weights(rank, world, round, seed)
        )


@dataclass(frozen=True, repr=False)
class OwnDegree(Hierarchy):
    """Divides by its own degree alone: rows sum to 1, columns do not."""

    def weights(self, rank, world, round, seed=0):  # noqa: A002
        peers = sorted((*self.receives_from(rank, world, round, seed), rank))
        return tuple((peer, 1 / len(peers)) for peer in peers)


@dataclass(frozen=True, repr=False)
class Asymmetric(Exponential):
    """Says that what has a direction has none."""

    mutual = True


@dataclass(frozen=True, repr=False)
class Deaf(Exponential):
    """Hears those it tells, though edges have a direction."""

    def receives_from(self, rank, world, round, seed=0):  # noqa: A002
        return self.sends_to(rank, world, round, seed)


@dataclass(frozen=True, repr=False)
class TwoIslands(Ring):
    """Two halves that never talk."""

    def sends_to(self, rank, world, round, seed=0):  # noqa: A002
        half = world // 2
        return tuple(peer for peer in range(world) if peer != rank and (peer < half) == (rank < half))


@dataclass(frozen=True, repr=False)
class ForgetsBehind(Exponential):
    """Does not count those it only hears."""

    def peers(self, rank, world):
        return self.sends_to(rank, world, 0)


@dataclass(frozen=True, repr=False)
class Optimist(Ring):
    """Thinks it averages faster than it does."""

    def second_eigenvalue(self, world):
        return super().second_eigenvalue(world) ** 1.001


@dataclass(frozen=True, repr=False)
class Selfless(Ring):
    """Keeps nothing of its own."""

    def weights(self, rank, world, round, seed=0):  # noqa: A002
        return tuple(pair for pair in super().weights(rank, world, round, seed) if pair[0] != rank)


BROKEN = [
    (check_edges, Asymmetric()),
    (check_edges, Deaf()),
    (check_edges, ForgetsBehind()),
    (check_peers, ForgetsBehind()),
    (check_stochastic, HalvesItself()),
    (check_stochastic, OwnDegree(per_node=3)),
    (check_stochastic, Asymmetric()),
    (check_stochastic, Selfless()),
    (check_weights, Selfless()),
    (check_connected, TwoIslands()),
    (check_decay, Optimist()),
]


@pytest.mark.parametrize(("law", "broken"), BROKEN, ids=shown)
def test_what_breaks_a_law_is_caught(law, broken):
    with pytest.raises(AssertionError):
        law(broken, 7)


def test_the_laws_cover_every_topology_there_is():
    exported = {getattr(topologies, name) for name in topologies.__all__} - {Topology}
    assert {type(each) for each in TOPOLOGIES} == exported


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_a_topology_is_text_in_a_recipe(topology):
    (read,) = parse(repr(topology)).terms
    assert read == topology
    assert resolve(f"Gossip() + {topology!r}").topology == topology


COLLECTIVES = {"Ring": "ring", "Exponential": "halving", "Hierarchy": "hierarchical"}


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_it_runs_in_lock_step_or_is_refused(topology):
    """Where all agree at once it chooses the collective, if there is one like it."""
    name = type(topology).__name__
    assert (topology.collective or "").partition("(")[0] == COLLECTIVES.get(name, "")
    if name in {*COLLECTIVES, "Complete"}:
        assert resolve(f"LocalSGD(period=4) + {topology!r}").topology == topology
        return
    with pytest.raises(RecipeError, match=r"no collective. Write Gossip\(\) \+ .* or omit"):
        resolve(repr(topology))


def test_every_collective_that_is_wished_for_is_there():
    assert set(COLLECTIVES.values()) <= set(collectives.COLLECTIVES)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_alone_there_is_nobody_to_talk_to(topology):
    assert topology.peers(0, 1) == topology.sends_to(0, 1, 3) == topology.receives_from(0, 1, 3) == ()
    assert topology.weights(0, 1, 3) == ((0, 1.0),)
    assert topology.second_eigenvalue(1) == 0
    assert topology.spectral_gap(1) == 1


def test_unequal_degrees_are_weighed_by_the_larger():
    """0 and 1 and 2 are a node; 3, alone in the second, knows 0 only."""
    third, quarter = 1 / 3, 1 / 4
    wanted = [
        [1 - 3 * quarter, quarter, quarter, quarter],
        [quarter, 1 - quarter - third, third, 0],
        [quarter, third, 1 - quarter - third, 0],
        [quarter, 0, 0, 1 - quarter],
    ]
    close(Hierarchy(per_node=3).mixing(4), wanted, within=1e-15)
    pushed = [
        [quarter, third, third, 0.5],
        [quarter, third, third, 0],
        [quarter, third, third, 0],
        [quarter, 0, 0, 0.5],
    ]
    close(Hierarchy(per_node=3).pushes(4), pushed, within=1e-15)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_a_picture_has_a_place_for_everyone(topology):
    for world in WORLDS:
        places = [topology.place(rank, world) for rank in range(world)]
        assert all(max(map(abs, place)) <= 1 + 1e-12 for place in places)
        assert all(dist(one, other) > 0.1 for number, one in enumerate(places) for other in places[:number])


def test_topology_accepts_methods_by_their_former_names() -> None:
    with pytest.warns(DeprecationWarning, match="sends_to"):

        class Older(Topology):
            def tells(self, rank, world, round, seed=0):  # noqa: A002
                return ((rank + 1) % world,)

    assert Older().sends_to(1, 4, 0) == (2,)
    with pytest.warns(DeprecationWarning, match="receives_from"):
        assert Ring().hears(0, 4, 0) == Ring().receives_from(0, 4, 0)
