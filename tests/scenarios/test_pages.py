"""Pages of measurements: each says from which commit it is, and what can be computed is what the code says today."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.busiest import SCHEMES, cell
from benchmarks.provenance import commit, provenance
from benchmarks.recipes import RECIPES, SCRIPT
from benchmarks.rehearsals import REHEARSALS, STEP_SECONDS, WORKERS, section
from benchmarks.stragglers import ratios
from benchmarks.studies import EVERY
from support.paths import ROOT

from gossamer import events
from gossamer.algorithms.compressors import Dense, TopK
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import AggregationContext
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.runner import price
from gossamer.base.units import bytes_text
from gossamer.plan.bench import KERNELS, case_texts, with_feedback
from gossamer.plan.emulation import EmulationPlan
from gossamer.plan.profile.user_script import attached_by
from gossamer.plan.rehearse import worker
from gossamer.plan.rehearse.model_shapes import find_shapes
from gossamer.train.traffic.traffic import estimate_traffic

pytestmark = pytest.mark.nightly

PAGES = ROOT / "docs" / "benchmarks"
MEASURED = re.compile(r"[Ww]ritten\s+from\s+commit\s+`[0-9a-f]{7,40}(-dirty)?`")
UNWRITTEN = re.compile(r"^To be written by `make bench-[a-z]+`\.$", re.MULTILINE)  # a page that tells no number
PARTS = re.compile(r"<!-- written by a program: (\w+) -->(.*?)<!-- end: \1 -->", re.DOTALL)


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def parts(page: str) -> dict[str, str]:
    return dict(PARTS.findall(page))


def rows(table: str) -> Iterator[list[str]]:
    """Cells of a table's lines, without those of its head."""
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and not set(line) <= set("|-: "):
            yield cells


def named(cell: str) -> str:
    return cell.strip("`")


# -- from which commit ---------------------------------------------------------------------------------------------


COPIED = {"lost-workers"}  # tables that were copied from the output of a program, with its command
DATED = [page for page in sorted(PAGES.glob("*.md")) if page.stem not in {"README", *COPIED}]


@pytest.mark.parametrize("page", DATED, ids=lambda page: page.stem)
def test_every_page_says_from_which_commit_it_is(page: Path) -> None:
    told = page.read_text(encoding="utf-8")
    assert MEASURED.search(told) or UNWRITTEN.search(told)


@pytest.mark.parametrize("page", ["docs/benchmarks/compressors.md", "docs/benchmarks/local.md"])
def test_every_part_says_from_which_commit_it_is(page: str) -> None:
    assert parts(text(page))
    assert [name for name, part in parts(text(page)).items() if not MEASURED.search(part)] == []


def test_what_programs_write_is_seen() -> None:
    assert MEASURED.search(provenance(["make"]))


