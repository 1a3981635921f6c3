"""Meeting place: the address where the workers meet, at rank 0 itself or found through a launcher's store; cause and
remedy where they cannot meet."""

from __future__ import annotations

import errno
import ipaddress
import multiprocessing
import os
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from gossamer.base.host_port import Address, read_host_port
from gossamer.base.units import first_line
from gossamer.comm.environment.launcher_env import JobEnvironment
from gossamer.comm.environment.listening import dialable, listen_as
from gossamer.comm.environment.meeting_member import Failed, Foreign, Refused, Unreachable
from gossamer.comm.environment.tcp_store import hosted_store, remote_store
from gossamer.comm.environment.wait_timeout import VARIABLE
from gossamer.errors import ConnectError, LeftWhileJoining

AGENT_SECONDS = 10.0  # for the launcher's store to answer: it starts before any worker


class NotAnnounced(ConnectionRefusedError):
    """Rank 0 has not published its address."""


class MeetingPlace(ABC):
    """How ranks find the meeting in rank 0 and torch's store.

    Args:
        job: Place of this process in the job.
        address: Address of the interface for this job's traffic, if known.
    """

    def __init__(self, job: JobEnvironment, address: str | None) -> None:
        self._job = job
        self._address = address

    @abstractmethod
    def listen(self) -> socket.socket:
        """Return rank 0's listener. Raises OSError, with EADDRINUSE if another process has the address."""

    @abstractmethod
    def locate(self) -> Address:
        """Return rank 0's address. Raises OSError if it is not known yet."""

    @abstractmethod
    def store(self, port: int, host: str) -> Store:
        """Return the store, at port `port` of `host`. Raises RuntimeError if it does not answer."""

    @abstractmethod
    def store_port(self) -> int:
        """At rank 0, after `listen`: the port of its store; 0 if the launcher has the store."""

    def _listen(self, host: str, port: int) -> socket.socket:
        several = self._job.local_world < self._job.world
        return listen_as(host, port, several_machines=several, interface_address=self._address)


class AtRankZero(MeetingPlace):
    """Rank 0 listens at MASTER_ADDR and MASTER_PORT, and also hosts torch's store, for authenticated ranks only."""

    def __init__(self, job: JobEnvironment, address: str | None) -> None:
        super().__init__(job, address)
        self._here = (job.master_address or "", job.master_port or 0)
        self._served: Store | None = None

    def listen(self) -> socket.socket:
        host, port = self._here
        listener = self._listen(host, port)
        self._here = dialable(listener, host), port
        return listener

    def locate(self) -> Address:
        return self._here

    def store_port(self) -> int:
        listener = self._listen(self._here[0], 0)
        port = int(listener.getsockname()[1])
        self._served = hosted_store(self._here[0], listener)
        return port

    def store(self, port: int, host: str) -> Store:
        return self._served or remote_store(host, port)


class ByAgentStore(MeetingPlace):
    """A launcher's store, which has no secret, holds rank 0's address. Raises OSError if it does not answer."""

    def __init__(self, job: JobEnvironment, address: str | None) -> None:
        super().__init__(job, address)
        host, port = job.master_address or "", job.master_port or 0
        socket.create_connection((host, port), AGENT_SECONDS).close()  # torch's own client prints stack traces
        try:
            self._agent = remote_store(host, port, timeout=timedelta(seconds=AGENT_SECONDS))
        except RuntimeError as problem:
            raise OSError(first_line(problem)) from problem
        # The store persists when the workers restart
        self._pin = f"gossamer/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/meeting"

    def listen(self) -> socket.socket:
        host = self._address or self._job.master_address or ""
        listener = self._listen(host, 0)
        here = f"{dialable(listener, host)}:{listener.getsockname()[1]}"
        try:
            if (held := self._agent.compare_set(self._pin, "", here).decode()) != here:
                self._replace(held, here)
        except BaseException:
            listener.close()
            raise
        return listener

    def _replace(self, held: str, here: str) -> None:
        """Take over from a rank 0 that has ended."""
        try:
            socket.create_connection(_address(held), 1.0).close()
        except OSError:
            self._agent.set(self._pin, here)
            return
        raise FileExistsError(f"another worker is already present as rank {self._job.rank}, at {held}")

    def locate(self) -> Address:
        try:
            if not self._agent.check([self._pin]):
                raise NotAnnounced("it has not joined the meeting")
            return _address(self._agent.get(self._pin).decode(errors="replace"))
        except RuntimeError as problem:
            raise ConnectionRefusedError(first_line(problem)) from None

    def store_port(self) -> int:
        return 0

    def store(self, port: int, host: str) -> Store:
        return self._agent


def _address(text: str) -> Address:
    try:
        return read_host_port(text)
    except ValueError:
        raise ConnectionRefusedError(f"invalid rendezvous address {text[:60]!r}") from None


