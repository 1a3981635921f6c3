"""Rendezvous: the machines of a job connect to a key-value store of machine 0's launcher."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from gossamer.base.host_port import LOOPBACK, is_loopback, read_host_port
from gossamer.base.units import first_line
from gossamer.comm.environment import interface_towards, interfaces
from gossamer.comm.environment.emulated_host import in_namespace, silence_torch
from gossamer.comm.environment.interruptible_call import interruptible
from gossamer.comm.environment.listening import dialable, listen_as, names_this_machine
from gossamer.comm.environment.tcp_store import hosted_store, remote_store
from gossamer.comm.environment.wait_timeout import (
    USUAL_SECONDS,
    VARIABLE,
    duration,
    engine_timeout,
    timeout_seconds,
    waiting_for,
)
from gossamer.errors import ConnectError
from gossamer.launcher.job import Job

DIAL_SECONDS = 5.0  # of one attempt without an answer
NOTICE_SECONDS = 10.0
SELF_REACH_SECONDS = 2.0
POLL_SECONDS = 0.1
END_SECONDS = 300.0  # for the other machines to finish after this one
RUN_ID = "gossamer"
LIKELY_CAUSES: dict[type[OSError], str] = {
    socket.gaierror: "This machine cannot resolve the name: write the address instead.",
    ConnectionRefusedError: "The machine answers, but no launcher listens there: it has not been started, or ended.",
}

Met = Callable[[Store, str], None]


def ignore_peer(store: Store, address: str) -> None:
    """Default for `met`: does nothing."""


class MachineRendezvous:
    """Rendezvous of the machines of one run. Machine 0 serves a store at one of its addresses.

    Args:
        job: has the endpoint, the number of machines and this machine's number.
        met: called after the rendezvous with the store and the address of machine 0.

    Raises:
        ConnectError: machine 0 cannot listen, or machines are missing after the timeout.
    """

    def __init__(self, job: Job, met: Met = ignore_peer) -> None:
        self._job, self._met = job, met
        self.run = ""  # the run's name, the same on all machines; set by `meet`, as the next four
        self.first_rank = self.world = 0
        self.seals = False  # whether a machine asks for it
        self.host, self.port = LOOPBACK, 0
        self._store: Store | None = None
        self._listener = None
        if job.rendezvous is not None:
            self.host, self.port = split_endpoint(job.rendezvous)
        self._address = self.host
        if job.node_rank == 0:
            self._listener = listen_at(job.rendezvous, several_machines=job.nodes > 1, interface=job.interface)
            self._address = str(self._listener.getsockname()[0])
            self.host, self.port = dialable(self._listener, self.host), self._listener.getsockname()[1]

    def meet(self) -> None:
        """Wait for all machines."""
        try:
            self._store, workers, sealing = interruptible(self._meet, look=lambda: None)
        except DistError as problem:
            raise ConnectError(
                f"The {self._job.nodes} machines did not all connect to {self._job.rendezvous} within "
                f"{duration(timeout_seconds())} ({first_line(problem)}). Start the same command on every "
                "machine, with --node-rank 0 on the one that has this address, and open the port in its firewall."
            ) from problem
        self.first_rank, self.world = sum(workers[: self._job.node_rank]), sum(workers)
        self.seals = any(sealing)
        self._met(self._store, self._address)
        self.run = self._store.compare_set("run", "", secrets.token_hex(8)).decode()

    def _meet(self) -> tuple[Store, list[int], list[bool]]:
        """Return the store; and for each machine its number of workers, and whether it asks for encryption.

        The machines may answer differently, because the name of machine 0 may be a loopback address there.
        """
        job = self._job
        timeout = engine_timeout() or timedelta(seconds=USUAL_SECONDS)
        if self._listener is None:
            store = remote_store(self.host, self.port, world=job.nodes, timeout=timeout)
        else:
            store = hosted_store(self.host, self._listener, world=job.nodes, timeout=timeout)
        store.set(f"machine/{job.node_rank}", f"{job.workers} {job.seals:d}")
        machines = [store.get(f"machine/{node}").split() for node in range(job.nodes)]
        return store, [int(workers) for workers, _ in machines], [seals == b"1" for _, seals in machines]

    def wait_for_ends(self) -> None:
        """Wait up to END_SECONDS for all machines to finish: workers of others need the store of machine 0."""
        store = self._store
        if store is None or self._job.nodes == 1:
            return

        def wait() -> None:
            if store.add("finished", 1) == self._job.nodes:
                store.set("all finished", "")
            store.wait(["all finished"], timedelta(seconds=END_SECONDS))

        with contextlib.suppress(RuntimeError):  # machine 0 has ended, or another one did not finish
            interruptible(wait, look=lambda: None)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    try:
        return read_host_port(endpoint)
    except ValueError:
        raise ConnectError(
            f"{endpoint!r:.80} is not a rendezvous endpoint: it needs a host and a port. Write --rendezvous HOST:PORT, "
            "such as --rendezvous 10.0.0.1:29500, with the address of the machine whose --node-rank is 0."
        ) from None


def listen_at(endpoint: str | None, *, several_machines: bool, interface: str | None) -> socket.socket:
    """Listen at the rendezvous endpoint, on one address of this machine; on loopback without `endpoint`.

    Raises ConnectError at once if it cannot listen or the endpoint is another machine; torch would retry for minutes.
    """
    host, port = split_endpoint(endpoint) if endpoint is not None else ("", 0)
    try:
        listener = listen_as(
            host, port, several_machines=several_machines, interface_address=_outward_address(interface)
        )
    except OSError as problem:
        reason = "is in use" if problem.errno == errno.EADDRINUSE else f"cannot be listened on ({problem})"
        raise ConnectError(
            f"Port {port} {reason} on this machine, so the workers cannot connect to {endpoint}. "
            f"Use another one on all machines: --rendezvous {str(endpoint).rpartition(':')[0]}:{port + 1}; "
            f"`ss -ltnp sport = :{port}` shows which process has it."
        ) from None
    if host and not names_this_machine(host) and (failure := _dial(host, port, SELF_REACH_SECONDS)) is not None:
        listener.close()
        raise ConnectError(
            f"{endpoint} does not lead to this machine ({failure}), and the other machines connect to machine 0. "
            "Write this machine's own address in --rendezvous, or --node-rank 0 on the machine with this address."
        )
    return listener


def _outward_address(interface: str | None) -> str | None:
    """The address of this interface, or of the only one besides loopback; None if there are several."""
    owned = interfaces()
    if interface is not None:
        return owned.get(interface)
    outward = [address for address in owned.values() if not is_loopback(address)]
    return outward[0] if len(outward) == 1 else None


def reach(
    endpoint: str, seconds: float, note: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> None:
    """Wait up to `seconds` until machine 0 listens, and note the likely cause every ten seconds.

    Raises:
        ConnectError: with endpoint, interface and last error. A name that cannot be resolved raises at once.
    """
    host, port = split_endpoint(endpoint)
    began = clock()
    notice_at = began + NOTICE_SECONDS
    while (problem := _dial(host, port, min(DIAL_SECONDS, began + seconds - clock()))) is not None:
        now = clock()
        if isinstance(problem, socket.gaierror) or now + POLL_SECONDS >= began + seconds:
            interface = interface_towards(host) or "the system's choice"
            raise ConnectError(
                f"No connection to machine 0 at {endpoint}, interface {interface}: {problem}. {_likely_cause(problem)} "
                "Start it with --node-rank 0 and the same --rendezvous. All machines wait for each other; to wait "
                f"longer, set {VARIABLE}=7200 (seconds)."
            )
        if now >= notice_at:
            notice_at += NOTICE_SECONDS * (1 + (now - notice_at) // NOTICE_SECONDS)
            note(
                f"has waited {duration(round(now - began))} for machine 0 to listen at {endpoint} ({problem}); "
                f"waiting {waiting_for(seconds)}. {_likely_cause(problem)}"
            )
        time.sleep(POLL_SECONDS)


def _dial(host: str, port: int, seconds: float) -> OSError | None:
    """The error of one connection attempt; None if it succeeded."""
    try:
        socket.create_connection((host, port), max(seconds, POLL_SECONDS)).close()
    except OSError as problem:
        return problem
    return None


def _likely_cause(problem: OSError) -> str:
    return LIKELY_CAUSES.get(
        type(problem), "No answer: the address is wrong, its machine is off, or a firewall blocks it."
    )


def serve_store(endpoint: str, network: Path | None = None) -> tuple[Store, str]:
    """Serve a key-value store at `endpoint` only, as long as the returned store is referenced.

    Args:
        endpoint: HOST:PORT, with port 0 for any free one.
        network: file of the network namespace to listen in; None for this process's own.

    Returns:
        The store and its endpoint.
    """
    address = read_host_port(endpoint, least=0)
    if network is None:
        return _serve(*address)
    silence_torch()
    return in_namespace(network, lambda: _serve(*address))


def _serve(host: str, port: int) -> tuple[Store, str]:
    try:
        listener = socket.create_server((host, port))
    except OSError as problem:
        raise ConnectError(
            f"The launcher cannot listen at {host} for its workers ({problem}), so they cannot connect. Name "
            "another interface: --interface NAME"
        ) from None
    endpoint = f"{host}:{listener.getsockname()[1]}"
    return hosted_store(host, listener), endpoint
