"""Picture: who has what, for few devices, for many, and for far too many."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.nightly import nightly

from gossamer.errors import GossamerError
from gossamer.federated.population import partition, plot_partition
from gossamer.federated.population import picture as pictures

LABELS = [index % 10 for index in range(600)]


@pytest.mark.parametrize("clients", [20, 100, *nightly(1, 35)])  # bubbles, bars of a sample; bubbles, bars
def test_a_picture_is_drawn(tmp_path: Path, clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pictures, "MOST_COLUMNS", 40)
    path = tmp_path / "who.png"
    plot_partition(partition(LABELS, clients, alpha=0.1), LABELS, path, "digits")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_rare_labels_are_drawn_together() -> None:
    words = [f"word {index % 50}" for index in range(500)] + ["word 0"]
    names = pictures._names(words)
    assert len(names) == pictures.MOST_LABELS
    assert "word 0" in names


def test_numbers_stand_in_their_order() -> None:
    assert [*pictures._names([10, 9, 2, 2.5]).values()] == ["2", "2.5", "9", "10"]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (
            ["Homo sapiens sapiens 1", "Homo sapiens sapiens 2"],
            ["'Homo sapiens sapiens 1'", "'Homo sapiens sapiens 2'"],
        ),
        ([1000001, 1000002, 3], ["3", "1000001", "1000002"]),
        (["others", "cat"], ["cat", "'others'"]),
    ],
)
def test_labels_with_the_same_short_name_stay_apart(labels: list[object], names: list[str]) -> None:
    assert [*pictures._names(labels).values()] == names


def test_parts_of_other_data_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="sample 599, but there are 5 labels"):
        plot_partition(partition(LABELS, 3), LABELS[:5], tmp_path / "who.png")
    with pytest.raises(ValueError, match="it is empty"):
        plot_partition([], LABELS, tmp_path / "who.png")


def test_without_matplotlib_the_line_to_write_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.base.figures.find_spec", lambda name: None)
    with pytest.raises(GossamerError, match=r"gossamer\[plot\]"):
        plot_partition(partition(LABELS, 3), LABELS, tmp_path / "who.png")