def test_a_page_says_that_networks_were_only_approximated(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = EmulationPlan(emulation="paced", reason="missing commands: tc")
    monkeypatch.setattr("gossamer.plan.emulation.plan", lambda network: paced)
    assert provenance(["make"]).endswith("only approximated here: missing commands: tc.")
    assert not MEASURED.search("Written by `make`.")


def test_a_page_tells_the_commit_that_is_checked_out(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "--quiet")
    (tmp_path / "docs").mkdir()
    for name in ("code.py", "docs/page.md"):
        (tmp_path / name).write_text("one")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    head = git("rev-parse", "HEAD")
    assert head.startswith(commit(tmp_path))
    (tmp_path / "docs" / "page.md").write_text("two")
    assert head.startswith(commit(tmp_path)), "pages are what is written"
    (tmp_path / "code.py").write_text("two")
    assert commit(tmp_path) == f"{head[:10]}-dirty"


# -- bytes ---------------------------------------------------------------------------------------------------------


def sent(script: Path, arguments: list[str], recipe: str) -> float:
    """Bytes per step and worker, as `gossamer explain` foretells them."""
    resolved = resolve(recipe, WORKERS)
    return estimate_traffic(resolved, attached_by(script, arguments, resolved), workers=WORKERS).bytes_sent


def check_recipes(page: str) -> None:
    told = {named(name): nbytes for name, _, nbytes, _ in list(rows(page))[1:] if nbytes}
    assert told.keys() == {"Dense()", *RECIPES}
    for recipe, nbytes in told.items():
        assert nbytes == f"{sent(ROOT / SCRIPT, ['--size', 'small'], recipe):,.0f}", recipe


def test_the_page_of_recipes_has_the_bytes_that_explain_estimates() -> None:
    check_recipes(text("docs/benchmarks/recipes.md"))


def test_other_bytes_of_recipes_are_noticed() -> None:
    with pytest.raises(AssertionError, match="Int8"):
        check_recipes(text("docs/benchmarks/recipes.md").replace("378,135", "733,719"))


def test_dense_has_as_many_steps_as_the_bytes_pay_for() -> None:
    page = text("docs/benchmarks/recipes.md")
    told = [int(row[2].replace(",", "")) for row in list(rows(page))[1:] if row[2]]
    steps = [int(found) for found in re.findall(r"^\| \.\.\. .* same bytes \((\d+) steps\)", page, re.MULTILINE)]
    assert steps == [round(300 * nbytes / told[0]) for nbytes in told[1:]]


@pytest.mark.parametrize("shapes", ["resnet18", "resnet50"])
def test_rehearsals_sent_what_is_estimated(shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last column of the model's sections."""
    # The worker listens for as long as its process lives, and this one goes on to other tests
    monkeypatch.setattr(events, "subscribe", lambda listener: None)
    file = tmp_path / "shapes.json"
    file.write_text(find_shapes(shapes).to_json())
    arguments = [str(file), f"--step-seconds={STEP_SECONDS[shapes]}", "--forward-share=0.3", "--steps=1"]
    title = {"resnet18": "ResNet-18,", "resnet50": "ResNet-50,"}[shapes]
    sections = [part for part in text("docs/benchmarks/rehearsals.md").split("\n## ") if part.startswith(title)]
    told = {(named(row[0]), row[-1]) for part in sections for row in list(rows(part))[1:]}
    assert {recipe for recipe, _ in told} == {
        recipe for each in REHEARSALS if each.shapes == shapes for recipe in each.recipes
    }
    for recipe, nbytes in told:
        assert nbytes == bytes_text(sent(Path(worker.__file__), arguments, recipe)), recipe


PRINTED = """\
model     ResNet-18, 224 pixels, 1000 classes
          11,689,512 parameters in 62 tensors
step      137 ms alone, 33 % of it forward
workers   4, network 1gbit,1ms

recipe                     step  estimate  sent per step
Dense()                  675 ms    763 ms        70.1 MB
Dense(dtype='bfloat16')  655 ms                  35.1 MB

Encoding and decoding ran on the 2 cores of this machine, which all workers share.
With Dense() the cores were too few: workers kept 1.29 busy.
"""


def test_what_rehearse_prints_becomes_a_table() -> None:
    title, about, table, said = section(PRINTED)
    assert title == "## ResNet-18, 1gbit,1ms"
    assert about.startswith("224 pixels, 1000 classes. 11,689,512 parameters in 62 tensors; a step is 137 ms alone")
    assert list(rows(table)) == [
        ["recipe", "step", "estimate", "sent per step"],
        ["`Dense()`", "675 ms", "763 ms", "70.1 MB"],
        ["`Dense(dtype='bfloat16')`", "655 ms", "", "35.1 MB"],
    ]
    assert said == "With Dense() the cores were too few: workers kept 1.29 busy."


def trained_bytes(task: str, compressor: str, steps: int) -> float:
    """Bytes per step and worker of the simulated training that benchmarks/convergence.py counts."""
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in EVERY[task].build().named_parameters()}
    layout = Layout.of(shapes)
    x = FlatTensors(torch.zeros(layout.numel, device="meta"), layout)
    resolved = resolve(compressor, WORKERS).compressor

    def step_bytes(step: int) -> float:
        at = AggregationContext(world=WORKERS, step=step)
        return sum(op.bytes_sent for op in price(resolved.aggregate(x, resolved.init(x, at), at), WORKERS))

    warming = int((re.findall(r"(?:warmup|steps)=(\d+)", compressor) or ["0"])[0])
    return (sum(map(step_bytes, range(warming))) + (steps - warming) * step_bytes(steps)) / steps


def check_training(section: str) -> int:
    """How many rows of a section of docs/benchmarks/compressors.md have the bytes that the code sends."""
    task = section.split("\n", 1)[0].strip()
    (steps,) = re.findall(r"; (\d+) steps, ", section)
    head, *body = rows(section)
    column = head.index("sent a step and worker")
    for row in body:
        assert row[column] == bytes_text(trained_bytes(task, named(row[0]), int(steps))), row[0]
    return len(body)


@pytest.mark.parametrize("task", ["digits-conv", "digits-conv-adamw", "bytelm"])
def test_trainings_sent_what_the_code_sends(task: str) -> None:
    (section,) = re.findall(rf"^### ({task}\n.*?)(?=^###|^<!--)", text("docs/benchmarks/compressors.md"), re.M | re.S)
    assert check_training(section) > 10
    with pytest.raises(AssertionError, match="Float4"):
        check_training(re.sub(r"(`Float4.*? )[\d.]+ kB", r"\g<1>1.0 kB", section))


def test_an_all_reduce_among_64_machines_passes_what_the_code_sends() -> None:
    """The row of docs/explanation/gossip.md that takes a moment to compute."""
    found = re.search(r"^\| all-reduce \| ([\d.]+) \| ([\d.]+) \|", text("docs/explanation/gossip.md"), re.MULTILINE)
    assert found is not None
    for figure, each in zip(found.groups(), (Dense(), TopK(density=0.01)), strict=True):
        busiest, *_ = cell(SCHEMES["all-reduce"], each, 64, 512).split()
        assert figure == f"{float(busiest):.{len(figure.partition('.')[2])}f}", each


# -- what is measured ----------------------------------------------------------------------------------------------


def test_the_speed_table_has_a_row_for_every_case() -> None:
    told = [row[0] for row in rows(parts(text("docs/benchmarks/compressors.md"))["speed"])][1:]
    assert set(told) == {repr(with_feedback(case)) for case in case_texts(KERNELS)}


def test_one_round_has_no_spread() -> None:
    assert ratios([3.0], [6.0]) == "0.50"
    assert ratios([3.0, 4.0, 6.0], [6.0, 4.0, 6.0]) == "1.00 (0.50 to 1.00)"


def test_pages_of_one_round_show_no_spread() -> None:
    for page in PAGES.glob("*.md"):
        if "--rounds 1 " in page.read_text(encoding="utf-8"):
            assert not re.search(r"\((\S+) to \1\)", page.read_text(encoding="utf-8")), page
