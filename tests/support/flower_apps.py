"""Flower apps that train what federations do: linear regression, one pass over a device's own batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from support.federations import model_of, one_pass
from torch import Tensor, nn

from gossamer.federated.client.functions import Round, Update

Function = Callable[[nn.Module, Round], Update]


def linear_app(mods: Sequence[Any] = (), function: Function = one_pass) -> ClientApp:
    """An app of which device k is client k."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = model_of()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        told = Round(index=0, client=int(context.node_config["partition-id"]), local_epochs=1)
        update = function(model, told)
        metrics = MetricRecord({"num-examples": update.samples, **update.metrics})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        total = sum(float(array.numpy().sum()) for array in message.content["arrays"].values())
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "total": total})}), reply_to=message)

    return app


def first_arrays() -> ArrayRecord:
    return ArrayRecord(model_of().state_dict())


def flat_of(record: ArrayRecord) -> Tensor:
    return torch.cat([torch.from_numpy(array.numpy()).reshape(-1) for array in record.values()])


def replaced(record: ArrayRecord, **arrays: Array) -> ArrayRecord:
    return ArrayRecord(dict(record.items()) | arrays)
