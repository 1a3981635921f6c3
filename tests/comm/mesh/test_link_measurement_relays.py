"""Relayed links: all ranks know them, keep them across views, and gather and broadcast by the rank that relays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.standalone_group import StandaloneGroup
from support.virtual_meetings import Meeting, network_of

from gossamer.algorithms.collectives import HubAllReduce
from gossamer.base.kernels.library import are_built
from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import AllGather, AllReduceMean, InGroup
from gossamer.comm.mesh import link_measurement
from gossamer.comm.mesh import program as mesh_program
from gossamer.comm.mesh.collective_selector import CollectivePrices, CollectiveSelector
from gossamer.comm.mesh.link_measurement import Links, RelayLine, RelayRoutes, measure
from gossamer.comm.mesh.standalone import OwnRoutes
from gossamer.comm.mesh.tcp_info import transferred_bytes
from gossamer.comm.network import Host, Network, Path
from gossamer.comm.network.cost.cheapest_collective import candidates, table_seconds

compiled = pytest.mark.skipif(not are_built(), reason="the compiled loops are missing")
RELAY, OTHER = 0, 7  # numbers of relays
NBYTES = 400_000


def homes(world: int, here: int = 0) -> RelayRoutes:
    """The relay is on the machine of rank `here`, and connects all other ranks."""
    hosts = [RELAY if rank == here else None for rank in range(world)]
    return RelayRoutes.of(hosts, [others_of(rank, world, here) for rank in range(world)])


def others_of(rank: int, world: int, here: int) -> dict[int, int]:
    return {peer: RELAY for peer in range(world) if rank != here and peer not in (rank, here)}


def own_routes(world: int, here: int = 0) -> list[OwnRoutes]:
    return [OwnRoutes(RELAY if rank == here else None, others_of(rank, world, here)) for rank in range(world)]


def links_of(routes: RelayRoutes, office: float = 1e9, up: float = 2e7) -> Links:
    """Homes with slow uploads."""
    world = len(routes.relayed)
    flat = Links.alike(((0.0001,) * world,) * world, office)
    relays = tuple(RelayLine(number, rank, office, office) for number, rank in routes.relays)
    here = routes.relays[0][1]
    ups = tuple(office if rank == here else up for rank in range(world))
    return replace(flat, up=ups, relays=relays, relayed=routes.relayed)


# -- what ranks know ---------------------------------------------------------------------------------------------------


def test_declarations_of_all_ranks_are_combined() -> None:
    by = [{1: OTHER}, {0: OTHER}, {0: RELAY, 1: RELAY}]
    assert RelayRoutes.of([None, None, OTHER], by) == RelayRoutes(
        relays=((RELAY, None), (OTHER, 2)), relayed=((0, 2, 1), (2, 0, 1), (1, 1, 0))
    )
    assert RelayRoutes.of([RELAY, None], [{}, {}]) == RelayRoutes(relays=(), relayed=((0, 0), (0, 0)))


def test_the_calling_rank_decides_if_two_ends_declare_different_relays() -> None:
    assert RelayRoutes.of([None, None], [{1: RELAY}, {0: OTHER}]).relays == ((OTHER, None),)


def test_pairs_of_a_relay_are_disjoint_and_without_its_own_rank() -> None:
    by = [dict.fromkeys(range(rank), RELAY) for rank in range(6)]
    routes = RelayRoutes.of([None, RELAY, None, None, None, None], by)
    assert routes.pairs(0) == [(0, 2), (3, 4)]


def check_text(of: Callable[[str], Links]) -> None:
    for links in (links_of(homes(4)), links_of(homes(3, here=2)).among([0, 1])):
        assert of(links.text) == links
        assert hash(of(links.text)) == hash(links)
        assert of(links.text).network == links.network


def forgets_ranks(text: str) -> Links:
    links = Links.of(text)
    return replace(links, relays=tuple(replace(each, rank=None) for each in links.relays))


def test_relays_are_written_and_read() -> None:
    check_text(Links.of)
    with pytest.raises(AssertionError):
        check_text(forgets_ranks)


def test_links_that_were_written_without_relays_are_read() -> None:
    links = Links.alike(((0.0,) * 3,) * 3, 1e9)
    before = json.loads(links.text)
    del before["relays"], before["relayed"]
    assert Links.of(json.dumps(before)) == links


def test_a_relay_continues_without_its_rank() -> None:
    some = links_of(homes(4)).among([1, 3])
    assert some.relays == (RelayLine(RELAY, None, 1e9, 1e9),)
    assert some.network.relays == (Host(up_bits_per_second=1e9, down_bits_per_second=1e9),)
    assert some.network.relayed == {frozenset((0, 1)): 2}
    assert links_of(homes(4)).among([0, 2]).relays == ()


def test_the_network_of_a_group_has_its_relays() -> None:
    network = links_of(homes(4, here=3)).network
    assert network.relayed == {frozenset(pair): 3 for pair in ((0, 1), (0, 2), (1, 2))}
    assert (network.hubs, network.relays) == ((3,), ())
    whole = ((0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0))  # only the port of the relay is open
    assert replace(links_of(homes(4, here=3)), relayed=whole).network == network


def test_a_relayed_connection_is_as_fast_as_its_slowest_line() -> None:
    links = links_of(homes(3), office=1e7, up=2e7)
    assert [links.bits_per_second(*pair) for pair in ((0, 1), (1, 0), (1, 2))] == [1e7, 1e7, 1e7]
    links = replace(links, down=(9e7,) * 3, relays=(replace(links.relays[0], up=5e6, down=9e7),))
    assert [links.bits_per_second(*pair) for pair in ((0, 1), (1, 0), (1, 2))] == [1e7, 2e7, 5e6]
    own = replace(links, relayed=((0, 1, 1), (1, 0, 1), (1, 1, 0)))  # by the relay on the machine of one end
    assert [own.bits_per_second(*pair) for pair in ((0, 1), (1, 0), (1, 2))] == [1e7, 2e7, 5e6]


def test_survivors_keep_links_unless_a_pair_is_connected_in_another_way() -> None:
    links = links_of(homes(4))
    assert links.by(homes(4)) == links
    survivors = links.among([1, 2, 3])
    lone = RelayRoutes(relays=((RELAY, None),), relayed=((0, 1, 1), (1, 0, 1), (1, 1, 0)))
    assert survivors.by(lone) == survivors
    returned = replace(lone, relays=((RELAY, 1),))  # another rank of the relay's machine
    assert survivors.by(returned) == replace(survivors, relays=(replace(survivors.relays[0], rank=1),))
    assert survivors.by(replace(lone, relays=((OTHER, None),))) is None
    assert survivors.by(RelayRoutes(relays=(), relayed=((0,) * 3,) * 3)) is None
    assert Links.alike(((0.0,) * 3,) * 3, 1e9).by(lone) is None


def test_choices_after_the_loss_of_any_rank_are_known_if_pairs_are_relayed() -> None:
    links, prices = links_of(homes(5)), CollectivePrices(pause=0.0)
    prices.note((NBYTES, 4))
    prices.prepare(links)
    prices.wait()
    assert prices.choice((NBYTES, 4), links) == HubAllReduce()
    for lost in range(5):
        left = [rank for rank in range(5) if rank != lost]
        assert prices.covers(links.among(left))
        hub = prices.choice((NBYTES, 4), links.among(left)) == HubAllReduce()
        assert hub is (lost != 0)


def test_a_group_without_the_relaying_rank_uses_no_hub() -> None:
    pick = CollectiveSelector("auto", links_of(homes(4)))
    assert pick.has_hubs
    assert pick.gathering_hub((NBYTES,) * 4, (0, 1, 2, 3)) == 0
    assert pick.gathering_hub((NBYTES,) * 3, (2, 3, 0)) == 2
    assert pick.gathering_hub((NBYTES,) * 3, (1, 2, 3)) is None
    assert not CollectiveSelector("ring", links_of(homes(4))).has_hubs
    assert not CollectiveSelector("auto", Links.alike(((0.0,) * 4,) * 4, 1e9)).has_hubs


def test_hubs_follow_later_links_and_requests() -> None:
    direct = Links.alike(((0.0,) * 4,) * 4, 1e9)
    pick = CollectiveSelector("auto", direct)
    pick.links = links_of(homes(4))
    assert pick.has_hubs
    pick.prefer("ring")
    assert not pick.has_hubs
    pick.prefer("auto")
    assert pick.has_hubs
    pick.links = direct
    assert not pick.has_hubs


# -- over connections --------------------------------------------------------------------------------------------------


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandaloneGroup]:
    monkeypatch.setenv("GOSSAMER_SHARED_MEMORY", "0")  # all bytes pass the connections
    routes = homes(4, here=1)
    with StandaloneGroup(4, known=lambda world: links_of(routes), routes=own_routes(4, here=1)) as group:
        yield group


def payload(rank: int, numel: int = NBYTES // 4) -> tuple[torch.Tensor, ...]:
    numbers = torch.arange(numel).mul(rank + 3).remainder(113)
    return numbers.float(), torch.tensor([rank, 7], dtype=torch.int16)


def between_homes(group: StandaloneGroup) -> int:
    """Bytes that homes have sent to homes so far."""
    sockets = [group.sockets[a][b] for a in (0, 2, 3) for b in (0, 2, 3) if a != b]
    return sum(transferred_bytes(each)[0] for each in sockets)


def check_by_hub(group: StandaloneGroup, act: Callable[[], None], *, by_hub: bool = True) -> None:
    before = between_homes(group)
    act()
    assert (between_homes(group) - before < 10_000) is by_hub


def check_answers(group: StandaloneGroup, ops: list[object]) -> None:
    found, expected = group.answers(ops), answer_all(ops)
    for mine, due in zip(found, expected, strict=True):
        for one, other in zip(mine, due, strict=True):
            pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
            assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@compiled
@pytest.mark.parametrize("numel", [0, 1, 1000, NBYTES // 4, 300_001])
def test_payloads_are_gathered_by_the_hub_bit_for_bit(group: StandaloneGroup, numel: int) -> None:
    ops = [AllGather(payload(rank, numel)) for rank in range(4)]
    check_by_hub(group, lambda: check_answers(group, ops))


@compiled
def test_unequal_and_empty_payloads_are_gathered_by_the_hub(group: StandaloneGroup) -> None:
    payloads = [payload(rank, 70_001 * rank) for rank in range(4)]
    ops = [AllGather(each, tuple(payloads)) for each in payloads]

    def act() -> None:
        for found in group.answers(ops):
            assert all(
                torch.equal(a, b)
                for one, due in zip(found, payloads, strict=True)
                for a, b in zip(one, due, strict=True)
            )

    check_by_hub(group, act)
    nothing = [AllGather((torch.empty(0),)) for _ in range(4)]
    check_answers(group, nothing)


@compiled
@pytest.mark.parametrize("source", [0, 1, 3])
def test_tensors_are_broadcast_by_the_hub_bit_for_bit(group: StandaloneGroup, source: int) -> None:
    given = [list(payload(rank, 1_000_000)) for rank in range(4)]

    def act() -> None:
        group.all(lambda rank: group.transports[rank].broadcast_(given[rank], source))
        for tensors in given:
            assert all(map(torch.equal, tensors, payload(source, 1_000_000)))

    check_by_hub(group, act)


@compiled
def test_means_use_the_hub_and_equal_those_of_other_algorithms_bit_for_bit(group: StandaloneGroup) -> None:
    """Integers, whose sums are exact in every order."""
    tensors = [payload(rank)[0] for rank in range(4)]
    found: list[list[torch.Tensor]] = []

    def act() -> None:
        found.append(group.answers([AllReduceMean(each.clone()) for each in tensors]))

    check_by_hub(group, act)
    for requested in ("direct", "ring", "tree", "halving"):
        group.all(lambda rank, name=requested: group.transports[rank].prefer(name))
        check_by_hub(group, act, by_hub=False)
    due = sum(tensors) / 4
    assert all(torch.equal(each, due) for answers in found for each in answers)


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_means_by_the_hub_equal_those_of_direct_bit_for_bit(
    group: StandaloneGroup, dtype: torch.dtype
) -> None:
    """Also sums beyond float16, and values that would lose digits if they were rounded at every hop."""
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(50_000, generator=draw).mul(1 + rank).to(dtype) for rank in range(4)]
    for each in tensors:
        each[:2] = torch.tensor([40_000.0, -0.0], dtype=dtype)
    found: list[list[torch.Tensor]] = []

    def act() -> None:
        found.append(group.answers([AllReduceMean(each.clone()) for each in tensors]))

    check_by_hub(group, act)
    group.all(lambda rank: group.transports[rank].prefer("direct"))
    check_by_hub(group, act, by_hub=False)
    by_hub, directly = found
    assert all(torch.equal(one, other) for one, other in zip(by_hub, directly, strict=True))
    assert all(torch.equal(each, by_hub[0]) for each in by_hub)
    due = torch.stack([each.float() for each in tensors]).mean(0).to(dtype)
    assert torch.equal(by_hub[0][0], due[0])  # 40,000 is summed to 160,000


@compiled
def test_a_group_of_homes_gathers_directly(group: StandaloneGroup) -> None:
    homes_only = (0, 2, 3)
    ops: list[object] = [
        InGroup(homes_only, AllGather(payload(rank))) if rank in homes_only else InGroup((1,), AllGather(payload(rank)))
        for rank in range(4)
    ]
    check_by_hub(group, lambda: check_answers(group, ops), by_hub=False)


@compiled
def test_a_hub_that_forgets_a_payload_is_detected(group: StandaloneGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub sends its own payload in the place of all others."""
    real = mesh_program._program

    def wrong(rows, *rest):  # type: ignore[no-untyped-def]
        return real(
            [(does, peer, 1 if does == 0 and stage else piece, 0, tag) for does, peer, piece, stage, tag in rows], *rest
        )

    monkeypatch.setattr(mesh_program, "_program", wrong)
    mesh_program.hub_gather_program.cache_clear()
    ops = [AllGather(payload(rank)) for rank in range(4)]
    with pytest.raises(AssertionError):
        check_answers(group, ops)
    mesh_program.hub_gather_program.cache_clear()


