"""Words answered by torch.distributed: Gloo on processors, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.kernels import half_decode, room_like
from gossamer.transports.simulated import mean_of
from gossamer.words import Exchange, Gather, Mean, Mix, Payload, Together, Word

# torch 2.13 renamed it and warns about the old name; this is the one place that knows
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SMALL_BYTES = 2**20  # of a mean that goes straight to its owners: what it takes is mostly hops


class ProcessGroupTransport:
    """Answers words over a process group of its own, so that nothing of the user's comes between.

    Every rank of the default group must make one. Raises PeerLost when the group breaks.
    """

    def __init__(self, size: int | None = None) -> None:
        """size: of the blocks of neighbouring ranks that talk among themselves; all ranks together where it is None."""
        rank, world = dist.get_rank(), dist.get_world_size()
        self.rank, self.world, self._first = rank, world, 0
        self._group: Any = dist.group.WORLD
        self.gather_text("here")  # a rank that failed before is missed here at once; new_group would wait for it
        self._first, self.world = rank - rank % (size or world), size or world
        blocks = [range(first, first + self.world) for first in range(0, world, self.world)]
        groups = [dist.new_group(list(block)) for block in blocks]  # every rank takes part in making all of them
        self.rank, self._group = rank - self._first, groups[self._first // self.world]

        self._parts: list[ProcessGroupTransport] = []

    def part(self, size: int) -> ProcessGroupTransport:
        self._parts.append(ProcessGroupTransport(size))
        return self._parts[-1]

    def answer(self, word: Word) -> Any:
        return self.begin(word)()

    def begin(self, word: Word) -> Callable[[], Any]:
        with self._translated():
            answered = self._start(word)

        def wait() -> Any:
            with self._translated():
                return answered()

        return wait

    def _start(self, word: Word) -> Callable[[], Any]:
        match word:
            case Mean(tensor, out):
                return self._mean(tensor, out)
            case Gather(payload):
                return self._gather(payload)
            case Exchange(parts):
                return self._exchange(parts)
            case Mix(payload):
                return self._mix(payload, word.told, word.hears)
            case Together(words):
                waiting = [self._start(each) for each in words]
                return lambda: [wait() for wait in waiting]

    def _mean(self, tensor: Tensor, out: Tensor | None) -> Callable[[], Tensor]:
        mean = _into(out, tensor)
        if mean.is_cuda:
            averages = "nccl" in str(dist.get_backend_config(self._group))
            return self._all_reduced(mean, dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM)
        if mean.dtype.itemsize < 4 or mean.nbytes <= SMALL_BYTES:
            return self._direct_mean(mean)
        return self._all_reduced(mean, dist.ReduceOp.SUM)

    def _all_reduced(self, mean: Tensor, operation: Any) -> Callable[[], Tensor]:
        work = dist.all_reduce(mean, op=operation, group=self._group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return mean.div_(self.world) if operation == dist.ReduceOp.SUM else mean

        return wait

    def _direct_mean(self, mean: Tensor) -> Callable[[], Tensor]:
        """Each part straight to its owner, who adds up in at least float32 and sends the mean to everyone.

        Two hops instead of a ring's many; and the engine's own half-precision sum rounds at every hop, and overflows in
        float16. What travels is the same.
        """
        parts = [part.view(torch.uint8) for part in mean.view(-1).tensor_split(self.world)]
        mine = parts[self.rank]
        own = mean.view(-1).tensor_split(self.world)[self.rank]
        heard = own.new_empty((self.world, own.numel()))
        arrived = self._straight(parts, [row.view(torch.uint8) for row in heard])

        def wait() -> Tensor:
            arrived()
            _average(heard, own)
            self._straight([mine] * self.world, parts)()
            return mean

        return wait

    def _gather(self, payload: Payload) -> Callable[[], list[Payload]]:
        joint = _join(payload)
        if joint.is_cuda:
            return self._all_gathered(joint, payload)
        heard = [joint if peer == self.rank else torch.empty_like(joint) for peer in range(self.world)]
        arrived = self._straight([joint] * self.world, heard)

        def wait() -> list[Payload]:
            arrived()
            return [_split(part, payload) for part in heard]

        return wait

    def _all_gathered(self, joint: Tensor, like: Payload) -> Callable[[], list[Payload]]:
        heard = joint.new_empty(self.world * joint.numel())
        work = _all_gather(heard, joint, group=self._group, async_op=True)

        def wait() -> list[Payload]:
            work.wait()
            return [_split(part, like) for part in heard.view(self.world, -1)]

        return wait

    def _exchange(self, parts: Sequence[Payload]) -> Callable[[], list[Payload]]:
        joined = [_join(part) for part in parts]
        mine = joined[self.rank]
        heard = [mine if peer == self.rank else torch.empty_like(mine) for peer in range(self.world)]
        arrived = self._straight(joined, heard)

        def wait() -> list[Payload]:
            arrived()
            return [_split(part, parts[self.rank]) for part in heard]

        return wait

    def _mix(self, payload: Payload, tells: Sequence[int], hears: Sequence[int]) -> Callable[[], list[Payload]]:
        joint = _join(payload)
        told: list[Tensor | None] = [joint if peer in tells else None for peer in range(self.world)]
        heard = {peer: joint if peer == self.rank else torch.empty_like(joint) for peer in hears}
        arrived = self._straight(told, [heard.get(peer) for peer in range(self.world)])

        def wait() -> list[Payload]:
            arrived()
            return [_split(heard[peer], payload) for peer in hears]

        return wait

    def _straight(self, told: Sequence[Tensor | None], heard: Sequence[Tensor | None]) -> Callable[[], None]:
        """Bytes told[j] straight to rank j, its own into heard[j]: all at once, in one hop. None where nothing goes."""
        mine, own = told[self.rank], heard[self.rank]
        if mine is not None and own is not None and own.data_ptr() != mine.data_ptr():
            own.copy_(mine)
        others = [(self.rank + step) % self.world for step in range(1, self.world)]
        moves = [
            dist.P2POp(move, numbers, self._first + peer, self._group)
            for move, all_numbers in ((dist.irecv, heard), (dist.isend, told))
            for peer in others
            if (numbers := all_numbers[peer]) is not None and numbers.numel()
        ]
        works = dist.batch_isend_irecv(moves) if moves else []

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        with self._translated(), torch.no_grad():
            for tensor in tensors:
                if not tensor.numel():
                    continue
                dense = tensor.contiguous()
                dist.broadcast(dense.view(-1).view(torch.uint8), self._first + source, group=self._group)
                if dense is not tensor:
                    tensor.copy_(dense)

    def gather_text(self, text: str) -> list[str]:
        with self._translated():
            data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8).to(self._device())
            (lengths,) = zip(*self._gather((torch.tensor([data.numel()], device=data.device),))(), strict=True)
            longest = int(max(lengths))
            heard = self._gather((torch.nn.functional.pad(data, (0, longest - data.numel())),))()
        return [
            bytes(part[: int(length)].tolist()).decode().rstrip("\0")
            for (part,), length in zip(heard, lengths, strict=True)
        ]

    def _device(self) -> torch.device:
        """Where small control tensors must live for this group."""
        only_cuda = "gloo" not in str(dist.get_backend_config(self._group))
        return torch.device("cuda", torch.cuda.current_device()) if only_cuda else torch.device("cpu")

    def close(self) -> None:
        for part in self._parts:
            part.close()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            # Freed here and now: as garbage it could be collected in a forked child, where its threads do not exist, or
            # while the interpreter is taken down, where the engine has been seen to abort.
            self._group = None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as failure:
            raise PeerLost(
                f"the group broke while rank {self.rank} of {self.world} waited for an answer: another worker ended, "
                "failed, or could not be reached. Its own output says why. Ranks that merely ran out of data at "
                f"different times need `with session.epoch():` around the loop over batches. ({failure})"
            ) from failure


def _average(heard: Tensor, out: Tensor) -> None:
    """The mean of rows by rank order, summed in at least float32 and rounded once. heard: (world, n); out: (n,)."""
    if heard.is_cuda or heard.dtype.itemsize >= 4:
        out.copy_(mean_of(heard.unbind()))
        return
    total = room_like(out, torch.float32)
    half_decode(heard.unbind(), total, len(heard))
    out.copy_(total)


def _into(out: Tensor | None, tensor: Tensor) -> Tensor:
    """`tensor`'s values where the answer belongs, without a copy where they are there already."""
    if out is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    return out if out.data_ptr() == tensor.data_ptr() else out.copy_(tensor)


def _order(payload: Payload) -> list[int]:
    """Widest elements first, so that every tensor is aligned in the joint buffer without padding."""
    return sorted(range(len(payload)), key=lambda place: -payload[place].element_size())


def _join(payload: Payload) -> Tensor:
    """One buffer of bytes for the whole payload."""
    parts = [payload[place].reshape(-1).view(torch.uint8) for place in _order(payload)]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def _split(joint: Tensor, like: Payload) -> Payload:
    """The payload again, as views into the buffer of bytes."""
    heard: list[Tensor] = list(like)
    at = 0
    for place in _order(like):
        size = like[place].nbytes
        part = joint[at : at + size]
        if part.storage_offset() % like[place].element_size():
            part = part.clone()  # a peer's row may begin anywhere, a view of wider elements may not
        heard[place] = part.view(like[place].dtype).view(like[place].shape)
        at += size
    return tuple(heard)
