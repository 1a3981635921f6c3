"""Join errors: turn what goes wrong at the meeting into a ConnectError that says what to do."""

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
    "Nothing listens there: rank 0 was not started, still imports or has failed, or MASTER_ADDR or MASTER_PORT is "
    "not rank 0's. Look at rank 0's own output."
)
NOT_ANNOUNCED = "Rank 0 still imports or loads, or has failed before gossamer.init(): look at its own output."
SILENT = (
    "The address does not answer: it is wrong, its machine is off or still boots, or a firewall drops the packets. "
    "Open the port on rank 0's machine, or name another network with `--interface`."
)
NAMELESS = (
    "The name cannot be resolved here, or not yet: it may be mistyped, or appear when rank 0's machine does. Rank 0's "
    "IP address always works: MASTER_ADDR=<address>."
)
TAKEN = (
    "Another program, perhaps an earlier run of yours, already uses this port. Stop it, or choose another: "
    "MASTER_PORT=<a free port>, the same for every worker. Workers that share a name, GOSSAMER_RUN=<a name>, take none "
    "of an earlier run for theirs."
)
FOREIGN = (
    "Another program uses this port: stop it, or choose another, the same for every worker: MASTER_PORT=<a free port>. "
    "If rank 0 was started, it has said the same."
)
GONE = (
    "Its own output says why, unless it was killed from outside: look there first. All workers were told; start all of "
    "them again."
)
STRAY = "This worker was not taken, and the others go on waiting for the one that belongs to them."
SPAWNED = (
    "That is the worker which starts this process: a DataLoader's worker, like any process that is spawned, imports "
    'the script again, which then joins again. Put the program under `if __name__ == "__main__":`'
)
LATE = f"Workers that need longer are waited for with {VARIABLE}=7200, in seconds, for all of them."
FEW = f"Too few workers were started, or some failed before joining: look at their output. {LATE}"
BLOCKED = (
    "A firewall blocks connections between the workers, or the interface is not the one that joins the "
    "machines. Open the ports between them, or name the interface: `gossamer run --interface NAME ...`."
)


def join_error(job: JobEnvironment, what: str, cause: str, kind: type[ConnectError] = ConnectError) -> ConnectError:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "the system's choice")
    return kind(
        f"Rank {job.rank} of {job.world} could not join: {what} (meeting point "
        f"{job.master_address}:{job.master_port}, interface {interface}). {cause}".rstrip()
    )


def check_address(job: JobEnvironment) -> None:
    """Refuse at once what can be no address, whatever machine starts later. Raises ConnectError."""
    if job.master_address is None or job.master_port is None:
        raise join_error(job, "no meeting point is known", "Set MASTER_ADDR and MASTER_PORT for every worker.")
    try:
        ipaddress.ip_address(job.master_address)
    except ValueError:
        labels = job.master_address.rstrip(".").split(".")
        if not all(re.fullmatch(r"[\w-]{1,63}", label) for label in labels) or labels[-1].isdecimal():
            raise join_error(
                job,
                f"MASTER_ADDR={job.master_address[:60]!r} is no address, nor the name of a machine",
                "Write rank 0's, without a port: MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
            ) from None


def _taken() -> str:
    """Why this rank is taken already. `_inheriting` is how multiprocessing knows that it imports the script again; its
    parent_process() is set only after that."""
    return SPAWNED if getattr(multiprocessing.current_process(), "_inheriting", False) else TAKEN


@contextmanager
def explained(job: JobEnvironment) -> Iterator[None]:
    """Turn what goes wrong at the meeting into a ConnectError that says what to do."""
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
    """What may have to be done where rank 0 cannot be reached."""
    causes = {socket.gaierror: NAMELESS, ConnectionRefusedError: REFUSED, NotAnnounced: NOT_ANNOUNCED}
    return causes.get(type(problem), SILENT)
