"""Resting connections: how long bytes take over one that was silent, beside the model, with the kernel's windows.

Rank 0 sends to the last rank: cold, then again and again after rests of several lengths; --beside: while it also sends
as much to rank 1, which is near on examples/networks/two-sites-80ms.toml. A line for each rest: seconds until the
receiver has said that all is there, medians over rounds; the estimate of comm/network/tcp_model.py; congestion window
and slow start threshold of the far connection before sending, in packets. Where the measured time is longer, these two
say why: a threshold near the window is a slow start that ended early, a small window one that was halved in silence.

    python benchmarks/resting.py [--workers 2] [--network 200mbit,80ms] [--megabytes 1] [--rests 0 0.3 1 3] [--rounds 5]
    python benchmarks/resting.py --workers 4 --network examples/networks/two-sites-80ms.toml --beside
"""

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gossamer
from gossamer.comm.environment.run_settings import own_address
from gossamer.comm.mesh.connect import connect
from gossamer.comm.network import Network, read_network
from gossamer.comm.network.cost.message_schedule import Collect, Moves, Send
from gossamer.comm.network.cost.message_simulator import Wires
from gossamer.comm.process_group import ProcessGroupTransport

ROOT = Path(__file__).resolve().parent.parent
THRESHOLD, WINDOW = 76, 80  # where tcpi_snd_ssthresh and tcpi_snd_cwnd lie in Linux' struct tcp_info
COLD = -1.0  # a rest of a connection that has sent nothing yet
UNSET = 2**30  # packets: a threshold beyond is none


def windows(connection: socket.socket) -> tuple[int, int]:
    """Congestion window and slow start threshold, in packets."""
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, WINDOW + 4)
    return struct.unpack_from("=I", told, WINDOW)[0], struct.unpack_from("=I", told, THRESHOLD)[0]


def timed(connection: socket.socket, payload: bytes) -> float:
    began = time.perf_counter()
    connection.sendall(payload)
    connection.recv(1)
    return time.perf_counter() - began


def serve(connection: socket.socket, nbytes: int, times: int) -> None:
    room = bytearray(2**20)
    for _ in range(times):
        left = nbytes
        while left:
            left -= connection.recv_into(room, min(left, len(room)))
        connection.sendall(b"!")


def work(args: argparse.Namespace) -> None:
    """One rank's part."""
    world = gossamer.init()
    engine = ProcessGroupTransport()
    sockets = connect(world.rank, world.size, own_address(), engine.all_gather_text)
    for each in filter(None, sockets):
        each.setblocking(True)
    nbytes, far = int(1e6 * args.megabytes), world.size - 1
    to = [far, 1] if args.beside else [far]
    rests = [COLD, *(rest for rest in args.rests for _ in range(args.rounds))]
    if world.rank in to:
        serve(sockets[0], nbytes, len(rests))  # type: ignore[arg-type]
    if world.rank == 0:
        there = {peer: each for peer, each in enumerate(sockets) if each is not None}
        rows, payload = [], bytes(nbytes)
        with ThreadPoolExecutor(len(to)) as pool:
            for rest in rests:
                time.sleep(max(0.0, rest))
                window, threshold = windows(there[far])
                spent = [pool.submit(timed, there[peer], payload) for peer in to]
                rows.append((rest, spent[0].result(), window, threshold))
                [each.result() for each in spent]
        print(f"RESULT {json.dumps(rows)}", flush=True)
    engine.all_gather_text("")


def estimated(network: Network, nbytes: int, rests: list[float], beside: bool) -> list[float]:
    """The same messages in virtual time."""
    world = len(network.hosts)
    wires, far, now, found = Wires(network), world - 1, 0.0, []
    to = [far, 1] if beside else [far]
    for rest in rests:
        now += max(0.0, rest)
        moves: list[list[Moves]] = [[] for _ in range(world)]
        moves[0] = [iter([*(Send(peer, nbytes, eager=True) for peer in to), Collect(far)])]
        for peer in to:
            moves[peer] = [iter([Collect(0), *([Send(0, 1, eager=True)] if peer == far else [])])]
        end = wires.run([each or [iter(())] for each in moves], [now] * world)[0]
        found.append(end - now)
        now = end
    return found


def main(args: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "gossamer", "run", "--workers", str(args.workers), "--network", args.network]
    command += ["--logs", str(ROOT / "runs" / "resting"), __file__, "--megabytes", str(args.megabytes)]
    command += ["--rounds", str(args.rounds), "--rests", *map(str, args.rests), *(["--beside"] if args.beside else [])]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    told = next((line.partition("RESULT ")[2] for line in said.stdout.splitlines() if "RESULT " in line), "")
    if not told:
        sys.exit(f"no result:\n{said.stdout[-2000:]}{said.stderr[-2000:]}")
    show(args, json.loads(told))


def show(args: argparse.Namespace, rows: list[tuple[float, float, int, int]]) -> None:
    """A line for each rest."""
    rests = [rest for rest, *_ in rows]
    network = read_network(args.network, args.workers)
    model = estimated(network, int(1e6 * args.megabytes), rests, args.beside)
    beside = ", beside a near stream" if args.beside else ""
    print(f"{args.network}, {args.megabytes:g} MB{beside}, load {os.getloadavg()[0]:.1f}")
    print(f"{'rest':>8} {'measured':>10} {'estimated':>10} {'ratio':>6} {'window':>8} {'threshold':>10}")
    for rest in dict.fromkeys(rests):
        places = [place for place, other in enumerate(rests) if other == rest]
        measured = statistics.median(rows[place][1] for place in places)
        price = statistics.median(model[place] for place in places)
        window, threshold = (int(statistics.median(rows[place][which] for place in places)) for which in (2, 3))
        name, limit = "cold" if rest == COLD else f"{rest:g} s", "none" if threshold > UNSET else str(threshold)
        cells = [f"{1000 * measured:>7.0f} ms", f"{1000 * price:>7.0f} ms", f"{measured / price:>6.2f}"]
        print(f"{name:>8} {' '.join(cells)} {window:>8} {limit:>10}")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Bytes over connections that have rested.")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--network", default="200mbit,80ms")
    options.add_argument("--megabytes", type=float, default=1.0)
    options.add_argument("--rests", type=float, nargs="+", default=[0.0, 0.3, 1.0, 3.0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--beside", action="store_true", help="rank 0 sends as much to rank 1 at once")
    (work if "RANK" in os.environ else main)(options.parse_args())
