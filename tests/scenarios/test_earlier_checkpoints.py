"""Checkpoints and journals written by earlier commits load, and training resumes from them bit for bit.

Each archive of golden/checkpoints has the files that the case's commit wrote, and the parameters that its code reached
after it resumed from them. `python test_earlier_checkpoints.py NAME ...` writes archives: in a checkout of the commit
whose formats must stay readable, never of one under test.
"""

from __future__ import annotations

import json
import random
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.federated_faults import SAMPLES, WholeMomentum, WholeNumbers, sparse
from support.killed_server import Desk
from support.paths import TESTS
from support.server_runs import Run, run, sgd
from support.virtual_workers import Worker, cluster, parameters
from torch import Tensor, nn
from torch.nn import Parameter

from gossamer.algorithms.compressors import TopK
from gossamer.base.kernels import Factoring, back_project, expand, project
from gossamer.federated.server import journal

FOLDER = TESTS / "golden" / "checkpoints"
EXPECTED = "expected.safetensors"  # the parameters RESUMED_STEPS later, by rank
WORLD, RESUMED_STEPS = 2, 6
Shapes = Sequence[tuple[int, ...]]
SHAPES: Shapes = [(16, 16), (16,), (4, 16)]  # only the first is large enough to be compressed
LARGE_SHAPES: Shapes = [(16, 16), (512, 512), (4, 16)]  # more than the first bucket of later versions
PATTERN = (16, 16)  # repeated in larger tensors, so that their checkpoints are small files
RNG_STATE = (3, (*(i % 10 for i in range(624)), 624), None)  # of Python's generator; few digits keep checkpoints small
PARAMETER_SERVER, FEDERATION = "parameter_server", "federation"
FIRST_COMMIT, FEDERATED_COMMIT = "d8ad6ccb", "87fed1c3"  # of 2026-11-22 and 2026-11-23
ONE_BUCKET_COMMIT = "e8fb0e1e"  # of 2026-11-30, when all buckets had 25 MiB


class Stopped(BaseException):
    """A server ended in the middle of a round."""


@dataclass(frozen=True)
class Case:
    """A run that was saved after `steps` steps.

    tensor: one in rank 0's file that the resumed run depends on; commit: the code that wrote the archive; matmul:
    whether it multiplies matrices, whose last digits depend on the machine.
    """

    recipe: str
    steps: int
    tensor: str
    commit: str = FIRST_COMMIT
    matmul: bool = False
    shapes: Shapes = tuple(SHAPES)


CASES = {
    "topk": Case("TopK(density=0.1)", 5, "session.state.0.0.residual"),
    "accumulation": Case("EveryStep(accumulate=2) + OneBit()", 5, "session.state.0.accumulated"),
    "local_sgd": Case("LocalSGD(period=4) + Int8()", 6, "session.state.0.merging.agreed"),
    "diloco": Case(
        "DiLoCo(period=4, outer_learning_rate=0.5, outer_momentum=0.5, fragments=2, delay=1)",
        6,
        "session.progress.flights.0.means.0",
    ),
    "powersgd": Case("PowerSGD(rank=2)", 5, "session.state.0.0.q", matmul=True),
    "gossip": Case("Gossip() + Ring()", 5, "model.0"),
    "dgc": Case("DGC(density=0.1)", 5, "session.state.0.0.momentum"),
    "delay": Case("EveryStep(delay=1)", 5, "session.progress.flights.0.means.0"),
    "sharded": Case("Route(Feedback(Sharded(OneBit())), smallest=0)", 5, "session.state.0.0.owed"),
    "delayed_averaging": Case("DelayedAveraging(1, period=4)", 6, "session.state.0.merging.from"),
    "warmup": Case("Warmup(TopK(density=0.1), steps=8)", 5, "session.state.0.0.residual"),
    "choco": Case("Gossip() + Ring() + TopK(density=0.2)", 5, "session.state.0.mixing.hat"),
    "ef21": Case(
        "Feedback(TopK(density=0.1), rule='ef21')", 5, "session.state.0.0.known_mean", commit=FEDERATED_COMMIT
    ),
    "first_moment": Case(
        "LocalSGD(2, first_moment_period=4)", 5, "session.state.0.merging.agreed", commit=FEDERATED_COMMIT
    ),
    "large": Case(
        "Route(Feedback(Sharded(OneBit())), smallest=0)",
        5,
        "session.state.1.0.owed",
        commit=ONE_BUCKET_COMMIT,
        shapes=tuple(LARGE_SHAPES),
    ),
    FEDERATION: Case("", 2, "model.parameters", commit=FEDERATED_COMMIT),
    PARAMETER_SERVER: Case(
        "ParameterServer('sync', pull=TopK(0.3)) + Route(Feedback(TopK(0.2)), smallest=0)",
        6,
        "shard.optimizer.state.0.momentum_buffer",
    ),
}


