"""Commands on pages: each line that README.md, CONTRIBUTING.md and docs/ show is one that its program takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.page_commands import SCRIPTS, Line, WrongCommand, check_line, command_lines
from support.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(autouse=True)
def _where_a_reader_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout, with a script of one's own."""
    monkeypatch.chdir(tmp_path)
    for name in SCRIPTS:
        Path(name).touch()
    Path("advice.json").write_text('{"advice_version": 1, "recipe": "Int8()"}')
    Path("package").mkdir()
    Path("package", "train.py").touch()
    Path("runs").mkdir()
    for name in ("examples", "benchmarks", "docs"):
        Path(name).symlink_to(ROOT / name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_one_that_its_program_takes(page: Path) -> None:
    for line in command_lines(page.read_text(encoding="utf-8")):
        check_line(line)


def test_commands_are_found() -> None:
    page = "\n".join(
        [
            "Run `gossamer recipes`, or:",
            "",
            "    gossamer run train.py  # here",
            "    weights = model.state_dict()",
            "",
            "```sh",
            "#SBATCH --nodes=2",
            "gossamer run \\",
            "  --workers 2 train.py",
            "```",
            "```python",
            "gossamer = 3",
            "```",
        ]
    )
    found = [(line.text.split()[-1], line.fragment) for line in command_lines(page)]
    assert found == [("train.py", False), ("here", False), ("recipes", True)]
    assert sum(len(list(command_lines(page.read_text(encoding="utf-8")))) for page in PAGES) > 60


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("gossamer run --workers 4 train.py", "gossamer run --worker 4 train.py"),
        ("gossamer run --workers 4 train.py", "gossamer run --workers four train.py"),
        ("gossamer run --workers 4 train.py", "gossamer run --workers 4 training.py"),
        ("gossamer run --workers 4 train.py", "gossamer walk --workers 4 train.py"),
        ('gossamer run --recipe "TopK(0.01)" train.py', 'gossamer run --recipe "TopKay(0.01)" train.py'),
        ('gossamer explain "TopK(0.01)"', 'gossamer explain "TopK(ratio=0.01)"'),
        ("gossamer explain lan", "gossamer explain lane"),
        ("gossamer doctor --network 1gbit,1ms", "gossamer doctor --network 1furlong"),
        ("gossamer compare --recipe lan --recipe wan train.py", "gossamer compare --recipe lan --recipe lan train.py"),
        ("gossamer bench compressors", "gossamer bench compressor"),
        (
            "gossamer run --nnodes 2 --node-rank 1 --rendezvous first:29617 train.py",
            "gossamer run --nnodes 2 --node-rank 2 --rendezvous first:29617 train.py",
        ),
        ("gossamer run --nnodes 2 --rendezvous first:1 train.py", "gossamer run --nnodes 2 train.py"),
        (
            'gossamer run --fault "cut(1, at=10, for_seconds=5)" train.py',
            'gossamer run --fault "cut(9, at=1)" train.py',
        ),
        ("python examples/bytelm.py --size base", "python examples/bytelm.py --size minute"),
        ("python examples/bytelm.py", "python examples/lm.py"),
        ("python benchmarks/pace.py --steps 50 --recipes ...", "python benchmarks/pace.py --step-count 50"),
        ("python -m gossamer.algorithms.topologies.ring", "python -m gossamer.algorithms.topologies.star"),
        ("torchrun --nproc-per-node 4 train.py", "torchrun --workers 4 train.py"),
        ("torchrun --nproc-per-node 4 train.py", "torchrun --nproc-per-node 4 training.py"),
        ("srun --ntasks 4 python train.py", "srun --ntasks 4 python training.py"),
        ("make demo", "make demonstration"),
        ("pip install .", "pip install gossamer"),
        ("GOSSAMER_THREADS=4 python train.py", "GOSSAMER_THREADS=4 pythn train.py"),
        ("GOSSAMER_THREADS=4 python train.py", "GOSSAMER_THREAD=4 python train.py"),
    ],
)
def test_a_wrong_command_is_noticed(right: str, wrong: str) -> None:
    check_line(Line(right))
    with pytest.raises(WrongCommand):
        check_line(Line(wrong))


def test_a_sentence_may_leave_arguments_out() -> None:
    check_line(Line("gossamer run --tls FOLDER", fragment=True))
    check_line(Line("gossamer compare --no-estimate --recipe ... examples/bytelm.py --size base", fragment=True))
    for wrong in ("gossamer run --ssl FOLDER", "gossamer explain RECIPE training.py", "gossamer walk"):
        with pytest.raises(WrongCommand):
            check_line(Line(wrong, fragment=True))
