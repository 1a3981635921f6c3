"""Arrays: layouts of records, and payloads as bytes."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.ops import Payload
from gossamer.errors import LayoutError, MalformedError
from gossamer.federated.flower.arrays import (
    MAGIC,
    MOST_HEADER_BYTES,
    PREFIX_BYTES,
    ArrayLayout,
    PayloadHeader,
    codec_noun,
    frame,
    is_gossamer_record,
    stype_of,
    unframe,
)

PAYLOADS: list[Payload] = [
    (),
    (torch.zeros(0),),
    (torch.arange(7, dtype=torch.uint8), torch.randn(3, 5), torch.zeros(0, dtype=torch.int64)),
    (torch.tensor(3.5, dtype=torch.float64), torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor([True, False])),
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=len)
def test_what_is_framed_comes_back(payload: Payload) -> None:
    header = PayloadHeader(recipe="TopK(0.01)", layout="abc", step=3, counts=(len(payload),), about='{"a": 1}')
    found, tensors = unframe(frame(header, payload))
    assert (found.recipe, found.layout, found.step, found.counts, found.about) == (
        "TopK(0.01)", "abc", 3, (len(payload),), '{"a": 1}',
    )  # fmt: skip
    assert [(each.dtype, each.shape) for each in tensors] == [(each.dtype, each.shape) for each in payload]
    assert all(torch.equal(a, b) for a, b in zip(tensors, payload, strict=True))


def test_tensors_may_be_written_to() -> None:
    data = frame(PayloadHeader(), (torch.zeros(4),))
    _, (found,) = unframe(data)
    found += 1
    assert torch.equal(unframe(data).payload[0], torch.zeros(4))


def framed(header: dict[str, object], tail: bytes) -> bytes:
    text = json.dumps(header).encode()
    start = PREFIX_BYTES + len(text)
    return MAGIC + len(text).to_bytes(4, "little") + text + bytes(-start % 8) + tail


FLOAT32 = 8  # its place among dtypes


def test_the_header_that_is_written_by_hand_is_read() -> None:
    _, (found,) = unframe(framed({"tensors": [[FLOAT32, [2]]]}, torch.tensor([1.0, 2.0]).numpy().tobytes()))
    assert torch.equal(found, torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        MAGIC,
        b"\x93NUMPY" + bytes(100),
        MAGIC + (2**32 - 1).to_bytes(4, "little") + b"{}",
        MAGIC + (MOST_HEADER_BYTES + 1).to_bytes(4, "little") + bytes(MOST_HEADER_BYTES + 8),
        framed({"tensors": [[FLOAT32, [10**12]]]}, bytes(8)),  # a bomb
        framed({"tensors": [[FLOAT32, [2**62, 2**62]]]}, bytes(8)),
        framed({"tensors": [[FLOAT32, [0, 2**80]]]}, b""),
        framed({"tensors": [[FLOAT32, [-2]]]}, bytes(8)),
        framed({"tensors": [[FLOAT32, [1] * 9]]}, bytes(8)),
        framed({"tensors": [[99, [2]]]}, bytes(8)),
        framed({"tensors": [[FLOAT32, [2]]]}, bytes(16)),
        framed({"tensors": [[FLOAT32, [2]]]}, b""),
        framed({"tensors": [[0, [8]]]}, b"\x07" * 8),  # bool
        framed({"tensors": [], "more": 1}, b""),
        framed({"step": -1}, b""),
        framed({"step": 1.5}, b""),
        MAGIC + (400).to_bytes(4, "little") + b"[" * 400,
        MAGIC + (4).to_bytes(4, "little") + b"\xff\xfe{}",
    ],
)
def test_what_nobody_framed_is_refused_without_memory(data: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(MalformedError):
        unframe(data)
    assert tracemalloc.get_traced_memory()[1] < 5 * MOST_HEADER_BYTES
    tracemalloc.stop()


def test_no_damage_is_worse_than_a_refusal() -> None:
    data = frame(PayloadHeader(recipe="Int8()", counts=(2,)), (torch.randn(5), torch.arange(3)))
    for cut in range(len(data)):
        with pytest.raises(MalformedError):
            unframe(data[:cut])
    for place in range(len(data)):
        for bit in (1, 16, 128):
            damaged = bytearray(data)
            damaged[place] ^= bit
            try:
                found: list[Tensor] = list(unframe(bytes(damaged)).payload)
            except MalformedError:
                continue
            assert sum(each.nbytes for each in found) <= len(data)


def test_the_codec_is_in_the_type() -> None:
    assert codec_noun(resolve("TopK(0.01)").compressor) == "TopK"
    assert codec_noun(resolve("Chain(TopK(0.01), Int8())").compressor) == "Chain"
    assert stype_of("TopK") == "gossamer.topk.v1"
    assert is_gossamer_record("gossamer.topk.v1")
    assert not any(
        map(is_gossamer_record, ["numpy.ndarray", "gossamer..v1", "gossamer.topk.v2", "xgossamer.topk.v1", ""])
    )


def test_a_header_that_nobody_would_read_is_not_sent() -> None:
    with pytest.raises(ValueError, match="fewer tensors"):
        frame(PayloadHeader(about="x" * MOST_HEADER_BYTES), (torch.zeros(1),))


ARRAYS = {
    "conv": np.arange(12, dtype=np.float32).reshape(3, 4),
    "count": np.array(7),
    "mean": np.array(3.0),  # what an averaging strategy makes of a count
    "odd": np.zeros(2, np.float64),
    "bias": np.ones(3, np.float32),
    "places": np.arange(4),
}


def test_floats_of_the_most_common_dtype_are_compressed() -> None:
    layout = ArrayLayout.of(ARRAYS)
    assert layout.layout.names == ("conv", "bias")
    assert "conv" in layout
    assert "odd" not in layout
    flat = layout.read(ARRAYS, "it")
    assert torch.equal(flat, torch.cat([torch.arange(12.0), torch.ones(3)]))
    written = layout.write(flat)
    assert all(np.array_equal(written[name], ARRAYS[name]) for name in written)
    written["conv"] += 1
    assert flat[0] == 0


def test_halves_are_summed_in_single_precision() -> None:
    layout = ArrayLayout.of({"w": np.ones(4, np.float16)})
    assert (layout.dtype, layout.is_exact) == (torch.float32, False)
    assert layout.write(torch.ones(4))["w"].dtype == np.float16
    assert ArrayLayout.of({"w": np.ones(4)}).is_exact


def test_the_text_rebuilds_it() -> None:
    layout = ArrayLayout.of(ARRAYS)
    assert ArrayLayout.from_text(layout.to_text()) == layout
    for text in ("", "[]", '["int64", []]', '["float32", [["w", [-1.5]]]]'):
        with pytest.raises(MalformedError):
            ArrayLayout.from_text(text)


def test_names_shapes_and_dtypes_are_in_the_fingerprint() -> None:
    first = ArrayLayout.of({"w": np.ones(4)})
    others = [{"v": np.ones(4)}, {"w": np.ones((2, 2))}, {"w": np.ones(4, np.float32)}]
    assert len({first.fingerprint(), *(ArrayLayout.of(each).fingerprint() for each in others)}) == 4


@pytest.mark.parametrize(
    "arrays",
    [
        {"bias": ARRAYS["bias"]},
        ARRAYS | {"conv": np.zeros((4, 3), np.float32)},
        ARRAYS | {"conv": np.zeros((3, 4), np.int64)},
        ARRAYS | {"conv": np.zeros((3, 4), ">f4")},
        ARRAYS | {"conv": np.zeros((3, 4), "U1")},
    ],
)
def test_other_arrays_are_refused(arrays: dict[str, np.ndarray]) -> None:  # type: ignore[type-arg]
    with pytest.raises(LayoutError, match='it: "conv"'):
        ArrayLayout.of(ARRAYS).read(arrays, "it")


def test_a_record_without_floats_is_refused() -> None:
    with pytest.raises(LayoutError, match="nothing to compress"):
        ArrayLayout.of({"count": np.array(3), "places": np.arange(3)})
