"""Mesh operations: the collectives that the compiled loops serve, each as a program over a mesh's connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from gossamer.base.kernels.buffer_pool import empty, scratch_for
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, NeighborAllGather, Payload, SimpleOp
from gossamer.comm.mesh.collective_selector import CollectiveSelector
from gossamer.comm.mesh.native_mesh import Mesh
from gossamer.comm.mesh.program import (
    FORMATS,
    Program,
    Ranks,
    broadcast_program,
    form_of,
    mean_program,
    straight_program,
)
from gossamer.comm.packing import join, split
from gossamer.errors import PeerLost

ALIGNED_BYTES = 64  # so that what is received may be viewed as wider numbers

Wait = Callable[[], Any]


class MeshOperations:
    """One rank's operations over a mesh. A failure closes it at once, so that those hear of it who wait for this rank.

    pick: which table of hops a mean takes; advice: what the user may do where the group broke, after each PeerLost.
    """

    def __init__(self, mesh: Mesh, pick: CollectiveSelector, advice: str = "") -> None:
        self.mesh, self.pick, self._advice = mesh, pick, advice
        self.rank, self.world = mesh.rank, mesh.world
        self.everyone: Ranks = tuple(range(self.world))

    @staticmethod
    def serves(op: SimpleOp) -> bool:
        """Whether the compiled loops can answer it: formats that they know, in this machine's own memory."""
        return is_here(op.tensors()) and (not isinstance(op, AllReduceMean) or op.tensor.dtype in FORMATS)

    def begin(self, op: SimpleOp, ranks: Ranks) -> Wait:
        """Begin an operation that is served, among some ranks of the whole group; its peers are places in `ranks`."""
        match op:
            case AllReduceMean(tensor, out):
                return self._mean(tensor, out, ranks)
            case AllGather(payload):
                return self._gather(payload, ranks)
            case AllToAll(parts):
                return self._exchange(parts, ranks)
            case NeighborAllGather(payload):
                return self._mix(payload, op.told, op.hears, ranks)

    def _mean(self, tensor: Tensor, out: Tensor | None, ranks: Ranks) -> Wait:
        """The mean appears in `out`, or in memory of its own, without a copy of `tensor` before; which stays as it is
        where `out` is not `tensor` itself."""
        source = tensor.contiguous()
        flat = scratch_for(source.numel(), source.dtype, source.device) if out is None else out.contiguous()
        if len(ranks) == 1:
            flat.view(-1).copy_(source.view(-1))
        chosen = self.pick(source.nbytes, source.dtype.itemsize, ranks)
        program = mean_program(chosen, source.numel(), source.dtype, ranks.index(self.rank), ranks)
        places, sources = ([each.data_ptr() + offset for offset in program.offsets] for each in (flat, source))

        def answer() -> Tensor:
            if out is None:
                return flat.view(tensor.shape)
            return out if out.is_contiguous() else out.copy_(flat)

        return self.run(program, places, (flat, source), answer, sources)

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

    def begin_bytes(self, mine: Tensor, sizes: Sequence[int]) -> Wait:
        """The bytes of all ranks, which differ in length. sizes: by rank, the same on every rank."""
        told, heard = dict.fromkeys(self.everyone, mine), dict(enumerate(sizes))
        likes = [(peer, (torch.empty(size, dtype=torch.uint8, device="meta"),)) for peer, size in heard.items()]
        return self._straight(told, heard, form_of("bytes", tuple(sizes)), likes)

    def begin_nothing(self) -> Wait:
        """An operation in which this rank neither says nor hears anything."""
        nothing = (0,) * self.world
        return self.run(
            straight_program(nothing, nothing, form_of("nothing")), (0,) * 2 * self.world, None, lambda: None
        )

    def deliver(self, told: Mapping[int, Tensor], heard: Mapping[int, int]) -> dict[int, Tensor]:
        """Bytes of their own for some ranks, told[j], and heard[j] bytes from some."""
        likes = [(peer, (torch.empty(size, dtype=torch.uint8, device="meta"),)) for peer, size in heard.items()]
        came = self._straight(dict(told), dict(heard), form_of("deliver"), likes)()
        return {peer: theirs for peer, (theirs,) in zip(heard, came, strict=True)}

    def _straight(
        self, told: dict[int, Tensor], heard: dict[int, int], form: int, answers: Sequence[tuple[int, Payload]]
    ) -> Wait:
        """told: bytes for each rank; heard: how many come from each; answers: of which rank, and of what form."""
        to = tuple(told[peer].nbytes if peer in told and peer != self.rank else 0 for peer in self.everyone)
        of = tuple(heard.get(peer, 0) if peer != self.rank else 0 for peer in self.everyone)
        stride = -(-max(of) // ALIGNED_BYTES) * ALIGNED_BYTES
        room = empty(sum(map(bool, of)) * stride, torch.uint8)
        speakers = [peer for peer in self.everyone if of[peer]]
        came = {peer: room[row * stride :][: of[peer]] for row, peer in enumerate(speakers)}
        places = [told[peer].data_ptr() if to[peer] else 0 for peer in self.everyone]
        places += [came[peer].data_ptr() if of[peer] else 0 for peer in self.everyone]
        if self.rank in heard:
            came[self.rank] = told[self.rank]
        nothing = room[:0]

        def answer() -> list[Payload]:
            return [split(came.get(peer, nothing), like) for peer, like in answers]

        return self.run(straight_program(to, of, form), places, (told, room), answer)

    def broadcast_(self, tensors: Sequence[Tensor], source: int) -> None:
        """Fill `tensors`, of this machine's memory, at all ranks with those of one of them, bit for bit.

        All as one operation: its latency is waited for once.
        """
        filled = [tensor.detach() for tensor in tensors if tensor.numel()]
        dense = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in filled]
        sizes = tuple(tensor.nbytes for tensor in dense)
        program, parts = broadcast_program(sizes, source, self.rank, self.everyone)
        places = [dense[part.tensor].data_ptr() + part.offset for part in parts]
        self.run(program, places, dense, lambda: None)()
        for tensor, heard in zip(filled, dense, strict=True):
            if heard is not tensor:
                tensor.copy_(heard)

    def run(
        self,
        program: Program,
        places: Sequence[int],
        keep: object,
        answer: Wait,
        sources: Sequence[int] | None = None,
    ) -> Wait:
        """Begin a program on memory at these addresses; what it returns waits, and gives what `answer` does. keep,
        sources: as in Mesh.begin."""
        with self._translated():
            op = self.mesh.begin(program, places, keep, sources)

        def wait() -> Any:
            with self._translated():
                self.mesh.wait(op)
            return answer()

        return wait

    def hung_up(self) -> bool:
        """Whether a peer has hung up, though nothing here waits for it. Raises PeerLost where this rank has."""
        with self._translated():
            return bool(self.mesh.hung_up())

    def break_off(self, why: str) -> NoReturn:
        """Hang up and raise PeerLost, as an operation does that finds a peer gone; where none is, for `why`."""
        with self._translated():
            self.mesh.break_off(why)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except PeerLost as failure:
            self.mesh.close(str(failure))
            raise PeerLost(
                f"the group broke while rank {self.rank} of {self.world} waited for an answer: {failure}.{self._advice}"
            ) from None


def is_here(tensors: Sequence[Tensor]) -> bool:
    """Whether all of them lie in this machine's own memory."""
    return all(tensor.device.type == "cpu" for tensor in tensors)
