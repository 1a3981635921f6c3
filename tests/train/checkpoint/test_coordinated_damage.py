"""Damaged checkpoints: an intact one before them is taken, and the user is told; nothing malformed ends raw."""

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
from support.resharded_training import train
from support.virtual_workers import Worker, cluster, network, notices, train_step

from gossamer.errors import CheckpointError
from gossamer.train import checkpoint

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
    begun = cluster(lambda worker: train(worker, RECIPE, 0, load=directory)[0], world)
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