@compiled
def test_members_that_know_no_links_measure_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_SHARED_MEMORY", "0")
    with StandaloneGroup(4, known=None, routes=own_routes(4)) as group:
        links = [transport.known_links for transport in group.transports]
    assert all(each == links[0] for each in links)
    assert links[0].relayed == homes(4).relayed
    (relay,) = links[0].relays
    assert (relay.number, relay.rank) == (RELAY, 0)
    assert (relay.up, relay.down) == (links[0].up[0], links[0].down[0])
    assert min(relay.up, relay.down) > 1e6


@compiled
def test_members_measure_again_if_a_pair_is_relayed_now() -> None:
    flat = Links.alike(((0.0001,) * 4,) * 4, 1e9)
    with StandaloneGroup(4, known=lambda world: flat, routes=own_routes(4)) as group:
        assert group.transports[0].known_links.relayed == homes(4).relayed


# -- what is chosen on links that were measured ------------------------------------------------------------------------


def measured_links(network: Network, routes: RelayRoutes, monkeypatch: pytest.MonkeyPatch) -> Links:
    """Measure a network in virtual time. The kernel's round trip of a relayed pair is that to the relay."""
    world = range(len(network.hosts))
    legs = [
        [(0.5 if routes.relayed[a][b] else 1.0) * network.path(a, b).round_trip_seconds * (a != b) for b in world]
        for a in world
    ]
    found = iter([legs, [[(0, 0) for _ in world] for _ in world]])
    meeting = Meeting(network)
    monkeypatch.setattr(link_measurement, "_gathered", lambda transport, own: next(found))
    monkeypatch.setattr(link_measurement, "meet", lambda transport, flows, nbytes: meeting(flows, nbytes))
    transport: Any = SimpleNamespace(world=len(network.hosts))
    return measure(transport, legs[0], lambda: [(0, 0) for _ in world], routes)


