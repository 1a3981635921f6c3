"""A worker of a job that trains with Lightning: makes the checks that it is given, and says what came of each.

Arguments: a folder that all workers share, then names of checks; none for all that two workers make together.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from support.lightning_training import (
    ByHand,
    Tiny,
    flat,
    loader,
    momentum,
    network,
    plain_loop,
    trainer,
)
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR

import gossamer
from gossamer.errors import AttachError, LoopError
from gossamer.integrations.lightning import GossamerFabricStrategy, GossamerStrategy
from gossamer.train.checkpoint import digest

RECIPES = ["Dense()", "TopK(density=0.3)", "DiLoCo(period=3)", "EveryStep(delay=1)"]


def numbers(tensor: Tensor) -> str:
    """A digest of all bits, after some of the numbers."""
    return f"{tensor[:3].tolist()} {digest([tensor.contiguous()])}"


def fitted(folder: Path, recipe: str, *, seed: int = 0, **options: Any) -> Tiny:
    model = Tiny(seed)
    trainer(folder, GossamerStrategy(recipe), **options).fit(model, loader(shuffle=True), loader())
    return model


def same_bits(folder: Path) -> Any:
    """A fit beside a plain loop with the same batches; ranks begin with other weights."""
    found = {}
    for recipe in RECIPES:
        rank = gossamer.init().rank
        model = fitted(folder, recipe, seed=rank)
        parameters, batches = plain_loop(recipe, 2, seed=rank)
        same_batches = all(torch.equal(mine, theirs) for mine, theirs in zip(model.seen, batches, strict=True))
        found[recipe] = [same_batches, numbers(flat(model)), numbers(parameters)]
    return found


def accumulated(folder: Path) -> Any:
    """Two batches a step, and gradients clipped."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.25}
    strategy = GossamerStrategy("TopK(density=0.3)")
    model, exchanges = Tiny(), []
    fit = trainer(folder, strategy, callbacks=[Steps(exchanges)], **options)
    fit.fit(model, loader(shuffle=True))
    parameters, _ = plain_loop("TopK(density=0.3)", 2, accumulate=2, clip=0.25)
    return [numbers(flat(model)), numbers(parameters), exchanges]


class Steps(lightning.Callback):
    """How many steps the session counts at the end."""

    def __init__(self, seen: list[int]) -> None:
        self._seen = seen

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._seen.append(trainer.strategy.session.steps)


