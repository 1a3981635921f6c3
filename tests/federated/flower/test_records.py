"""Records of Flower and notes: what is read, refused and counted."""

from __future__ import annotations

import ast
import tracemalloc
from importlib.metadata import PackageNotFoundError
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gossamer.errors import LoopError, MalformedError
from gossamer.federated import flower
from gossamer.federated.flower import records as installed
from gossamer.federated.flower.records import (
    MOST_LETTERS,
    NUMPY,
    PAYLOAD,
    FlowerMissing,
    NodeAnswer,
    NodeInvitation,
    RoundTraffic,
    from_text,
    has_payload,
    need_flower,
    numpy_arrays,
    only_record,
    parsed,
    payload_of,
    record_bytes,
)
from gossamer.federated.messages import encode


def test_without_flower_the_line_to_write_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installed, "version", missing)
    with pytest.raises(FlowerMissing, match=r"gossamer\[flower\]"):
        need_flower()
    with pytest.raises(FlowerMissing):
        flower.compression_mod("TopK(0.1)")
    for name in ("CompressedStrategy", "VirtualGrid", "simulate"):
        with pytest.raises(FlowerMissing):
            getattr(flower, name)


def test_a_flower_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", lambda name: "1.9.0")
    with pytest.raises(FlowerMissing, match=r"1\.9\.0 is installed"):
        need_flower()


def test_versions_are_read() -> None:
    assert [parsed(text) for text in ("1.41.0", "2.0", "1.30.0.dev1", "", "x.y")] == [
        (1, 41), (2, 0), (1, 30), (0, 0), (0, 0),
    ]  # fmt: skip


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flower.nothing


def test_importing_the_adapter_does_not_import_flower() -> None:
    eager = {path.stem for path in Path(flower.__file__).parent.rglob("*.py") if _imports_flower(path.read_text())}
    assert eager == {
        "strategy",
        "virtual_grid",
        "tcp_grid",
        "messages",
    }  # which the package imports when they are asked for


def _imports_flower(source: str) -> bool:
    """Whether a module's own lines do, outside of functions."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or node.names[0].name for node in found]
    return any(name.split(".")[0] == "flwr" for name in names)


def test_bytes_add_up() -> None:
    traffic = RoundTraffic()
    traffic.went_down(1, 10, 40)
    traffic.went_down(2, 40, 40)
    traffic.went_up(1, 3, 40)
    assert (traffic.up_bytes, traffic.up_plain_bytes, traffic.down_bytes, traffic.down_plain_bytes) == (3, 40, 50, 80)
    assert traffic.by_node == {1: (3, 10), 2: (0, 40)}


def test_what_is_written_is_read() -> None:
    told = NodeInvitation(run="r", recipe="TopK(density=0.1)", pull="Int8()", seed=2**53, step=3, counted=1, version=2)
    assert from_text(encode(told), NodeInvitation, "it") == told
    answer = NodeAnswer(run="r", step=3, held=-1)
    assert from_text(encode(answer), NodeAnswer, "it") == answer


@pytest.mark.parametrize(
    "text",
    [
        None, 7, b"{}", "", "{", "[]", '{"run": 1}', '{"step": 1}', '{"run": "r", "step": -2}',
        '{"run": "r", "step": 1e400}', '{"run": "r", "more": 1}', '{"run": "r", "held": true}', "[" * 5000,
        '{"run": "' + "r" * MOST_LETTERS + '"}', '{"run": "' + "r" * 9000 + '"}',
    ],
)  # fmt: skip
def test_what_a_stranger_writes_is_refused(text: object) -> None:
    with pytest.raises(MalformedError, match="it sent"):
        from_text(text, NodeAnswer, "it")


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