def behind(office: tuple[float, float], home: tuple[float, float], world: int) -> Network:
    """up and down in Mbit/s; 30 ms to the office, and twice as much between homes."""
    network = network_of(office, *[home] * (world - 1), path=Path(round_trip_seconds=0.06))
    sites = ("office", *["homes"] * (world - 1))
    hosts = tuple(replace(host, site=site) for host, site in zip(network.hosts, sites, strict=True))
    paths = {frozenset(("office", "homes")): Path(round_trip_seconds=0.03)}
    relayed = {frozenset(pair): 0 for pair in combinations(range(1, world), 2)}
    return replace(network, hosts=hosts, paths=paths, relayed=relayed)


def check_measured(links: Links, network: Network) -> None:
    """The relay has the rate to which all others can load it, and the choice is the best one for the true network."""
    (relay,), office = links.relays, network.hosts[0]
    load = sum(host.up_bits_per_second for host in network.hosts[1:])
    assert 0.9 * min(load, office.up_bits_per_second) <= relay.up <= 1.1 * office.up_bits_per_second
    assert 0.9 * min(load, office.up_bits_per_second) <= relay.down <= 1.1 * office.down_bits_per_second
    for nbytes in (400_000, 8_000_000):
        ranks = tuple(range(len(network.hosts)))
        picked = CollectiveSelector("auto", links)(nbytes, 4, ranks)
        prices = {each: table_seconds(each, nbytes, 4, network) for each in candidates(network)}
        assert prices[picked] <= 1.05 * min(prices.values())


