"""Terms that a script defines are registered by running it once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gossamer.algorithms.recipes.catalog import NOUNS
from gossamer.cli import script_terms
from gossamer.cli.main import gossamer
from gossamer.cli.script_terms import refuse_unknown_terms, register_terms

SCRIPT = """
from dataclasses import dataclass
import sys, torch, gossamer

@gossamer.register
@dataclass(frozen=True, repr=False)
class Thirds(gossamer.Int8):
    block: int = 96

print("it ran")
model = torch.nn.Linear(2, 2)
gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    before = dict(NOUNS)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    yield path
    NOUNS.clear()
    NOUNS.update(before)


def test_a_script_runs_once_and_each_recipe_is_resolved_once(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved: list[object] = []
    resolve = script_terms.resolve
    monkeypatch.setattr(script_terms, "resolve", lambda text: [resolved.append(text), resolve(text)][1])
    texts = ["Thirds()", "Int8()", "LocalSGD(2) + Thirds()"]
    register_terms(script, [], texts)
    assert "Thirds" in NOUNS
    assert capsys.readouterr().err.count("it ran") == 1
    assert [text for text in resolved if text is not None] == texts


def test_a_script_does_not_run_for_known_terms(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    register_terms(script, [], ["Int8()", "DiLoCo(period=20)"])
    assert capsys.readouterr().err == ""


def test_a_term_that_the_script_names_and_does_not_register_is_refused(script: Path) -> None:
    script.write_text(SCRIPT.replace("@gossamer.register\n", ""))
    with pytest.raises(click.BadParameter, match=r"gossamer\.register\(Thirds\)"):
        register_terms(script, [], ["Thirds()"])
    with pytest.raises(click.BadParameter, match="There is no Fourths"):
        register_terms(script, [], ["Fourths()"])


def test_server_processes_need_an_entry_point_for_a_term_of_the_script(script: Path) -> None:
    refuse_unknown_terms("ParameterServer() + Thirds()", script)
    refuse_unknown_terms("ParameterServer() + Int8()", script, servers=1)
    with pytest.raises(click.BadParameter) as refused:
        refuse_unknown_terms("ParameterServer() + Thirds()", script, servers=1)
    assert '[project.entry-points."gossamer.terms"] Thirds = "my_package:Thirds"' in str(refused.value)
    assert "omit --servers" in str(refused.value)


def test_run_refuses_a_term_of_the_script_with_server_processes_before_it_starts(script: Path) -> None:
    words = ["run", "--workers", "2", "--servers", "1", "--recipe", "ParameterServer() + Thirds()", str(script)]
    done = CliRunner().invoke(gossamer, words)
    assert done.exit_code == 2
    assert "entry-points" in done.stderr
