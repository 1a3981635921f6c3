"""Traffic of the busiest machine in one step: parameter servers, all-reduce and gossip side by side.

The real scripts are run, over meta tensors or in virtual time, and payload bytes that a machine sends and receives are
added up. Prints a table in markdown, in sizes of the model.

    python benchmarks/busiest.py [--workers 64] [--rows 512] [--page FILE.md]
"""

import argparse
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from gossamer.algorithms.compressors import Compressor, Dense, OneBit, TopK
from gossamer.algorithms.gossip.partner import Partner, answering, initiate
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies import Gossip
from gossamer.algorithms.strategies.parameter_server import ParameterServer
from gossamer.algorithms.topologies import Complete, Exponential, Ring, Topology
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import CollectiveOp, NeighborAllGather, Script
from gossamer.base.peer_ops import SERVER, WORKER, Peer, PeerScript
from gossamer.comm.network.cost.message_schedule import Send
from gossamer.comm.network.cost.op_cost import parts_of
from gossamer.comm.simulation import Trace, compute, simulate_peers
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.errors import RecipeError
from gossamer.train.parameter_server import Client, host

COLUMNS = 264
COMPRESSORS: tuple[Compressor, ...] = (Dense(), TopK(density=0.01), OneBit())
STEPS = 1  # after one that does not count: the second is like all that follow
CALLER = "caller"

Through = Counter[Hashable]  # bytes that each machine sends and receives in a step


def model(rows: int, device: str = "cpu") -> FlatTensors:
    return FlatTensors.pack({"weight": torch.zeros(rows, COLUMNS, device=device)})


# -- in lock step: what the ranks say, and what that makes each of them send


def said(script: Script, world: int, rank: int) -> Iterable[CollectiveOp]:
    answer: Any = None
    while True:
        try:
            op = script.send(answer)
        except StopIteration:
            return
        yield op
        answer = op.meta_answer(world, rank)


def carried(ops: Sequence[Iterable[CollectiveOp]]) -> Through:
    """words[r]: the operations of rank r, one after the other."""
    through: Through = Counter()
    for rank, each in enumerate(ops):
        for op in each:
            for moves in parts_of(op, rank, len(ops)):
                for move in moves:
                    if isinstance(move, Send):
                        through[rank] += move.nbytes
                        through[move.to] += move.nbytes
    return through


def all_reduce(compressor: Compressor, world: int, rows: int) -> Through:
    chosen, x = resolve(compressor, world).compressor, model(rows, "meta")

    def script(rank: int) -> Script:
        at = AggregationContext(rank=rank, world=world)
        return chosen.aggregate(x, chosen.init(x, at), at)

    return carried([said(script(rank), world, rank) for rank in range(world)])


def gossip(topology: Topology, compressor: Compressor, world: int, rows: int) -> Through:
    """A message has the same size whichever neighbor gets it, so one is enough."""
    recipe = resolve(Gossip() + compressor + topology, world)
    assert isinstance(recipe.strategy, Gossip)
    x, rule = model(rows), recipe.strategy.rule(recipe.compressor)
    x.flat.normal_()
    like = FlatTensors.zeros(x.layout, dtype=x.flat.dtype, device=x.flat.device)
    state = recipe.compressor.init(x, AggregationContext())
    payload = rule.offer(x, rule.begin(like.flat), state, AggregationContext(), 1).payload

    def op(rank: int) -> CollectiveOp:
        tells = topology.sends_to(rank, world, 0)
        return NeighborAllGather(payload, topology.weights(rank, world, 0), tells)

    return carried([[op(rank)] for rank in range(world)])


# -- in their own time: what they send in virtual time


