"""Random combinations of options: training that is saved and resumed ends with the bits of one that was not.

Each seed draws a recipe by the grammar of terms, an optimizer, a model, and events of the loop. Four trainings follow:
one without checkpoints, one that saves and continues, one that loads that checkpoint into another model, and one that
loads it after its last step. All must have the same bits after each step. On the way ranks that agree must hold equal
bits, nothing may become NaN, and counters never decrease. A fifth loads it with another number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.nightly import nightly
from support.random_recipes import random_recipe
from support.virtual_workers import Worker, cluster, seeded
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import AttachError, RecipeError
from gossamer.train.engine import bucket
from gossamer.train.session.session import Session
from gossamer.train.session.validation import refuse_sparse_gradients
from gossamer.train.synchronizers import gradients, scheduled

SEEDS = range(200)
BY_DAY = 4  # of them
REFUSED = (RecipeError, AttachError, ValueError)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


# -- optimizers, schedulers and models ---------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.05),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampening": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.5, dampening=0.1),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "Adam L2": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.01, foreach=False),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.005, momentum=0.5, centered=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "Muon": lambda groups: torch.optim.Muon(groups, lr=0.01),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=200),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6),
}


class Model(nn.Module):
    """A small network with the parameters and buffers that its options name."""

    def __init__(self, parts: Sequence[str], dtype: torch.dtype) -> None:
        super().__init__()
        self.parts, bias = frozenset(parts), "matrices" not in parts
        self.first, self.last = nn.Linear(6, 48, bias=bias), nn.Linear(48, 3, bias=bias)
        if "norm" in parts:
            self.norm = nn.BatchNorm1d(48)
        if "strided" in parts:
            self.turned = nn.Parameter(torch.randn(48, 20).t() / 10)
        if "scalar" in parts:
            self.scale = nn.Parameter(torch.tensor(1.0))
        if "empty" in parts:
            self.empty = nn.Parameter(torch.zeros(0, 4))
        if "unused" in parts:
            self.unused = nn.Parameter(torch.randn(7, 5))
        if "late" in parts:
            self.late = nn.Linear(48, 3, bias=bias)
        if "some" in parts:
            self.some = nn.Linear(48, 3, bias=bias)
        if "table" in parts:
            self.table = nn.Embedding(20, 48, sparse=True)
        if "frozen" in parts:
            self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        if "follower" in parts:
            self.follower = nn.Linear(48, 3).requires_grad_(False)
        if "buffers" in parts:
            self.register_buffer("seen", torch.zeros(6))
            self.register_buffer("count", torch.tensor(0))
        self.to(dtype)
        if "mixed" in parts:
            self.last.to(torch.float64 if dtype != torch.float64 else torch.float32)

    def forward(self, x: Tensor, at: int, rank: int) -> Tensor:
        x = x.to(self.first.weight.dtype)
        if "buffers" in self.parts:
            self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.count.add_(1)
        hidden = self.first(x)
        if "norm" in self.parts:
            hidden = self.norm(hidden)
        hidden = torch.tanh(hidden)
        if "strided" in self.parts:
            hidden = hidden + torch.tanh(hidden @ self.turned.t()) @ self.turned
        if "scalar" in self.parts:
            hidden = hidden * self.scale
        if "table" in self.parts and (at + rank) % 4:
            hidden = hidden + self.table((7 * x[:, 0].detach()).long() % 20)
        out: Tensor = self.last(hidden.to(self.last.weight.dtype)).to(torch.float64)
        if "late" in self.parts and at >= 4:
            out = out + self.late(hidden)
        if "some" in self.parts and (at + rank) % 3 == 0:
            out = out + self.some(hidden)
        return out

    def follow(self) -> None:
        if "follower" in self.parts:
            for own, leader in zip(self.follower.parameters(), self.last.parameters(), strict=False):
                own.data.mul_(0.9).add_(leader.data.to(own.dtype), alpha=0.1)


PARTS = ["norm", "strided", "scalar", "empty", "unused", "late", "some", "frozen", "follower", "buffers", "mixed"]


# -- a combination -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Combination:
    """The options of some trainings."""

    recipe: str
    save_at: int  # iterations made before; with epochs, epochs made before
    seed: int = 0
    world: int = 2
    optimizer: str = "momentum"
    groups: int = 1
    scheduler: str | None = None
    parts: tuple[str, ...] = ()
    dtype: str = "float32"
    clip_norm: float | None = None
    clips_in_loop: bool = False
    local: int = 1  # backward passes per step; all but the last in no_sync
    set_to_none: bool = True
    weighted: bool = False
    scaled: bool = False
    infinite: tuple[int, int] | None = None  # (iteration, rank) with infinite gradients
    switch: tuple[int, str] | None = None  # iteration and another recipe
    reset: int | None = None  # iteration after which the compressor's state is reset
    iterations: int = 8
    epochs: tuple[tuple[int, ...], ...] | None = None  # iterations of each epoch, by rank, instead
    looks: tuple[int, ...] = ()  # iterations after which the averaged parameters are read
    readers: int | None = None  # another number of workers that load the checkpoint

    @classmethod
    def drawn(cls, seed: int, draw: Random) -> Combination:
        world = draw.choice([1, 2, 2, 3, 3, 4, 5])
        optimizer = draw.choice([*OPTIMIZERS, "momentum", "Adam", "AdamW"])
        parts = tuple(part for part in PARTS if draw.random() < 0.25)
        dtype = draw.choice(["float32", "float32", "float64", "bfloat16"])
        if optimizer == "NAdam":  # whose load_state_dict converts a product in float32 to the parameter's dtype
            dtype, parts = "float32", tuple(part for part in parts if part != "mixed")
        if optimizer == "Muon":
            parts = ("matrices", *(part for part in parts if part not in ("norm", "scalar", "empty")))
        scheduler = draw.choice([None, *SCHEDULERS])
        # Other optimizers, and OneCycleLR's momentum, do not work with sparse gradients
        if optimizer in ("SGD", "Adagrad") and scheduler != "OneCycleLR" and draw.random() < 0.5:
            parts = (*parts, "table")
        iterations = draw.randint(8, 12)
        uneven = draw.random() < 0.2
        epochs = None
        if uneven:
            epochs = tuple(tuple(draw.randint(2, 4) for _ in range(world)) for _ in range(3))
        chosen = random_recipe(draw, world)
        switch = (draw.randint(1, iterations - 1), random_recipe(draw, world)) if draw.random() < 0.2 else None
        fits = not uneven and "global_batch" not in f"{chosen} {switch}"  # another number of passes otherwise
        readers = draw.choice([None, None, 1, 2, 4]) if fits else None
        guarded = world > 1 and readers != 1 and not chosen.startswith("Silent")  # as plain torch otherwise
        return cls(
            seed=seed,
            world=world,
            recipe=chosen,
            optimizer=optimizer,
            groups=draw.choice([1, 1, 2]),
            scheduler=scheduler,
            parts=parts,
            dtype=dtype,
            clip_norm=draw.choice([None, None, 0.5]),
            clips_in_loop="table" not in parts and draw.random() < 0.2,
            local=draw.choice([1, 1, 1, 2]),
            set_to_none=draw.random() < 0.7 or bool({"some", "late"} & {*parts}),  # zeros are gradients to optimizers
            weighted=draw.random() < 0.3,
            scaled=draw.random() < 0.1,
            infinite=(draw.randrange(iterations), draw.randrange(world)) if guarded and draw.random() < 0.2 else None,
            switch=switch,
            reset=draw.randint(1, iterations - 1) if draw.random() < 0.1 and not uneven else None,
            epochs=epochs,
            iterations=iterations,
            save_at=draw.randint(1, 2) if uneven else draw.randint(1, iterations - 1),
            looks=() if uneven else tuple(each for each in range(iterations) if draw.random() < 0.2),
            readers=readers,
        )

    def numbers(self, rank: int, first: int, last: int) -> list[list[int]]:
        """Numbers of the iterations of a rank, by epoch; first and last as save_at."""
        if self.epochs is None:
            return [list(range(first, last))]
        return [[10 * epoch + each for each in range(self.epochs[epoch][rank])] for epoch in range(first, last)]

    @property
    def last(self) -> int:
        return self.iterations if self.epochs is None else len(self.epochs)


State = Mapping[str, Tensor]


@dataclass
class Trace:
    """What one rank found."""

    states: list[State] = field(default_factory=list)
    merged: dict[int, State] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)
    in_step: list[bool] = field(default_factory=list)  # whether all ranks hold equal parameters after the iteration
    common: bool = True  # whether all ranks have the same merged parameters


def begin(worker: Worker, c: Combination, seed: int) -> tuple[Model, Any, Any, Session]:
    with seeded(100 * seed + worker.rank):
        model = Model(c.parts, DTYPES[c.dtype])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    halves = [trained[::2], trained[1::2]] if c.groups == 2 else [trained]
    groups = [{"params": half, **({"lr": 0.003} if place else {})} for place, half in enumerate(halves)]
    optimizer = OPTIMIZERS[c.optimizer](groups)
    scheduler = None if c.scheduler is None else SCHEDULERS[c.scheduler](optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3) if c.scaled else None
    options = {"scaler": scaler, "clip_norm": c.clip_norm, "scheduler": scheduler, "seed": c.seed}
    recipe = resolve(c.recipe, worker.world)
    refuse_sparse_gradients(model, recipe)  # as gossamer.attach does
    session = worker.attach(model, optimizer, recipe, **options)
    return model, scheduler, scaler, session


def iterate(c: Combination, session: Session, scheduler: Any, scaler: Any, number: int, rank: int) -> None:
    """One step of the loop."""
    model, optimizer = session.model, session.optimizer
    assert isinstance(model, Model)
    optimizer.zero_grad(set_to_none=c.set_to_none)
    for part in range(c.local):
        generator = torch.Generator().manual_seed(1000 * number + 10 * rank + part)
        x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator, dtype=torch.float64)
        if c.weighted:
            session.set_batch_weight(1 + (number + rank) % 3)
        with nullcontext() if part == c.local - 1 else session.no_sync():
            loss = (model(x, number, rank) - y).square().mean() / c.local
            if c.infinite == (number, rank):
                loss = loss * math.inf
            (loss if scaler is None else scaler.scale(loss)).backward()
    if c.clips_in_loop and not session.accumulating:
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    if scaler is None:
        optimizer.step()
    elif not session.accumulating:
        scaler.step(optimizer)
        scaler.update()
    model.follow()
    if scheduler is not None and not session.accumulating:
        scheduler.step()


def train(worker: Worker, c: Combination, *, save: Path | None = None, load: Path | None = None) -> Trace:
    """Train to the end, or from a checkpoint. save: also save on the way."""
    model, scheduler, scaler, session = begin(worker, c, 0 if load is None else 1)
    if load is not None:
        assert session.load(load) == {"made": c.save_at}
    trace = loop(c, session, scheduler, scaler, 0 if load is None else c.save_at, save)
    return finished(session, model, trace)


def train_twice(worker: Worker, c: Combination, load: Path) -> Trace:
    """Train to the end, and once more from a checkpoint, in one session."""
    model, scheduler, scaler, session = begin(worker, c, 0)
    loop(c, session, scheduler, scaler, 0)
    assert session.load(load) == {"made": c.save_at}
    return finished(session, model, loop(c, session, scheduler, scaler, c.save_at))


def loop(c: Combination, session: Session, scheduler: Any, scaler: Any, first: int, save: Path | None = None) -> Trace:
    trace, rank = Trace(), session._transport.rank
    for epoch, numbers in enumerate(c.numbers(rank, first, c.last), first):
        if save is not None and c.epochs is not None and epoch == c.save_at:
            session.save(save, made=epoch)
        with nullcontext() if c.epochs is None else session.epoch():
            for number in numbers:
                if save is not None and c.epochs is None and number == c.save_at:
                    session.save(save, made=number)
                before = session.steps, session.stats.run.bytes_sent
                iterate(c, session, scheduler, scaler, number, rank)
                counted = f"after iteration {number} {session.steps} steps and {session.stats.run.bytes_sent} bytes"
                assert before[0] <= session.steps, f"{counted}, {before} before"
                assert before[1] <= session.stats.run.bytes_sent, f"{counted}, {before} before"
                if c.switch is not None and c.epochs is None and number == c.switch[0] and not session.accumulating:
                    switch(session, c.switch[1])
                if c.reset == number and not session.accumulating:
                    session.reset_compressor_state(next(iter(session._parameters)))
                trace.states.append(state_of(session, scheduler, scaler))
                trace.in_step.append(session._synchronizer.in_step and not session._stages.now.local_parameters)
                if number in c.looks and save is None:
                    trace.merged[number] = merged_state(session)
    return trace


def finished(session: Session, model: Model, trace: Trace) -> Trace:
    trace.common = session._synchronizer.in_common
    trace.merged[-1] = merged_state(session)
    trace.final = {"session": session.state_dict()}
    session.close()
    trace.final |= {"closed": dict(model.state_dict())}
    return trace


def switch(session: Session, text: str) -> None:
    """Switch to another recipe; one that this session refuses leaves the first in force."""
    with suppress(*REFUSED):
        session.switch(resolve(text, session._transport.world))


def state_of(session: Session, scheduler: Any, scaler: Any) -> State:
    """A copy of all that a step may change."""
    model, optimizer = session.model, session.optimizer
    assert model is not None
    found = {name: each.detach().clone() for name, each in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{key} of {name}"] = torch.as_tensor(value).detach().clone()
    for place, group in enumerate(optimizer.param_groups):
        found[f"rate {place}"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
    found["steps"] = torch.tensor(session.steps)
    if scaler is not None:
        found["scale"] = torch.tensor(scaler.get_scale())
    return found


def merged_state(session: Session) -> State:
    assert session.model is not None
    with session.averaged_parameters(session.model):
        return {name: each.detach().clone() for name, each in session.model.state_dict().items()}


# -- comparisons -------------------------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}")
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from leaves(value, f"{path}.{place}")
    else:
        yield path, tree


def differing(a: Any, b: Any) -> list[str]:
    """Paths of leaves that differ."""
    left, right = dict(leaves(a)), dict(leaves(b))
    return sorted(
        [
            *(left.keys() ^ right.keys()),
            *(path for path in left.keys() & right.keys() if not same(left[path], right[path])),
        ]
    )


def check_invariants(c: Combination, traces: Sequence[Trace]) -> None:
    named = Model(c.parts, torch.float64).named_parameters()
    parameters = {name for name, _ in named if not name.startswith("follower")}  # averaged from some round on
    for rank, trace in enumerate(traces):
        for number, state in enumerate(trace.states):
            bad = [name for name, each in state.items() if each.is_floating_point() and not each.isfinite().all()]
            assert not bad, f"rank {rank} has non-finite {bad} after iteration {number}"
    if c.epochs is None:
        for number, states in enumerate(zip(*(trace.states for trace in traces), strict=True)):
            if traces[0].in_step[number]:
                for rank, state in enumerate(states):
                    apart = [name for name in parameters if not same(state[name], states[0][name])]
                    assert not apart, f"ranks 0 and {rank} differ in {apart} after iteration {number}"
    for number, merged in traces[0].merged.items() if traces[0].common else ():
        for rank, trace in enumerate(traces):
            apart = [name for name in differing(merged, trace.merged[number]) if name.removeprefix(".") in parameters]
            assert not apart, f"merged on ranks 0 and {rank}, {apart} differ after iteration {number}"


def check_equal(whole: Sequence[Trace], other: Sequence[Trace], what: str) -> None:
    for rank, (a, b) in enumerate(zip(whole, other, strict=True)):
        made = len(a.states) - len(b.states)
        for number, (before, after) in enumerate(zip(a.states[made:], b.states, strict=True), made):
            assert not (apart := differing(before, after)), f"{what}, rank {rank}: {apart} at iteration {number}"
        apart = differing([a.merged[-1], a.final], [b.merged[-1], b.final])
        assert not apart, f"{what}, rank {rank}: {apart} at the end"


def check(seed: int, directory: Path) -> Combination:
    """Train the combination of a seed in three ways. Combinations that attach refuses are drawn again."""
    draw = Random(seed)
    for number in range(200):
        c = Combination.drawn(seed, draw)
        if any(cluster(lambda worker, c=c: _refuses(worker, c), c.world)):
            continue
        try:
            check_combination(c, directory / f"{number}")
        except BaseException as failure:
            failure.add_note(f"of {c}")
            raise
        return c
    raise AssertionError(f"seed {seed}: no combination was accepted")


def check_combination(c: Combination, directory: Path) -> None:
    whole = cluster(lambda worker: train(worker, c), c.world)
    check_invariants(c, whole)
    saving = cluster(lambda worker: train(worker, c, save=directory), c.world)
    check_equal(whole, saving, "a run that saves")
    resumed = cluster(lambda worker: train(worker, c, load=directory), c.world)
    check_equal(whole, resumed, "a run that resumes")
    rolled_back = cluster(lambda worker: train_twice(worker, c, directory), c.world)
    check_equal(whole, rolled_back, "a session that loads what it had saved")
    if c.readers is not None and not any(cluster(lambda worker: _refuses(worker, c), c.readers)):
        check_invariants(c, cluster(lambda worker: train(worker, c, load=directory), c.readers))


def _refuses(worker: Worker, c: Combination) -> bool:
    try:
        begin(worker, c, 0)
    except REFUSED:
        return True
    return False


@pytest.mark.parametrize("seed", [*range(BY_DAY), *nightly(*SEEDS[BY_DAY:])])
def test_random_combination_of_options_resumes_bit_for_bit(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.parametrize(
    ("combination", "module"),
    [
        (Combination(recipe="TopK(0.1)", save_at=4), gradients),
        (Combination(recipe="DiLoCo(3, delay=1) + Int8()", save_at=4), scheduled),
        (Combination(recipe="EveryStep(accumulate=3) + Dense()", save_at=4), bucket),
    ],
)
def test_the_check_finds_state_that_is_not_restored(
    combination: Combination, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_combination(combination, tmp_path / "intact")
    if module is bucket:
        monkeypatch.setattr(bucket.GradientAccumulator, "resume", lambda self, progress: None)
    else:
        monkeypatch.setattr(module, "copy_state", lambda old, new: None)
    with pytest.raises(AssertionError, match="a run that resumes"):
        check_combination(combination, tmp_path / "broken")


def test_the_check_finds_a_save_that_changes_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Session.save

    def spoiled(session: Session, *arguments: Any, **options: Any) -> None:
        save(session, *arguments, **options)
        with torch.no_grad():
            next(session.model.parameters()).mul_(2)

    monkeypatch.setattr(Session, "save", spoiled)
    with pytest.raises(AssertionError, match="a run that saves"):
        check_combination(Combination(recipe="LocalSGD(2)", save_at=3), tmp_path)


def test_the_check_finds_ranks_that_differ_after_an_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = bucket.Bucket.commit

    def spoiled(own: bucket.Bucket, *arguments: Any, **options: Any) -> None:
        commit(own, *arguments, **options)
        own.flat.mul_(1 + own._at.rank)

    monkeypatch.setattr(bucket.Bucket, "commit", spoiled)
    with pytest.raises(AssertionError, match="ranks 0 and 1 differ"):
        check_combination(Combination(recipe="Dense()", save_at=3), tmp_path)
