"""Records: arrays that lie about their size are refused before numpy makes room for them."""

from __future__ import annotations

import tracemalloc
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gossamer.errors import LoopError, MalformedError
from gossamer.federated.flower.records import (
    NUMPY,
    PAYLOAD,
    has_payload,
    numpy_arrays,
    only_record,
    payload_of,
    record_bytes,
)


def saved(array: Any, **options: Any) -> bytes:
    stream = BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def record(data: bytes, stype: str = NUMPY, name: str = "w") -> dict[str, Any]:
    return {name: SimpleNamespace(stype=stype, data=data)}


@pytest.mark.parametrize(
    "array", [np.ones((2, 3)), np.zeros((0, 4)), np.array(3), np.asfortranarray(np.random.rand(3, 4))]
)
def test_what_numpy_saved_is_read(array: Any) -> None:
    assert np.array_equal(numpy_arrays(record(saved(array)), "it")["w"], array)


SAVED = saved(np.zeros((1, 4)))
BOMB = SAVED.replace(b"(1, 4), }          ", b"(1000000000, 4), } ")


@pytest.mark.parametrize(
    ("data", "stype"),
    [
        (b"", NUMPY),
        (SAVED[:-1], NUMPY),
        (SAVED + b"\0", NUMPY),
        (BOMB, NUMPY),
        (SAVED.replace(b"(1, 4)", b"(1,-4)"), NUMPY),
        (SAVED.replace(b"'descr'", b"'desks'"), NUMPY),
        (b"\x93NUMPY\x09\x00" + SAVED[8:], NUMPY),
        (saved(np.array([{}], dtype=object), allow_pickle=True), NUMPY),
        (SAVED, "python.pickle"),
    ],
)
def test_what_numpy_did_not_save_is_refused_without_memory(data: bytes, stype: str) -> None:
    tracemalloc.start()
    with pytest.raises(MalformedError, match='it: "w"'):
        numpy_arrays(record(data, stype), "it")
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_the_bomb_is_one() -> None:
    assert len(BOMB) == len(SAVED)
    assert b"1000000000" in BOMB


def test_payloads_are_told_from_arrays() -> None:
    both = record(b"abc", "gossamer.topk.v1", PAYLOAD) | record(SAVED)
    assert has_payload(both)
    assert not has_payload(record(SAVED, NUMPY, PAYLOAD))
    assert list(numpy_arrays(both, "it")) == ["w"]
    assert payload_of(both, "it") == b"abc"
    assert record_bytes(both) == 3 + len(SAVED)
    with pytest.raises(MalformedError, match="python"):
        payload_of(record(b"abc", "python.pickle", PAYLOAD), "it")


def test_one_record_is_compressed() -> None:
    assert only_record(SimpleNamespace(array_records={"a": 1}), "it") == ("a", 1)
    for several in ({}, {"a": 1, "b": 2}):
        with pytest.raises(LoopError, match=f"it has {len(several)} ArrayRecords"):
            only_record(SimpleNamespace(array_records=several), "it")
