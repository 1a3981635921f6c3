"""Ray Train adapter: options, reports and restored checkpoints. Real workers: tests/engines/test_ray_cluster.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("pyarrow")  # of ray[train]

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
