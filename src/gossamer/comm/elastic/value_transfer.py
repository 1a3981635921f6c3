"""Value transfer: sends texts and tensors from ranks that have them to ranks that do not, over one group."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.base.json_text import read_json
from gossamer.base.layout import bytes_of, dtype_name
from gossamer.comm.elastic.change import Group
from gossamer.errors import MalformedError

MOST_TENSORS, MOST_ENTRIES = 2**20, 2**48
CUT_BYTES = 64

Form = tuple[torch.Size, torch.dtype]


def broadcast_value(group: Group, source: int, value: Any) -> Any:
    """Broadcast the value of rank `source`."""
    tensors: list[Tensor] = []
    text = json.dumps(_described(value, tensors)) if group.rank == source else ""
    text = group.all_gather_text(text)[source]
    if group.rank != source:
        tensors = _blank(_forms(text))
    if tensors:
        group.broadcast_(tensors, source)
    return value if group.rank == source else _built(json.loads(text), tensors)


class Outgoing:
    """One donor's part of some values, copied, so that training may change them afterwards.

    Args:
        rank: This donor's rank.
        values: Texts, tensors, lists and tuples; with the ranks that have the same value, each of which sends a part.
        before: An earlier transfer.
        kept: Indices of the values that receivers keep from the earlier transfer, unless their descriptions differ.
    """

    def __init__(
        self,
        rank: int,
        values: Sequence[tuple[Any, Sequence[int]]],
        before: Outgoing | None = None,
        kept: Collection[int] = (),
    ) -> None:
        self.texts: list[str] = []
        self.forms: list[list[Form]] = []
        self.nbytes = 0  # of all values, from all donors
        self.parts: list[Tensor] = []
        self.kept, self.describes = set[int](), rank == values[0][1][0]
        for index, (value, donors) in enumerate(values):
            tensors: list[Tensor] = []
            self.texts.append(json.dumps(_described(value, tensors)))
            self.forms.append([(tensor.shape, tensor.dtype) for tensor in tensors])
            ends = list(accumulate((tensor.nbytes for tensor in tensors), initial=0))
            self.nbytes += ends[-1]
            if before is not None and index in kept and self.forms[-1] == before.forms[index]:
                self.kept.add(index)
            cut = (0, 0) if index in self.kept else _parts_of(ends[-1], donors).get(rank, (0, 0))
            self.parts.append(_bytes(tensors, ends, *cut))


class Incoming:
    """The values that a receiver has. Tensors of an earlier transfer with the same shapes are changed in place."""

    def __init__(self, texts: Sequence[str], donors: Sequence[Sequence[int]], before: Incoming | None = None) -> None:
        self.texts, self._donors = texts, donors
        self._received: list[bool] = []
        self._tensors: list[list[Tensor]] = []
        for index, forms in enumerate(map(_forms, texts)):
            known = [] if before is None else before._tensors[index]
            self._received.append(before is not None and forms == [(each.shape, each.dtype) for each in known])
            self._tensors.append(known if self._received[-1] else _blank(forms))
        self._ends = [list(accumulate((each.nbytes for each in some), initial=0)) for some in self._tensors]

    @property
    def values(self) -> list[Any]:
        return [_built(json.loads(text), tensors) for text, tensors in zip(self.texts, self._tensors, strict=True)]

    def fill(self, index: int, donor: int, groups: Sequence[Tensor]) -> None:
        """Fill a donor's part of one value with its bytes, or change it by the groups of a difference."""
        ends = self._ends[index]
        begin, end = self._part(index, donor)
        if len(groups) > 1:
            self.check_received(index)
            changed = decode_difference(groups, end - begin)
            _fill(self._tensors[index], ends, begin, changed, Tensor.bitwise_xor_)
        elif len(groups[0]) == end - begin:
            _fill(self._tensors[index], ends, begin, groups[0])
        else:
            raise MalformedError(f"rank {donor} sent {len(groups[0])} bytes of a value; {end - begin} were expected")

    def part_bytes(self, donor: int) -> list[int]:
        """The size of this donor's part of each value; 0 where it has none."""
        parts = [self._part(index, donor) for index in range(len(self._ends))]
        return [end - begin for begin, end in parts]

    def _part(self, index: int, donor: int) -> tuple[int, int]:
        return _parts_of(self._ends[index][-1], self._donors[index]).get(donor, (0, 0))

    def check_received(self, index: int) -> None:
        """Raise MalformedError unless an earlier transfer had this value."""
        if not self._received[index]:
            raise MalformedError("a donor did not send a value that this rank has not received before")


