"""Shared memory between two workers of one machine, so that messages between them need not pass through the kernel.

The lower rank of a pair makes it: a file without a name, sealed against shrinking. The higher one opens it as a file of
that process. Where that is refused (other containers, other systems), the pair goes on with its socket alone.
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

from gossamer.comm.mesh.connect import Gather
from gossamer.errors import require

if sys.platform == "linux":
    from fcntl import F_ADD_SEALS, F_GET_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl

    SEALS = F_SEAL_SHRINK | F_SEAL_GROW  # or reading beyond its end would kill the reader

NAME = "gossamer"
MESSAGE_BYTES, TURNS_BYTES = 2**18, 4096  # kernels-src/shared_memory.hpp
MOST_SLOTS, SLOTS_TO_ALL = 8, 64  # of one worker to another, and to all others: 16 MiB
MARK_BYTES = 16  # at the end of the first page

Memories = dict[int, mmap.mmap]  # by rank


@dataclass(frozen=True)
class MemoryOffer:
    """Where the other end finds the memory."""

    process: int  # by its id
    number: int  # of the file in that process
    nbytes: int
    mark: str  # in hexadecimal: MARK_BYTES that are written in the memory


def share(rank: int, sockets: Sequence[socket.socket | None], all_gather_text: Gather) -> Memories:
    """Memory between this worker and others of its machine. All ranks call it; all_gather_text: all ranks' texts.

    GOSSAMER_SHARED_MEMORY=0 on either of two workers has them do without.
    """
    near = [peer for peer, each in enumerate(sockets) if each is not None and _is_here(each)] if _wanted() else []
    with ExitStack() as files:
        made, offers = _make([peer for peer in near if peer > rank], _slots(len(near)), files)
        told = [json.loads(text) for text in all_gather_text(json.dumps(offers))]
        offered = {peer: MemoryOffer(*told[peer][str(rank)]) for peer in near if str(rank) in told[peer]}
        opened = {peer: memory for peer, offer in offered.items() if (memory := _open(offer)) is not None}
        taken = [json.loads(text) for text in all_gather_text(json.dumps(list(opened)))]
    return opened | {peer: memory for peer, memory in made.items() if rank in taken[peer]}


def _wanted() -> bool:
    asked = os.environ.get("GOSSAMER_SHARED_MEMORY") or "1"
    require(
        asked in ("0", "1"),
        f"GOSSAMER_SHARED_MEMORY={asked}: that says neither yes nor no, so it is open whether workers of one machine "
        "may share memory. Write GOSSAMER_SHARED_MEMORY=0 for sockets alone, or leave it unset.",
    )
    return sys.platform == "linux" and asked == "1"


def _is_here(connection: socket.socket) -> bool:
    """Whether its other end is on this machine: no other machine has the same address."""
    named = connection.family in (socket.AF_INET, socket.AF_INET6)
    return named and bool(connection.getpeername()[0] == connection.getsockname()[0])


def _slots(near: int) -> int:
    """How many for each of so many others; none where they are too many."""
    return min(MOST_SLOTS, SLOTS_TO_ALL // near) if near else 0


def _make(peers: Sequence[int], slots: int, files: ExitStack) -> tuple[Memories, dict[int, tuple[int | str, ...]]]:
    """Memory for each of these, as far as there is any, and an offer to each. files: closes what it is made of."""
    made: Memories = {}
    offers: dict[int, tuple[int | str, ...]] = {}
    nbytes = TURNS_BYTES + 2 * slots * MESSAGE_BYTES
    with suppress(OSError):
        for peer in peers if slots else ():
            number = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            files.callback(os.close, number)
            os.ftruncate(number, nbytes)
            fcntl(number, F_ADD_SEALS, SEALS | F_SEAL_SEAL)
            memory, mark = mmap.mmap(number, nbytes), secrets.token_bytes(MARK_BYTES)
            memory[TURNS_BYTES - MARK_BYTES : TURNS_BYTES] = mark
            made[peer] = memory
            offers[peer] = astuple(MemoryOffer(os.getpid(), number, nbytes, mark.hex()))
    return made, offers


def _open(offer: MemoryOffer) -> mmap.mmap | None:
    """The memory of another process; None where it may not be had, or is not what was offered."""
    path = f"/proc/{offer.process}/fd/{offer.number}"
    with suppress(OSError), ExitStack() as files:
        if not os.readlink(path).startswith(f"/memfd:{NAME} "):
            return None  # of another process of that number
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        files.callback(os.close, file)
        if os.fstat(file).st_size != offer.nbytes or fcntl(file, F_GET_SEALS) & SEALS != SEALS:
            return None
        memory = mmap.mmap(file, offer.nbytes)
        if memory[TURNS_BYTES - MARK_BYTES : TURNS_BYTES] == bytes.fromhex(offer.mark):
            return memory
    return None