def meeting_place(job: JobEnvironment, address: str | None) -> MeetingPlace:
    """Choose the meeting place for this launcher. Raises OSError if the launcher's store does not answer."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return ByAgentStore(job, address)
    return AtRankZero(job, address)


# -- cause and remedy of a failed rendezvous ---------------------------------------------------------------------------

REFUSED = (
    "Nothing listens there: rank 0 was not started, is still importing or has failed, or MASTER_ADDR or MASTER_PORT is "
    "not rank 0's. Check rank 0's output."
)
NOT_ANNOUNCED = "Rank 0 is still importing or loading, or failed before gossamer.init(). Check its output."
SILENT = (
    "The address does not answer: it is wrong, its machine is off or booting, or a firewall drops the packets. "
    "Open the port on rank 0's machine, or choose another network with `--interface`."
)
NAMELESS = (
    "The name cannot be resolved on this machine: it is misspelled, or rank 0's machine is not up yet. Rank 0's "
    "IP address always works: MASTER_ADDR=<address>."
)
TAKEN = (
    "Another program, perhaps an earlier run of yours, already uses this port. Stop it, or choose another: "
    "MASTER_PORT=<a free port>, the same for every worker. To keep workers of an earlier run out, give all workers of "
    "this run a common name: GOSSAMER_RUN=<a name>."
)
FOREIGN = (
    "Another program uses this port. Stop it, or choose another port, the same for every worker: "
    "MASTER_PORT=<a free port>. If rank 0 was started, it reports the same problem."
)
GONE = (
    "Its output has the cause, unless it was killed from outside: check that first. All workers were notified; restart "
    "all of them."
)
STRAY = "This worker was rejected, and the others keep waiting for the right one."
SPAWNED = (
    "That worker started this process: a DataLoader worker, like any spawned process, imports the script again, which "
    'then joins again. Put the program under `if __name__ == "__main__":`'
)
CHILD = (
    "This process was started by multiprocessing and has the rank of the worker that started it. The launcher has "
    "started all workers already: call the training function once in each, without torch.multiprocessing.spawn."
)
LATE = f"To wait longer, set {VARIABLE}=7200 (seconds) for every worker."
FEW = f"Too few workers were started, or some failed before joining: check their output. {LATE}"
BLOCKED = (
    "A firewall blocks connections between the workers, or the interface is not on the network that connects the "
    "machines. Open the ports between them, or name the interface: `gossamer run --interface NAME ...`."
)


def join_error(job: JobEnvironment, what: str, cause: str, kind: type[ConnectError] = ConnectError) -> ConnectError:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "the system's choice")
    return kind(
        f"Rank {job.rank} of {job.world} could not join: {what} (meeting point "
        f"{job.master_address}:{job.master_port}, interface {interface}). {cause}".rstrip()
    )


def check_address(job: JobEnvironment) -> None:
    """Reject an invalid MASTER_ADDR at once, without waiting for a machine to start. Raises ConnectError."""
    if job.master_address is None or job.master_port is None:
        raise join_error(job, "the rendezvous address is unknown", "Set MASTER_ADDR and MASTER_PORT for every worker.")
    try:
        ipaddress.ip_address(job.master_address)
    except ValueError:
        labels = job.master_address.rstrip(".").split(".")
        if not all(re.fullmatch(r"[\w-]{1,63}", label) for label in labels) or labels[-1].isdecimal():
            raise join_error(
                job,
                f"MASTER_ADDR={job.master_address[:60]!r} is neither an IP address nor a host name",
                "Write rank 0's address without a port: MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
            ) from None


def _taken() -> str:
    """Remedy if this rank is already present. multiprocessing sets `_inheriting` while a spawned process imports the
    script again, and parent_process() afterwards."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return SPAWNED
    return TAKEN if multiprocessing.parent_process() is None else CHILD


@contextmanager
def explained(job: JobEnvironment) -> Iterator[None]:
    """Convert a failure of the rendezvous into a ConnectError with cause and remedy."""
    try:
        yield
    except Failed as failed:
        if failed.left:
            raise join_error(job, str(failed), GONE, LeftWhileJoining) from None
        raise join_error(job, str(failed), FEW) from None
    except Refused as refused:
        raise join_error(job, f"rank 0 refused it: {refused}", _taken() if refused.taken else STRAY) from None
    except Foreign as foreign:
        raise join_error(job, str(foreign), FOREIGN) from None
    except FileExistsError as held:
        raise join_error(job, str(held), _taken()) from None
    except Unreachable as unreachable:
        raise _no_connection(job, unreachable.problem) from None
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise join_error(job, f"the meeting point cannot be opened ({problem})", _taken()) from problem
        raise _no_connection(job, problem) from problem


def _no_connection(job: JobEnvironment, problem: OSError) -> ConnectError:
    return join_error(job, f"no connection to rank 0 ({problem})", f"{likely_cause(problem)} {LATE}")


def likely_cause(problem: OSError) -> str:
    """Return likely causes and remedies if rank 0 cannot be reached."""

    causes = {socket.gaierror: NAMELESS, ConnectionRefusedError: REFUSED, NotAnnounced: NOT_ANNOUNCED}
    return causes.get(type(problem), SILENT)
