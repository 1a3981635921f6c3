"""Whatever happens to networks and processes: each contribution counts once, and what is left is owed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.fault_seeds import block_name, blocks, replayed
from support.federated_faults import SAMPLES, Buffered, WholeNumbers, WholeSteps, check_conserved

from gossamer.compressors import TopK
from gossamer.core.peer_ops import Peer
from gossamer.federated.messages import CLIENT, THE_SERVER
from gossamer.simulation.faulty_network import VirtualNetwork

PEERS = [THE_SERVER, *(Peer(CLIENT, number) for number in range(len(SAMPLES)))]
EVERYONE = {"fewest": len(SAMPLES)}

CASES: dict[str, Callable[[], WholeNumbers]] = {
    "everyone": lambda: WholeNumbers(WholeSteps(fraction=1.0), options=EVERYONE),
    "parts": lambda: WholeNumbers(WholeSteps(fraction=1.0), "TopK(0.1)", part_bytes=40, options=EVERYONE),
    "deltas": lambda: WholeNumbers(WholeSteps(fraction=1.0, pull=TopK(density=0.2)), "TopK(0.1)", options=EVERYONE),
    "cohorts": lambda: WholeNumbers(WholeSteps(fraction=0.5), "TopK(0.1)", options={"round_seconds": 3.0}),
    "late": lambda: WholeNumbers(
        WholeSteps(fraction=0.5), "TopK(0.1)", options={"round_seconds": 0.5, "over_selection": 0.5, "late": "count"}
    ),
    "buffered": lambda: WholeNumbers(Buffered(fraction=1.0), "TopK(0.1)", rounds=6, part_bytes=40),
    "bounded": lambda: WholeNumbers(Buffered(fraction=0.5, staleness=0), "TopK(0.1)", rounds=6),
}


def bad_network(seed: int) -> VirtualNetwork:
    return VirtualNetwork.random(seed, PEERS, 10.0)


@pytest.mark.parametrize("block", blocks(25), ids=block_name)
@pytest.mark.parametrize("name", CASES)
def test_whatever_happens_each_contribution_counts_once(name: str, block: range) -> None:
    """Clients and the server are killed and started again; where everyone takes part, the outcome is the same bits."""
    calm = CASES[name]()
    calm.run()
    check_conserved(calm)
    for seed in block:
        with replayed(seed, f"whatever_happens and {name}"):
            done = CASES[name]()
            done.run(bad_network(seed))
            check_conserved(done)
            if done.options is EVERYONE:
                assert done.parameters.tolist() == calm.parameters.tolist()
