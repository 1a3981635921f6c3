"""What comes from the wire picks nothing but numbers, names of tensors and one of a few optimizers."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from support.server_runs import run
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, AdamW

from gossamer.base.layout import FlatTensors
from gossamer.errors import MalformedError
from gossamer.train.parameter_server.from_recipe import make_shard
from gossamer.train.parameter_server.shard import FlatOptimizer
from gossamer.train.parameter_server.shard_spec import ELEMENTWISE, Block, ShardSpec, options_of


def described() -> ShardSpec:
    client, _ = run('ParameterServer("sync") + Int8()', optimizer=lambda t: AdamW(list(t), betas=(0.8, 0.9))).client(0)
    return client.shard_clients[0].spec


def test_its_text_gives_it_back() -> None:
    one = described()
    assert ShardSpec.from_json(one.to_json()) == one
    assert ShardSpec.from_json(one.to_json()).to_json() == one.to_json()
    assert one.groups[0]["betas"] == (0.8, 0.9)
    assert "lr" not in one.agreed_settings()


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "LBFGS"},
        {"optimizer": "Optimizer"},
        {"optimizer": "lr_scheduler"},
        {"optimizer": ["SGD"]},
        {"groups": [{"lr": "import"}]},
        {"groups": [{"lr": {"a": 1}}]},
        {"groups": [{"lr": [[1]]}]},
        {"groups": []},
        {"world": -1},
        {"world": True},
        {"world": 2.0},
        {"seed": "0"},
        {"blocks": [["float32", 0, [["weight", [2, -1]]]]]},
        {"blocks": [["int64", 0, [["weight", [2]]]]]},
        {"blocks": [["float32", 7, [["weight", [2]]]]]},
        {"blocks": [["float32", 0]]},
        {"blocks": None},
        {"more": 1},
    ],
)
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    text = json.dumps({**json.loads(described().to_json()), **change})
    with pytest.raises(MalformedError):
        ShardSpec.from_json(text)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "[" * 100_000, "3"])
def test_no_description(text: str) -> None:
    with pytest.raises(MalformedError):
        ShardSpec.from_json(text)


def test_damaged_text_is_refused_or_harmless() -> None:
    """Whatever letters are lost or changed: a description, or MalformedError."""
    text, random = described().to_json(), Random(0)
    refused = 0
    for _ in range(300):
        place = random.randrange(len(text))
        changed = text[:place] + random.choice(["", "0", '"', "}", "-", "x"]) + text[place + random.randint(0, 3) :]
        try:
            ShardSpec.from_json(changed)
        except MalformedError:
            refused += 1
    assert 100 < refused < 300


@pytest.mark.parametrize("recipe", ["EveryStep()", "ParameterServer(", "ParameterServer(pull=TernGrad())", "x" * 5000])
def test_recipes_that_no_server_follows_are_refused(recipe: str) -> None:
    one = described()
    text = json.dumps({**json.loads(one.to_json()), "recipe": recipe})
    values = tuple(block.flat for block in one.zeros())
    with pytest.raises(MalformedError, match="servers do not support"):
        make_shard(text, values)


def test_sizes_are_checked_before_memory_is_taken() -> None:
    one = json.loads(described().to_json())
    one["blocks"] = [["float64", 0, [["weight", [2**40, 2**20]]]]]
    with pytest.raises(MalformedError, match="has parameters"):
        make_shard(json.dumps(one), (torch.zeros(3, dtype=torch.float64),))


def test_all_that_are_elementwise_are_there() -> None:
    """And treat each element alike: rows in two pieces move as in one."""
    for name in ELEMENTWISE:
        kind = getattr(torch.optim, name)
        whole, pieces = Parameter(torch.arange(6.0)), [Parameter(torch.arange(2.0)), Parameter(torch.arange(2.0, 6.0))]
        one, other = kind([whole], lr=0.1), kind(pieces, lr=0.1)
        for step in range(4):
            whole.grad = torch.linspace(-1, 2, 6) * (step + 1)
            for piece, gradient in zip(pieces, whole.grad.split([2, 4]), strict=True):
                piece.grad = gradient
            one.step()
            other.step()
        assert torch.equal(whole, torch.cat(pieces)), name


@pytest.mark.parametrize("more", [{"name": "head"}, {"param_names": ["weight"]}, {"initial_lr": 0.1}])
def test_what_others_keep_in_the_groups_is_not_told(more: dict[str, Any]) -> None:
    optimizer = SGD([{"params": [Parameter(torch.zeros(2))], **more}], lr=0.1)
    (options,) = options_of(optimizer)
    assert options["lr"] == 0.1
    assert not options.keys() & more.keys()


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5)])
def test_hyperparameters_are_told_as_plain_numbers(number: Any) -> None:
    """A schedule that is computed with numpy leaves its numbers in the groups."""
    optimizer = AdamW([Parameter(torch.zeros(2))])
    optimizer.param_groups[0].update(lr=number, betas=(number, number))
    (options,) = options_of(optimizer)
    assert (options["lr"], options["betas"]) == (0.5, (0.5, 0.5))
    assert {type(each) for each in (options["lr"], *options["betas"])} == {float}


def test_what_an_optimizer_is_given_once_for_all_groups_is_given_again() -> None:
    """Adagrad reads where its sums begin when it is made, and not from the groups."""
    weight = Parameter(torch.ones(2))
    optimizer = Adagrad([weight], lr=0.5, initial_accumulator_value=1.0)
    block = Block("float32", 0, (("weight", (2,)),))
    spec = ShardSpec((block,), "Adagrad", options_of(optimizer), "", world=1, seed=0, number=0, shards=1)
    packed = FlatTensors.pack({"weight": weight.detach()})
    weight.grad = torch.tensor([1.0, -2.0])
    FlatOptimizer(spec, [packed], [False]).step([weight.grad.clone()], options_of(optimizer))
    optimizer.step()
    assert torch.equal(packed.flat, weight)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_one_is_made_again_from_what_is_reported(name: str) -> None:
    weight = Parameter(torch.arange(6.0))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1)
    block = Block("float32", 0, (("weight", (6,)),))
    spec = ShardSpec((block,), name, options_of(optimizer), "", world=1, seed=0, number=0, shards=1)
    packed = FlatTensors.pack({"weight": weight.detach()})
    again = FlatOptimizer(ShardSpec.from_json(spec.to_json()), [packed], [False])
    for step in range(3):
        weight.grad = torch.linspace(-1, 2, 6) * (step + 1)
        again.step([weight.grad.clone()], options_of(optimizer))
        optimizer.step()
    assert torch.equal(packed.flat, weight)