# -- training ----------------------------------------------------------------------------------------------------------


def targets(step: int, rank: int, shapes: Shapes = SHAPES) -> list[Tensor]:
    """Numbers with few digits, the same on every machine."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    repeated = [[size // PATTERN[0] for size in shape] if prod(shape) > prod(PATTERN) else () for shape in shapes]
    drawn = [PATTERN if times else shape for times, shape in zip(repeated, shapes, strict=True)]
    found = [torch.randint(-64, 65, shape, generator=generator).float() / 32 for shape in drawn]
    return [each.repeat(times) if times else each for each, times in zip(found, repeated, strict=True)]


def initial_parameters(shapes: Shapes = SHAPES) -> list[Parameter]:
    return [Parameter(target / 8) for target in targets(99, 0, shapes)]


def train(
    worker: Worker, case: Case, first: int, last: int, load: Path | None = None, save: Path | None = None
) -> Tensor:
    """Minimize the distance to the targets: elementwise, and with powers of two, so that every machine rounds alike."""
    model = nn.ParameterList(initial_parameters(case.shapes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    session = worker.attach(model, optimizer, case.recipe)
    if load is not None:
        assert session.load(load) == {"step": first}
        assert random.getstate() == RNG_STATE
    session.set_batch_weight(1 + worker.rank)
    for step in range(first, last):
        optimizer.zero_grad()
        pairs = zip(model, targets(step, worker.rank, case.shapes), strict=True)
        sum((0.5 * (parameter - target).square()).sum() for parameter, target in pairs).backward()  # type: ignore
        optimizer.step()
    if save is not None:
        session.save(save, step=last)
    return parameters(model)


def train_served(recipe: str, last: int, directory: Path) -> Run:
    """The same up to step `last`, with a server that resumes from its journal in `directory`, or begins one there."""

    def gradient(tensors: Mapping[str, Tensor], worker: int, step: int) -> Mapping[str, Tensor]:
        pairs = zip(tensors.items(), targets(step, worker), strict=True)
        return {name: (parameter - target).detach() for (name, parameter), target in pairs}

    return run(
        recipe,
        world=WORLD,
        servers=1,
        steps=last,
        directory=directory,
        optimizer=sgd(0.125, momentum=0.5),
        make=lambda: dict(zip("abc", initial_parameters(), strict=True)),
        gradient=gradient,
    )


def federation(rounds: int, directory: Path) -> WholeNumbers:
    """Devices without a past, and a server that resumes from its journal in `directory`, or begins one there."""
    return WholeNumbers(
        WholeMomentum(fraction=1.0, pull=TopK(density=0.2)),
        sparse(),
        rounds=rounds,
        options={"fewest": len(SAMPLES)},
        keep=lambda rounds: journal.keep(directory, rounds),
    )


def resume(name: str, directory: Path) -> list[Tensor]:
    """The parameters by rank, RESUMED_STEPS after what was saved in `directory`."""
    case = CASES[name]
    last = case.steps + RESUMED_STEPS
    if name == FEDERATION:
        done = federation(last, directory)
        Desk(done).run()
        return [done.parameters.float()]
    if name == PARAMETER_SERVER:
        return train_served(case.recipe, last, directory).go()
    return cluster(lambda worker: train(worker, case, case.steps, last, load=directory), WORLD)


def products() -> Tensor:
    """PowerSGD's matrix products, whose last digits show in which order they are added up here."""
    wide, thin = targets(0, 0)[0] / 3, targets(1, 0)[0][:, :2] / 3
    factoring = Factoring.of(2, [(tuple(wide.shape), wide.stride(), 0)], [True])
    x, factor, whole = wide.reshape(-1), thin.reshape(-1), torch.empty(wide.numel())
    ahead, back = project(x, factoring, factor, 1.0), back_project(x, factoring, factor)
    expand(factoring, factor, factor, whole)
    return torch.cat([ahead.view(thin.shape), back.view(thin.shape), whole.view(wide.shape)], 1)


