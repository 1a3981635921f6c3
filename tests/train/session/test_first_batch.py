"""First batch: ranks that begin with the same data are noticed, whatever their batches are made of."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.sessions import sgd
from support.virtual_workers import Worker, cluster, notices
from torch import Tensor, nn

from gossamer.train.session.first_batch import MOST_OBJECTS, NO_BATCH, NOT_SEEN, FirstBatch, tensors_in

Pair = namedtuple("Pair", ["inputs", "label"])


@dataclass
class Example:
    inputs: Tensor
    label: str = ""


@dataclass(slots=True)
class Slim:
    inputs: Tensor


class Output(OrderedDict[str, Any]):
    """As a ModelOutput: a dict with attributes."""


class Lazy(Mapping[str, Tensor]):
    """As a BatchEncoding may be: a mapping, and no dict."""

    def __init__(self, x: Tensor) -> None:
        self._hidden = lambda: x

    def __getitem__(self, key: str) -> Tensor:
        return self._hidden()

    def __iter__(self) -> Iterator[str]:
        return iter(["inputs"])

    def __len__(self) -> int:
        return 1


KINDS: list[Callable[[Tensor], Any]] = [
    lambda x: x,
    lambda x: {"inputs": x},
    lambda x: [x],
    lambda x: (1, "text", x),
    lambda x: [{"image": (x, 3), "label": None}],
    lambda x: UserDict({"inputs": x}),
    lambda x: Output(inputs=x),
    Lazy,
    lambda x: Pair(x, 1),
    Example,
    Slim,
    lambda x: {"batch": [Example(x)]},
    lambda x: SimpleNamespace(inputs=SimpleNamespace(x=x)),
    lambda x: nn.utils.rnn.pack_sequence([x]),
]


class Sum(nn.Module):
    """Takes any batch, by position or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: Any = None, named: Any = None) -> Tensor:
        given = batch if named is None else named
        return self.weight * sum(tensor.sum() for tensor in tensors_in(given))


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_equal_batches_are_noticed(kind: int, equal: bool) -> None:
    def work(worker: Worker) -> None:
        model, _, _ = worker.start(Sum(), sgd)
        batch = KINDS[kind](torch.full((3,), 1.0 if equal else float(worker.rank)))
        (model(named=batch) if kind % 2 else model(batch)).backward()

    with notices() as said:
        cluster(work, 2)
    assert len(said) == equal
    assert all("world.shard" in message for message in said)
    assert all("torch.manual_seed(seed + world.rank)" in message for message in said)
    assert all("other nodes of one graph" in message for message in said)


OTHER_LAYOUTS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "rows": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "meta": lambda: torch.empty(3, device="meta"),
}


@pytest.mark.filterwarnings("ignore")  # torch calls some of these layouts a prototype
@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_inputs_without_one_strided_buffer_are_not_hashed(layout: str) -> None:
    alone, beside = FirstBatch(), FirstBatch()
    alone.see(nn.Identity(), (OTHER_LAYOUTS[layout](),), {})
    beside.see(nn.Identity(), (torch.ones(3), OTHER_LAYOUTS[layout]()), {})
    assert alone.hash == NO_BATCH
    assert beside.hash not in (NOT_SEEN, NO_BATCH)


@pytest.mark.parametrize("equal", [True, False])
def test_equal_batches_are_noticed_within_vmap(equal: bool) -> None:
    def work(worker: Worker) -> None:
        model, _, _ = worker.start(nn.Linear(3, 1), sgd)

        def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, weights, (x,)).sum()

        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        batch = torch.ones(4, 3) if equal else torch.full((4, 3), float(worker.rank))
        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, batch)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].mean(0)
        worker.sessions[0].optimizer.step()

    with notices() as said:
        cluster(work, 2)
    assert sum("world.shard" in message for message in said) == equal


def test_each_tensor_is_found_once_and_in_order() -> None:
    first, second = torch.zeros(1), torch.ones(1)
    assert [id(x) for x in tensors_in([first], {"again": first, "then": second})] == [id(first), id(second)]


def test_circles_end() -> None:
    batch: dict[str, Any] = {"x": torch.zeros(1)}
    batch["self"] = batch
    assert len(tensors_in(batch)) == 1


def test_properties_and_generators_are_not_evaluated() -> None:
    class Greedy:
        @property
        def inputs(self) -> Tensor:
            raise AssertionError

    def generator() -> Iterator[Tensor]:
        raise AssertionError
        yield

    assert tensors_in(Greedy(), generator(), nn.Linear(2, 2), Tensor, torch, "text", None, 3) == []


def test_a_batch_that_leads_to_everything_is_left_at_some_point() -> None:
    assert len(tensors_in([SimpleNamespace(x=torch.zeros(1)) for _ in range(MOST_OBJECTS)])) < MOST_OBJECTS


def test_inputs_without_a_tensor_are_no_batch() -> None:
    seen = FirstBatch()
    seen.see(nn.Linear(1, 1), ("text", {"numbers": [1, 2]}), {"flag": True})
    assert seen.hash == NO_BATCH