def validated(folder: Path) -> Any:
    """What validation evaluates, and what a checkpoint holds, while workers train apart."""
    apart: list[str] = []

    class Apart(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            apart.append(numbers(flat(module)))

    model = Tiny()
    saves = ModelCheckpoint(folder / "validated", monitor="missed")
    fit = trainer(
        folder,
        GossamerStrategy("DiLoCo(period=3)"),
        max_epochs=1,
        enable_checkpointing=True,
        callbacks=[saves, Apart()],
    )
    fit.fit(model, loader(shuffle=True), loader())
    held = torch.load(saves.best_model_path, weights_only=True)["state_dict"]
    agreed = numbers(torch.cat([each.reshape(-1) for each in held.values()]))
    metrics = {name: float(value) for name, value in fit.callback_metrics.items()}
    return {"evaluated": numbers(model.evaluated[-1]), "held": agreed, "apart": apart, "metrics": metrics}


def resumed(folder: Path) -> Any:
    """Four epochs at once, and two and two; a checkpoint without what lies beside it; and other random numbers."""
    found = {}
    for place, recipe in enumerate(["TopK(density=0.3)", "DiLoCo(period=3)"]):
        at = folder / f"resumed {place}"

        def fit(name: str, epochs: int, path: Path | None = None, recipe: str = recipe, at: Path = at) -> Tensor:
            torch.manual_seed(7 + gossamer.init().rank)
            model = Tiny(dropout=0.25)
            torch.manual_seed(9 + gossamer.init().rank)
            saves = ModelCheckpoint(at / name, filename="{epoch}", save_top_k=-1, save_last="link")
            options = {"max_epochs": epochs, "enable_checkpointing": True, "callbacks": [saves]}
            trainer(at, GossamerStrategy(recipe), **options).fit(model, loader(shuffle=True), loader(), ckpt_path=path)
            return flat(model)

        whole = fit("whole", 4)
        fit("parts", 2)
        link = at / "parts" / "last.ckpt"
        resumed_ = fit("more", 4, link)
        world = gossamer.init()
        gossamer.gather(True)
        if world.is_first:
            shutil.rmtree(at / "parts" / "epoch=1.ckpt.gossamer")
        gossamer.gather(True)
        without = fit("without", 4, link)
        found[recipe] = [numbers(whole), numbers(resumed_), numbers(without)]
    return found


def collective_calls(folder: Path) -> Any:
    world = gossamer.init()
    strategy = trainer(folder).strategy
    mine = torch.tensor([world.rank + 1, 10 * world.rank])
    operations = ["mean", "sum", torch.distributed.ReduceOp.MAX, "product"]
    reduced = [strategy.reduce(mine, reduce_op=each).tolist() for each in operations]
    refused = ""
    try:
        strategy.broadcast(object())
    except TypeError as error:
        refused = str(error)
    return {
        "reduced": reduced,
        "gathered": strategy.all_gather(mine).tolist(),
        "told": strategy.broadcast({"from": world.rank, "none": None}, src=1),
        "refused": refused,
        "any": strategy.reduce_boolean_decision(world.rank == 1, all=False),
        "all": strategy.reduce_boolean_decision(world.rank == 1, all=True),
        "places": [strategy.global_rank, strategy.world_size, strategy.local_rank, strategy.node_rank],
        "zero": strategy.is_global_zero,
    }


def refused(folder: Path) -> Any:
    """What is refused before the first batch; and a fit after it, and after an exception in the loop."""
    said = []
    for recipe, options in [
        ("DGC(density=0.3)", {"gradient_clip_val": 1.0}),
        ("EveryStep(delay=1)", {"gradient_clip_val": 1.0}),
        ("EveryStep(accumulate=2)", {}),
    ]:
        try:
            fitted(folder, recipe, **options)
            said.append("")
        except AttachError as error:
            said.append(str(error))

    try:
        trainer(folder, GossamerStrategy("DiLoCo(period=3)")).fit(ByHand(2), loader(shuffle=True))
    except LoopError as error:
        said.append(str(error))
    trainer(folder, GossamerStrategy("Int8()")).fit(both := ByHand(2), loader(shuffle=True))
    said.append(numbers(flat(both)))

    class Fails(Tiny):
        def training_step(self, batch: Any, number: int) -> Tensor:
            if number == 2:
                raise ZeroDivisionError
            return super().training_step(batch, number)

    fit = trainer(folder, GossamerStrategy("DiLoCo(period=3)"))
    try:
        fit.fit(Fails(), loader(shuffle=True))
    except ZeroDivisionError:
        said.append(repr(fit.strategy.session))
    said.append("after it" if fitted(folder, "Dense()").seen else "")
    return said


def stopped_early(folder: Path) -> Any:
    """What one rank alone measures badly stops all; and a stop that a session was asked for."""
    epochs = []

    class Worse(Tiny):
        def validation_step(self, batch: Any, number: int) -> None:
            self.log("missed", float(self.current_epoch * self.global_rank), sync_dist=True)

    fit = trainer(folder, max_epochs=6, callbacks=[EarlyStopping("missed", patience=1)])
    fit.fit(Worse(), loader(shuffle=True), loader())
    epochs.append(fit.current_epoch)

    class Asks(Tiny):
        def on_train_batch_start(self, batch: Any, number: int) -> None:
            if self.global_rank == 1 and self.global_step == 5:
                self.trainer.strategy.session.request_stop()

    fit = trainer(folder, max_epochs=6)
    fit.fit(Asks(), loader(shuffle=True))
    epochs.append(fit.global_step)
    return epochs


def quiet_between_batches(folder: Path) -> Any:
    """Broadcasts that the loop of a fit makes, and that Lightning's own would make before each batch."""
    counted, broadcast = [], torch.distributed.broadcast

    def counts(*arguments: Any, **options: Any) -> Any:
        counted.append(1)
        return broadcast(*arguments, **options)

    torch.distributed.broadcast = counts
    fit = trainer(folder, GossamerStrategy("DiLoCo(period=3)"))
    fit.fit(Tiny(), loader(shuffle=True))
    quiet = len(counted)
    loop = fit.fit_loop.epoch_loop
    type(loop)._broadcast_sigterm_tensor(loop)
    torch.distributed.broadcast = broadcast
    return [quiet, len(counted)]


def with_fabric(folder: Path) -> Any:
    """Fabric's loop beside a plain one, in one go and from a checkpoint."""
    found = {}
    for place, recipe in enumerate(["TopK(density=0.3)", "DiLoCo(period=3)"]):
        path = folder / f"fabric {place}.ckpt"

        def train(
            epochs: range, saves: bool = False, loads: bool = False, recipe: str = recipe, path: Path = path
        ) -> Any:
            strategy = GossamerFabricStrategy(recipe)
            fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=1)
            fabric.launch()
            model = network(fabric.global_rank)
            optimizer = momentum(model.parameters())
            scheduler = StepLR(optimizer, 2, gamma=0.5)
            model, optimizer = fabric.setup(model, optimizer)
            data = fabric.setup_dataloaders(loader())  # in one order: Fabric's loader begins with epoch 0 after a load
            state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            if loads:
                fabric.load(path, state)
            for _ in epochs:
                for number, (inputs, targets) in enumerate(data):
                    with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                        fabric.backward(mse_loss(model(inputs), targets) / 2)
                    if number % 2:
                        optimizer.step()
                        optimizer.zero_grad()
                scheduler.step()
            if saves:
                fabric.save(path, state)
            strategy.close()
            return numbers(flat(model))

        whole = train(range(4))
        train(range(2), saves=True)
        parts = train(range(2, 4), loads=True)
        parameters, _ = plain_loop(recipe, 4, accumulate=2, seed=gossamer.init().rank, shuffle=False)
        found[recipe] = [whole, numbers(parameters), parts]
    return found


