"""Standby server: a warmed-up process that becomes any server of a run at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import MutableMapping
from tempfile import TemporaryDirectory
from typing import TextIO

import torch
from torch.nn import Parameter

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.peer_ops import Stamp
from gossamer.train.parameter_server.client.shard_client import shard_clients
from gossamer.train.parameter_server.from_recipe import make_shard, push_pull_codecs
from gossamer.train.parameter_server.journal import keep, restore
from gossamer.train.parameter_server.shard_spec import options_of


def warm_up() -> None:
    """Serve a model with one parameter and restore it from a journal. This loads modules that torch imports on first
    use, which takes as long as importing torch."""
    tensors = {"weight": Parameter(torch.zeros(1))}
    optimizer = torch.optim.AdamW(tensors.values())
    recipe = resolve("ParameterServer(push=Int8(), pull=Int8())")
    (shard_client,) = shard_clients(
        tensors, optimizer, push_pull_codecs(recipe), recipe=repr(recipe), world=1, seed=0, shards=1
    )
    message = shard_client.encode(Stamp(0, 0))
    with TemporaryDirectory() as directory:
        shard = make_shard(shard_client.spec.to_json(), shard_client.parameters_of(tensors))
        keep(directory, shard)
        about = shard_client.about(options_of(optimizer), 1.0, message.counts)
        shard.take(Stamp(0, 0), 1, about, message.payload)
        shard.apply(1.0)
        shard.publish()
        shard.journal.close()
        again = restore(directory, 0)
        if again is not None:
            again.journal.close()


def wait_for_role(orders: TextIO | None = None, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Wait for a line of JSON with environment variables, and set them. Returns False if the writer has ended.

    orders: where the line comes from; None for standard input.
    """
    line = (sys.stdin if orders is None else orders).readline()
    if not line.endswith("\n"):
        return False
    environ.update({str(name): str(text) for name, text in json.loads(line).items()})
    return True