def steady(run: Callable[[int], Trace], machine: Callable[[Peer], Hashable]) -> Through:
    """What `STEPS` more than one add: whatever it takes to begin does not count."""
    first, every = (run(steps).bytes_through(machine) for steps in (1, 1 + STEPS))
    return Counter({each: (every[each] - first[each]) // STEPS for each in every})


def served(servers: int, beside: bool, compressor: Compressor, world: int, rows: int) -> Through:
    """beside: server i shares a machine with worker i, and what they tell each other does not count."""
    pull = None if compressor == Dense() else compressor
    recipe = resolve(ParameterServer(mode="sync", shards=servers, pull=pull) + compressor)  # each speaks for itself

    def worker(number: int, steps: int) -> PeerScript:
        tensors = {"weight": Parameter(torch.zeros(rows, COLUMNS))}
        client = Client(number, world, tensors, torch.optim.SGD(tensors.values(), 0.1), recipe, shards=servers)
        yield from client.begin()
        client.apply_pull()
        for _ in range(steps):
            client.gather({"weight": torch.randn(rows, COLUMNS)})
            yield from client.push_pull()
            client.apply_pull()

    def run(steps: int) -> Trace:
        workers = {Peer(WORKER, number): partial(worker, number, steps) for number in range(world)}
        hosts = {Peer(SERVER, number): partial(host, number) for number in range(servers)}
        return simulate_peers({**workers, **hosts}, VirtualNetwork(round_trip_seconds=0.01), 0, most_words=10**9)

    return steady(run, lambda peer: peer.number if beside else peer)


def pairwise(compressor: Compressor, world: int, rows: int, steps: int = 20) -> Through:
    """Every worker initiates one exchange a step, with a random peer; the busiest machine is that of `steps` steps."""
    partners = [Partner(model(rows), rank, compressor, seed=1) for rank in range(world)]

    def call(partner: Partner) -> PeerScript:
        for step in range(steps):
            yield from compute(1.0 + 0.01 * partner.rank)
            peer = partner.neighbor(Complete(), world, step)
            assert peer is not None
            yield from initiate(partner, peer, step)

    answerers = {Peer(WORKER, each.rank): partial(answering, each) for each in partners}
    callers = {Peer(CALLER, each.rank): partial(call, each) for each in partners}
    trace = simulate_peers(
        {**answerers, **callers}, VirtualNetwork(round_trip_seconds=0.1), 0, servers=tuple(answerers)
    )
    through = trace.bytes_through(lambda peer: peer.number)
    return Counter({rank: through[rank] // steps for rank in through})


# -- the table


Scheme = Callable[[Compressor, int, int], Through]
SCHEMES: dict[str, Scheme] = {
    "one parameter server": lambda compressor, world, rows: served(1, False, compressor, world, rows),
    "a parameter server beside each worker": lambda compressor, world, rows: served(
        world, True, compressor, world, rows
    ),
    "all-reduce": all_reduce,
    "gossip, `Ring()`": partial(gossip, Ring()),
    "gossip, `Exponential()`": partial(gossip, Exponential()),
    "gossip, `Exponential(one_peer=True)`": partial(gossip, Exponential(one_peer=True)),
    "gossip, pairwise": pairwise,
}


def cell(scheme: Scheme, compressor: Compressor, world: int, rows: int) -> str:
    try:
        through = scheme(compressor, world, rows)
    except RecipeError:
        return "refused"
    busiest, mean = max(through.values()), sum(through.values()) / world
    nbytes = model(rows, "meta").flat.nbytes
    return f"{busiest / nbytes:.3g} ({mean / nbytes:.3g})"


def table(world: int, rows: int) -> str:
    lines = [
        f"| {world} workers, {rows * COLUMNS:,} parameters | {' | '.join(f'`{each}`' for each in COMPRESSORS)} |",
        "|---|" + "---:|" * len(COMPRESSORS),
    ]
    for name, scheme in SCHEMES.items():
        cells = [cell(scheme, compressor, world, rows) for compressor in COMPRESSORS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


ABOUT = (
    "Payload bytes that the busiest machine sends and receives in one step, over the bytes of the model in float32; in "
    "brackets all that machines send and receive, divided by the workers. Servers push and pull by the compressor."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--rows", type=int, default=512, help=f"of the model's one matrix, of {COLUMNS} columns")
    parser.add_argument("--page", type=Path, help="write the table to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = f"{ABOUT}\n\n{table(args.workers, args.rows)}\n"
    print(f"\n{text}")
    if args.page:
        args.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
