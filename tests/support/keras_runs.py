"""Runs of Keras in one process that need no backend: an elastic one, one that counts bytes, and a page's examples."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.elastic_groups import ElasticRun, Join
from support.keras_data import batches
from support.paths import ROOT
from support.virtual_workers import Worker, cluster, heard

from gossamer import events


def joined_in_second_epoch(
    fit: Callable[[Worker], Any], values: Callable[[Any], Any], more: Callable[[Any], Any] | None = None
) -> list[Any]:
    """Two workers fit for two epochs, and a third one joins in the second: by number the steps, the epochs made, the
    optimizer's variables and the parameters. fit: returns the fitted model. values: of variables. more: of the model,
    in place of the parameters."""

    def work(worker: Worker) -> Any:
        model = fit(worker)
        worker.array_sessions.append(model.optimizer.session)
        steps, moments = model.optimizer.session.steps, values(model.optimizer.inner.variables)
        shown = values(model.trainable_variables) if more is None else more(model)
        return steps, len(model.history.epoch), moments, shown

    alone = ElasticRun(2)
    alone(work)
    operations = alone.members.operations[0, 2]
    return ElasticRun(2, newcomers=1, join=Join(op=operations * 3 // 4))(work)


def one_validates(fitted: Callable[..., Any], callbacks: Callable[[], list[Any]]) -> list[list[dict[str, list[float]]]]:
    """By recipe the histories of two ranks, of which only rank 0 validates. fitted: fits a model; callbacks: of fit."""

    def work(worker: Worker, recipe: str) -> dict[str, list[float]]:
        check = None if worker.rank else batches("network", 7, 2)
        model = fitted(worker, recipe, epochs=2, validation_data=check, callbacks=callbacks)
        model.optimizer.session.close()
        history: dict[str, list[float]] = model.history.history
        return history

    recipes = "Dense()", "Gossip() + Ring()", "NoLoCo(period=3)"
    return [cluster(partial(work, recipe=recipe), 2) for recipe in recipes]


def examples(name: str) -> dict[str, Any]:
    """The names that the examples of a page define, in a world of one."""
    text = (ROOT / "docs" / "how-to" / "integrations" / name).read_text()
    known: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for number, source in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
            path = Path(folder) / f"example{number}.py"  # TensorFlow reads the source of what it compiles
            path.write_text(source)
            exec(compile(source, path, "exec"), known)
        os.chdir("/")
    return known


def sent(work: Callable[[Worker], Any]) -> tuple[list[Any], list[int]]:
    """Results by rank, and the bytes of each rank's steps in ascending order."""
    with heard(events.StepEnded) as found:
        results = cluster(work, 2)
    return results, sorted(event.bytes_sent for event in found)


def failure(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


class Broadcasts:
    """The one method of gossamer.World that broadcast_variables calls, over the transport of a test."""

    def __init__(self, worker: Worker) -> None:
        self.rank, self._transport = worker.rank, worker.transport

    def broadcast(self, value: Any, root: int) -> Any:
        texts = self._transport.all_gather_text(json.dumps(None if value is None else [v.tolist() for v in value]))
        kinds = [torch.bfloat16, torch.int32, torch.float32]
        return [torch.tensor(v, dtype=kind) for v, kind in zip(json.loads(texts[root]), kinds, strict=True)]
