"""Checkpoint replicas: copies of parts on other machines, if each machine has its own directory, and fetching them.

Ranks that share a directory are detected by temporary files in it. A part is copied to a rank of the next directory
under its own name, so ranks can load a save if all of its parts are in their directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.base import bounded_file
from gossamer.base.ops import NeighborAllGather, Script
from gossamer.base.transport import Transport
from gossamer.errors import CheckpointError
from gossamer.events import notice
from gossamer.train.checkpoint.agreement import AllGatherText, on_all_ranks
from gossamer.train.checkpoint.files import intact, part_files, parts_of, pieces_of, put_in_place, stage_pieces
from gossamer.train.checkpoint.fsync import make_folder
from gossamer.train.checkpoint.runs import agree_on_name, save_of

CHUNK_BYTES = 1 << 26


def directories(directory: str | os.PathLike[str], rank: int, all_gather_text: AllGatherText) -> list[tuple[int, ...]]:
    """Groups of ranks that share a directory, sorted by their first rank. Collective.

    Raises CheckpointError on all ranks if one rank cannot write into its directory.
    """
    here, name, failed = Path(directory), agree_on_name(all_gather_text), ""
    mark = here / f".rank-{rank}-{name}"
    try:
        make_folder(here)
        mark.touch()
    except OSError as error:
        failed = str(error)
    lost = [f"rank {who}: {text}" for who, text in enumerate(all_gather_text(failed)) if text]
    seen = sorted(int(path.name.split("-")[1]) for path in here.glob(f".rank-*-{name}"))
    answers = all_gather_text(",".join(map(str, seen)))  # marks are removed only after all ranks have read them
    with suppress(OSError):
        mark.unlink()
    if lost:
        raise CheckpointError(f"not every rank can write into its {os.fspath(directory)}: {'; '.join(lost)}.")
    return sorted({tuple(int(each) for each in text.split(",")) for text in answers})


def targets(groups: Sequence[Sequence[int]], replicas: int) -> dict[int, tuple[int, ...]]:
    """By rank: the ranks that keep a copy of its part, one in each of the next `replicas` directories, if available."""
    found = {}
    for at, group in enumerate(groups):
        others = [groups[(at + step) % len(groups)] for step in range(1, min(replicas, len(groups) - 1) + 1)]
        for place, rank in enumerate(group):
            found[rank] = tuple(other[place % len(other)] for other in others)
    return found


@dataclass
class ReplicaExchange:
    """Sends parts to the ranks that keep copies. The ranks that share a directory are determined on each call, since
    workers of an elastic run may change.

    run: runs a script on all ranks.
    device: of the tensors that are sent.
    """

    transport: Transport
    run: Callable[[Callable[[], Script]], Any]
    all_gather_text: AllGatherText
    device: Callable[[], torch.device]
    _noticed: bool = False

    @property
    def rank(self) -> int:
        return self.transport.rank

    def plan(self, directory: str | os.PathLike[str], replicas: int) -> dict[int, tuple[int, ...]]:
        """`targets` in this directory. Collective."""
        groups = directories(directory, self.rank, self.all_gather_text)
        if len(groups) <= replicas and not self._noticed and self.rank == 0:
            notice(
                f"{os.fspath(directory)} is one folder for all workers, so no part is written twice"
                if len(groups) == 1
                else f"parts are kept in only {len(groups)} directories, not {replicas + 1}, since there are no more"
            )
        self._noticed = True
        return targets(groups, replicas)

    def exchange(self, tree: Any, sizes: Sequence[int], plan: Mapping[int, Sequence[int]]) -> dict[int, list[bytes]]:
        """Files of the parts that this rank keeps, by rank. sizes: of all ranks' files, in bytes. Collective."""
        senders = tuple(rank for rank in sorted(plan) if self.rank in plan[rank])
        if not any(plan.values()):
            return {}
        script = partial(_exchange, pieces_of(tree), sizes, senders, tuple(plan[self.rank]), self.device())
        found: dict[int, list[bytes]] = self.run(script)
        return found


def _exchange(
    pieces: Iterable[bytes | memoryview],
    sizes: Sequence[int],
    senders: tuple[int, ...],
    receivers: tuple[int, ...],
    device: torch.device,
) -> Script:
    chunks, most = blocks(pieces, CHUNK_BYTES), max(sizes)
    found: dict[int, list[bytes]] = {rank: [] for rank in senders}
    for start in range(0, most, CHUNK_BYTES):
        sent = torch.zeros(min(CHUNK_BYTES, most - start), dtype=torch.uint8)
        chunk = next(chunks, b"")
        if chunk:
            sent[: len(chunk)] = torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
        edges = tuple((rank, 1.0) for rank in senders)
        answers = yield NeighborAllGather((sent.to(device),), edges, receivers)
        for rank, (remote,) in zip(senders, answers, strict=True):
            count = max(0, min(len(remote), sizes[rank] - start))
            if count:
                found[rank].append(_bytes(remote[:count]))
    return found


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def blocks(pieces: Iterable[bytes | memoryview], nbytes: int) -> Iterator[bytes]:
    """Divide bytes into blocks of `nbytes`; the last one may be shorter."""
    block = bytearray()
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            taken = rest[: nbytes - len(block)]
            block += taken
            rest = rest[len(taken) :]
            if len(block) == nbytes:
                yield bytes(block)
                block.clear()
    if block:
        yield bytes(block)