# -- writing -----------------------------------------------------------------------------------------------------------


def write_checkpoint(case: Case, directory: Path) -> None:
    random.setstate(RNG_STATE)
    cluster(lambda worker: train(worker, case, 0, case.steps, save=directory), WORLD)


def write_journal(case: Case, directory: Path) -> None:
    """A snapshot taken halfway, and the log of every push since."""
    first_half = train_served(case.recipe, case.steps // 2, directory)
    first_half.go()
    journal = first_half.shards[0].journal
    journal.save()
    journal.close()
    train_served(case.recipe, case.steps, directory).go()


def write_rounds(case: Case, directory: Path) -> None:
    """The version of round `steps`, and the log of a round in which some devices have their tasks."""
    done = federation(case.steps + 1, directory)
    versions = done.ledger.commits

    def stop_later(op: object) -> float:
        if len(versions) == case.steps and len(done.ledger.given) % len(SAMPLES) == 2:
            raise Stopped
        return 0.0

    done.train_seconds = stop_later
    directory.mkdir()
    with suppress(Stopped):
        Desk(done).run()


WRITERS = {PARAMETER_SERVER: write_journal, FEDERATION: write_rounds}


def write(name: str, folder: Path) -> None:
    directory = folder / name
    WRITERS.get(name, write_checkpoint)(CASES[name], directory)
    copy = copytree(directory, folder / "copy")  # resuming appends to a journal
    expected = {str(rank): values for rank, values in enumerate(resume(name, copy))}
    save_file({**expected, **({"products": products()} if CASES[name].matmul else {})}, directory / EXPECTED)
    with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz") as archive:
        archive.add(directory, name)


# -- verifying ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _global_generators_are_restored() -> Iterator[None]:
    """Loading a checkpoint sets them."""
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    yield
    random.setstate(python_state)
    torch.set_rng_state(torch_state)


def extract(name: str, folder: Path) -> Path:
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def verify(name: str, directory: Path) -> None:
    expected = load_file(directory / EXPECTED)
    exact = not CASES[name].matmul or torch.equal(products(), expected["products"])
    for rank, found in enumerate(resume(name, directory)):
        error = (found - expected[str(rank)]).abs().max()
        assert error <= (0.0 if exact else 1e-5), f"{name}: rank {rank} resumed differently, by up to {error}"


def corrupt(directory: Path, tensor: str) -> None:
    """Change the first entry of a tensor of rank 0, and its file's digest with it."""
    (path,) = directory.rglob("step-*/rank-0.safetensors")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors[tensor].view(-1)[0] += 1
    save_file(tensors, path, metadata)
    digest = blake2b(path.read_bytes(), digest_size=16).hexdigest()
    for manifest in path.parent.glob("rank-*.json"):
        content = json.loads(manifest.read_text())
        content["digests"][0] = digest
        manifest.write_text(json.dumps(content))


@pytest.mark.parametrize("name", CASES)
def test_promise_17_training_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    verify(name, extract(name, tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_one_changed_entry_is_detected(name: str, tmp_path: Path) -> None:
    directory = extract(name, tmp_path)
    corrupt(directory, CASES[name].tensor)
    with pytest.raises(AssertionError, match="resumed differently"):
        verify(name, directory)


def test_a_lost_log_is_detected(tmp_path: Path) -> None:
    directory = extract(PARAMETER_SERVER, tmp_path)
    (log,) = directory.glob("server-0/log-*")
    log.unlink()
    with pytest.raises(AssertionError, match="resumed differently"):
        verify(PARAMETER_SERVER, directory)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in sys.argv[1:]:
        with TemporaryDirectory() as temporary:
            write(each, Path(temporary))
