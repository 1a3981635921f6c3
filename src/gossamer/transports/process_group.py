"""Words answered by torch.distributed: Gloo on processors, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.words import Exchange, Gather, Mean, Mix, Payload, Together, Word

# torch 2.13 renamed it and warns about the old name; this is the one place that knows
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroupTransport:
    """Answers words over a process group of its own, so that nothing of the user's comes between.

    Every rank of the default group must make one. Raises PeerLost when the group breaks.
    """

    def __init__(self, size: int | None = None) -> None:
        """size: of the blocks of neighbouring ranks that talk among themselves; all ranks together where it is None."""
        rank, world = dist.get_rank(), dist.get_world_size()
        self.rank, self.world = rank, world
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
        with self._translated():
            return self._start(word)()

    def _start(self, word: Word) -> Callable[[], Any]:
        """Begin to say a word; the function returned waits for its answer. Words are begun and waited for in order."""
        match word:
            case Mean(tensor, out):
                return self._mean(tensor, out)
            case Gather(payload):
                return self._gather(payload)
            case Exchange(parts):
                return self._exchange(parts)
            case Mix(payload, edges):
                return self._mix(payload, [peer for peer, _ in edges])
            case Together(words):
                waiting = [self._start(each) for each in words]
                return lambda: [wait() for wait in waiting]

    def _mean(self, tensor: Tensor, out: Tensor | None) -> Callable[[], Tensor]:
        mean = _into(out, tensor)
        averages = mean.is_cuda and "nccl" in str(dist.get_backend_config(self._group))
        if not averages and mean.dtype.itemsize < 4:
            return self._half_mean(mean)
        operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        work = dist.all_reduce(mean, op=operation, group=self._group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return mean if averages else mean.div_(self.world)

        return wait

    def _half_mean(self, mean: Tensor) -> Callable[[], Tensor]:
        """Reduce-scatter in the tensor's precision, summed in float32 by one owner per part; then all-gather.

        The engine's own half-precision sum rounds at every hop, and overflows in float16.
        """
        flat = mean.view(-1)
        parts = flat.tensor_split(self.world)
        sizes = [part.nbytes for part in parts]
        mine = parts[self.rank]
        heard = torch.empty(self.world * mine.nbytes, dtype=torch.uint8, device=mean.device)
        work = self._all_to_all(heard, flat.view(torch.uint8), [mine.nbytes] * self.world, sizes)

        def wait() -> Tensor:
            work.wait()
            total = heard.view(mean.dtype).view(self.world, -1).sum(0, dtype=torch.float32)
            mine.copy_(total.div_(self.world))
            told = mine.view(torch.uint8).repeat(self.world)
            self._all_to_all(flat.view(torch.uint8), told, sizes, [mine.nbytes] * self.world).wait()
            return mean

        return wait

    def _gather(self, payload: Payload) -> Callable[[], list[Payload]]:
        joint = _join(payload)
        heard = joint.new_empty(self.world * joint.numel())
        work = _all_gather(heard, joint, group=self._group, async_op=True)

        def wait() -> list[Payload]:
            work.wait()
            return [_split(part, payload) for part in heard.view(self.world, -1)]

        return wait

    def _exchange(self, parts: Sequence[Payload]) -> Callable[[], list[Payload]]:
        joined = [_join(part) for part in parts]
        mine = joined[self.rank].numel()
        heard = joined[0].new_empty(self.world * mine)
        told = torch.cat(joined)
        work = self._all_to_all(heard, told, [mine] * self.world, [part.numel() for part in joined])

        def wait() -> list[Payload]:
            work.wait()
            return [_split(part, parts[self.rank]) for part in heard.view(self.world, -1)]

        return wait

    def _mix(self, payload: Payload, peers: Sequence[int]) -> Callable[[], list[Payload]]:
        joint = _join(payload)
        heard = {peer: joint if peer == self.rank else torch.empty_like(joint) for peer in peers}
        others = [peer for peer in heard if peer != self.rank]
        sends = [dist.P2POp(dist.isend, joint, self._first + peer, self._group) for peer in others]
        receives = [dist.P2POp(dist.irecv, heard[peer], self._first + peer, self._group) for peer in others]
        works = dist.batch_isend_irecv(sends + receives) if others else []

        def wait() -> list[Payload]:
            for work in works:
                work.wait()
            return [_split(heard[peer], payload) for peer in peers]

        return wait

    def _all_to_all(self, heard: Tensor, told: Tensor, heard_sizes: list[int], told_sizes: list[int]) -> dist.Work:
        work: dist.Work = dist.all_to_all_single(heard, told, heard_sizes, told_sizes, group=self._group, async_op=True)
        return work

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
