"""Mesh operations: the collectives that the compiled loops support, each as a program over the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor

from gossamer.base.kernels.buffer_pool import empty, scratch_for
from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    NeighborAllGather,
    Payload,
    SimpleOp,
    payload_bytes,
)
from gossamer.comm.mesh.collective_selector import CollectiveSelector
from gossamer.comm.mesh.native_mesh import Mesh
from gossamer.comm.mesh.program import (
    Program,
    Ranks,
    broadcast_program,
    form_of,
    hub_gather_program,
    mean_program,
    straight_program,
)
from gossamer.comm.packing import dense, join, split
from gossamer.errors import PeerLost

ALIGNED_BYTES = 64  # so that received bytes may be viewed as wider types

Wait = Callable[[], Any]


class MeshOperations:
    """One rank's operations over a mesh. A failure closes the mesh at once, which notifies the ranks that wait for it.

    Args:
        mesh: The connections.
        pick: Selects the all-reduce algorithm of a mean.
        advice: Remedy for a broken group, appended to each PeerLost.
    """

    def __init__(self, mesh: Mesh, pick: CollectiveSelector, advice: str = "") -> None:
        self.mesh, self.pick, self._advice = mesh, pick, advice
        self.rank, self.world = mesh.rank, mesh.world
        self.everyone: Ranks = tuple(range(self.world))

    def begin(self, op: SimpleOp, ranks: Ranks) -> Wait:
        """Begin an operation on a subgroup: tensors in host memory, a mean of one of FORMATS. Peers in `op` are indices
        into `ranks`."""
        match op:
            case AllReduceMean(tensor, out):
                return self._mean(tensor, out, ranks)
            case AllGather():
                return self._gather(op, ranks)
            case AllToAll():
                return self._exchange(op, ranks)
            case NeighborAllGather(payload):
                return self._mix(payload, op.receivers, op.senders, ranks)

    def _mean(self, tensor: Tensor, out: Tensor | None, ranks: Ranks) -> Wait:
        """Write the mean to `out` or to new memory, without copying `tensor` first. `tensor` is unchanged unless it is
        `out`."""
        source = dense(tensor)
        flat = scratch_for(source.numel(), source.dtype, source.device) if out is None else out.contiguous()
        if len(ranks) == 1:
            flat.view(-1).copy_(source.view(-1))
        chosen = self.pick(source.nbytes, source.dtype.itemsize, ranks)
        program = mean_program(chosen, source.numel(), source.dtype, ranks.index(self.rank), ranks)
        places = [flat.data_ptr() + offset for offset in program.offsets]
        sources = [source.data_ptr() + offset for offset in program.offsets]

        def answer() -> Tensor:
            if out is None:
                return flat.view(tensor.shape)
            return out if out.is_contiguous() else out.copy_(flat)

        return self.run(program, places, (flat, source), answer, sources)

    def _gather(self, op: AllGather, ranks: Ranks) -> Wait:
        joint = join(op.payload)
        if self.pick.has_hubs:
            likes = op.meta_answer(len(ranks), ranks.index(self.rank))
            sizes = tuple(map(payload_bytes, likes))
            if (hub := self.pick.gathering_hub(sizes, ranks)) is not None:
                return self._gather_by(hub, joint, sizes, likes, ranks)
        outgoing = dict.fromkeys(ranks, joint)
        if op.forms is not None:
            return self._unequal(outgoing, op, ranks)
        form = form_of("gather", joint.nbytes, ranks)
        answers = [(peer, op.payload) for peer in ranks]
        return self._straight(outgoing, dict.fromkeys(ranks, joint.nbytes), form, answers)

    def _gather_by(
        self, hub: int, joint: Tensor, sizes: tuple[int, ...], likes: Sequence[Payload], ranks: Ranks
    ) -> Wait:
        """All-gather by a hub, an index into `ranks`, which sends each rank the payloads of all others."""
        place = ranks.index(self.rank)
        stride = -(-max(sizes) // ALIGNED_BYTES) * ALIGNED_BYTES
        room = empty(len(ranks) * stride, torch.uint8)
        parts = [room[index * stride :][:size] for index, size in enumerate(sizes)]
        parts[place] = joint
        places = [part.data_ptr() if part.numel() else 0 for part in parts]

        def answer() -> list[Payload]:
            return [split(part, like) for part, like in zip(parts, likes, strict=True)]

        return self.run(hub_gather_program(sizes, hub, place, ranks), places, (joint, room), answer)

    def _exchange(self, op: AllToAll, ranks: Ranks) -> Wait:
        outgoing = {peer: join(part) for peer, part in zip(ranks, op.parts, strict=True)}
        if op.forms is not None:
            return self._unequal(outgoing, op, ranks)
        own = outgoing[self.rank].nbytes
        form = form_of("exchange", tuple(each.nbytes for each in outgoing.values()), ranks)
        like = op.parts[ranks.index(self.rank)]
        return self._straight(outgoing, dict.fromkeys(ranks, own), form, [(peer, like) for peer in ranks])

    def _unequal(self, outgoing: dict[int, Tensor], op: AllGather | AllToAll, ranks: Ranks) -> Wait:
        """Begin an operation with `forms`: the messages of each rank have their own size."""
        likes = dict(zip(ranks, op.meta_answer(len(ranks), ranks.index(self.rank)), strict=True))
        received = {peer: payload_bytes(like) for peer, like in likes.items()}
        form = form_of(op.name, tuple(received.values()), ranks)
        return self._straight(outgoing, received, form, [*likes.items()])

    def _mix(self, payload: Payload, receivers: Sequence[int], senders: Sequence[int], ranks: Ranks) -> Wait:
        joint = join(payload)
        outgoing = {ranks[peer]: joint for peer in receivers} | {self.rank: joint}
        peers = [ranks[peer] for peer in senders]
        form = form_of("mix", joint.nbytes, ranks)
        return self._straight(outgoing, dict.fromkeys(peers, joint.nbytes), form, [(peer, payload) for peer in peers])

    def begin_bytes(self, local: Tensor, sizes: Sequence[int]) -> Wait:
        """All-gather bytes of different lengths. sizes: by rank, equal on every rank."""
        outgoing, incoming = dict.fromkeys(self.everyone, local), dict(enumerate(sizes))
        likes = [(peer, (torch.empty(size, dtype=torch.uint8, device="meta"),)) for peer, size in incoming.items()]
        return self._straight(outgoing, incoming, form_of("bytes", tuple(sizes)), likes)

    def begin_nothing(self) -> Wait:
        """Begin an operation in which this rank neither sends nor receives."""
        nothing = (0,) * self.world
        return self.run(
            straight_program(nothing, nothing, form_of("nothing")), (0,) * 2 * self.world, None, lambda: None
        )

    def deliver(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int]) -> dict[int, Tensor]:
        """Send the bytes `outgoing[j]` to rank j, and receive `incoming[j]` bytes from rank j."""
        likes = [(peer, (torch.empty(size, dtype=torch.uint8, device="meta"),)) for peer, size in incoming.items()]
        came = self._straight(dict(outgoing), dict(incoming), form_of("deliver"), likes)()
        return {peer: remote for peer, (remote,) in zip(incoming, came, strict=True)}

    def _straight(
        self, outgoing: dict[int, Tensor], incoming: dict[int, int], form: int, answers: Sequence[tuple[int, Payload]]
    ) -> Wait:
        """outgoing: bytes by rank; incoming: their number from each; answers: (sender, layout) of each result."""
        to = tuple(outgoing[peer].nbytes if peer in outgoing and peer != self.rank else 0 for peer in self.everyone)
        of = tuple(incoming.get(peer, 0) if peer != self.rank else 0 for peer in self.everyone)
        stride = -(-max(of) // ALIGNED_BYTES) * ALIGNED_BYTES
        room = empty(sum(map(bool, of)) * stride, torch.uint8)
        speakers = [peer for peer in self.everyone if of[peer]]
        came = {peer: room[row * stride :][: of[peer]] for row, peer in enumerate(speakers)}
        places = [outgoing[peer].data_ptr() if to[peer] else 0 for peer in self.everyone]
        places += [came[peer].data_ptr() if of[peer] else 0 for peer in self.everyone]
        if self.rank in incoming:
            came[self.rank] = outgoing[self.rank]
        nothing = room[:0]

        def answer() -> list[Payload]:
            return [split(came.get(peer, nothing), like) for peer, like in answers]

        return self.run(straight_program(to, of, form), places, (outgoing, room), answer)

    def broadcast_(self, tensors: Sequence[Tensor], source: int) -> None:
        """Copy the tensors of rank `source` to all ranks, bit for bit. The tensors must be in host memory.

        All of them are one operation, so its latency is paid once.
        """
        filled = [tensor.detach() for tensor in tensors if tensor.numel()]
        copies = [dense(tensor) for tensor in filled]
        sizes = tuple(tensor.nbytes for tensor in copies)
        hub = self.pick.broadcasting_hub(sum(sizes), source) if self.pick.has_hubs else None
        program, parts = broadcast_program(sizes, source, self.rank, self.everyone, hub)
        places = [copies[part.tensor].data_ptr() + part.offset for part in parts]
        self.run(program, places, copies, lambda: None)()
        for tensor, copy in zip(filled, copies, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)

    def run(
        self,
        program: Program,
        places: Sequence[int],
        keep: object,
        answer: Wait,
        sources: Sequence[int] | None = None,
    ) -> Wait:
        """Begin a program on memory at these addresses. The returned function waits, then returns answer(). keep,
        sources: as in Mesh.begin."""
        try:
            op = self.mesh.begin(program, places, keep, sources)
        except PeerLost as failure:
            raise self._broken(failure) from None

        def wait() -> Any:
            try:
                self.mesh.wait(op)
            except PeerLost as failure:
                raise self._broken(failure) from None
            return answer()

        return wait

    def hung_up(self) -> bool:
        """Whether a peer has disconnected, even if no operation needs it. Raises PeerLost if this rank has closed."""
        try:
            return bool(self.mesh.hung_up())
        except PeerLost as failure:
            raise self._broken(failure) from None

    def break_off(self, why: str) -> NoReturn:
        """Close and raise PeerLost: for a disconnected peer, as an operation would, else with `why`."""
        try:
            self.mesh.break_off(why)
        except PeerLost as failure:
            raise self._broken(failure) from None

    def _broken(self, failure: PeerLost) -> PeerLost:
        """Close the mesh after a failure. Returns the error to raise instead."""
        self.mesh.close(str(failure))
        return PeerLost(
            f"the group broke while rank {self.rank} of {self.world} waited for an answer: {failure}.{self._advice}"
        )


def is_here(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are in host memory."""
    return all(map(attrgetter("is_cpu"), tensors))
