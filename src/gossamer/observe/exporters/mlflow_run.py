"""MLflow: a run at a tracking server, by its library."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import import_module
from itertools import islice

from gossamer.observe.exporters.points import Point

AT_ONCE = 1000  # metrics, MLflow's limit
LONGEST = 250  # characters of a name, likewise
EXPERIMENT = "gossamer"  # unless MLFLOW_EXPERIMENT_NAME says another


class MlflowWriter:
    """uri: as in MLFLOW_TRACKING_URI. Characters that MLflow does not take in names become underscores."""

    def __init__(self, uri: str) -> None:
        self._mlflow = import_module("mlflow")
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment).info.run_id

    def write(self, points: Sequence[Point]) -> None:
        metric = self._mlflow.entities.Metric
        metrics = iter(
            [
                metric(mlflow_name(name), value, int(point.at * 1000), point.step)
                for point in points
                for name, value in point.values.items()
            ]
        )
        while batch := list(islice(metrics, AT_ONCE)):
            self._client.log_batch(self._run, metrics=batch)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def mlflow_name(name: str) -> str:
    """Names are paths there: without empty parts, and not above themselves."""
    clean = re.sub(r"[^\w\-./: ]", "_", name, flags=re.ASCII)[:LONGEST]
    parts = [part if part.strip(".") else "_" * max(1, len(part)) for part in clean.split("/")]
    return "/".join(parts)
