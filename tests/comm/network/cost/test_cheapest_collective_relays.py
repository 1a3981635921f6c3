"""Pairs of hosts that share a relay, in virtual time: closed forms of its lines, and the choice of collectives."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch

from gossamer.algorithms.collectives import (
    Collective,
    DirectAllReduce,
    HubAllReduce,
    RingAllReduce,
)
from gossamer.base.ops import AllGather
from gossamer.comm.network import Host, Network, Path
from gossamer.comm.network.cost import cheapest_collective, op_cost
from gossamer.comm.network.cost.cheapest_collective import (
    broadcasting_hub,
    candidates,
    chosen_collective,
    fastest,
    gathering_hub,
    table_seconds,
)
from gossamer.comm.network.cost.message_simulator import Wires
from gossamer.comm.network.cost.op_cost import NetworkCost, seconds
from gossamer.comm.network.tcp_model import ETHERNET

NBYTES = 8_000_000
MBIT = 1e6
FAST = Host(up_bits_per_second=2000 * MBIT, down_bits_per_second=2000 * MBIT)
OFFICE = Host(up_bits_per_second=100 * MBIT, down_bits_per_second=100 * MBIT)
HOME = Host(up_bits_per_second=20 * MBIT, down_bits_per_second=100 * MBIT)


def behind_relay(world: int, home: Host = FAST, office: Host = OFFICE, round_trip_seconds: float = 0.0) -> Network:
    """Rank 0 is in the office, whose machine relays between all other ranks."""
    relayed = {frozenset(pair): 0 for pair in combinations(range(1, world), 2)}
    path = Path(round_trip_seconds=round_trip_seconds)
    return Network(hosts=(office, *(home,) * (world - 1)), default=path, relayed=relayed)


def behind_lone_relay(world: int) -> Network:
    """All ranks are connected by a relay whose machine has none."""
    relayed = {frozenset(pair): world for pair in combinations(range(world), 2)}
    return Network(hosts=(FAST,) * world, relays=(OFFICE,), relayed=relayed)


def ignores_relays(wires: Wires, relay: int, bits: float, begin: float, left: float) -> float:
    """Mutant: each pair has the relay for itself."""
    return left


def half_duplex(wires: Wires, relay: int, bits: float, begin: float, left: float) -> float:
    """Mutant: forwarded bytes pass the relay's download only."""
    wires._down[relay] = max(wires._down[relay], begin) + bits / wires._network.line(relay).down_bits_per_second
    return max(wires._down[relay], left)


# -- laws --------------------------------------------------------------------------------------------------------------


def check_shared(network: Network, collective: Collective, tensors: float) -> None:
    """The busiest direction of the relay carries this many tensors, and is never idle for long."""
    least = 8 * tensors * NBYTES / OFFICE.up_bits_per_second
    most = 8 * tensors * ETHERNET.wire_bytes(NBYTES) / OFFICE.up_bits_per_second
    assert least <= table_seconds(collective, NBYTES, 4, network) <= 1.15 * most


LAWS: dict[str, tuple[Callable[[int], Network], Collective, Callable[[int], float]]] = {
    "direct": (behind_relay, DirectAllReduce(), lambda n: 2 * (n - 1) ** 2 / n),
    "ring": (behind_relay, RingAllReduce(), lambda n: 2 * (n - 1) ** 2 / n),
    "hub": (behind_relay, HubAllReduce(), lambda n: n - 1),
    "direct, no rank at the relay": (behind_lone_relay, DirectAllReduce(), lambda n: 2 * (n - 1)),
    "ring, no rank at the relay": (behind_lone_relay, RingAllReduce(), lambda n: 2 * (n - 1)),
}


@pytest.mark.parametrize("world", [3, 4, 6])
@pytest.mark.parametrize("law", LAWS)
def test_a_mean_takes_as_long_as_the_bytes_that_the_relay_carries(law: str, world: int) -> None:
    network, collective, tensors = LAWS[law]
    check_shared(network(world), collective, tensors(world))


@pytest.mark.parametrize("law", [law for law in LAWS if law != "hub"])
def test_a_relay_that_each_pair_has_for_itself_is_detected(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wires, "_forward", ignores_relays)
    network, collective, tensors = LAWS[law]
    with pytest.raises(AssertionError):
        check_shared(network(4), collective, tensors(4))


def check_both_lines(up: float, down: float) -> None:
    """The slower direction of the relay limits the pairs."""
    lone = behind_lone_relay(4)
    relay = Host(up_bits_per_second=up, down_bits_per_second=down)
    network = Network(hosts=lone.hosts, relays=(relay,), relayed=lone.relayed)
    check_shared(network, DirectAllReduce(), 6)


@pytest.mark.parametrize("lines", [(100 * MBIT, 900 * MBIT), (900 * MBIT, 100 * MBIT)], ids=["up", "down"])
def test_forwarded_bytes_load_the_relay_s_upload_and_download(lines: tuple[float, float]) -> None:
    check_both_lines(*lines)


