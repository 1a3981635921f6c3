"""Checkpoint files: written whole or not at all."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file
from support.pytrees import alike, trees

from gossamer.errors import CheckpointError
from gossamer.train import checkpoint

ABOUT = {"recipe": "EveryStep() + Dense() + Complete()"}


def save(directory, step, tree=(), rank=0, world=1):
    digests = ["unknown"] * world
    digests[rank] = checkpoint.stage(directory, step, rank, tree)
    checkpoint.complete(directory, step, rank, digests, ABOUT)


def names(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees)
def test_a_tree_survives_the_disk(tmp_path, tree):
    save(tmp_path, 20, tree)
    found, manifest = checkpoint.read(tmp_path, 20, 0)
    assert alike(found, tree)
    assert (manifest["step"], manifest["world"], manifest["about"]) == (20, 1, ABOUT)


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), step + 1.0)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        lambda parameters: torch.optim.SGD(parameters, lr=0.001, momentum=0.9),
    ],
)
def test_optimizers_continue_where_they_stood(tmp_path, make):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    save(tmp_path, 3, {"model": model, "optimizer": optimizer.state_dict()})
    train(model, optimizer, 2)

    resumed = torch.nn.Linear(3, 2)
    again = make(resumed.parameters())
    tree, _ = checkpoint.read(tmp_path, 3, 0)
    resumed.load_state_dict(tree["model"])
    again.load_state_dict(tree["optimizer"])
    train(resumed, again, 2)
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))


def test_layout_and_format_are_those_of_the_library(tmp_path):
    shared = torch.arange(4.0)
    save(tmp_path, 20, {"odd": torch.ones(3, dtype=torch.int8), "a": shared, "b": shared[1:], "c": shared})
    assert names(tmp_path) == ["step-00000020/rank-0.json", "step-00000020/rank-0.safetensors"]
    tensors = load_file(tmp_path / "step-00000020/rank-0.safetensors")
    assert set(tensors) == {"odd", "a", "b", "c"}
    assert torch.equal(tensors["b"], torch.tensor([1.0, 2.0, 3.0]))


def test_what_was_loaded_does_not_hang_on_the_file(tmp_path):
    save(tmp_path, 1, {"x": torch.arange(100.0)})
    tree, _ = checkpoint.read(tmp_path, 1, 0)
    os.truncate(tmp_path / "step-00000001/rank-0.safetensors", 0)
    assert torch.equal(tree["x"], torch.arange(100.0))


def test_the_newest_two_stay_and_other_ranks_are_left_alone(tmp_path):
    for step in (5, 10, 15, 20):
        save(tmp_path, step, world=2)
        if step < 15:
            save(tmp_path, step, rank=1, world=2)
    assert checkpoint.complete_steps(tmp_path, 0) == [15, 20]
    assert checkpoint.complete_steps(tmp_path, 1) == [5, 10]
    for step in (15, 20):
        save(tmp_path, step, rank=1, world=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000015", "step-00000020"]


def test_what_a_run_has_just_saved_outlives_later_steps_of_an_older_run(tmp_path):
    for step in (1000, 1010, 3, 4, 5):
        save(tmp_path, step)
    assert checkpoint.complete_steps(tmp_path, 0) == [4, 5, 1000, 1010]


def test_staged_is_not_saved(tmp_path):
    save(tmp_path, 1)
    checkpoint.stage(tmp_path, 2, 0, {"step": 2})
    assert checkpoint.complete_steps(tmp_path, 0) == [1]
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 2 for rank 0.*\[1\]"):
        checkpoint.read(tmp_path, 2, 0)
    save(tmp_path, 3)  # tidies up after what was left
    assert not any("partial" in name for name in names(tmp_path))
    assert checkpoint.complete_steps(tmp_path, 0) == [1, 3]


def test_abandoned_is_gone_and_others_stay(tmp_path):
    save(tmp_path, 1)
    before = names(tmp_path)
    checkpoint.stage(tmp_path, 2, 0, {"step": 2})
    assert names(tmp_path) != before
    checkpoint.abandon(tmp_path, 2, 0)
    assert names(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    checkpoint.abandon(tmp_path, 2, 0)


def test_saving_a_step_again_replaces_it_only_when_complete(tmp_path):
    save(tmp_path, 1, {"try": 1})
    checkpoint.stage(tmp_path, 1, 0, {"try": 2})
    assert checkpoint.read(tmp_path, 1, 0)[0] == {"try": 1}
    checkpoint.abandon(tmp_path, 1, 0)
    assert checkpoint.read(tmp_path, 1, 0)[0] == {"try": 1}
    save(tmp_path, 1, {"try": 3})
    assert checkpoint.read(tmp_path, 1, 0)[0] == {"try": 3}


def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def survives(tmp_path, action):
    """A failed save says why, leaves nothing, and the checkpoint before it loads."""
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match=r"No space left on device.*Earlier checkpoints are untouched"):
        action()
    assert names(tmp_path) == before
    assert checkpoint.complete_steps(tmp_path, 0) == [1]
    assert alike(checkpoint.read(tmp_path, 1, 0)[0], {"x": torch.ones(3)})


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_while_staging(tmp_path, monkeypatch, call):
    save(tmp_path, 1, {"x": torch.ones(3)})
    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        survives(tmp_path, lambda: checkpoint.stage(tmp_path, 2, 0, {"x": torch.zeros(3)}))
    save(tmp_path, 2)


@pytest.mark.parametrize("step", [1, 2])
def test_a_full_disk_while_completing(tmp_path, monkeypatch, step):
    save(tmp_path, 1, {"x": torch.ones(3)})

    def staged_then_full():
        told = checkpoint.stage(tmp_path, step, 0, {"x": torch.zeros(3)})
        monkeypatch.setattr(os, "write", full)
        checkpoint.complete(tmp_path, step, 0, [told], ABOUT)

    survives(tmp_path, staged_then_full)


def test_a_tree_that_cannot_be_stored_leaves_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="mine is a set"):
        checkpoint.stage(tmp_path, 1, 0, {"mine": {1}})
    assert list(tmp_path.iterdir()) == []


def test_slow_disks_that_take_a_byte_at_a_time(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:5]))
    save(tmp_path, 1, {"x": torch.arange(9.0)})
    assert torch.equal(checkpoint.read(tmp_path, 1, 0)[0]["x"], torch.arange(9.0))


def damage_end(path):
    os.truncate(path, path.stat().st_size - 1)


def damage_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [damage_end, damage_bit])
def test_a_damaged_file_is_refused(tmp_path, damage):
    save(tmp_path, 1, {"x": torch.ones(3)})
    data = tmp_path / "step-00000001/rank-0.safetensors"
    checkpoint.read(tmp_path, 1, 0)
    damage(data)
    expected = json.loads((data.parent / "rank-0.json").read_text())["digests"][0]
    with pytest.raises(CheckpointError, match=f"rank-0.safetensors is damaged.*should be {expected}"):
        checkpoint.read(tmp_path, 1, 0)


def test_a_damaged_manifest_is_refused(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-00000001/rank-0.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"rank-0\.json is damaged"):
        checkpoint.read(tmp_path, 1, 0)


def test_a_missing_directory_has_no_steps(tmp_path):
    assert checkpoint.complete_steps(tmp_path / "none", 0) == []


KILLED = """
import os, signal, sys, torch
from gossamer.train import checkpoint
directory, call, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
saved = getattr(os, call)
left = [count]
def fatal(*args, **options):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return saved(*args, **options)
told = checkpoint.stage(directory, 1, 0, {"x": torch.ones(3)})
checkpoint.complete(directory, 1, 0, [told], {})
setattr(os, call, fatal)
told = checkpoint.stage(directory, 2, 0, {"x": torch.zeros(3)})
checkpoint.complete(directory, 2, 0, [told], {})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("call", "count", "steps"),
    [
        ("write", 1, [1]),  # after the header, before the data
        ("fsync", 2, [1]),  # the folder and the data are synced, the manifest is not
        ("fsync", 3, [1]),  # the data are named, the manifest is not
        ("fsync", 4, [1, 2]),  # both are named
    ],
)
def test_killed_at_any_moment_a_whole_checkpoint_remains(tmp_path, call, count, steps):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), call, str(count)], timeout=200, check=False)
    assert done.returncode == -signal.SIGKILL
    assert checkpoint.complete_steps(tmp_path, 0) == steps
    for step in steps:
        checkpoint.read(tmp_path, step, 0)


def test_nothing_is_pickled(tmp_path):
    seen = []
    watching = [True]
    sys.addaudithook(lambda event, args: watching and event == "pickle.find_class" and seen.append(args))
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    save(tmp_path, 1, {"optimizer": optimizer, "x": torch.ones(2, dtype=torch.complex128)})
    checkpoint.read(tmp_path, 1, 0)
    assert seen == []
    path = tmp_path / "twin.pt"
    torch.save({"x": torch.ones(2)}, path)
    torch.load(path, weights_only=False)  # the twin: the hook does notice
    assert seen
    watching.clear()  # an audit hook stays for the life of the process
