"""gossamer.Record: read from a run's folder, shown as a table, and as a pandas frame."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.run_records import record

import gossamer
from gossamer.errors import StoreError
from gossamer.observe import saved_record

REST = {
    "seconds_per_step": {"median": 0.02, "p90": 0.03},
    "skipped_steps": 0,
    "parameters": 3,
    "seconds": 4.0,
    "memory_bytes": {"peak_resident": 1e6},
    "final": {"loss <train>": 0.005},
    "workers_agree": True,
}


def test_a_record_is_loaded_from_its_folder_or_its_file(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text(json.dumps(record("Dense()")))
    loaded = gossamer.Record.load(tmp_path)
    assert loaded == gossamer.Record.load(str(file)) == record("Dense()")
    assert loaded["steps"] == 200


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "neither"),
        ("{", "not JSON"),
        ("3", "not a record"),
        ("[]", "it has no recipe"),
        ('{"recipe": "Dense()", "workers": 2}', "it has no steps. Name a run's folder"),  # of gossamer explain --json
    ],
)
def test_a_missing_or_invalid_record_is_an_error(content: str | None, word: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "record.json").write_text(content)
    with pytest.raises(StoreError, match=word):
        gossamer.Record.load(tmp_path)
    with pytest.raises(StoreError, match="neither"):
        gossamer.Record.load(tmp_path / "nowhere")


def test_a_notebook_shows_a_table_with_escaped_names() -> None:
    page = gossamer.Record(record("Dense()") | REST)._repr_html_()
    assert "Dense()" in page
    assert "loss &lt;train&gt;" in page


def test_a_frame_has_a_row_per_step_and_a_column_per_metric() -> None:
    pytest.importorskip("pandas")
    metrics = {"loss": [[1, 0.5, 3.0], [3, 1.5, None]], "accuracy": [[3, 1.5, 0.25]]}
    frame = gossamer.Record(metrics=metrics).to_frame()
    assert list(frame.columns) == ["seconds", "loss", "accuracy"]
    assert list(frame.index) == [1, 3]
    assert frame.loc[3, "accuracy"] == 0.25
    assert frame["loss"].isna().tolist() == [False, True]
    assert list(gossamer.Record(metrics={}).to_frame().columns) == ["seconds"]


def test_the_line_to_install_pandas_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_record, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install pandas"):
        gossamer.Record(metrics={}).to_frame()
