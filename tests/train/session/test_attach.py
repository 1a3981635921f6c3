"""Attach: serves a model or says at once why not, and touches neither its peers nor the rest of the process."""

from __future__ import annotations

import inspect
import logging
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import SUPPORT, TESTS
from support.processes import findings, per_rank, succeed
from support.virtual_workers import notices
from torch import nn
from torch.optim import SGD, Optimizer

import gossamer
from gossamer.algorithms.recipes.recipe import automatic, resolve
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.errors import AttachError, GossamerError, RecipeError
from gossamer.train.session import attach as attaching
from gossamer.train.world_state import WorldState

CHECKS = SUPPORT / "attach_checks.py"
REFUSED = "says_how_it_was_refused"


@pytest.fixture(autouse=True)
def every_session_is_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("GOSSAMER_RECIPE", raising=False)
    for session in open_sessions():  # of other tests, which the collector has not come to yet
        with suppress(GossamerError):  # some of them are of workers that were lost
            session.close()
    yield
    left = open_sessions()
    for session in left:
        session.close()
    assert left == [], "a refused attach, or this test, left a session open"


def attach(model: nn.Module, optimizer: Optimizer | None = None, **options: Any) -> gossamer.Session:
    return gossamer.attach(model, optimizer or SGD(model.parameters(), 0.1), **options)


# -- refusals ----------------------------------------------------------------------------------------------------------


def with_hook(act: Callable[[torch.Tensor], None] | None) -> nn.Module:
    model = nn.Linear(3, 2)
    if act is not None:
        model.weight.register_post_accumulate_grad_hook(act)
    return model


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    model = nn.Linear(3, 2)
    model.register_buffer("graph", buffer)
    return model


def steps_in_backward(parameter: torch.Tensor) -> None:
    SGD([parameter], 0.1).step()


def holding(parameter: torch.Tensor) -> nn.Module:
    return nn.ParameterList([nn.Parameter(parameter)])


@pytest.mark.parametrize(
    ("refused", "says", "served"),
    [
        (
            lambda: nn.Linear(3, 2).requires_grad_(False),
            "Call model.requires_grad_(True)",
            lambda: nn.Linear(3, 2).requires_grad_(True),
        ),
        (
            lambda: holding(torch.zeros(3, dtype=torch.complex64)),
            '"0" is complex, but compressors support real numbers only. Use torch.view_as_real(...) as the '
            "parameter and torch.view_as_complex in forward",
            lambda: holding(torch.view_as_real(torch.zeros(3, dtype=torch.complex64))),
        ),
        (
            lambda: holding(torch.zeros(3).to(torch.float8_e4m3fn)),
            '"0" is torch.float8_e4m3fn, a format without addition',
            lambda: holding(torch.zeros(3, dtype=torch.bfloat16)),
        ),
        (
            lambda: with_buffer(torch.eye(3).to_sparse()),
            '"graph" is a sparse or quantized buffer',
            lambda: with_buffer(torch.eye(3)),
        ),
        (
            lambda: with_hook(steps_in_backward),
            '"weight" has a post-accumulate-gradient hook',
            lambda: with_hook(None),
        ),
        (
            lambda: with_hook(steps_in_backward),
            "Remove the hook and call optimizer.step() after backward()",
            lambda: with_hook(None),
        ),
    ],
)
def test_models_that_cannot_be_served(
    refused: Callable[[], nn.Module], says: str, served: Callable[[], nn.Module]
) -> None:
    with pytest.raises(AttachError, match=re.escape(says)):
        attach(refused())
    attach(served()).close()


def batch_normed(device: str) -> nn.Module:
    """With no parameter of its own kind that is missing, but buffers."""
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False, device=device))


def lazily(*, run: bool) -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    if run:
        model(torch.zeros(2, 3))
    return model


@pytest.mark.parametrize(
    ("refused", "says", "served"),
    [
        (
            lambda: nn.Linear(3, 2, device="meta"),
            '"weight" is on the meta device and has no values, so it cannot be trained. Call '
            "model.to_empty(device=world.device) and initialize or load",
            lambda: nn.Linear(3, 2, device="meta").to_empty(device="cpu"),
        ),
        (lambda: batch_normed("meta"), '"1.running_mean" is on the meta device', lambda: batch_normed("cpu")),
        (
            lambda: lazily(run=False),
            '"0.weight" has no shape before the first batch. Run one '
            "batch through the model, build the optimizer, and then attach",
            lambda: lazily(run=True),
        ),
    ],
)
def test_models_without_numbers(refused: Callable[[], nn.Module], says: str, served: Callable[[], nn.Module]) -> None:
    with pytest.raises(AttachError, match=re.escape(says)):
        attach(refused())
    attach(served()).close()


def test_an_optimizer_of_another_kind() -> None:
    class Both:
        def __init__(self, model: nn.Module) -> None:
            self.param_groups = [{"params": list(model.parameters())}]

    model = nn.Linear(3, 2)
    with pytest.raises(AttachError, match=r"Both is not a torch\.optim\.Optimizer.*Subclass torch\.optim\.Optimizer"):
        attach(model, Both(model))  # type: ignore[arg-type]