# -- loading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MissingPart:
    """A part that some ranks need and lack, and a rank that has it."""

    step: int
    part: int
    holder: int
    takers: tuple[int, ...]


Parts = set[tuple[int, int, str, int]]  # (step, rank, name of the save, number of parts)


def parts_here(directory: str | os.PathLike[str]) -> Parts:
    return {(step, rank, save_of(manifest), manifest["world"]) for step, rank, manifest in parts_of(directory)}


def missing(held: Sequence[Parts]) -> list[MissingPart]:
    """The parts to fetch so that all ranks can load the newest step with all parts somewhere; empty if none is needed.

    Args:
        held: by rank, the parts in its directory.
    """
    world = len(held)
    for step, save, writers in sorted({(step, save, writers) for step, _, save, writers in set().union(*held)})[::-1]:
        holders = [
            [rank for rank in range(world) if (step, part, save, writers) in held[rank]] for part in range(writers)
        ]
        if not all(holders):
            continue
        found = []
        for part in range(writers):
            needing = [part] if writers == world else range(world)
            takers = tuple(rank for rank in needing if rank not in holders[part])
            if takers:
                found.append(MissingPart(step, part, holders[part][0], takers))
        return found
    return []


def fetch(exchange: ReplicaExchange, directory: str | os.PathLike[str]) -> None:
    """Fetch missing parts into the ranks' directories from ranks with a copy. Collective.

    Raises CheckpointError on all ranks if a part cannot be read or written.
    """
    gather = exchange.all_gather_text
    held_parts = gather(json.dumps(sorted(parts_here(directory))))
    held: list[Parts] = [
        {(step, part, save, world) for step, part, save, world in json.loads(text)} for text in held_parts
    ]
    if not (missing(held) or _kept_twice(held)):
        return
    try:
        groups = directories(directory, exchange.rank, gather)
    except CheckpointError:
        if missing(held):
            raise
        return  # nothing can be written, but nothing is missing
    if len(groups) > 1:
        _take_out_damaged(directory, exchange, held, groups)
    wanted = missing(held)
    if not wanted:
        return
    first = {rank: group[0] for group in groups for rank in group}
    for each in wanted:
        takers = {first[rank] for rank in each.takers}  # one rank per directory
        _fetch(exchange, directory, each, tuple(sorted(takers)))
    if exchange.rank == 0:
        parts = ", ".join(str(each.part) for each in wanted)
        notice(
            f"step {wanted[0].step}: the part{'s' * (len(wanted) > 1)} of rank{'s' * (len(wanted) > 1)} {parts} "
            f"{'were' if len(wanted) > 1 else 'was'} missing or damaged in a {os.fspath(directory)} that needs it, and "
            "was copied from another machine"
        )


def _kept_twice(held: Sequence[Parts]) -> bool:
    return sum(map(len, held)) > len(set().union(*held))


def _take_out_damaged(
    directory: str | os.PathLike[str],
    exchange: ReplicaExchange,
    held: Sequence[Parts],
    groups: Sequence[Sequence[int]],
) -> None:
    """Remove a rank's own part of the newest step from `held` if the rank finds it damaged."""
    newest = max((step for parts in held for step, *_ in parts), default=0)
    holds_newest = any((step, part) == (newest, exchange.rank) for step, part, *_ in held[exchange.rank])
    fine = not holds_newest or intact(directory, newest, exchange.rank)
    for rank, text in enumerate(exchange.all_gather_text("" if fine else "damaged")):
        for each in next(group for group in groups if rank in group) if text else ():
            held[each].difference_update({part for part in held[each] if part[:2] == (newest, rank)})


def _fetch(
    exchange: ReplicaExchange, directory: str | os.PathLike[str], each: MissingPart, takers: tuple[int, ...]
) -> None:
    data, manifest = part_files(directory, each.step, each.part)
    pieces: list[bytes] = []

    def read() -> str:
        if exchange.rank != each.holder:
            return "0"
        pieces.extend((bounded_file.read_bytes(manifest), data.read_bytes()))
        return f"{len(pieces[0])} {len(pieces[1])}"

    def write() -> str:
        if exchange.rank in takers:
            whole = b"".join(parts[each.holder])
            stage_pieces(directory, each.step, each.part, [memoryview(whole)[length:]])
            put_in_place(directory, each.step, each.part, whole[:length])
        return ""

    sizes = [[int(part) for part in text.split()] for text in on_all_ranks(exchange.all_gather_text, each.step, read)]
    length = sizes[each.holder][0]
    senders, receivers = ((each.holder,), ()) if exchange.rank in takers else ((), takers if pieces else ())
    parts = exchange.run(
        partial(_exchange, pieces, [sum(size) for size in sizes], senders, receivers, exchange.device())
    )
    on_all_ranks(exchange.all_gather_text, each.step, write, "could be fetched")
