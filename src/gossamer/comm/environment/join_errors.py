"""Join errors: convert a failed rendezvous into a ConnectError with cause and remedy."""

from __future__ import annotations

import errno
import ipaddress
import multiprocessing
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from gossamer.comm.environment.launcher_env import JobEnvironment
from gossamer.comm.environment.meeting_member import Failed, Foreign, Refused, Unreachable
from gossamer.comm.environment.meeting_place import NotAnnounced
from gossamer.comm.environment.wait_timeout import VARIABLE
from gossamer.errors import ConnectError, LeftWhileJoining

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
    script again; parent_process() is only set afterwards."""
    return SPAWNED if getattr(multiprocessing.current_process(), "_inheriting", False) else TAKEN


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