def test_a_relay_without_an_upload_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wires, "_forward", half_duplex)
    with pytest.raises(AssertionError):
        check_both_lines(100 * MBIT, 900 * MBIT)


def test_a_lone_relayed_pair_has_the_rate_of_its_slowest_line() -> None:
    network = Network(hosts=(FAST, HOME), relays=(OFFICE,), relayed={frozenset((0, 1)): 2})
    assert network.bits_per_second(1, 0) == HOME.up_bits_per_second
    assert network.bits_per_second(0, 1) == OFFICE.up_bits_per_second
    assert not network.is_uniform
    assert network.hubs == ()


def test_a_fast_relay_costs_nothing() -> None:
    """Its lines are as fast as those of all hosts together."""
    fast = Host(up_bits_per_second=1e12, down_bits_per_second=1e12)
    for collective in (DirectAllReduce(), RingAllReduce()):
        direct = Network(hosts=(fast, *(HOME,) * 4))
        relayed = behind_relay(5, HOME, fast)
        took = [table_seconds(collective, NBYTES, 4, network) for network in (direct, relayed)]
        assert took[0] <= took[1] <= 1.001 * took[0]


# -- groups of ranks ---------------------------------------------------------------------------------------------------


def test_a_relay_whose_rank_is_not_in_a_group_still_relays() -> None:
    network = behind_relay(4).among([3, 1])
    assert (network.hosts, network.relays) == ((FAST, FAST), (OFFICE,))
    assert network.relayed == {frozenset((0, 1)): 2}
    assert network.hubs == ()
    again = behind_relay(4).among([2, 0, 3])
    assert (again.relays, again.relayed, again.hubs) == ((), {frozenset((0, 2)): 1}, (1,))
    assert again.among([0, 2]) == network


def test_a_relay_at_one_end_of_its_pair_is_rejected() -> None:
    for relay in (0, 5, -1):
        with pytest.raises(ValueError, match="a relay is a third machine"):
            Network(hosts=(FAST,) * 3, relayed={frozenset((0, 1)): relay})


# -- choices -----------------------------------------------------------------------------------------------------------


def check_hub_where_the_relay_limits(world: int) -> None:
    """Homes are fast: direct exchanges would be faster if each pair had the relay for itself."""
    assert fastest(NBYTES, 4, behind_relay(world)) == HubAllReduce()
    assert fastest(NBYTES, 4, Network(hosts=behind_relay(world).hosts)) != HubAllReduce()


@pytest.mark.parametrize("world", [4, 6])  # a tree of three ranks is a hub
def test_means_use_the_hub_if_the_relay_is_the_limit(world: int) -> None:
    check_hub_where_the_relay_limits(world)


def check_hub_where_uploads_limit(world: int) -> None:
    network = behind_relay(world, HOME, FAST, round_trip_seconds=0.04)
    assert fastest(NBYTES, 4, network) == HubAllReduce()
    prices = {each: table_seconds(each, NBYTES, 4, network) for each in candidates(network)}
    # N from each home, and 2 N (n-1) / n directly
    assert prices[DirectAllReduce()] / prices[HubAllReduce()] == pytest.approx(2 * (world - 1) / world, rel=0.15)


@pytest.mark.parametrize("world", [4, 6])
def test_means_use_the_hub_if_the_uploads_of_homes_are_the_limit(world: int) -> None:
    check_hub_where_uploads_limit(world)


def test_means_do_not_use_a_hub_that_is_the_slowest_rank() -> None:
    """One pair of six needs the relay, which is at a home itself."""
    network = Network(hosts=(HOME, *(FAST,) * 5), relayed={frozenset((1, 2)): 0})
    assert HubAllReduce() in candidates(network)
    assert fastest(NBYTES, 4, network) != HubAllReduce()


def test_choices_without_the_hub_or_without_the_shared_relay_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Wires, "_forward", ignores_relays)
        cheapest_collective._fastest.cache_clear()
        with pytest.raises(AssertionError):
            check_hub_where_the_relay_limits(4)
    with monkeypatch.context() as patched:
        patched.setattr(Network, "hubs", ())
        cheapest_collective._fastest.cache_clear()
        with pytest.raises((AssertionError, KeyError)):
            check_hub_where_uploads_limit(4)
    cheapest_collective._fastest.cache_clear()


def test_the_requested_hub_is_the_rank_that_relays_or_has_the_fastest_line() -> None:
    assert chosen_collective("hub", NBYTES, 4, behind_relay(4).among([1, 2, 0])) == HubAllReduce(hub=2)
    assert chosen_collective("hub", NBYTES, 4, Network(hosts=(HOME, OFFICE, FAST, FAST))) == HubAllReduce(hub=2)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_half_precision_uses_the_hub_where_float32_does(itemsize: int) -> None:
    """Its one owner rounds once. Without a rank at a relay only `direct` does."""
    slow_uploads = behind_relay(4, HOME, FAST, 0.03)
    assert chosen_collective("auto", NBYTES, itemsize, slow_uploads) == HubAllReduce()
    assert chosen_collective("hub", NBYTES, itemsize, slow_uploads.among([1, 0, 2])) == HubAllReduce(hub=1)
    assert chosen_collective(HubAllReduce(hub=3), NBYTES, itemsize, slow_uploads) == HubAllReduce(hub=3)