CASES = {
    "slow uploads": ((1000, 1000), (20, 100)),
    "slow relay": ((50, 50), (200, 200)),
    "a home relays": ((20, 100), (20, 100)),
}


@pytest.mark.parametrize("world", [3, 5])
@pytest.mark.parametrize("case", CASES)
def test_the_choice_on_measured_links_is_that_on_the_true_network(
    case: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = behind(*CASES[case], world)
    check_measured(measured_links(network, homes(world), monkeypatch), network)


def test_the_same_links_without_the_relay_have_another_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    network = behind(*CASES["slow relay"], 5)
    links = measured_links(network, homes(5), monkeypatch)
    direct = replace(links, relays=(), relayed=())
    assert CollectiveSelector("auto", links)(8_000_000, 4, tuple(range(5))) == HubAllReduce()
    assert CollectiveSelector("auto", direct)(8_000_000, 4, tuple(range(5))) != HubAllReduce()


def test_the_round_trip_of_a_relayed_pair_is_that_of_both_legs(monkeypatch: pytest.MonkeyPatch) -> None:
    links = measured_links(behind((100, 100), (20, 100), 4), homes(4), monkeypatch)
    assert links.round_trips[0][1:] == (0.03,) * 3
    assert links.round_trips[1][2:] == (0.06,) * 2
