"""A federation's server under load and under faults: many connections on loopback, and a network that breaks.

    python benchmarks/federated_server.py load [--idle 2000] [--active 100] [--rounds 10] [--parameters 25000]
    python benchmarks/federated_server.py faults [--seconds 180] [--every 60] [--network 20mbit,80ms]

load: every device has a connection and waits for a task; a round takes so many of them. Devices are scripts of the
library over bare sockets, in one process, and their training adds one. faults: a server and four devices as processes
on hosts of an emulated network; every so often one device is killed and started again, and another is cut off, and once
the server is killed. What each round should have come to is known, so what is counted twice or lost shows.
"""

import argparse
import json
import os
import random
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import provenance  # found only after the line above

from gossamer.algorithms.strategies.federated_rules import LocalWork
from gossamer.base.peer_ops import Peer, PeerOp, Push, Stamp
from gossamer.comm.environment.run_token import read_token
from gossamer.comm.network import read_network
from gossamer.comm.rpc_protocol.connection_state import ConnectionState
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.comm.rpc_protocol.messages import encode_ask
from gossamer.federated.client.script import ClientRecipe, Train, Trained, participate
from gossamer.federated.client.store import MemoryStore
from gossamer.federated.deployment import limits
from gossamer.federated.deployment.reception import DEVICE, JOIN, RUN, Invitation, JoinRequest
from gossamer.federated.federation import recipe_terms
from gossamer.federated.messages import THE_SERVER, decode, encode
from gossamer.federated.model_state import ModelState
from gossamer.plan.emulation import plan
from gossamer.plan.emulation.testbed import EmulatedNetwork

PORT = 29601
DEVICES = 4
CUT_SECONDS = 15.0
PROGRAM = """
import sys, time, torch
from torch import nn
from gossamer import federated

size, seconds = int(sys.argv[1]), float(sys.argv[2])

@federated.model
def make():
    model = nn.Linear(size, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model

@federated.client
def train(model, round):
    "Client k adds one to entry k: what a version is follows from who was counted."
    time.sleep(seconds)
    with torch.no_grad():
        model.weight[0, round.client] += 1
    return federated.Update(samples=1)

@federated.evaluate
def evaluate(model, round):
    return federated.Update(samples=1, metrics={f"entry {k}": model.weight[0, k].item() for k in range(4)})
"""


