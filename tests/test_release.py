"""Extras that pages name, oldest versions, checks of wheels, and workflows of the public host."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from release import aarch64, matrix, wheels
from support.paths import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
PAGES = [
    *(path for folder in ("src", "docs", "examples") for path in (ROOT / folder).rglob("*")),
    *ROOT.glob("*.md"),
]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


# -- extras --------------------------------------------------------------------------------------------------


def _unknown_extras(text: str) -> set[str]:
    """Extras in `gossamer[a,b]` and in `pip install ".[a,b]"` that pyproject.toml does not have."""
    lists = re.findall(r"(?:\bgossamer|[\s\"'\\]\.)\[([a-z][a-z,_-]*)\]", text)
    return {name for each in lists for name in each.split(",")} - EXTRAS


def test_extras_that_pages_and_messages_name_exist() -> None:
    texts = {
        path: path.read_text() for path in PAGES if path.suffix in {".py", ".md", ".ipynb", ".yaml", ".yml", ".sh"}
    }
    assert sum("[watch]" in text for text in texts.values()) > 1
    assert {str(path): found for path, text in texts.items() if (found := _unknown_extras(text))} == {}


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("pip install 'gossamer[lightening]'", {"lightening"}),
        ('pip install ".[watch,wach]"', {"wach"}),
        ('"pip install \\".[notebok]\\""', {"notebok"}),
        ("tensor[rank]", set()),
    ],
)
def test_an_extra_that_does_not_exist_is_seen(text: str, unknown: set[str]) -> None:
    assert _unknown_extras(text) == unknown


# -- floors --------------------------------------------------------------------------------------------------


def test_the_file_of_floors_has_the_oldest_version_of_each_dependency() -> None:
    lines = [line for line in matrix.FLOORS.read_text().splitlines() if line and not line.startswith("#")]
    floors = dict(line.split("==") for line in lines)
    stated = matrix.requirements()
    assert floors.keys() == stated.keys()
    assert {name: version for name, version in floors.items() if not matrix.satisfies(version, stated[name])} == {}


def test_rows_of_versions_and_the_emulator_test_files_that_exist() -> None:
    assert [name for name in (*matrix.TESTS, *aarch64.TESTS) if not (ROOT / name).exists()] == []


def test_a_row_whose_versions_do_not_install_fails_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def conflicting(row: matrix.Row, wheel: Path) -> Path:
        raise matrix.Broken("pip install numpy==1.24.0\nERROR: conflict")

    monkeypatch.setattr(matrix, "environment", conflicting)
    assert matrix.measure(matrix.ROWS[0], tmp_path)["outcome"] == "FAILED: ERROR: conflict"


def test_the_page_of_versions_has_a_line_for_each_row() -> None:
    page = matrix.PAGE.read_text()
    assert [row.name for row in matrix.ROWS if f"| {row.name} |" not in page] == []


def test_a_row_states_the_commit_that_was_tested() -> None:
    row = matrix.ROWS[0].name
    (line,) = (
        each for each in matrix.table({row: {"outcome": "passed", "commit": "0123abcdef"}}).splitlines() if row in each
    )
    assert line.endswith("| passed |  | `0123abcdef` |")


def test_the_commit_of_a_row_is_dirty_where_sources_were_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--quiet")
    assert matrix.commit(tmp_path) == ""
    for name in ("src", "docs", "release/versions.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    clean = matrix.commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{10}", clean)
    for name in ("docs", "release/versions.json"):
        (tmp_path / name).write_text("2")
    assert matrix.commit(tmp_path) == clean
    (tmp_path / "src").write_text("2")
    assert matrix.commit(tmp_path) == f"{clean}-dirty"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """An sdist of the sources in tmp_path."""
    for name in ("src/gossamer/a.py", "src/gossamer/page.js", "kernels-src/b.cpp", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    sdist = tmp_path / "dist" / "gossamer-0.1.0.tar.gz"
    sdist.parent.mkdir()
    with tarfile.open(sdist, "w:gz") as archive:
        for name in ("src", "kernels-src", "README.md"):
            archive.add(tmp_path / name, f"gossamer-0.1.0/{name}")
    return sdist


def test_an_sdist_of_the_present_sources_may_be_tested(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("2")
    (tmp_path / "src" / "gossamer" / "a.pyc").write_text("compiled")
    assert matrix.differing(packed, tmp_path) == []


@pytest.mark.parametrize("name", ["src/gossamer/a.py", "src/gossamer/page.js", "kernels-src/b.cpp"])
def test_an_sdist_of_other_sources_is_refused(name: str, packed: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text("2")
    assert matrix.differing(packed, tmp_path) == [name]
    (tmp_path / name).unlink()
    assert matrix.differing(packed, tmp_path) == [name]


@pytest.mark.parametrize("name", ["src/gossamer/new.py", "kernels-src/new.hpp"])
def test_an_sdist_without_a_new_source_is_refused(name: str, packed: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text("1")
    assert matrix.differing(packed, tmp_path) == [name]


def test_no_row_runs_with_a_wheel_of_other_sources(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (packed.parent / "gossamer-0.1.0-py3-none-manylinux_2_28_x86_64.whl").touch()
    (tmp_path / "src" / "gossamer" / "a.py").write_text("2")
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "measure", lambda row, wheel: pytest.fail(f"{row} was tested"))
    with pytest.raises(SystemExit, match=r"other sources: src/gossamer/a\.py differ\. Build again: make wheels"):
        matrix.main([])


@pytest.mark.parametrize("outcome", ["passed", "FAILED"])
def test_the_exit_code_is_that_of_the_rows_that_ran(
    outcome: str, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that did not run keep their results, of which one failed."""
    (packed.parent / "gossamer-0.1.0-py3-none-manylinux_2_28_x86_64.whl").touch()
    results, page = tmp_path / "versions.json", tmp_path / "versions.md"
    results.write_text(json.dumps({"Python 3.12": {"outcome": "FAILED"}}))
    page.write_text(f"{matrix.BEGIN}{matrix.END}")
    for name, value in (("ROOT", tmp_path), ("RESULTS", results), ("PAGE", page)):
        monkeypatch.setattr(matrix, name, value)
    monkeypatch.setattr(matrix, "measure", lambda row, wheel: {"outcome": outcome})
    if outcome == "passed":
        matrix.main(["Python 3.13"])
    else:
        with pytest.raises(SystemExit, match=r"failed: Python 3\.13$"):
            matrix.main(["Python 3.13"])
    stored = json.loads(results.read_text())
    assert {name: row["outcome"] for name, row in stored.items()} == {"Python 3.12": "FAILED", "Python 3.13": outcome}


