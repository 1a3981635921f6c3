"""Whatever happens to networks and processes: each contribution counts once, and what is left is owed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from support.fault_seeds import block_name, blocks, replayed
from support.federated_faults import SAMPLES, Buffered, WholeNumbers, WholeSteps, check_conserved, some_seconds, sparse

from gossamer.algorithms.compressors import TopK
from gossamer.base.peer_ops import Peer, Push, Receipt
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.federated.client.store import ClientState, MemoryStore
from gossamer.federated.messages import CLIENT, NOT_COUNTED, REPORT, THE_SERVER, Report, decode
from gossamer.federated.server.rounds import Reported, Rounds

PEERS = [THE_SERVER, *(Peer(CLIENT, number) for number in range(len(SAMPLES)))]
EVERYONE = {"fewest": len(SAMPLES)}

CASES: dict[str, Callable[[], WholeNumbers]] = {
    "everyone": lambda: WholeNumbers(WholeSteps(fraction=1.0), options=EVERYONE),
    "parts": lambda: WholeNumbers(WholeSteps(fraction=1.0), sparse(), part_bytes=40, options=EVERYONE),
    "deltas": lambda: WholeNumbers(WholeSteps(fraction=1.0, pull=TopK(density=0.2)), sparse(), options=EVERYONE),
    "cohorts": lambda: WholeNumbers(WholeSteps(fraction=0.5), sparse(), options={"round_seconds": 3.0}),
    "late": lambda: WholeNumbers(
        WholeSteps(fraction=0.5), sparse(), options={"round_seconds": 1.0, "over_selection": 0.5, "late": "count"}
    ),
    "buffered": lambda: WholeNumbers(Buffered(fraction=1.0), sparse(), rounds=6, part_bytes=40),
    "gathering": lambda: WholeNumbers(
        Buffered(fraction=1.0, buffer=64), sparse(), clients=1000, options={"gather_seconds": 2.0, "fewest": 2}
    ),
    "bounded": lambda: WholeNumbers(Buffered(fraction=0.5, staleness=0), sparse(), rounds=6),
}


def federation(name: str) -> WholeNumbers:
    done = CASES[name]()
    done.train_seconds = some_seconds
    return done


def bad_network(seed: int) -> VirtualNetwork:
    return VirtualNetwork.random(seed, PEERS, 6.0)


@cache
def calm_bits(name: str) -> list[float]:
    """Of the parameters where nothing happens."""
    calm = federation(name)
    calm.run()
    check_conserved(calm)
    return calm.parameters.tolist()


@pytest.mark.parametrize("block", blocks(200), ids=block_name)
def test_whatever_happens_each_contribution_counts_once(block: range) -> None:
    """Devices and the server are killed and started again; where everyone takes part, the outcome is the same bits."""
    for seed in block:
        name = [*CASES][seed % len(CASES)]
        with replayed(seed, f"whatever_happens and {block_name(block)}"):
            done = federation(name)
            done.run(bad_network(seed))
            check_conserved(done)
            if done.options is EVERYONE:
                assert done.parameters.tolist() == calm_bits(name)


# -- twins ------------------------------------------------------------------------------------------------------------


def adds_again(rounds: Rounds) -> None:
    """A report that is said again is added again."""
    said_again = rounds._repeated

    def added(reported: Reported, push: Push, token: int) -> Receipt | None:
        if push.key == REPORT and not decode(push.about, Report, THE_SERVER).parts:
            rounds.take(push.stamp.worker, push.stamp, reported.report, push.payload)
        return said_again(reported, push, token)

    rounds._repeated = added  # type: ignore[method-assign]


def forgets_fates(rounds: Rounds) -> None:
    """Who asks what became of a report that counted hears that it did not."""
    rounds._answered_before = lambda client, stamp: Receipt(version=NOT_COUNTED)  # type: ignore[method-assign]


@pytest.mark.parametrize(("twin", "name"), [(adds_again, "everyone"), (forgets_fates, "buffered")])
def test_a_broken_mutant_is_caught(twin: Callable[[Rounds], None], name: str) -> None:
    caught = 0
    for seed in range(60):
        done = federation(name)
        done.change = twin
        try:
            done.run(bad_network(seed))
            check_conserved(done)
            assert done.options is not EVERYONE or done.parameters.tolist() == calm_bits(name)
        except AssertionError:
            caught += 1
        if caught > 2:
            return
    raise AssertionError(f"{twin.__name__} was seen {caught} times only")


def test_a_device_that_forgets_what_it_sent_is_caught() -> None:
    """One that, killed between its report and the receipt, trains anew: what was counted is owed once more."""

    class Forgetful(MemoryStore):
        def load(self) -> ClientState:
            return replace(super().load(), pending=None)

    caught = 0
    for seed in range(100):
        done = federation("parts")
        done.stores = [Forgetful() for _ in SAMPLES]
        try:
            done.run(bad_network(seed))
            check_conserved(done)
        except AssertionError:
            caught += 1
        if caught:
            return
    raise AssertionError("nobody was killed in between")