def gossamer(words: Sequence[object], log: Path, prefix: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    with log.open("a") as output:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "gossamer", "federate", *map(str, words)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def wait_for(log: Path, text: str, process: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while text not in log.read_text():
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"{text!r} was not said within {seconds} s: {log.read_text()}")
        time.sleep(0.1)


def resident_bytes(pid: int, key: str = "VmRSS") -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 1024 * int(found[1]) if found else 0


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- load --------------------------------------------------------------------------------------------------


class BareDevice:
    """A device's script over one socket: no thread, no reconnection."""

    def __init__(self, identity: int, settings: dict[str, Any], state: ModelState) -> None:
        self._model_state = state
        credentials = Credentials(me=Peer(DEVICE, identity), **settings)
        self._connection = ConnectionState(credentials, THE_SERVER)
        self.sock = socket.create_connection(("127.0.0.1", PORT))
        self._request, self.number = 0, -1
        self._script: Any = None  # once it has joined
        self.ended = False
        self._write(self._connection.control_frames())

    @property
    def waits(self) -> bool:
        return self._script is not None

    def read(self) -> None:
        buffer = self._connection.receive_buffer()
        nbytes = self.sock.recv_into(buffer)
        if not nbytes:
            raise SystemExit(f"the server closed the connection of client {self.number}")
        for frame in self._connection.receive_data(nbytes):
            if frame is None:
                self._write(self._connection.control_frames())
                if self._connection.authenticated is not None:
                    self._ask(Push(to=THE_SERVER, key=JOIN, stamp=Stamp(0, 0), about=encode(JoinRequest())))
            elif hasattr(frame.record, "answer"):
                self._answered(frame.record.answer(frame.payload))

    def _answered(self, answer: Any) -> None:
        if self._script is None:
            told = decode(answer.about, Invitation, THE_SERVER)
            if told.refused:
                raise SystemExit(told.refused)
            terms = recipe_terms(told.recipe)
            self.number = told.number
            recipe = ClientRecipe(
                strategy=terms.strategy, compressor=terms.compressor, pull=terms.pull, state=self._model_state,
                seed=told.seed, part_bytes=told.part_bytes,
            )  # fmt: skip
            self._script, answer = participate(told.number, recipe, MemoryStore()), None
        try:
            op = self._script.send(answer)
            while isinstance(op, Train):
                work = LocalWork(samples=1, steps=1)
                op = self._script.send(Trained(flat=op.anchor + 1, work=work, metrics={}))
            self._ask(op)
        except StopIteration:
            self.ended = True

    def _ask(self, op: PeerOp) -> None:
        self._request += 1
        self._write(self._connection.send(encode_ask(op, self._request)))  # type: ignore[arg-type]

    def _write(self, buffers: Any) -> None:
        for buffer in buffers:
            self.sock.sendall(buffer)


def load(args: argparse.Namespace, folder: Path) -> None:
    everyone = args.idle + args.active
    limits.allow_open_files(everyone)
    script, token, log, record = (folder / name for name in ("program.py", "token", "log", "record.json"))
    script.write_text(PROGRAM)
    recipe = f"FedAvg(fraction={args.active / everyone!r}) + {args.compressor}"
    server = gossamer(
        ["serve", script, "--recipe", recipe, "--clients", everyone, "--rounds", args.rounds, "--bind",
         f"127.0.0.1:{PORT}", "--token-file", token, "--journal", folder / "journal", "--json", record, "--",
         args.parameters, 0],
        log,
    )  # fmt: skip
    try:
        wait_for(log, "devices join by", server)
        model = nn.Linear(args.parameters, 1, bias=False)
        state = ModelState.of(model)
        settings = {
            "token": read_token(token),
            "run": RUN,
            "layout": state.fingerprint,
            "largest_frame_bytes": limits.largest_frame_bytes(state),
        }
        before = resident_bytes(server.pid)
        files = len(os.listdir(f"/proc/{server.pid}/fd"))
        began = time.monotonic()
        chosen = selectors.DefaultSelector()
        devices: list[BareDevice] = []
        for identity in range(everyone - 1):
            devices.append(BareDevice(identity, settings, state))
            chosen.register(devices[-1].sock, selectors.EVENT_READ, devices[-1])
            _serve(chosen, 0.0)
        while not all(each.waits for each in devices):
            _serve(chosen, 1.0)
        connected = time.monotonic() - began
        time.sleep(1.0)
        idle_bytes, idle_seconds = resident_bytes(server.pid), processor_seconds(server.pid)
        time.sleep(5.0)
        idle_share = (processor_seconds(server.pid) - idle_seconds) / 5.0
        print(f"{len(devices)} devices connected and waiting after {connected:.1f} s")
        print(f"server: {before / 1e6:.0f} MB before, {idle_bytes / 1e6:.0f} MB with them: "
              f"{(idle_bytes - before) / len(devices) / 1e3:.1f} kB a connection; "
              f"{len(os.listdir(f'/proc/{server.pid}/fd')) - files} more open files; "
              f"{100 * idle_share:.1f} % of a core while all wait")  # fmt: skip
        spent, began = processor_seconds(server.pid), time.monotonic()
        devices.append(BareDevice(everyone - 1, settings, state))
        chosen.register(devices[-1].sock, selectors.EVENT_READ, devices[-1])
        while not all(each.ended for each in devices):
            _serve(chosen, 5.0)
        seconds = time.monotonic() - began
        peak, spent = resident_bytes(server.pid, "VmHWM"), processor_seconds(server.pid) - spent
        for each in devices:
            each.sock.close()
        server.wait(60)
        rounds = [entry["seconds"] for entry in json.loads(record.read_text())["history"]]
        print(f"{args.rounds} rounds of {args.active} devices, {args.parameters} numbers, {recipe}: "
              f"{seconds / args.rounds:.3f} s a round (median {sorted(rounds[1:])[len(rounds[1:]) // 2]:.3f} s), "
              f"{spent / args.rounds:.3f} s of the server's processor a round, peak {peak / 1e6:.0f} MB")  # fmt: skip
    finally:
        server.kill()
        server.wait()


def _serve(chosen: selectors.BaseSelector, seconds: float) -> None:
    for key, _ in chosen.select(seconds):
        key.data.read()


# -- faults ------------------------------------------------------------------------------------------------


def faults(args: argparse.Namespace, folder: Path) -> None:
    network = read_network(args.network, DEVICES + 1)
    planned = plan(network)
    if planned.emulation == "paced" or planned.reenters:
        raise SystemExit(f"no network can be emulated by this user: {planned.reason or 'run as root'}")
    script, token, record = (folder / name for name in ("program.py", "token", "record.json"))
    script.write_text(PROGRAM)
    program = ["--", args.parameters, args.train_seconds]
    with EmulatedNetwork(network) as testbed:
        address = f"{testbed.hosts[0].address}:{PORT}"
        serve = ["serve", script, "--recipe", args.recipe, "--clients", DEVICES, "--rounds", 10**6, "--bind", address,
                 "--token-file", token, "--journal", folder / "journal", "--json", record,
                 "--round-seconds", 60, *program]  # fmt: skip
        running: dict[int, subprocess.Popen[bytes]] = {}

        def start(host: int) -> None:
            join = ["join", script, "--server", address, "--token-file", token, "--number", host - 1,
                    "--state", folder / f"device-{host}", *program]  # fmt: skip
            running[host] = gossamer(serve if host == 0 else join, folder / f"log-{host}", testbed.hosts[host].prefix)

        try:
            start(0)
            wait_for(folder / "log-0", "devices join by", running[0])
            for host in range(1, DEVICES + 1):
                start(host)
            wait_for(folder / "log-0", "round 1/", running[0])
            _break(args, testbed, running, start)
            running[0].send_signal(signal.SIGTERM)
            running[0].wait(60)
        finally:
            for process in running.values():
                process.kill()
                process.wait()
    _report(json.loads(record.read_text())["history"], args, folder)


def _break(args: argparse.Namespace, testbed: EmulatedNetwork, running: dict[int, Any], start: Any) -> None:
    """Kill a device and cut another every so often, at chance moments within; kill the server once, in the middle."""
    chance, began = random.Random(0), time.monotonic()
    events: list[tuple[float, str, int]] = [(args.seconds / 2, "kill", 0)]
    for period in range(int(args.seconds / args.every)):
        killed, cut = chance.sample(range(1, DEVICES + 1), 2)
        at = period * args.every + chance.uniform(0.1, 0.5) * args.every
        events += [(at, "kill", killed), (at + 0.1 * args.every, "cut", cut)]
        events += [(at + 0.1 * args.every + CUT_SECONDS, "heal", cut)]
    for at, what, host in sorted(events):
        time.sleep(max(began + at - time.monotonic(), 0.0))
        print(f"{at:6.1f} s: {what} {'the server' if host == 0 else f'device {host - 1}'}", flush=True)
        if what == "kill":
            running[host].kill()
            running[host].wait()
            start(host)
        else:
            getattr(testbed, what)(host)
    time.sleep(max(began + args.seconds - time.monotonic(), 0.0))


def _report(history: list[dict[str, Any]], args: argparse.Namespace, folder: Path) -> None:
    """What the rounds' clients come to, beside what the server's parameters are."""
    due, worst = [0.0] * DEVICES, 0.0
    missing = {*range(1, history[-1]["version"] + 1)} - {entry["version"] for entry in history}
    for entry in history:
        for client in entry["clients"]:
            due[client] += 1 / len(entry["clients"])
        if entry["metrics"] and not missing:
            is_there = [entry["metrics"][f"entry {client}"] for client in range(DEVICES)]
            worst = max(worst, *(abs(a - b) for a, b in zip(is_there, due, strict=True)))
    seconds = sorted(entry["seconds"] for entry in history)
    cohorts = [len(entry["clients"]) for entry in history]
    counted = sum((folder / f"log-{host}").read_text().count("trained") for host in range(1, DEVICES + 1))
    print(f"{history[-1]['version']} rounds in {args.seconds} s; median {seconds[len(seconds) // 2]:.2f} s, longest "
          f"{seconds[-1]:.1f} s; {sum(cohorts)} contributions counted of {counted} trained; all four in "
          f"{cohorts.count(DEVICES)} rounds")  # fmt: skip
    lost = f"; lines of versions {sorted(missing)} were lost with the server" if missing else ""
    print(f"largest difference of the parameters from what these contributions make: {worst:.2g}{lost}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("load")
    one.add_argument("--idle", type=int, default=2000)
    one.add_argument("--active", type=int, default=100)
    one.add_argument("--rounds", type=int, default=10)
    one.add_argument("--parameters", type=int, default=25_000)
    one.add_argument("--compressor", default="Dense()")
    one.set_defaults(do=load)
    two = commands.add_parser("faults")
    two.add_argument("--seconds", type=float, default=180.0)
    two.add_argument("--every", type=float, default=60.0)
    two.add_argument("--network", default="20mbit,80ms")
    two.add_argument("--recipe", default="FedAvg(fraction=1.0)")
    two.add_argument("--parameters", type=int, default=500_000)
    two.add_argument("--train-seconds", type=float, default=0.5)
    two.set_defaults(do=faults)
    args = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    print(provenance())
    with tempfile.TemporaryDirectory() as folder:
        args.do(args, Path(folder))


if __name__ == "__main__":
    main()