def test_half_precision_is_exchanged_directly_elsewhere() -> None:
    one_pair = Network(hosts=(HOME, *(FAST,) * 4), relayed={frozenset((1, 2)): 0})
    for network in (one_pair, behind_lone_relay(4), Network(hosts=(HOME,) * 4)):
        assert chosen_collective("auto", NBYTES, 2, network) == DirectAllReduce()
    assert chosen_collective("ring", NBYTES, 2, behind_relay(4)) == DirectAllReduce()


# -- all-gathers and broadcasts ----------------------------------------------------------------------------------------


def gathered(nbytes: int) -> AllGather:
    return AllGather((torch.empty(nbytes, dtype=torch.uint8, device="meta"),))


def without_hubs(monkeypatch: pytest.MonkeyPatch, act: Callable[[], float]) -> float:
    with monkeypatch.context() as patched:
        patched.setattr(op_cost, "gathering_hub", lambda *_: None)
        patched.setattr(op_cost, "broadcasting_hub", lambda *_: None)
        return act()


@pytest.mark.parametrize("world", [3, 5])
def test_an_all_gather_crosses_each_upload_once(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of once per receiver."""
    network = behind_relay(world, HOME, FAST)
    once = 8 * NBYTES / HOME.up_bits_per_second
    by_hub = seconds(gathered(NBYTES), network)
    directly = without_hubs(monkeypatch, lambda: seconds(gathered(NBYTES), network))
    assert directly >= (world - 1) * once
    assert once <= by_hub <= 1.15 * max(1, (world - 1) * 20 / 100) * once * ETHERNET.wire_bytes(NBYTES) / NBYTES


@pytest.mark.parametrize("source", [0, 2])
def test_a_broadcast_crosses_an_upload_at_most_once(source: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network, starts = behind_relay(5, HOME, FAST), [0.0] * 5

    def took() -> float:
        return max(NetworkCost(network).broadcast(NBYTES, starts, source))

    assert broadcasting_hub(NBYTES, source, network) == 0
    line = HOME.up_bits_per_second if source else HOME.down_bits_per_second
    most = 8 * ETHERNET.wire_bytes(NBYTES) / line
    assert took() <= 1.15 * most
    assert without_hubs(monkeypatch, took) >= (1.05 if source else 3) * took()


SIZES = (1000, 100_000, 1_000_000)


def check_choice(choose: Callable[..., int | None], network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen way of an all-gather is at most 10 % slower than the other in the simulation of all messages."""
    world = len(network.hosts)
    for nbytes in SIZES:
        hub = choose([nbytes] * world, network)
        took: dict[int | None, float] = {}
        for way in (None, *network.hubs):
            monkeypatch.setattr(op_cost, "gathering_hub", lambda *_, way=way: way)
            took[way] = seconds(gathered(nbytes), network)
        assert took[hub] <= 1.1 * min(took.values()), nbytes


NETWORKS = {
    "slow uploads": behind_relay(5, HOME, FAST, 0.03),
    "slow relay": behind_relay(4, FAST, OFFICE, 0.03),
    "one relayed pair": Network(hosts=(HOME, *(FAST,) * 4), relayed={frozenset((1, 2)): 0}),
    "no relay": Network(hosts=(HOME,) * 4),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_the_hub_of_an_all_gather_is_that_of_the_simulation(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_choice(gathering_hub, NETWORKS[network], monkeypatch)


def always(sizes: Any, network: Network) -> int | None:
    return next(iter(network.hubs), None)


def never(sizes: Any, network: Network) -> int | None:
    return None


@pytest.mark.parametrize(("mutant", "network"), [(never, "slow uploads"), (always, "one relayed pair")])
def test_other_choices_are_detected(
    mutant: Callable[..., int | None], network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError):
        check_choice(mutant, NETWORKS[network], monkeypatch)


def test_unequal_payloads_are_gathered_by_a_hub() -> None:
    """The payload of each rank is sent once, whatever its size; empty ones are not sent."""
    network = behind_relay(4, HOME, FAST)
    forms = tuple((torch.empty(size, dtype=torch.uint8, device="meta"),) for size in (0, 10, 4_000_000, 1_000_000))
    ops = [AllGather(form, forms) for form in forms]
    once = 8 * 4_000_000 / HOME.up_bits_per_second
    assert once <= max(NetworkCost(network).answer(ops, [0.0] * 4)) <= 1.15 * once