# -- wheels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "refused"),
    [
        ("manylinux_2_25_x86_64", False),
        ("manylinux2014_x86_64", False),
        ("manylinux_2_28_x86_64", False),
        ("manylinux_2_34_x86_64", True),
        ("linux_x86_64", True),
    ],
)
def test_a_wheel_that_needs_a_newer_libc_than_its_tag_is_refused(tag: str, refused: bool) -> None:
    said = f'gossamer.whl is consistent with the\nfollowing platform tag: "{tag}".'
    assert (wheels.audit_problem(said, "manylinux_2_28_x86_64") is not None) is refused
    assert wheels.audit_problem("cannot be analysed", "manylinux_2_28_x86_64") is not None


def test_two_builds_with_different_bytes_are_refused(tmp_path: Path) -> None:
    for folder, content in (("first", b"1"), ("equal", b"1"), ("other", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "gossamer.whl").write_bytes(content)
    first, equal, other = (list((tmp_path / folder).iterdir()) for folder in ("first", "equal", "other"))
    wheels.compare(first, equal)
    for second in (other, []):
        with pytest.raises(SystemExit, match=r"gossamer\.whl"):
            wheels.compare(first, second)


# -- CI ------------------------------------------------------------------------------------------------------


AS_ROOT = 'sudo --preserve-env env "PATH=$PATH" '


def _commands(workflow: dict[str, Any]) -> list[str]:
    """The lines that a workflow runs, as root or not, without the installation of Debian's packages."""
    runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    lines = [line.strip().removeprefix(AS_ROOT) for run in runs for line in run.splitlines()]
    return [line for line in lines if not re.match(r"sudo apt-get (update|install)\b", line)]


def _refused(commands: list[str]) -> list[str]:
    """Commands that are not `make` with targets of the Makefile and perhaps variables, such as FUZZ_SECONDS=400."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    refused = []
    for line in commands:
        program, *words = line.split()
        named = {word for word in words if "=" not in word}
        if program != "make" or not named or named - targets:
            refused.append(line)
    return refused


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_only_targets_of_the_makefile(path: Path) -> None:
    commands = _commands(yaml.safe_load(path.read_text()))
    assert commands
    assert _refused(commands) == []


@pytest.mark.parametrize("line", ["pip install x", "make", "make chek", "make check chek", "make A=1"])
def test_a_command_that_is_no_target_is_refused(line: str) -> None:
    assert _refused([line, "make check", "make fuzz FUZZ_SECONDS=400"]) == [line]


def test_a_workflow_that_runs_something_else_is_seen() -> None:
    run = f"sudo apt-get update\nmake check\npip install x\n{AS_ROOT}make test\nsudo make test"
    job = {"steps": [{"run": run}, {"uses": "actions/checkout@v4"}]}
    assert _commands({"jobs": {"a": job}}) == ["make check", "pip install x", "make test", "sudo make test"]


def test_jobs_whose_tests_need_root_run_as_root() -> None:
    """Tests of Slurm and of network namespaces are skipped elsewhere."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())["jobs"]
    for name in ("nightly", "engines"):
        (*_, line) = (step["run"] for step in jobs[name]["steps"] if "run" in step)
        assert line.startswith(AS_ROOT), name


def test_the_workflow_of_the_site_has_all_commits() -> None:
    """In a shallow clone, pages of benchmarks cannot show how many commits changed the code since."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "docs.yml").read_text())
    (checkout,) = (
        step for step in workflow["jobs"]["docs"]["steps"] if step.get("uses", "").startswith("actions/checkout@")
    )
    assert checkout["with"]["fetch-depth"] == 0
