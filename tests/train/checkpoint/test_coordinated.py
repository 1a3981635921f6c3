"""Coordinated checkpoints: resumed training continues bit for bit, and a half-written one is never chosen."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.resharded_training import train as train_without_loader
from support.sessions import sgd
from support.virtual_workers import Worker, batch, cluster, network, notices, parameters, seeded, train_step
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import CheckpointError
from gossamer.train import checkpoint
from gossamer.train.session.session import Session
from gossamer.train.world_state import WorldState

RECIPES = ["Dense()", "TopK(0.1)", "Int8()", "PowerSGD(rank=2)", "Route(PowerSGD(2), rest=Int8(block=8))"]
RECIPES += ["ARCTopK(density=0.1, row=8)", "SharedMask(density=0.1)"]


def train(
    worker: Worker, recipe: str, start: int, stop: int, load: Path | None = None, save: Path | None = None
) -> Any:
    model = network(worker.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    session = worker.attach(model, optimizer, recipe, scaler=scaler)
    if load is not None:
        mine = session.load(load)
        assert mine["step"] == start
        scheduler.load_state_dict(mine["scheduler"])
    for step in range(start, stop):
        optimizer.zero_grad()
        session.set_batch_weight(3 if step == 4 and worker.rank == 0 else 4)
        inputs, targets = batch(step, worker.rank)
        scaler.scale(mse_loss(model(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    if save is not None:
        session.save(save, step=stop, scheduler=scheduler)
    return parameters(model), session.state_dict(), scaler.get_scale(), session.steps


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", [1, 3])
def test_k_steps_save_load_k_steps_are_2k_steps(recipe: str, world: int, tmp_path: Path) -> None:
    whole = cluster(lambda worker: train(worker, recipe, 0, 7), world)
    cluster(lambda worker: train(worker, recipe, 0, 3, save=tmp_path), world)
    resumed = cluster(lambda worker: train(worker, recipe, 3, 7, load=tmp_path), world)
    for one, other in zip(whole, resumed, strict=True):
        assert equal(one, other), "resumed training went another way"


def test_the_resume_law_catches_a_forgotten_residual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = checkpoint.stage

    def forgetful(directory: Any, step: int, rank: int, tree: Any) -> str:
        for remembered in tree["session"]["state"].values():
            for key in remembered:
                remembered[key] = torch.zeros_like(remembered[key])
        return honest(directory, step, rank, tree)

    monkeypatch.setattr(checkpoint, "stage", forgetful)
    with pytest.raises(AssertionError, match="another way"):
        test_k_steps_save_load_k_steps_are_2k_steps("TopK(0.1)", 3, tmp_path)


def test_random_state_is_part_of_it(tmp_path: Path) -> None:
    def work(worker: Worker, resume: bool) -> tuple[float, float]:
        model = network(0)
        session = worker.attach(model, torch.optim.SGD(model.parameters(), 0.1))
        if resume:
            with seeded(99):
                random.seed(99)
                session.load(tmp_path)
                return float(torch.rand(())), random.random()
        with seeded(5):
            random.seed(5)
            session.save(tmp_path)
            return float(torch.rand(())), random.random()

    assert cluster(lambda worker: work(worker, False), 1) == cluster(lambda worker: work(worker, True), 1)


def test_nothing_saved_yet_is_no_error(tmp_path: Path) -> None:
    def work(worker: Worker) -> dict[str, Any]:
        model = network(0)
        return worker.attach(model, torch.optim.SGD(model.parameters(), 0.1)).load(tmp_path / "none")

    assert cluster(work, 2) == [{}, {}]


def test_another_recipe_or_layout_or_world_is_refused(tmp_path: Path) -> None:
    cluster(lambda worker: train(worker, "TopK(0.1)", 0, 2, save=tmp_path), 2)
    with pytest.raises(CheckpointError, match=r"TopK\(density=0\.1\).*PowerSGD\(rank=2\)"):
        cluster(lambda worker: train(worker, "PowerSGD(rank=2)", 2, 3, load=tmp_path), 2)

    def wider(worker: Worker) -> None:
        model = nn.Linear(6, 9)
        worker.attach(model, torch.optim.AdamW(model.parameters(), 0.1), "TopK(0.1)").load(tmp_path)

    with pytest.raises(CheckpointError, match="layout"):
        cluster(wider, 2)
    with pytest.raises(CheckpointError, match="layout"):
        cluster(wider, 3)
    (tmp_path / "step-00000002" / "rank-1.json").unlink()
    with pytest.raises(CheckpointError, match=r"were written by 2 workers, not 3.*Copy all parts"):
        cluster(lambda worker: train(worker, "TopK(0.1)", 2, 3, load=tmp_path), 3)


def test_a_part_that_cannot_be_written_gives_the_whole_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(lambda worker: train(worker, "TopK(0.1)", 0, 2, save=tmp_path), 2)
    honest = checkpoint.stage

    def full(directory: Any, step: int, rank: int, tree: Any) -> str:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return honest(directory, step, rank, tree)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "stage", full)
        with pytest.raises(CheckpointError, match=r"rank 1.*No space left"):
            cluster(lambda worker: train(worker, "TopK(0.1)", 2, 4, load=tmp_path, save=tmp_path), 2)
    assert checkpoint.complete_steps(tmp_path, 0) == checkpoint.complete_steps(tmp_path, 1) == [2]
    cluster(lambda worker: train(worker, "TopK(0.1)", 2, 3, load=tmp_path), 2)


def test_a_rank_that_died_before_completing_takes_all_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(lambda worker: train(worker, "TopK(0.1)", 0, 2, save=tmp_path), 2)
    honest = checkpoint.complete

    def dies(directory: Any, step: int, rank: int, digests: Any, about: Any, keep: int | None) -> None:
        if rank == 1:
            raise KeyboardInterrupt
        honest(directory, step, rank, digests, about, keep)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "complete", dies)
        with pytest.raises(KeyboardInterrupt):
            cluster(lambda worker: train(worker, "TopK(0.1)", 2, 4, load=tmp_path, save=tmp_path), 2)
    assert 4 in checkpoint.complete_steps(tmp_path, 0)
    cluster(lambda worker: train(worker, "TopK(0.1)", 2, 3, load=tmp_path), 2)


def test_dropout_and_a_loader_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """A DataLoader takes a seed from torch's generator whenever it is iterated, also when it is resumed."""

    def work(worker: Worker, start: bool, stop: int | None) -> Tensor:
        world = WorldState(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
        data = TensorDataset(torch.arange(60.0).view(20, 3))
        with seeded(3):
            model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        session = Session(model, optimizer, resolve(None), worker.transport, world=world)
        loader = DataLoader(data, 2, sampler=world.shard(data))
        torch.manual_seed(11)
        epoch = 0 if start else session.load(tmp_path)["epoch"]
        for now in range(epoch, 2):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if session.steps == stop:
                    session.save(tmp_path, epoch=now)
                    return parameters(model)
        return parameters(model)

    whole = cluster(lambda worker: work(worker, True, None), 1)[0]
    for stop in (3, 7, 14):
        cluster(lambda worker, s=stop: work(worker, True, s), 1)
        resumed = cluster(lambda worker, s=stop: work(worker, False, None), 1)[0]
        assert torch.equal(resumed, whole), stop


# -- session.load of a file is refused, and a start that loads nothing is said once ------------------------------------


def loaded(path: Path, world: int = 2) -> tuple[list[dict[str, Any]], list[str]]:
    def work(worker: Worker) -> dict[str, Any]:
        _, _, session = worker.start(network(worker.rank), sgd)
        return session.load(path)

    with notices() as said:
        found = cluster(work, world)
    return found, [text for text in said if "session.load" in text]


@pytest.mark.parametrize("world", [1, 2])
def test_load_refuses_a_file_and_names_the_line_to_write(tmp_path: Path, world: int) -> None:
    lines = {
        "old.pt": "torch.load",
        "archive": "torch.load",
        "model.safetensors": "safetensors.torch.load_file",
        "notes.txt": "Pass the folder",
    }
    for name, line in lines.items():
        path = tmp_path / name
        if name in ("old.pt", "archive"):
            torch.save({"model": {}}, path)
        else:
            path.write_text("text")
        with pytest.raises(CheckpointError, match=r"is a file, but session\.load reads a folder") as refusal:
            loaded(path, world)
        assert line in str(refusal.value)


def test_a_first_start_loads_nothing_and_reports_it_once(tmp_path: Path) -> None:
    found, said = loaded(tmp_path / "typo" / "dir")
    assert found == [{}, {}]
    assert [text.partition("since ")[2] for text in said] == [
        "this folder does not exist: training starts from scratch"
    ]
    assert loaded(tmp_path) == ([{}, {}], []), "an empty folder was made for this run"


def test_a_folder_without_a_checkpoint_is_named_with_what_it_holds(tmp_path: Path) -> None:
    for name in ("a.txt", "b", "c", "d"):
        (tmp_path / name).touch()
    found, said = loaded(tmp_path)
    assert found == [{}, {}]
    assert len(said) == 1
    assert "only a.txt, b, c and 1 more" in said[0]


# -- Damaged checkpoints: an intact one before them is taken, and the user is told; nothing malformed ends raw ---------

RECIPE = "TopK(density=0.2)"


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 and 4, by two workers."""
    directory = tmp_path_factory.mktemp("two_steps")

    def work(worker: Worker) -> None:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        session = worker.attach(model, optimizer, RECIPE)
        for step in range(4):
            train_step(model, optimizer, step, worker.rank)
            if step % 2:
                session.save(directory, rank=worker.rank)

    cluster(work, 2)
    return directory


@pytest.fixture
def kept(two_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_steps, tmp_path / "kept"))


def loaded_step(directory: Path, world: int = 2) -> int:
    begun = cluster(lambda worker: train_without_loader(worker, RECIPE, 0, load=directory)[0], world)
    (step,) = {steps for *_, steps, _ in begun}
    return int(step)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a bit": ("rank-1.safetensors", flip),
    "cut off": ("rank-0.safetensors", lambda path: os.truncate(path, path.stat().st_size - 1)),
    "empty": ("rank-1.safetensors", lambda path: os.truncate(path, 0)),
    "a manifest": ("rank-0.json", lambda path: path.write_text("{")),
    "a manifest that is a list": ("rank-1.json", lambda path: path.write_text("[]")),
    "a manifest without digests": ("rank-1.json", lambda path: path.write_text('{"world": 2, "digests": []}')),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", DAMAGES)
def test_the_intact_one_before_a_damaged_checkpoint_is_used(kind: str, world: int, kept: Path) -> None:
    name, damage = DAMAGES[kind]
    damage(kept / "step-00000004" / name)
    with notices() as said:
        assert loaded_step(kept, world) == 2
    told = [line for line in said if "continues from step 2: step 4 is damaged" in line]
    assert len(told) == 1
    assert name in told[0]


def test_without_an_intact_one_all_are_named(kept: Path) -> None:
    for folder in kept.iterdir():
        flip(folder / "rank-1.safetensors")
    with pytest.raises(CheckpointError, match=r"step 4 is damaged .*rank-1.*step 2 is damaged .*rank-1"):
        loaded_step(kept)


def test_a_disk_that_does_not_answer_is_no_damage(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = checkpoint.read

    def unplugged(directory: Any, step: int, rank: int) -> Any:
        if rank == 1:
            raise OSError(5, "Input/output error")
        return honest(directory, step, rank)

    monkeypatch.setattr(checkpoint, "read", unplugged)
    with pytest.raises(CheckpointError, match=r"step 4 .*rank 1: .*Input/output error"):
        loaded_step(kept)


def test_parts_of_two_saves_of_one_step_are_not_mixed(kept: Path, tmp_path: Path) -> None:
    """Killed after rank 0 had replaced its part and before rank 1 had: the step before is taken."""
    again = Path(shutil.copytree(kept, tmp_path / "again"))

    def save_once_more(worker: Worker) -> None:
        model = network(worker.rank)
        session = worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), RECIPE)
        session.load(again)
        session.save(again, another=True)

    cluster(save_once_more, 2)
    assert loaded_step(again) == 4
    for name in ("rank-0.json", "rank-0.safetensors"):
        shutil.copy(again / "step-00000004" / name, kept / "step-00000004" / name)
    with notices() as said:
        assert loaded_step(kept) == 2
    assert any("step 4 has parts of two saves" in line for line in said)


class Killed(BaseException):
    """Ends a save as a signal would: nothing tidies up."""


def test_killed_while_a_step_is_replaced_what_it_was_loads(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two renames no manifest describes the new data: the step is incomplete, and not damaged."""
    honest = Path.replace

    def dies_before_the_manifest(path: Path, target: Path) -> Path:
        if target.suffix == ".json" and rank_of(target) == 0:
            raise Killed
        return honest(path, target)

    def work(worker: Worker) -> None:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        session = worker.attach(model, optimizer, RECIPE)
        session.load(kept)
        with torch.no_grad():
            next(model.parameters()).add_(1)
        session.save(kept)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", dies_before_the_manifest)
        with pytest.raises(Killed):
            cluster(work, 2)
    assert checkpoint.complete_steps(kept, 0) == [2]
    with notices() as said:
        assert loaded_step(kept) == 4
        shutil.rmtree(kept / "replaced")
        assert loaded_step(kept) == 2
    assert said == []


def rank_of(manifest: Path) -> int:
    return int(manifest.stem.removeprefix("rank-"))


# -- forged ------------------------------------------------------------------------------------------------------------


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value in a JSON tree."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield node, key
        if isinstance(value, dict | list):
            yield from places(value)


JUNK: list[Any] = [None, -1, "?", 1.5, [], {}, [[]], {"tensor": "nowhere"}, {"dict": [["a"]]}, {"float": "x"}, 10**30]
JUNK += [{"bytes": "model.0.weight", "dtype": "nn", "shape": [1]}, {"dict": [[[1], 2]]}]


def forge(folder: Path, change: Callable[[Any], Any]) -> None:
    """Replace the tree of rank 0's file, with a digest that is right."""
    path = folder / "rank-0.safetensors"
    with safe_open(path, "pt") as file:
        tree = json.loads(file.metadata()["tree"])
    save_file(load_file(path), path, {"tree": json.dumps(change(tree))})
    sign(path)


def sign(path: Path) -> None:
    """Give all manifests the digest of rank 0's file as it is now."""
    digest = blake2b(path.read_bytes(), digest_size=16).hexdigest()
    for manifest in path.parent.glob("rank-*.json"):
        content = json.loads(manifest.read_text())
        content["digests"][0] = digest
        manifest.write_text(json.dumps(content))


def spoilt(seed: int) -> Callable[[Any], Any]:
    def change(tree: Any) -> Any:
        draw = random.Random(seed)
        container, key = draw.choice(list(places(tree)))
        if draw.random() < 0.3 and not isinstance(container, list):
            del container[key]
        else:
            container[key] = draw.choice(JUNK)
        return tree

    return change


@pytest.mark.parametrize("seed", range(60))
def test_a_forged_tree_never_ends_raw(seed: int, kept: Path) -> None:
    """Each loads as it is, is passed over, or is refused as a checkpoint."""
    forge(kept / "step-00000004", spoilt(seed))
    generators = random.getstate(), torch.get_rng_state()
    try:
        with suppress(CheckpointError):
            loaded_step(kept)
    finally:
        random.setstate(generators[0])
        torch.set_rng_state(generators[1])


@pytest.mark.parametrize("tree", [[], "text", {"dict": []}, None])
def test_a_tree_of_something_else_is_passed_over(tree: Any, kept: Path) -> None:
    forge(kept / "step-00000004", lambda _: tree)
    with notices() as said:
        assert loaded_step(kept) == 2
    assert any("is not a checkpoint of a session" in line for line in said)


def test_a_file_without_a_tree_is_passed_over(kept: Path) -> None:
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    forge(kept / "step-00000004", lambda _: deep)
    assert loaded_step(kept) == 2
    path = kept / "step-00000002" / "rank-0.safetensors"
    save_file({"x": torch.ones(1)}, path)
    sign(path)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        loaded_step(kept)


MANIFEST_JUNK: list[Any] = [None, [], "text", 10**30, -1, {"nested": {"deep": [1]}}]


@pytest.mark.parametrize("junk", MANIFEST_JUNK, ids=repr)
def test_a_manifest_with_anything_in_any_place_never_ends_raw(junk: Any, kept: Path) -> None:
    """Values that nothing depends on may be anything; with others the checkpoint before is taken."""
    path = kept / "step-00000004" / "rank-1.json"
    intact = path.read_text()
    count = len(list(places(json.loads(intact))))
    steps = []
    for number in range(count):
        manifest = json.loads(intact)
        container, key = list(places(manifest))[number]
        container[key] = junk
        path.write_text(json.dumps(manifest))
        steps.append(loaded_step(kept))
    assert set(steps) == {2, 4}


@pytest.mark.parametrize(
    "text", [b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b"null"], ids=lambda t: repr(t[:5])
)
def test_a_manifest_of_anything_is_passed_over(text: bytes, kept: Path) -> None:
    (kept / "step-00000004" / "rank-1.json").write_bytes(text)
    assert loaded_step(kept) == 2


HEADERS: dict[str, Any] = {
    "no metadata": {"__metadata__": None},
    "metadata of numbers": {"__metadata__": {"tree": 3}},
    "a deep tree": {"__metadata__": {"tree": "[" * 100_000}},
    "a tensor of text": {"model.0.weight": "text"},
    "an unknown dtype": {"model.0.weight": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}},
    "a huge shape": {"model.0.weight": {"dtype": "F64", "shape": [2**62, 2**62], "data_offsets": [0, 8]}},
    "negative places": {"model.0.weight": {"dtype": "F64", "shape": [1], "data_offsets": [-8, 0]}},
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_with_something_else_is_passed_over(kind: str, kept: Path) -> None:
    path = kept / "step-00000004" / "rank-0.safetensors"
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps({**json.loads(content[8:size]), **HEADERS[kind]}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[size:])
    sign(path)
    with notices() as said:
        assert loaded_step(kept) == 2
    assert any("continues from step 2: step 4 is damaged" in line for line in said)