def test_an_optimizer_that_trains_something_else_too() -> None:
    model, loss = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizer = SGD([*model.parameters(), *loss.parameters()], 0.1)
    with pytest.raises(AttachError, match=r"holds 2 parameters outside of the model.*nn\.ModuleList\(\[model, lo"):
        attach(model, optimizer)
    attach(nn.ModuleList([model, loss]), optimizer).close()


def test_an_optimizer_that_trains_a_parameter_of_no_module() -> None:
    model, temperature = nn.Linear(3, 2), nn.Parameter(torch.ones(()))
    optimizer = SGD([*model.parameters(), temperature], 0.1)
    with pytest.raises(AttachError, match=r'1 parameter outside of.*model\.register_parameter\("temperature", param'):
        attach(model, optimizer)
    model.register_parameter("temperature", temperature)
    attach(model, optimizer).close()


def test_a_model_is_attached_once_at_a_time() -> None:
    model = nn.Linear(3, 2)
    session = attach(model)
    for same in (model, nn.Sequential(model, nn.Linear(2, 1))):
        with pytest.raises(AttachError, match=r"attached already.*Call session\.close\(\) on the first"):
            attach(same)
    other = attach(nn.Linear(3, 2))
    session.close()
    again = attach(model)
    assert set(open_sessions()) == {other, again}
    other.close()
    again.close()


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_a_norm_to_clip_to_is_positive(norm: float) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=f"clip_norm must be positive, got {norm}"):
        attach(model, clip_norm=norm)
    attach(model, clip_norm=1.0).close()


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (
            "TopKK(0.1)",
            "Write one of: TopK(density, feedback=True",
        ),
        ("TopK()", "needs density. Write TopK(density=0.01)"),
        ("TopK(0.1) + Int8()", "a recipe has at most one compressor. Keep one of them: TopK(density=0.1"),
        ("", "An empty text is not a recipe. Write Dense()"),
        (gossamer.TopK, "Write TopK(...), with brackets."),
    ],
)
def test_recipes_that_mean_nothing(recipe: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(RecipeError, match=re.escape(says)):
        attach(model, recipe=recipe)
    if isinstance(recipe, str):
        monkeypatch.setenv("GOSSAMER_RECIPE", recipe)
        with pytest.raises(RecipeError, match=re.escape(says)):
            attach(model, recipe="Dense()")


@pytest.mark.processes
def test_models_that_are_sharded_or_averaged_already() -> None:
    succeed([str(CHECKS), "refuses_what_is_sharded_or_wrapped"], 1)


# -- whose recipe ------------------------------------------------------------------------------------------------------


@pytest.fixture
def noticed() -> Iterator[list[str]]:
    with notices() as said:
        yield said


@pytest.mark.parametrize(
    ("script", "command_line", "lines"),
    [
        ("TopK(density=0.1)", "Int8()", 1),
        (gossamer.Dense(), "TopK(0.25)", 1),
        ("TopK(density=0.1)", "TopK(0.1) + EveryStep()", 0),
        (gossamer.Int8(), "Int8", 0),
        (None, "Int8()", 0),
        ("Dense()", "Auto()", 1),
        ("auto", "Auto()", 0),
    ],
)
def test_the_command_lines_recipe_wins(
    script: Any, command_line: str, lines: int, noticed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_RECIPE", command_line)
    with attach(nn.Linear(3, 2), recipe=script) as session:
        assert automatic(command_line) or session.recipe == resolve(command_line)
    assert len(noticed) == lines
    assert all(command_line in line and line.endswith(f"replaces {script} of the script") for line in noticed)


def test_without_one_the_scripts_recipe_counts(noticed: list[str]) -> None:
    with attach(nn.Linear(3, 2), recipe="Int8()") as session:
        assert session.recipe == resolve("Int8()")
    with attach(nn.Linear(3, 2)) as session:
        assert session.recipe == resolve("Dense()")
    assert noticed == []


def test_replaced_recipe_is_logged_without_a_listener(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GOSSAMER_RECIPE", "Int8()")
    with caplog.at_level(logging.WARNING, "gossamer"):
        attach(nn.Linear(3, 2), recipe="TopK(0.1)").close()
    (record,) = caplog.records
    assert re.search(r"Int8\(\).*replaces TopK\(0.1\)", record.getMessage())


# -- the length of the training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "steps", "first"),
    [
        ("auto", 100, "Dense()"),
        ("auto", 500, "LocalSGD(period=8) + Int8()"),
        ("auto", None, "DiLoCo(period=20, outer_learning_rate=1.0, outer_momentum=0.5) + Float4()"),
        ("Auto(steps=500)", 20_000, "LocalSGD(period=8) + Int8()"),
        ("Int8()", 500, "Int8()"),
    ],
)
def test_auto_begins_with_local_steps_in_trainings_with_enough_rounds(
    recipe: str, steps: int | None, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attach(nn.Linear(3, 2), recipe=recipe, steps=steps) as session:
        assert session.recipe == resolve(first, 1)
    monkeypatch.setenv("GOSSAMER_RECIPE", recipe)
    with attach(nn.Linear(3, 2), steps=steps) as session:
        assert session.recipe == resolve(first, 1)


@pytest.mark.parametrize("steps", [0, -3, 2.5, True, "500"])
def test_steps_that_are_no_number_of_steps_are_refused(steps: Any) -> None:
    with pytest.raises(AttachError, match=r"steps must be the optimizer steps .* Write gossamer.attach"):
        attach(nn.Linear(3, 2), steps=steps)


# -- ranks that are not alike ------------------------------------------------------------------------------------------


def virtual_environment(folder: Path, *paths: Path) -> str:
    """A Python that imports from `paths`, and then what is installed here."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    found = [*paths, *(Path(inspect.getfile(module)).parents[1] for module in (gossamer, torch))]
    (packages / "everything.pth").write_text("".join(f"{path}\n" for path in found))
    return str(folder / "bin" / "python")


AT_ONCE_SECONDS = 60  # on a busy machine: who waits, waits for minutes
SAME = "(install the same one everywhere)"


@pytest.mark.processes
def test_promise_11_two_versions_of_gossamer_and_of_the_script(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(Path(gossamer.__file__).parent, other / "gossamer", ignore=shutil.ignore_patterns("__pycache__"))
    (other / "gossamer" / "version.py").write_text('__version__ = "9.8.7"\n')
    edited = tmp_path / "edited.py"
    edited.write_text(CHECKS.read_text() + "# changed on one machine only\n")
    here, there = virtual_environment(tmp_path / "here"), virtual_environment(tmp_path / "there", other)
    paths = {"PYTHONPATH": str(TESTS)}  # and none that would find another Gossamer first
    said = succeed(per_rank([[here, str(CHECKS), REFUSED], [there, str(edited), REFUSED]]), 2, extra=paths)
    for text in said:
        (finding,) = findings(text)
        assert finding["seconds"] < AT_ONCE_SECONDS
        first, second = finding["message"].partition("They differ in ")[2].split("; in ")
        assert first == f"Gossamer's version {SAME}: '{gossamer.__version__}' on rank 0, '9.8.7' on rank 1"
        assert re.fullmatch(
            r"a hash of the script \(copy the same file everywhere\): '(\w{16})' on rank 0, '(?!\1)\w{16}' on rank 1",
            second,
        )


SHARED = [
    "never_unpickles",
    "refuses_other_versions_and_serves_equal_ones",
    "refuses_ddp_around_what_is_attached",
    "tells_once_whose_recipe_counts",
    "trains_beside_forked_loaders",
    "leaves_forked_children_alone",
    "keeps_its_port",
    "misses_a_peer_that_ends_early",
]


@pytest.mark.processes
def test_two_real_workers(tmp_path: Path) -> None:
    """The checks in SHARED, one after the other in the same two processes."""
    said = succeed([str(CHECKS), *SHARED], 2, extra={"CHECKS_FOLDER": str(tmp_path)})
    for text in said:
        assert [line for line in text.splitlines() if line.startswith("passed")] == [f"passed {c}" for c in SHARED]
        of_torch, of_python, *_ = findings(text)
        assert of_torch["message"].endswith(
            f"torch's version {SAME}: '{torch.__version__}' on rank 0, '9.8.7' on rank 1"
        )
        python = f"Python's version (use the same one everywhere): '{platform.python_version()}'"
        assert of_python["message"].endswith(f"{python} on rank 0, '9.8.7' on rank 1")
        assert max(of_torch["seconds"], of_python["seconds"]) < AT_ONCE_SECONDS
    *_, of_peer = findings(said[0])
    assert of_peer["seconds"] < AT_ONCE_SECONDS
    assert "`with session.epoch():`" in of_peer["message"]


@pytest.mark.parametrize(
    ("size", "local_rank", "missing", "told"),
    [(2, 0, "not built", ["not built"]), (2, 1, "not built", []), (1, 0, "not built", []), (2, 0, None, [])],
)
def test_missing_kernels_are_reported_once_a_machine_where_workers_exchange_anything(
    size: int, local_rank: int, missing: str | None, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = WorldState(rank=1 if local_rank else 0, size=size, local_rank=local_rank, device=torch.device("cpu"))
    monkeypatch.setattr(attaching, "current", lambda: world)
    asked: list[int] = []
    monkeypatch.setattr(attaching, "missing_kernels", lambda: asked.append(local_rank) or missing)
    monkeypatch.setattr(attaching, "transport_for", lambda *_: pytest.fail("far enough"))
    with notices() as said, pytest.raises(pytest.fail.Exception, match="far enough"):
        attach(nn.Linear(3, 2))
    assert said == told
    assert asked, "this rank would warn of them when it encodes"
