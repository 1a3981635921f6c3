"""Named values: numbers, texts and tensors by name, as JSON and bytes that travel between ranks without pickle."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from gossamer.base.layout import bytes_of, dtype_name, dtype_of
from gossamer.comm.environment.roll_call import RollCall, process_calls
from gossamer.errors import MismatchError
from gossamer.train.session.group_calls import newest_group
from gossamer.train.world_state import WorldState

Scalar = bool | int | float | str
Named = Mapping[str, Scalar | Tensor]
Header = dict[str, Any]  # by name: the scalar itself, or [dtype, shape] of a tensor
LENGTH = struct.Struct("!Q")


def survivor_calls(world: WorldState) -> RollCall | None:
    """Return the roll call for calls outside of steps, if the recipe tolerates the loss of a rank; otherwise None.

    Raises ConnectError if the launcher's store does not answer.
    """
    group = newest_group()
    return process_calls(world.rank, world.size) if group is None else group.roll_call()


def gathered(calls: RollCall, caller: str, named: Named) -> list[dict[str, Any]]:
    """Values of the ranks that are left, by rank, on this rank's devices. Raises as RollCall.gather, and MismatchError
    where names, shapes or dtypes differ."""
    description, flat = described(named), flat_bytes(named)
    form = hashlib.sha256(json.dumps(form_of(json.loads(description))).encode()).hexdigest()
    contents = calls.gather(
        f"gossamer.{caller}", form, b"".join((LENGTH.pack(len(description)), description, flat.numpy().tobytes()))
    )
    split = {rank: _split(content) for rank, content in contents.items()}
    check_alike({rank: header for rank, (header, _) in split.items()} | {calls.rank: json.loads(description)}, caller)
    return [opened(header, part, named) for header, part in split.values()]


def _split(content: bytes) -> tuple[Header, Tensor]:
    (length,) = LENGTH.unpack_from(content)
    end = LENGTH.size + length
    return json.loads(content[LENGTH.size : end]), tensor_of(content[end:])


def tensor_of(content: bytes) -> Tensor:
    """A copy as (n,) of uint8, on the CPU."""
    if not content:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def described(named: Named) -> bytes:
    """The header of these values, in the order of names."""
    return json.dumps({name: _header(named[name]) for name in sorted(named)}).encode()


def flat_bytes(named: Named) -> Tensor:
    """All tensors side by side, in the order of names: (n,) of uint8, on the CPU."""
    tensors = [each for _, each in sorted(named.items()) if isinstance(each, Tensor) and each.numel()]
    return torch.cat([_bytes(each) for each in tensors]) if tensors else tensor_of(b"")


def _header(value: Scalar | Tensor) -> Any:
    return [dtype_name(value.dtype), list(value.shape)] if isinstance(value, Tensor) else value


def _bytes(tensor: Tensor) -> Tensor:
    return bytes_of(tensor.cpu().contiguous())


def form_of(header: Header) -> dict[str, Any]:
    """The form that must be the same on every rank: names, and dtypes and shapes of tensors."""
    return {name: each if isinstance(each, list) else None for name, each in header.items()}


def check_alike(headers: Mapping[int, Header], caller: str) -> None:
    """Raises MismatchError if names, dtypes or shapes differ from those of the first rank."""
    leader = min(headers)
    first = form_of(headers[leader])
    for rank, header in headers.items():
        other = form_of(header)
        differing = [name for name in sorted({*first, *other}) if first.get(name, ...) != other.get(name, ...)]
        if differing:
            name = differing[0]
            raise MismatchError(
                f"gossamer.{caller} received {shown(name)}{_form(headers[leader], name)} on rank {leader} and "
                f"{_form(header, name)} on rank {rank}. Pass the same names, shapes and dtypes on every rank: if they "
                "have different numbers of samples, pass sums and counts."
            )


def _form(header: Header, name: str) -> str:
    if name not in header:
        return "nothing"
    each = header[name]
    return f"a tensor of shape {tuple(each[1])} and {each[0]}" if isinstance(each, list) else repr(each)


def shown(name: object) -> str:
    return f'"{name}": ' if name != "" else ""


def opened(header: Header, flat: Tensor, own: Mapping[str, Scalar | Tensor]) -> dict[str, Any]:
    """One rank's values, in this rank's order of names and on this rank's devices."""
    found: dict[str, Any] = {}
    begin = 0
    for name, each in header.items():
        if isinstance(each, list):
            kind, shape = dtype_of(each[0]), each[1]
            end = begin + prod(shape) * kind.itemsize
            local = own[name]
            assert isinstance(local, Tensor)  # or its form would be another
            found[name] = flat[begin:end].clone().view(kind).view(shape).to(local.device)
            begin = end
        else:
            found[name] = each
    return {name: found[name] for name in own}
