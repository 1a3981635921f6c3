"""The program that Flower and Gossamer both run: digits, a small network, one pass over each client's own data.

A module of its own, since Flower's simulation runs it in processes that import it by name.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gossamer.federated.client.functions import Round, Update

BATCH, RATE = 16, 0.1


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def make_model() -> nn.Module:
    """The first version, the same everywhere."""
    torch.manual_seed(0)
    return network()


@lru_cache
def digits(clients: int) -> list[tuple[Tensor, Tensor]]:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(1))
    inputs, targets = torch.tensor(found.data / 16, dtype=torch.float32)[order], torch.tensor(found.target)[order]
    return list(zip(inputs.tensor_split(clients), targets.tensor_split(clients), strict=True))


def train(model: nn.Module, told: Round, clients: int) -> Update:
    inputs, targets = digits(clients)[told.client or 0]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch, wanted in told.batches(list(zip(inputs.split(BATCH), targets.split(BATCH), strict=True))):
        optimizer.zero_grad()
        loss = cross_entropy(model(batch), wanted)
        loss.backward()
        optimizer.step()
    return Update(samples=len(inputs), metrics={"loss": loss.item()})


def accuracy(flat: Tensor) -> float:
    model = make_model()
    nn.utils.vector_to_parameters(flat, model.parameters())
    right = sum(int((model(inputs).argmax(1) == targets).sum()) for inputs, targets in digits(10))
    return right / sum(len(targets) for _, targets in digits(10))


def flower_app(clients: int, mods: list[Any]) -> Any:
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    def answer(message: Any, context: Any) -> Any:
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        told = Round(index=0, client=int(context.node_config["partition-id"]), local_epochs=1)
        update = train(model, told, clients)
        metrics = MetricRecord({"num-examples": update.samples, **update.metrics})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    app = ClientApp(mods=mods)
    app.train()(answer)
    return app
