"""Throughput of long links: iperf3, Gloo and the mesh between two emulated hosts, in turns.

Two workers, each on its own emulated host, keep a Gloo group and one mesh per variant open through all rounds. In each
round every way moves data for some seconds: iperf3 from host 0 to host 1, the others point to point in the same
direction, and as an all-reduce in both. A way warms up first, because TCP closes its window when it is idle. Rates are
those of payload in one direction. Writes a page into docs/benchmarks.

    python benchmarks/long_links.py [--networks SPEC ...] [--rounds 5]     # as root
    python benchmarks/long_links.py --quick        # two minutes, into runs/quick, to see that it runs
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import ROOT, provenance, scratch  # found only after the line above

REFERENCE = "iperf3 -P16"
IPERF = {REFERENCE: (16, "cubic"), "iperf3 -P16, bbr": (16, "bbr")}
MESHES: dict[str, dict[str, str]] = {
    "mesh": {},
    "mesh, --congestion bbr": {"GOSSAMER_CONGESTION": "bbr"},
}
GLOO = "Gloo"
SEND, MEAN = "point to point", "all-reduce"
LEAST_BYTES, MOST_BYTES, GROWTH = 2**20, 2**28, 3
WARM_SECONDS = 3


# -- a worker ----------------------------------------------------------------------------------------------------------


def work(rank: int, address: str, seconds: float) -> None:
    """Run the commands of standard input: a way and a kind of transfer; answer with megabits per second."""
    import torch
    import torch.distributed as dist

    from gossamer.base.ops import AllReduceMean
    from gossamer.comm.mesh.transport import MeshTransport, mesh_transport
    from gossamer.comm.process_group import ProcessGroupTransport

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29500", rank=rank, world_size=2)
    engine = ProcessGroupTransport()
    own = address if rank == 0 else os.environ["OWN_ADDRESS"]
    room = torch.zeros(MOST_BYTES // 4)
    moves: dict[tuple[str, str], Callable[[int], object]] = {}

    def gloo_send(nbytes: int) -> None:
        part = room[: nbytes // 4]
        dist.recv(part, src=0) if rank else dist.send(part, dst=1)

    def add(name: str, mesh: MeshTransport) -> None:
        def send(nbytes: int) -> None:
            data = room[: nbytes // 4].view(torch.uint8)
            mesh.deliver({} if rank else {1: data}, {0: nbytes} if rank else {})

        moves[name, SEND] = send
        moves[name, MEAN] = lambda nbytes: mesh.answer(AllReduceMean(room[: nbytes // 4], room[: nbytes // 4]))

    moves[GLOO, SEND] = gloo_send
    moves[GLOO, MEAN] = lambda nbytes: dist.all_reduce(room[: nbytes // 4])
    for name, settings in MESHES.items():
        os.environ |= settings
        started = time.perf_counter()
        mesh = mesh_transport(engine, own)
        for each in settings:
            del os.environ[each]
        assert isinstance(mesh, MeshTransport)
        print(name, f"{time.perf_counter() - started:.1f} s", mesh.links, file=sys.stderr, flush=True)
        add(name, mesh)
    sizes: dict[tuple[str, str], int] = {}

    def timed(move: Callable[[int], object], nbytes: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        move(nbytes)
        return time.perf_counter() - start

    print("ready", flush=True)
    for line in sys.stdin:
        way, kind = json.loads(line)
        move, nbytes = moves[way, kind], sizes.get((way, kind), 0)
        if not nbytes:
            nbytes, most = LEAST_BYTES, 0.0
            while most < seconds / 2 and nbytes * GROWTH <= MOST_BYTES:
                nbytes *= GROWTH
                most = max(json.loads(each) for each in engine.all_gather_text(json.dumps(timed(move, nbytes))))
            nbytes = sizes[way, kind] = min(MOST_BYTES, int(nbytes * seconds / most) // 2**20 * 2**20)
        timed(move, nbytes // 2)  # opens the window
        taken = timed(move, nbytes)
        both = [json.loads(each) for each in engine.all_gather_text(json.dumps(taken))]
        print(json.dumps(8e-6 * nbytes / max(both)), flush=True)
    os._exit(0)


# -- the measurement ---------------------------------------------------------------------------------------------------


def measure(spec: str, args: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    from gossamer.comm.network.parse import read_network
    from gossamer.plan.emulation.namespaces import ip
    from gossamer.plan.emulation.testbed import EmulatedNetwork

    found: dict[tuple[str, str], list[float]] = {}
    with EmulatedNetwork(read_network(spec, 2)) as testbed, ExitStack() as stack:
        hosts = testbed.hosts

        def use(congestion: str) -> None:
            for host in hosts:
                to = f"10.77.0.0/24 dev {host.interface} scope link src {host.address}"
                ip(host.namespace, [f"route replace {to} congctl {congestion}"])

        workers = []
        for rank, host in enumerate(hosts):
            command = [*host.prefix, sys.executable, __file__, "--work", str(rank), hosts[0].address]
            worker = stack.enter_context(
                subprocess.Popen(
                    [*command, "--seconds", str(args.seconds)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "GLOO_SOCKET_IFNAME": host.interface, "OWN_ADDRESS": host.address},
                )
            )
            stack.callback(worker.kill)
            workers.append(worker)
        for worker in workers:
            read(worker.stdout, "ready")
        for number in range(args.rounds):
            for name, (streams, congestion) in IPERF.items():
                use(congestion)
                found.setdefault((name, SEND), []).append(iperf(testbed, streams, args.seconds))
                use("cubic")
            for name in (GLOO, *MESHES):
                for kind in (SEND, MEAN):
                    for worker in workers:
                        assert worker.stdin is not None
                        worker.stdin.write(json.dumps([name, kind]) + "\n")
                        worker.stdin.flush()
                    rates = [float(read(worker.stdout)) for worker in workers]
                    found.setdefault((name, kind), []).append(min(rates))
            shown = ", ".join(f"{' '.join(way)} {rates[-1]:.1f}" for way, rates in found.items())
            print(f"{spec} round {number + 1}: {shown}", file=sys.stderr, flush=True)
    return found


def read(stream: IO[str] | None, expected: str = "") -> str:
    assert stream is not None
    line = stream.readline().strip()
    if not line or (expected and line != expected):
        raise SystemExit(f"a worker ended, or printed {line!r}; its error is above.")
    return line


def iperf(testbed: Any, streams: int, seconds: float) -> float:
    """Megabits per second from host 0 to host 1, as the receiver counts them."""
    with subprocess.Popen([*testbed.hosts[1].prefix, "iperf3", "-s", "-1"], stdout=subprocess.DEVNULL) as server:
        options = ["-P", str(streams), "-t", str(round(seconds)), "-O", str(WARM_SECONDS), "-J"]
        command = [*testbed.hosts[0].prefix, "iperf3", "-c", testbed.hosts[1].address, *options]
        try:
            for _ in range(100):
                run = subprocess.run(command, capture_output=True, text=True, timeout=10 * (seconds + WARM_SECONDS))
                answer = json.loads(run.stdout)
                if run.returncode == 0 and "sum_received" in answer.get("end", {}):
                    return float(answer["end"]["sum_received"]["bits_per_second"]) / 1e6
                time.sleep(0.1)  # the server does not listen yet
        finally:
            server.kill()
    raise SystemExit(f"iperf3 failed: {answer.get('error')}")


def table(spec: str, found: dict[tuple[str, str], list[float]]) -> str:
    reference = found[REFERENCE, SEND]
    lines = [f"\n## {spec}\n", f"| way | transfer | Mbit/s | least to most | share of `{REFERENCE}` |"]
    lines.append("|---|---|---:|---:|---:|")
    for (way, kind), rates in found.items():
        share = statistics.median(own / other for own, other in zip(rates, reference, strict=True))
        spread = f"{min(rates):.1f} to {max(rates):.1f}"
        lines.append(f"| {way} | {kind} | {statistics.median(rates):.1f} | {spread} | {share:.2f} |")
    return "\n".join(lines) + "\n"


def main(args: argparse.Namespace) -> None:
    if args.work:
        return work(int(args.work[0]), args.work[1], args.seconds)
    if args.quick:
        args.networks, args.rounds, args.seconds = args.networks[:1], 1, 2.0
        args.output = scratch(args.output)
    text = (
        "# Long links\n\nHow much of a long link does one way of communication use? Two emulated hosts; rates of "
        f"payload in one direction, in Mbit/s; median of {args.rounds} rounds in which all ways take turns; transfers "
        f"of about {args.seconds:g} s after half as much warm-up. CUBIC is the congestion control unless the row "
        "names another. "
        "The share is the median over rounds of the ratio within a round.\n\n"
        f"{provenance()}\n"
    )
    for spec in args.networks:
        text += table(spec, measure(spec, args))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)
    print(text)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Throughput of long links.")
    options.add_argument("--networks", nargs="+", default=["1gbit,100ms,loss=0.1%", "100mbit,100ms"])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=5.0, help="of a transfer")
    options.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "long-links.md")
    options.add_argument("--quick", action="store_true", help="one short round, in a file of its own")
    options.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    main(options.parse_args())
