"""Packing: payloads to and from one buffer of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.base.layout import bytes_of
from gossamer.base.ops import Payload


def into(out: Tensor | None, tensor: Tensor) -> Tensor:
    """Copy the values of `tensor` to `out`, unless both share memory; without `out`, to a new tensor."""
    if out is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    return out if out.data_ptr() == tensor.data_ptr() else out.copy_(tensor)


def moved(payload: Payload, own: Payload) -> Payload:
    """Move a received payload to the devices of `own`, this rank's; if it has another form, to that of own's first
    tensor."""
    like = own if len(own) == len(payload) else own[:1] * len(payload)
    return tuple(tensor.to(each.device) for tensor, each in zip(payload, like, strict=True))


def _order(payload: Payload) -> list[int]:
    """Order several tensors by element size, largest first, so that all are aligned without padding."""
    return sorted(range(len(payload)), key=lambda place: -payload[place].element_size())


def dense(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor with the same elements; the tensor itself if possible."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def join(payload: Payload) -> Tensor:
    """Concatenate the whole payload as bytes. Tensors that are adjacent in this order in one memory are not copied."""
    if len(payload) == 1:
        return bytes_of(dense(payload[0]))
    parts = [bytes_of(dense(payload[place])) for place in _order(payload)]
    if _adjacent(parts):
        return parts[0].as_strided((sum(part.nbytes for part in parts),), (1,))
    return torch.cat(parts)


def _adjacent(parts: Sequence[Tensor]) -> bool:
    memory, place = parts[0].untyped_storage().data_ptr(), parts[0].storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != memory or part.storage_offset() != place:
            return False
        place += part.nbytes
    return bool(memory)


def split(joint: Tensor, like: Payload) -> Payload:
    """Return the tensors of a payload as views into the buffer of bytes."""
    received: list[Tensor] = list(like)
    at = 0
    for place in _order(like) if len(like) > 1 else range(len(like)):
        size = like[place].nbytes
        part = joint[at : at + size]
        if part.storage_offset() % like[place].element_size():
            part = part.clone()  # a peer's row may be unaligned, which a view with larger elements does not allow
        received[place] = part.view(like[place].dtype).view(like[place].shape)
        at += size
    return tuple(received)
