"""Ray Train adapter: real workers of a local Ray that are lost, and resume with the same bits or in another number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("pyarrow")  # of ray[train]

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings(  # Ray's own
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::ResourceWarning",
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
)


def adapter() -> Any:
    from gossamer.integrations import ray as found

    return found


@pytest.mark.parametrize("wrong", [{"backend": "gloo"}, {"init_method": "tcp"}, {"timeout_s": 0}])
def test_options_that_would_have_no_effect_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        adapter().GossamerConfig(**wrong)


def test_ray_takes_the_backend_from_the_config() -> None:
    config = adapter().GossamerConfig(tls="/certificates")
    assert config.backend_cls is adapter().GossamerBackend
    assert config.to_dict() == {"timeout_s": 1800, "tls": "/certificates", "interface": None}


class StubSession:
    """Saves a text, and loads it."""

    def save(self, directory: str, *, keep: int, **mine: Any) -> None:
        (Path(directory) / f"keep-{keep}").write_text(str(mine["epoch"]))

    def load(self, directory: str) -> dict[str, Any]:
        return {"epoch": int((Path(directory) / "keep-1").read_text())}


def test_reports_and_restores_go_by_rays_checkpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ray.train import Checkpoint

    reported: list[tuple[dict[str, float], Any]] = []

    def keep(metrics: dict[str, float], checkpoint: Any = None) -> None:
        kept = checkpoint and Checkpoint.from_directory(checkpoint.to_directory(str(tmp_path / "kept")))
        reported.append((metrics, kept))

    stub = SimpleNamespace(
        report=keep, Checkpoint=Checkpoint, get_checkpoint=lambda: reported[-1][1] if reported else None
    )
    monkeypatch.setattr(adapter(), "train", stub)
    monkeypatch.setattr(adapter()._numbers, "take", lambda: {"gossamer/steps": 3})
    session = StubSession()
    assert adapter().restore(session) == {}
    adapter().report(session, {"loss": 0.5}, checkpoint=False)
    assert reported == [({"loss": 0.5, "gossamer/steps": 3}, None)]
    adapter().report(session, epoch=7)
    assert adapter().restore(session) == {"epoch": 7}


@contextmanager
def local_ray() -> Iterator[None]:
    import ray

    ray.init(
        address="local",  # not one that happens to run here
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT / "src")}},
    )
    try:
        yield
    finally:
        ray.shutdown()


def training(last: int) -> Callable[[dict[str, Any]], None]:
    """A loop that Ray pickles by value: `last` steps, a report after every other; rank 1 dies once, if `dies`."""

    def train(config: dict[str, Any]) -> None:
        import os
        from pathlib import Path

        import ray.train
        import torch

        import gossamer
        from gossamer.integrations.ray import report, restore

        torch.manual_seed(0)
        torch.set_num_threads(1)
        world = gossamer.init()
        model = torch.nn.Linear(16, 16)
        optimizer = torch.optim.AdamW(model.parameters())
        died = Path(config["folder"]) / "died"
        record = Path(config["folder"]) / "record.json"
        with gossamer.attach(model, optimizer, "TopK(0.1)", record=record) as session:
            begin = restore(session).get("step", 0)
            for step in range(begin, last):
                generator = torch.Generator().manual_seed(world.size * step + world.rank)
                model(torch.randn(8, 16, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if config["dies"] and step == 2 and world.rank == 1 and not died.exists():
                    ray.train.get_all_reported_checkpoints()  # comes back once the last report counts
                    died.touch()
                    os._exit(3)
                if step % 2:
                    weights = "".join(parameter.detach().numpy().tobytes().hex() for parameter in model.parameters())
                    report(session, {"weights": weights, "begin": begin, "world": world.size}, step=step + 1)

    return train


def fit(folder: Path, name: str, last: int = 6, workers: int = 2, dies: bool = False) -> dict[str, Any]:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        training(last),
        train_loop_config={"folder": str(folder), "dies": dies},
        torch_config=adapter().GossamerConfig(),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=1)),
    )
    metrics: dict[str, Any] = trainer.fit().metrics
    return metrics


@pytest.mark.processes
@pytest.mark.timeout(900)  # Ray starts thirty processes, more slowly than they train
def test_a_lost_worker_changes_no_bit_and_another_number_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with local_ray():
        calm = fit(tmp_path, "calm")
        broken = fit(tmp_path, "broken", dies=True)
        alone = fit(tmp_path, "calm", last=8, workers=1)
    assert (tmp_path / "died").exists()
    assert (calm["begin"], broken["begin"]) == (0, 2)
    assert broken["weights"] == calm["weights"]
    assert calm["gossamer/bytes_per_step"] > 0
    assert (alone["begin"], alone["world"]) == (6, 1)
    assert alone["weights"] != calm["weights"]
    assert "TopK" in (tmp_path / "record.json").read_text()
