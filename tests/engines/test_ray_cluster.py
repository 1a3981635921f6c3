"""Ray: training on a cluster of raylets loses a worker or a raylet, and resumes with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.ray_starts import raylets

ray = pytest.importorskip("ray")
pytest.importorskip("pyarrow")  # of ray[train]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.new_programs,
    pytest.mark.timeout(1800),  # Ray starts thirty processes, more slowly than they train
    pytest.mark.filterwarnings(  # Ray's own
        "ignore::pytest.PytestUnraisableExceptionWarning",
        "ignore::ResourceWarning",
        "ignore::FutureWarning",
        "ignore::DeprecationWarning",
    ),
]


def training() -> Callable[[dict[str, Any]], None]:
    """A loop that Ray pickles by value. Reports after every second step.

    After step 2, once: rank 1 of config["loses"] == "worker" ends; with "raylet", a worker outside of
    config["head"] kills its raylet.
    """

    def train(config: dict[str, Any]) -> None:
        import os
        import signal
        from pathlib import Path

        import ray
        import ray.train
        import torch

        import gossamer
        from gossamer.integrations.ray import report, restore

        torch.manual_seed(0)
        torch.set_num_threads(1)
        world = gossamer.init()
        model = torch.nn.Linear(16, 16)
        optimizer = torch.optim.AdamW(model.parameters())
        died = Path(config["folder"]) / f"lost-{config['loses']}"
        on_head = ray.get_runtime_context().get_node_id() == config["head"]
        dies = {"": False, "worker": world.rank == 1, "raylet": not on_head}[config["loses"]]
        record = Path(config["folder"]) / "record.json"
        with gossamer.attach(model, optimizer, "TopK(0.1)", record=record) as session:
            begin = restore(session).get("step", 0)
            for step in range(begin, config["steps"]):
                draws = torch.Generator().manual_seed(world.size * step + world.rank)
                model(torch.randn(8, 16, generator=draws)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if dies and step == 2 and not died.exists():
                    ray.train.get_all_reported_checkpoints()  # returns once the last report counts
                    died.touch(exist_ok=False)  # by one worker
                    if config["loses"] == "raylet":
                        os.kill(os.getppid(), signal.SIGKILL)
                    os._exit(3)
                if step % 2:
                    weights = "".join(parameter.detach().numpy().tobytes().hex() for parameter in model.parameters())
                    report(session, {"weights": weights, "begin": begin, "world": world.size}, step=step + 1)

    return train


@dataclass
class RayJobs:
    """Jobs on one cluster. Those with one name continue each other's checkpoints."""

    folder: Path

    def fit(self, name: str, steps: int = 6, workers: int = 2, loses: str = "") -> dict[str, Any]:
        """Train, and return the metrics of the last report."""
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        from gossamer.integrations.ray import GossamerConfig

        head = ray.get_runtime_context().get_node_id()
        trainer = TorchTrainer(
            training(),
            train_loop_config={"folder": str(self.folder), "steps": steps, "head": head, "loses": loses},
            torch_config=GossamerConfig(),
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(
                name=name, storage_path=str(self.folder), failure_config=FailureConfig(max_failures=3)
            ),
        )
        metrics: dict[str, Any] = trainer.fit().metrics
        return metrics


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayJobs]:
    environ = {"env_vars": {"PYTHONPATH": str(ROOT / "src"), "RAY_USAGE_STATS_ENABLED": "0"}}
    with raylets(3) as address:  # of one core each, for jobs of two workers; this process connects to the first one
        try:
            ray.init(address=address, log_to_driver=False, runtime_env=environ)
            yield RayJobs(tmp_path_factory.mktemp("ray"))
        finally:
            ray.shutdown()


@pytest.fixture(scope="module")
def undisturbed(jobs: RayJobs) -> dict[str, Any]:
    return jobs.fit("undisturbed")


def test_two_workers_train_and_write_a_record(jobs: RayJobs, undisturbed: dict[str, Any]) -> None:
    assert (undisturbed["begin"], undisturbed["world"]) == (0, 2)
    assert undisturbed["gossamer/bytes_per_step"] > 0
    assert "TopK" in (jobs.folder / "record.json").read_text()


def test_training_resumes_after_the_loss_of_a_worker(jobs: RayJobs, undisturbed: dict[str, Any]) -> None:
    resumed = jobs.fit("worker", loses="worker")
    assert (jobs.folder / "lost-worker").exists()
    assert (resumed["begin"], resumed["world"]) == (2, 2)
    assert resumed["weights"] == undisturbed["weights"]


def test_another_number_of_workers_continues_from_a_checkpoint(jobs: RayJobs, undisturbed: dict[str, Any]) -> None:
    alone = jobs.fit("undisturbed", steps=8, workers=1)
    assert (alone["begin"], alone["world"]) == (6, 1)
    assert alone["weights"] != undisturbed["weights"]


def test_training_resumes_after_the_loss_of_a_raylet(jobs: RayJobs, undisturbed: dict[str, Any]) -> None:
    resumed = jobs.fit("raylet", loses="raylet")
    assert (jobs.folder / "lost-raylet").exists()
    assert (resumed["begin"], resumed["world"]) == (2, 2)
    assert resumed["weights"] == undisturbed["weights"]
