"""A process that could become any server of a run at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import MutableMapping
from tempfile import TemporaryDirectory
from typing import TextIO

import torch
from torch.nn import Parameter

from gossamer.core.peer_ops import Stamp
from gossamer.parameter_server.client.shard_client import shard_clients
from gossamer.parameter_server.from_recipe import push_pull_codecs, shard_of
from gossamer.parameter_server.journal import keep, restore
from gossamer.parameter_server.shard_spec import options_of
from gossamer.recipes.recipe import resolve


def rehearse() -> None:
    """Serve a model of one number and come back from its journal: what torch imports and builds when it is first used,
    which takes as long as importing it, is there then."""
    tensors = {"weight": Parameter(torch.zeros(1))}
    optimizer = torch.optim.AdamW(tensors.values())
    recipe = resolve("ParameterServer(push=Int8(), pull=Int8())")
    (share,) = shard_clients(
        tensors, optimizer, push_pull_codecs(recipe), recipe=repr(recipe), world=1, seed=0, shards=1
    )
    written = share.write(Stamp(0, 0))
    with TemporaryDirectory() as directory:
        shard = shard_of(share.description.text(), share.values(tensors))
        keep(directory, shard)
        about = share.about(options_of(optimizer), 1.0, written.counts)
        shard.take(Stamp(0, 0), 1, about, written.payload)
        shard.apply(1.0)
        shard.publish()
        shard.journal.close()
        again = restore(directory, 0)
        if again is not None:
            again.journal.close()


def called(orders: TextIO = sys.stdin, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Wait for a line of JSON with the environment that this process does not have yet, and take it over.

    False where there will be none, since whoever would write it is gone.
    """
    line = orders.readline()
    if not line.endswith("\n"):
        return False
    environ.update({str(name): str(text) for name, text in json.loads(line).items()})
    return True
