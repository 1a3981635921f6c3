"""Shared memory between two workers on one machine, so that their messages bypass the kernel's network stack.

The lower rank of a pair creates an anonymous file, sealed against shrinking. The higher rank opens it through /proc of
that process. If this is refused (other containers, other systems), the pair uses only its socket.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass

from gossamer.base import system
from gossamer.comm.mesh.connect import Gather
from gossamer.errors import require

NAME = "gossamer"
SEALS = 0x2 | 0x4  # F_SEAL_SHRINK | F_SEAL_GROW: a read beyond a shrunk end would kill the reader
MESSAGE_BYTES, TURNS_BYTES = 2**18, 4096  # kernels-src/shared_memory.hpp
MOST_SLOTS, SLOTS_TO_ALL = 8, 64  # from one worker to another, and to all others: 16 MiB
MARK_BYTES = 16  # at the end of the first page

Memories = dict[int, mmap.mmap]  # by rank


@dataclass(frozen=True)
class MemoryOffer:
    """Location of the memory for the other worker."""

    process: int  # process id
    number: int  # file descriptor in that process
    nbytes: int
    mark: str  # MARK_BYTES in hexadecimal that the memory contains


def share(rank: int, sockets: Sequence[socket.socket | None], all_gather_text: Gather) -> Memories:
    """Create shared memory between this worker and the others on its machine. Collective call.

    all_gather_text: all-gathers texts. If GOSSAMER_SHARED_MEMORY=0 on either worker of a pair, it uses its socket.
    """
    near = [peer for peer, each in enumerate(sockets) if each is not None and _is_here(each)] if _wanted() else []
    with ExitStack() as files:
        made, offers = _make([peer for peer in near if peer > rank], _slots(len(near)), files)
        declarations = [json.loads(text) for text in all_gather_text(json.dumps(offers))]
        offered = {
            peer: MemoryOffer(*declarations[peer][str(rank)]) for peer in near if str(rank) in declarations[peer]
        }
        opened = {peer: memory for peer, offer in offered.items() if (memory := _open(offer)) is not None}
        taken = [json.loads(text) for text in all_gather_text(json.dumps(list(opened)))]
    return opened | {peer: memory for peer, memory in made.items() if rank in taken[peer]}


def _wanted() -> bool:
    asked = os.environ.get("GOSSAMER_SHARED_MEMORY") or "1"
    require(
        asked in ("0", "1"),
        f"GOSSAMER_SHARED_MEMORY must be 0 or 1, got {asked}. Write GOSSAMER_SHARED_MEMORY=0 to use sockets between "
        "workers on one machine, or leave it unset.",
    )
    return system.IS_LINUX and asked == "1"


def _is_here(connection: socket.socket) -> bool:
    """Whether the peer is on this machine: no other machine has the same address."""
    named = connection.family in (socket.AF_INET, socket.AF_INET6)
    return named and bool(connection.getpeername()[0] == connection.getsockname()[0])


def _slots(near: int) -> int:
    """Number of slots per peer; 0 if there are too many peers."""
    return min(MOST_SLOTS, SLOTS_TO_ALL // near) if near else 0


def _make(peers: Sequence[int], slots: int, files: ExitStack) -> tuple[Memories, dict[int, tuple[int | str, ...]]]:
    """Create memory for each of these peers, as far as possible, and an offer to each. files: closes descriptors."""
    if sys.platform != "linux":
        return {}, {}
    import fcntl

    made: Memories = {}
    offers: dict[int, tuple[int | str, ...]] = {}
    nbytes = TURNS_BYTES + 2 * slots * MESSAGE_BYTES
    with suppress(OSError):
        for peer in peers if slots else ():
            number = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            files.callback(os.close, number)
            os.ftruncate(number, nbytes)
            fcntl.fcntl(number, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
            memory, mark = mmap.mmap(number, nbytes), secrets.token_bytes(MARK_BYTES)
            memory[TURNS_BYTES - MARK_BYTES : TURNS_BYTES] = mark
            made[peer] = memory
            offers[peer] = astuple(MemoryOffer(os.getpid(), number, nbytes, mark.hex()))
    return made, offers


def _open(offer: MemoryOffer) -> mmap.mmap | None:
    """Map the memory of another process; None if it is inaccessible, or differs from the offer."""
    if sys.platform != "linux":
        return None
    import fcntl

    path = f"/proc/{offer.process}/fd/{offer.number}"
    with suppress(OSError), ExitStack() as files:
        if not os.readlink(path).startswith(f"/memfd:{NAME} "):
            return None  # a different process with the same id
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        files.callback(os.close, file)
        if os.fstat(file).st_size != offer.nbytes or fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
            return None
        memory = mmap.mmap(file, offer.nbytes)
        if memory[TURNS_BYTES - MARK_BYTES : TURNS_BYTES] == bytes.fromhex(offer.mark):
            return memory
    return None
