"""Mesh transport: collectives over TCP connections of its own, by tables of hops; GPUs and texts by the engine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer import events
from gossamer.collectives import DirectAllReduce
from gossamer.core.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    Payload,
)
from gossamer.environment.run_token import run_token
from gossamer.errors import ConnectError, MismatchError, PeerLost
from gossamer.kernels.buffer_pool import empty
from gossamer.runtime.transport import Transport
from gossamer.transports.mesh.collective_selector import AUTO, ENGINE, CollectiveSelector, check_wish
from gossamer.transports.mesh.connect import connect
from gossamer.transports.mesh.link_measurement import Links, measure
from gossamer.transports.mesh.native_mesh import Mesh, available
from gossamer.transports.mesh.program import (
    FORMATS,
    Program,
    Ranks,
    broadcast_program,
    form_of,
    mean_program,
    straight_program,
)
from gossamer.transports.mesh.shared_memory import share
from gossamer.transports.mesh.stall_watchdog import requested_timeouts
from gossamer.transports.mesh.tcp_info import packets
from gossamer.transports.packing import into, join, split

ALIGNED_BYTES = 64  # so that what is received may be viewed as wider numbers
Wait = Callable[[], Any]


def mesh_transport(engine: Transport, address: str, wish: str = AUTO, known: Links | None = None) -> Transport:
    """The engine's group over connections of its own, from each rank's `address`; every rank must call it.

    known: its links; they are measured where it is None.
    The engine alone where any rank asks for it or has no compiled loops, and where workers do not reach each other.
    Raises MismatchError where they ask for different collectives, or hold different tokens of the run.
    """
    check_wish(wish)
    patience = requested_timeouts()
    if engine.world == 1:
        return engine
    wishes = engine.all_gather_text(wish if available() else ENGINE)
    if ENGINE in wishes:
        return engine
    if len(set(wishes)) > 1:
        raise MismatchError(
            f"the ranks ask for different collectives ({', '.join(wishes)}, by rank), and would wait for each other's "
            "messages for ever. Give all of them the same --collective, or the same recipe."
        )
    try:
        sockets = connect(engine.rank, engine.world, address, engine.all_gather_text, run_token() or b"")
    except ConnectError as error:
        if engine.rank == 0:
            events.notice(f"{error}: the engine's own collectives are used, which take longer on slow links")
        return engine
    mesh = Mesh(engine.rank, sockets, patience, share(engine.rank, sockets, engine.all_gather_text))
    again = partial(mesh_transport, address=address, wish=wish)
    links = known or _measured(engine, mesh, sockets, again)
    return MeshTransport(engine, mesh, CollectiveSelector(wish, links, says=engine.rank == 0), again)


def _measured(
    engine: Transport, mesh: Mesh, sockets: Sequence[socket.socket | None], again: Callable[..., Transport]
) -> Links:
    unknown = Links.alike(((0.0,) * engine.world,) * engine.world, 1.0)
    transport = MeshTransport(engine, mesh, CollectiveSelector(DirectAllReduce(), unknown), again)
    return measure(transport, mesh.round_trips(), lambda: packets(sockets))


class MeshTransport:
    """Collective operations over a mesh, next to the `engine` that made the group.

    pick: which table of hops a mean takes; again: makes such a transport over another engine with links that are known.
    """

    def __init__(
        self, engine: Transport, mesh: Mesh, pick: CollectiveSelector, again: Callable[..., Transport]
    ) -> None:
        self._engine, self._mesh, self._pick, self._again = engine, mesh, pick, again
        self._parts: list[Transport] = []
        self.rank, self.world = engine.rank, engine.world
        self._everyone: Ranks = tuple(range(self.world))

    def answer(self, op: CollectiveOp) -> Any:
        return self.begin(op)()

    def begin(self, op: CollectiveOp) -> Wait:
        return self._begin(op, self._everyone)

    def _begin(self, op: CollectiveOp, ranks: Ranks) -> Wait:
        """Begin an operation among some ranks of the whole group; its peers are places in `ranks`."""
        match op:
            case Coalesced(ops):
                waiting = [self._begin(each, ranks) for each in ops]
                return lambda: [wait() for wait in waiting]
            case InGroup(some, inner):
                return self._begin(inner, tuple(ranks[each] for each in some))
            case _ if not _is_served(op):
                return self._engine.begin(InGroup(ranks, op) if len(ranks) < self.world else op)
            case AllReduceMean(tensor, out):
                return self._mean(tensor, out, ranks)
            case AllGather(payload):
                return self._gather(payload, ranks)
            case AllToAll(parts):
                return self._exchange(parts, ranks)
            case NeighborAllGather(payload):
                return self._mix(payload, op.told, op.hears, ranks)

    def _mean(self, tensor: Tensor, out: Tensor | None, ranks: Ranks) -> Wait:
        mean = into(out, tensor)
        flat = mean.contiguous()
        chosen = self._pick(mean.nbytes, mean.dtype.itemsize, ranks)
        program = mean_program(chosen, mean.numel(), mean.dtype, ranks.index(self.rank), ranks)
        start = flat.data_ptr()
        places = [start + offset for offset in program.offsets]
        return self._run(program, places, flat, lambda: mean if flat is mean else mean.copy_(flat))

    def _gather(self, payload: Payload, ranks: Ranks) -> Wait:
        joint = join(payload)
        told = dict.fromkeys(ranks, joint)
        form = form_of("gather", joint.nbytes, ranks)
        return self._straight(told, dict.fromkeys(ranks, joint.nbytes), form, [(peer, payload) for peer in ranks])

    def _exchange(self, parts: Sequence[Payload], ranks: Ranks) -> Wait:
        told = {peer: join(part) for peer, part in zip(ranks, parts, strict=True)}
        mine = told[self.rank].nbytes
        form = form_of("exchange", tuple(each.nbytes for each in told.values()), ranks)
        like = parts[ranks.index(self.rank)]
        return self._straight(told, dict.fromkeys(ranks, mine), form, [(peer, like) for peer in ranks])

    def _mix(self, payload: Payload, tells: Sequence[int], hears: Sequence[int], ranks: Ranks) -> Wait:
        joint = join(payload)
        told = {ranks[peer]: joint for peer in tells} | {self.rank: joint}
        heard = [ranks[peer] for peer in hears]
        form = form_of("mix", joint.nbytes, ranks)
        return self._straight(told, dict.fromkeys(heard, joint.nbytes), form, [(peer, payload) for peer in heard])

    def _straight(
        self, told: dict[int, Tensor], heard: dict[int, int], form: int, answers: Sequence[tuple[int, Payload]]
    ) -> Wait:
        """told: bytes for each rank; heard: how many come from each; answers: of which rank, and of what form."""
        to = tuple(told[peer].nbytes if peer in told and peer != self.rank else 0 for peer in self._everyone)
        of = tuple(heard.get(peer, 0) if peer != self.rank else 0 for peer in self._everyone)
        stride = -(-max(of) // ALIGNED_BYTES) * ALIGNED_BYTES
        room = empty(sum(map(bool, of)) * stride, torch.uint8)
        speakers = [peer for peer in self._everyone if of[peer]]
        came = {peer: room[row * stride :][: of[peer]] for row, peer in enumerate(speakers)}
        places = [told[peer].data_ptr() if to[peer] else 0 for peer in self._everyone]
        places += [came[peer].data_ptr() if of[peer] else 0 for peer in self._everyone]
        if self.rank in heard:
            came[self.rank] = told[self.rank]
        nothing = room[:0]

        def answer() -> list[Payload]:
            return [split(came.get(peer, nothing), like) for peer, like in answers]

        return self._run(straight_program(to, of, form), places, (told, room), answer)

    def _run(self, program: Program, places: Sequence[int], keep: object, answer: Wait) -> Wait:
        with self._translated():
            op = self._mesh.begin(program, places, keep)

        def wait() -> Any:
            with self._translated():
                self._mesh.wait(op)
            return answer()

        return wait

    def make_progress(self) -> bool:
        return self._mesh.make_progress()

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """All of them as one operation: its latency is waited for once."""
        filled = [tensor.detach() for tensor in tensors if tensor.numel()]
        if not _is_here(filled):
            self._engine.broadcast_(tensors, source)
            return
        dense = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in filled]
        sizes = tuple(tensor.nbytes for tensor in dense)
        program, parts = broadcast_program(sizes, source, self.rank, self._everyone)
        places = [dense[part.tensor].data_ptr() + part.offset for part in parts]
        self._run(program, places, dense, lambda: None)()
        for tensor, heard in zip(filled, dense, strict=True):
            if heard is not tensor:
                tensor.copy_(heard)

    def all_gather_text(self, text: str) -> list[str]:
        return self._engine.all_gather_text(text)

    def part(self, size: int) -> Transport:
        first = self.rank - self.rank % size
        known = self._pick.links.among(range(first, first + size))
        self._parts.append(self._again(self._engine.part(size), known=known))
        return self._parts[-1]

    @property
    def links(self) -> str:
        return self._pick.links.text

    @links.setter
    def links(self, text: str) -> None:
        if not text or len((known := Links.of(text)).round_trips) != self.world:
            return  # of another group
        self._pick.links = known
        for part in self._parts:
            first = self.rank - part.rank
            part.links = self._pick.links.among(range(first, first + part.world)).text

    def close(self) -> None:
        for part in self._parts:
            part.close()
        self._mesh.close()
        self._engine.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except PeerLost as failure:
            raise PeerLost(
                f"the group broke while rank {self.rank} of {self.world} waited for an answer: {failure}. That rank's "
                f"own output says why. If it merely ended its session while rank {self.rank} went on, stop all ranks "
                "together: session.ask_to_stop(). Where ranks run out of data at different times, write "
                "`with session.epoch():` around the loop over batches."
            ) from failure


def _is_served(op: CollectiveOp) -> bool:
    """Whether the compiled loops can answer it: formats that they know, in this machine's own memory."""
    return _is_here(op.tensors()) and (not isinstance(op, AllReduceMean) or op.tensor.dtype in FORMATS)


def _is_here(payload: Sequence[Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in payload)
