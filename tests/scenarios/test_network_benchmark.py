"""benchmarks/network.py: every step's time is stored, and an interrupted program continues."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from benchmarks import network
from benchmarks.network import Result, main, result

SECONDS = {"DDP": [1.0, 1.1, 1.2, 1.3, 5.0], "Dense()": [2.0, 2.0, 2.1, 2.2, 2.3]}


def options(folder: Path, rounds: int = 1) -> argparse.Namespace:
    return argparse.Namespace(
        quick=False, networks=["100mbit,20ms"], rows=["DDP", "Dense()"], workers=4, steps=5, rounds=rounds,
        times=folder / "times.jsonl", output=folder / "page.md",
    )  # fmt: skip


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was run, in order."""
    found: list[tuple[str, str]] = []

    def run(network_: str, name: str, args: object, model: object = ()) -> Result:
        found.append((network_, name))
        return result(SECONDS[name])

    monkeypatch.setattr(network, "today", run)
    monkeypatch.setattr(network, "ours", run)
    return found


def test_page_has_medians_with_deciles_and_ratios(runs: list[tuple[str, str]], tmp_path: Path) -> None:
    main(options(tmp_path))
    page = (tmp_path / "page.md").read_text()
    assert "| DDP | 1200 ms (1040 to 3520) | 1200 ms (1040 to 3520) |" in page
    assert "| Dense() | 2100 ms (2000 to 2260) | 2100 ms (2000 to 2260) |" in page
    assert "| Dense() | 1.75 | 1.75 |" in page


def test_interrupted_program_continues_from_the_stored_times(
    runs: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = network.today

    def interrupted(network_: str, name: str, args: object, model: object = ()) -> Result:
        if network_ != "none":
            raise KeyboardInterrupt
        return honest(network_, name, args, model)  # type: ignore[arg-type]

    monkeypatch.setattr(network, "today", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(options(tmp_path))
    assert not (tmp_path / "page.md").exists()
    monkeypatch.setattr(network, "today", honest)
    first = [*runs]
    main(options(tmp_path))
    assert first == [("none", "DDP"), ("none", "Dense()")]
    assert runs == [*first, ("100mbit,20ms", "DDP"), ("100mbit,20ms", "Dense()")]
    runs.clear()
    main(options(tmp_path, rounds=2))
    assert len(runs) == 4
    assert len((tmp_path / "times.jsonl").read_text().splitlines()) == 8


def test_error_is_stored_and_shown(
    runs: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "ours", lambda *_: Result(error="not done after 400 s"))
    main(options(tmp_path))
    assert "| Dense() | not done after 400 s |" in (tmp_path / "page.md").read_text()
    assert '"error": "not done after 400 s"' in (tmp_path / "times.jsonl").read_text()
