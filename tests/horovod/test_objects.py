"""Objects travel without pickles: which types come back as they were, and which are refused with the place."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.horovod_workers import horovod

import gossamer.horovod.torch as hvd
from gossamer.horovod.exceptions import HorovodInternalError
from gossamer.horovod.objects import decode, encode

VALUES: list[Any] = [
    None,
    [],
    ["horovod", 1],
    {"text": "a", 0: [1, 2], (1, "b"): {"deep": {1.5, 2.5}}, None: True},
    (1, (2,), [3, ()]),
    frozenset({"a"}),
    OrderedDict([("b", 1), ("a", 2)]),
    b"bytes",
    2 + 3j,
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cpu"),
    Namespace(lr=0.1, layers=[1, 2]),
    1 << 70,
    float("inf"),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_with_their_types(value: Any) -> None:
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)


def test_tensors_and_arrays_come_back() -> None:
    value = {
        "half": torch.ones(2, dtype=torch.bfloat16),
        1: np.arange(3),
        "parameter": torch.nn.Parameter(torch.ones(())),
    }
    found = decode(encode(value))
    assert torch.equal(found["half"], value["half"])  # type: ignore[arg-type]
    assert np.array_equal(found[1], np.arange(3))
    assert found["parameter"].shape == ()


@pytest.mark.parametrize("first", [np.arange(3), np.zeros((2, 0)), torch.arange(3)], ids=repr)
def test_a_list_may_begin_with_an_array(first: Any) -> None:
    found = decode(encode({"weights": [first, "horovod"]}))["weights"]
    assert np.array_equal(found[0], first)
    assert found[1:] == ["horovod"]


@dataclass
class Custom:
    """A class of a script."""

    rate: float = 0.1


@pytest.mark.parametrize(
    "value",
    [Custom(), {"a": [Custom()]}, {1: Custom()}, lambda: None, {Custom}],
    ids=["object", "in a list", "as a value", "function", "in a set"],
)
def test_other_types_are_refused_with_their_place(value: Any) -> None:
    with pytest.raises(TypeError, match=r"object.*(vars|asdict)"):
        encode(value)


def test_a_place_within_a_container_is_named() -> None:
    with pytest.raises(TypeError, match=r"object\['a'\]\[0\] is of type .*Custom"):
        encode({"a": [Custom()]})


def test_ranks_send_objects_of_different_lengths() -> None:
    def work(rank: int) -> tuple[Any, Any]:
        return hvd.allgather_object("x" * rank), hvd.broadcast_object({"rank": rank}, root_rank=2)

    assert horovod(work, 3) == [(["", "x", "xx"], {"rank": 2})] * 3


def test_only_the_root_needs_an_object_that_travels() -> None:
    assert horovod(lambda rank: hvd.broadcast_object(Custom() if rank else 5)) == [5, 5]


@pytest.mark.parametrize("call", [lambda: hvd.broadcast_object(1, root_rank=2), lambda: hvd.broadcast_object(1, -1)])
def test_a_root_that_is_not_a_rank_is_refused(call: Any) -> None:
    def work(rank: int) -> None:
        with pytest.raises(HorovodInternalError, match=r"root_rank (2|-1) is not in .*Name one of its ranks"):
            call()

    horovod(work)
