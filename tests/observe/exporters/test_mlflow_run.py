"""MLflow: names that it takes, and what its own store gives back (skipped where it is missing)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.exporting import MANY, ODD, ODD_POINT

from gossamer.observe.exporters.mlflow_run import MlflowWriter, mlflow_name
from gossamer.observe.exporters.points import Point


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("train/loss", "train/loss"), ("größe %", "gr__e _"), ("", "_"), ("a//b", "a/_/b"), ("../x", "__/x"),
        ("/x", "_/x"), (".", "_"), ("x" * 300, "x" * 250),
    ],
)  # fmt: skip
def test_names_become_paths_that_mlflow_takes(name: str, taken: str) -> None:
    """Seen with mlflow-skinny 3.17.2, whose log_batch refuses the whole batch for one bad name."""
    assert mlflow_name(name) == taken


def test_mlflow_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more packages
    writer = MlflowWriter(f"file://{tmp_path}")
    writer.write([ODD_POINT, Point(1.7e9 + 1, 301, {**MANY, "last": 1.0})])
    writer.close()
    client = mlflow.MlflowClient(tracking_uri=f"file://{tmp_path}")
    experiment = client.get_experiment_by_name("gossamer")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics.keys() == {*map(mlflow_name, ODD), *MANY, "last"}
    assert math.isnan(run.data.metrics["nan"])
    (point,) = client.get_metric_history(run.info.run_id, "train/loss")
    assert (point.step, point.value, point.timestamp) == (300, 0.25, 1_700_000_000_000)