def send_values(
    group: Group, about: Any, outgoing: Outgoing, receivers: Sequence[int], before: Outgoing | None = None
) -> list[Any]:
    """Send values to the `receivers`, as exact differences to the values of an earlier transfer if there is one.

    Every donor calls it, and every receiver `receive_values`. Returns the `about` of all ranks, by rank.
    """
    groups = [
        [part]
        if before is None or before.forms[index] != outgoing.forms[index] or index in outgoing.kept
        else encode_difference(part, before.parts[index])
        for index, part in enumerate(outgoing.parts)
    ]
    lengths = [[len(each) for each in some] for some in groups]
    texts = outgoing.texts if outgoing.describes else []
    head = {"about": about, "lengths": lengths, "kept": sorted(outgoing.kept), "texts": texts}
    heads = _gathered(group, head)
    joint = torch.cat([each for some in groups for each in some])
    group.deliver(dict.fromkeys(receivers, joint) if len(joint) else {}, {})
    return [each["about"] for each in heads]


def receive_values(
    group: Group, about: Any, donors: Sequence[Sequence[int]], before: Incoming | None = None
) -> tuple[list[Any], Incoming]:
    """Receive the values of `send_values`. donors: of each value. Returns the `about` of all ranks, and the values."""
    heads = _gathered(group, {"about": about})
    try:
        first = heads[donors[0][0]]
        found = Incoming([str(text) for text in first["texts"]], donors, before)
        kept = {int(index) for index in first["kept"]}
        senders = sorted({rank for some in donors for rank in some})
        lengths = {rank: _lengths(heads[rank]["lengths"], found.part_bytes(rank)) for rank in senders}
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedError(f"another rank's description of its state is invalid: {error!s:.100}") from None
    sums = {rank: sum(map(sum, some)) for rank, some in lengths.items()}
    came = group.deliver({}, {rank: size for rank, size in sums.items() if size})
    for index in kept:
        found.check_received(index)
    for rank in senders:
        pieces = iter(came[rank].split([size for some in lengths[rank] for size in some]) if rank in came else ())
        for index, some in enumerate(lengths[rank]):
            groups = [next(pieces, _NOTHING) for _ in some]
            if index not in kept and rank in donors[index]:
                found.fill(index, rank, groups)
    return [each["about"] for each in heads], found


def _gathered(group: Group, head: Any) -> list[Any]:
    try:
        return [read_json(text) for text in group.all_gather_text(json.dumps(head))]
    except ValueError as error:
        raise MalformedError(f"another rank's state is not valid JSON: {error!s:.100}") from None


_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _lengths(read: Any, most: Sequence[int]) -> list[list[int]]:
    """Lengths of the groups of each value, checked before memory is allocated. most: their largest sum per value."""
    if (
        len(read) != len(most)
        or not all(type(each) is int and each >= 0 for some in read for each in some)
        or not all(len(some) in (1, WORD + 1) and sum(some) <= size for some, size in zip(read, most, strict=True))
    ):
        raise ValueError("invalid lengths")
    return [list(some) for some in read]