def launched(folder: Path) -> Any:
    """Workers that Lightning starts, which begin with other weights."""
    fit, model = (
        trainer(folder, GossamerStrategy("TopK(density=0.3)"), devices=2),
        Tiny(int(os.environ.get("LOCAL_RANK", 0))),
    )
    fit.fit(model, loader(shuffle=True), loader())
    again = trainer(folder, devices=2)
    again.validate(model, loader(), verbose=False)
    parameters, _ = plain_loop("TopK(density=0.3)", 2)
    return {"rank": again.global_rank, "fitted": numbers(flat(model)), "plain": numbers(parameters)}


TOGETHER = [same_bits, accumulated, validated, resumed, collective_calls, refused, stopped_early, with_fabric]
TOGETHER += [quiet_between_batches]
CHECKS: dict[str, Callable[[Path], Any]] = {each.__name__: each for each in [*TOGETHER, launched]}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    noticed: list[str] = []
    gossamer.events.subscribe(lambda event: noticed.append(getattr(event, "message", "")))
    for name in sys.argv[2:] or [each.__name__ for each in TOGETHER]:
        print("said", json.dumps({name: CHECKS[name](folder)}), flush=True)
    print("said", json.dumps({"noticed": [text for text in noticed if text]}), flush=True)


if __name__ == "__main__":
    main()
