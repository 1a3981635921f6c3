"""The convergence benchmark: its workers are a group, its bytes are the price, its verdicts follow from its numbers."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.convergence import COMPRESSORS, main, options, without_feedback  # noqa: E402
from benchmarks.page import PAGE, put_between, read, rules  # noqa: E402
from benchmarks.report import DENSE, Table, page_part, plot, verdict  # noqa: E402
from benchmarks.tasks import TASKS, Samples, Task  # noqa: E402
from benchmarks.training import Run, Workers, train  # noqa: E402

from gossamer.bench import fed_back, roster  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are not worth waking a second one; what the benchmark sets for its process is set back."""
    logger = logging.getLogger("gossamer")
    threads, level = torch.get_num_threads(), logger.level
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    logger.setLevel(level)


def samples() -> Samples:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(96, 12, generator=draw, dtype=torch.float64)
    y = x @ torch.randn(12, 24, generator=draw, dtype=torch.float64)
    return (x[:64], y[:64]), (x[:64], y[:64]), (x[64:], y[64:])


PLAIN = Task(
    about="a linear map",
    steps=8,
    seeds=2,
    batch=4,
    without="OneBitAdam",
    build=lambda: nn.Linear(12, 24, bias=False).double(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    loss=lambda model, x, y: mse_loss(model(x), y),
    samples=samples,
)


def weights(text: str, steps: int = 8, world: int = 4) -> tuple[torch.Tensor, Workers]:
    workers = Workers(PLAIN, text, 0, world)
    batches = PLAIN.batches(world, 0)
    for _ in range(steps):
        workers.train(next(batches))
    return next(workers.model.parameters()).detach().clone(), workers


# -- training ------------------------------------------------------------------------------------------------------


def test_four_workers_equal_one_with_all_samples() -> None:
    torch.manual_seed(0)
    model = PLAIN.build()
    optimizer, batches = PLAIN.optimizer(model.parameters()), PLAIN.batches(4, 0)
    for _ in range(8):
        optimizer.zero_grad()
        PLAIN.loss(model, *(torch.cat(parts) for parts in zip(*next(batches), strict=True))).backward()
        optimizer.step()
    torch.testing.assert_close(weights(DENSE)[0], next(model.parameters()).detach(), atol=1e-12, rtol=1e-12)


def test_momentum_moves_into_the_compressor() -> None:
    dense = weights(DENSE)[0]
    torch.testing.assert_close(weights("DGC(density=1.0, masking=False)")[0], dense, atol=1e-12, rtol=1e-12)
    assert not torch.allclose(weights("DGC(density=1.0)")[0], dense, atol=1e-3), "masked, it is plain SGD"


def test_feedback_makes_up_for_what_was_lost() -> None:
    def loss(text: str) -> float:
        return weights(text, steps=30)[1].losses()[0] or 0.0

    assert loss("TopK(density=0.05)") < loss("TopK(density=0.05, feedback=False)")


def test_bytes_are_what_the_words_cost() -> None:
    assert weights(DENSE)[1].bytes_sent == 8 * 2 * 3 / 4 * 8 * 288
    assert weights("TopK(density=0.1)")[1].bytes_sent < weights(DENSE)[1].bytes_sent / 4


def test_batches_are_disjoint_and_depend_on_the_seed() -> None:
    def places(seed: int) -> list[float]:
        return torch.cat([x[:, 0] for x, _ in next(PLAIN.batches(4, seed))]).tolist()

    assert len(set(places(0))) == 16
    assert places(0) == places(0) != places(1)


def test_a_training_that_diverges_has_no_loss_at_the_end() -> None:
    wild = Task(**{**vars(PLAIN), "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e60)})
    run = train("plain", wild, "TopK(density=0.1)", 0, 40, 4, 1)
    assert run["curve"][-1][2] is None
    assert run["curve"][0][2] is not None


@pytest.mark.parametrize("name", TASKS)
def test_tasks_can_be_trained(name: str) -> None:
    run = train(name, TASKS[name], "TopK(density=0.05)", 0, 1, 2, 1)
    assert [step for step, _, _ in run["curve"]] == [0, 1]


# -- who takes part ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "twin"),
    [
        ("TopK(density=0.01)", "TopK(density=0.01, feedback=False)"),
        ("Chain(TopK(density=0.1), Int8())", "Chain(TopK(density=0.1, feedback=False), Int8(feedback=False))"),
        ("Dense()", None),
        ("DGC(density=0.01)", None),
    ],
)
def test_biased_compressors_have_a_twin(text: str, twin: str | None) -> None:
    assert without_feedback(text) == twin


def test_twins_forget() -> None:
    for text in roster(COMPRESSORS):
        twin = without_feedback(text)
        assert twin is None or "Feedback" not in repr(fed_back(twin))


# -- tables --------------------------------------------------------------------------------------------------------


def run_of(compressor: str, seed: int, losses: list[float | None], bytes_a_step: float) -> Run:
    curve = [(step, step * bytes_a_step, loss) for step, loss in enumerate(losses)]
    return {
        "task": "digits-conv",
        "compressor": compressor,
        "resolved": compressor,
        "seed": seed,
        "steps": len(losses) - 1,
        "workers": 4,
        "seconds": 1.0,
        "curve": curve,
        "held_out": losses[-1],
    }


def table(compressed: float | None, forgetful: float | None, start: float = 2.0) -> Table:
    dense = [run_of(DENSE, seed, [start, 1.0, 0.5, 0.4, 0.3 + shift], 100.0) for seed, shift in ((0, -0.01), (1, 0.01))]
    ours = [run_of("TopK(density=0.1)", seed, [start, None, None, None, compressed], 60.0) for seed in (0, 1)]
    twin = [run_of("twin", seed, [start, None, None, None, forgetful], 60.0) for seed in (0, 1)]
    return Table("digits-conv", {DENSE: dense, "TopK(density=0.1)": ours, "twin": twin})


def test_gaps_are_counted_in_spreads() -> None:
    found = table(0.35, 0.6)
    assert found.spread == pytest.approx(0.01 * 2**0.5)
    assert found.gap("TopK(density=0.1)") == pytest.approx(0.05 / found.spread)
    assert found.improvement == pytest.approx(1.7 / found.spread)


def test_dense_stops_at_the_same_bytes() -> None:
    steps, losses = table(0.35, 0.6).dense_at_equal_bytes("TopK(density=0.1)")
    assert (steps, losses.mean) == (2, 0.5)


@pytest.mark.parametrize(
    ("forgetful", "start", "said"),
    [
        (0.6, 2.0, "so the task can tell: `TopK(density=0.1)`"),
        (None, 2.0, "so the task can tell: `TopK(density=0.1)`"),
        (0.36, 2.0, "so the task cannot tell: `TopK(density=0.1)`"),
        (0.6, 0.4, "**this task cannot tell.**"),
    ],
)
def test_a_verdict_follows_from_the_numbers(forgetful: float | None, start: float, said: str) -> None:
    assert said in verdict(table(0.35, forgetful, start), {"TopK(density=0.1)": "twin"})


def test_what_diverged_is_said_to_have() -> None:
    runs = [run for runs in table(None, 0.6).runs.values() for run in runs]
    found = page_part(runs, {"TopK(density=0.1)": "twin"}, ["on this machine"])
    (line,) = [line for line in found.splitlines() if line.startswith("| `TopK")]
    assert (
        "diverged (2 of 2) | - | diverged (2 of 2) | 60 B | 1/1.7 | 0.500 ± 0.000 (2 steps) | 0.600 ± 0.000 |" in line
    )


def test_nothing_is_trained_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    asked = ["--tasks", "digits-conv", "--compressors", "TopK(density=0.1)", "--seeds", "2", "--steps", "3"]
    arguments = options().parse_args([*asked, "--json", str(file), "--processes", "1"])
    main(arguments)
    first = capsys.readouterr()
    assert "6 of 6: digits-conv, TopK(density=0.1, feedback=False), seed 1" in first.err
    assert "| `TopK(density=0.1)` |" in first.out
    assert len(json.loads(file.read_text())["runs"]) == 6
    main(arguments)
    second = capsys.readouterr()
    assert "of 6:" not in second.err
    assert second.out == first.out


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    plot([run for runs in table(0.35, 0.6).runs.values() for run in runs], tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


# -- the page ------------------------------------------------------------------------------------------------------


def test_the_page_has_the_rules_as_they_are() -> None:
    assert rules() in PAGE.read_text(encoding="utf-8"), "write: python benchmarks/page.py"


def test_docstrings_are_read() -> None:
    docstring = "Keep some.\n\nC(x) = x\n    or 0\nlaw:    a\n  and b\nbytes:  k\nsource: X\n\nMore."
    assert read(docstring) == ("Keep some.", "C(x) = x\n    or 0", {"law": "a and b", "bytes": "k", "source": "X"})


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A\n<!-- written by a program: x -->\nold\n<!-- end: x -->\nB\n")
    put_between(page, "x", "new")
    assert page.read_text() == "A\n<!-- written by a program: x -->\n\nnew\n\n<!-- end: x -->\nB\n"
    with pytest.raises(SystemExit, match="no lines"):
        put_between(page, "y", "new")