def _parts_of(size: int, donors: Sequence[int]) -> dict[int, tuple[int, int]]:
    """The range of bytes that each donor sends, cut between words."""
    cuts = [size * place // len(donors) // CUT_BYTES * CUT_BYTES for place in range(len(donors))]
    return dict(zip(donors, pairwise([*cuts, size]), strict=True))


def _pieces(tensors: Sequence[Tensor], ends: Sequence[int], begin: int, end: int) -> Collection[Tensor]:
    """Views of the bytes [begin, end) of the concatenation of tensors."""
    found: list[Tensor] = []
    for tensor, start, stop in zip(tensors, ends, ends[1:], strict=False):
        low, high = max(begin, start), min(end, stop)
        if low < high:
            found.append(bytes_of(tensor)[low - start : high - start])
    return found


def _bytes(tensors: Sequence[Tensor], ends: Sequence[int], begin: int, end: int) -> Tensor:
    dense = [tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    pieces = list(_pieces(dense, ends, begin, end))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def _fill(
    tensors: Sequence[Tensor],
    ends: Sequence[int],
    begin: int,
    joint: Tensor,
    apply: Callable[[Tensor, Tensor], object] = Tensor.copy_,
) -> None:
    for piece, remote in zip(
        (pieces := list(_pieces(tensors, ends, begin, begin + len(joint)))),
        joint.split([len(piece) for piece in pieces]),
        strict=True,
    ):
        apply(piece, remote)


def _described(value: Any, tensors: list[Tensor]) -> Any:
    """Encode a value as JSON. Its tensors are appended to `tensors`, and encoded as their index."""
    match value:
        case Tensor():
            tensors.append(value)
            return {"tensor": len(tensors) - 1, "shape": list(value.shape), "dtype": dtype_name(value.dtype)}
        case tuple():
            return {"tuple": [_described(each, tensors) for each in value]}
        case list():
            return [_described(each, tensors) for each in value]
        case str() | None:
            return value
        case _:
            raise TypeError(f"a {type(value).__name__} cannot be transferred")


def _blank(forms: Sequence[Form]) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in forms]


def _forms(text: str) -> list[Form]:
    """Return the shapes and types of the tensors that a text describes. Raises MalformedError if it is invalid."""
    found: dict[int, tuple[list[int], torch.dtype]] = {}

    def walk(described: Any) -> None:
        match described:
            case {"tensor": int(place), "shape": list(shape), "dtype": str(dtype)}:
                kind = getattr(torch, dtype.removeprefix("torch."), None)
                sized = (
                    all(type(each) is int and 0 <= each < MOST_ENTRIES for each in shape) and prod(shape) < MOST_ENTRIES
                )
                if len(found) >= MOST_TENSORS or not sized or not isinstance(kind, torch.dtype):
                    raise MalformedError(f"invalid tensor in another rank's state: {shape!s:.80} of {dtype:.20}")
                found[place] = shape, kind
            case list(parts) | {"tuple": list(parts)}:
                for each in parts:
                    walk(each)
            case str() | None:
                pass
            case _:
                raise MalformedError("another rank's state is invalid")

    try:
        walk(read_json(text))
    except ValueError as error:
        raise MalformedError(f"another rank's state is not valid JSON: {error!s:.100}") from None
    if sorted(found) != list(range(len(found))):
        raise MalformedError("the tensors in another rank's state are not numbered from 0")
    return [(torch.Size(shape), dtype) for shape, dtype in map(found.__getitem__, range(len(found)))]


def _built(described: Any, tensors: Sequence[Tensor]) -> Any:
    match described:
        case {"tensor": int(place)}:
            return tensors[place]
        case {"tuple": list(parts)}:
            return tuple(_built(each, tensors) for each in parts)
        case list(parts):
            return [_built(each, tensors) for each in parts]
    return described


# -- the exact change of some bytes since an earlier copy of them, compressed ------------------------------------------
# Numbers of 32 bits that changed a little keep their sign, their exponent and the first bits of their mantissa. The
# difference is therefore an exclusive or, whose bytes are grouped by their place in a word, and each group that zlib
# shortens is compressed.

WORD = 4  # bytes
SAMPLE_BYTES = 2**14  # of a group, to estimate whether it is worth compressing
WORTH = 0.9  # compressed over original size
LEVEL = 1  # of zlib

Bytes = npt.NDArray[np.uint8]


def encode_difference(part: Tensor, base: Tensor) -> list[Tensor]:
    """Return groups of bytes, from which `decode_difference` restores `part` ^ `base`.

    Args:
        part: uint8, one-dimensional.
        base: The earlier copy, of the same length.

    Returns:
        WORD groups, each compressed if it is shorter than its share of the words, and the remaining bytes.
    """
    changed = np.bitwise_xor(part.numpy(), base.numpy())
    words = len(part) // WORD * WORD
    groups = np.ascontiguousarray(changed[:words].reshape(-1, WORD).T)
    return [*map(_compressed, groups), torch.from_numpy(changed[words:])]


def decode_difference(groups: Sequence[Tensor], size: int) -> Tensor:
    """Return the exclusive or of two parts of `size` bytes. Raises MalformedError."""
    count = size // WORD
    if len(groups) != WORD + 1 or len(groups[-1]) != size - WORD * count:
        raise MalformedError(f"a difference of {size} bytes has invalid groups: {[len(each) for each in groups]}")
    changed = np.empty(size, dtype=np.uint8)
    words = changed[: WORD * count].reshape(count, WORD)
    for place, group in enumerate(groups[:WORD]):
        words[:, place] = _original(group.numpy(), count)
    changed[WORD * count :] = groups[-1].numpy()
    return torch.from_numpy(changed)


def _compressed(group: Bytes) -> Tensor:
    sample = np.ascontiguousarray(group[:: max(1, len(group) // SAMPLE_BYTES)])
    if len(zlib.compress(sample.data, LEVEL)) <= WORTH * len(sample):
        found = zlib.compress(group.data, LEVEL)
        if len(found) < len(group):
            return torch.frombuffer(bytearray(found), dtype=torch.uint8)
    return torch.from_numpy(group)


def _original(group: Bytes, count: int) -> Bytes:
    if len(group) == count:
        return group
    decoder = zlib.decompressobj()
    try:
        found = decoder.decompress(group.data, count + 1)
    except zlib.error as error:
        raise MalformedError(f"a compressed difference is damaged: {error}") from None
    if len(found) != count or not decoder.eof:
        raise MalformedError(f"a compressed difference has {len(found)} bytes or more, and {count} were expected")
    return np.frombuffer(found, dtype=np.uint8)
