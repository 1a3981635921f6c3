"""One of two workers that train by the Trainer and by Accelerate; prints what each run came to, as JSON."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from support.tiny_gpt2 import arguments, digest, texts, tiny_gpt2
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import get_scheduler
from transformers.data import default_data_collator

import gossamer
from gossamer import events
from gossamer.errors import AttachError, CheckpointError
from gossamer.integrations import accelerate
from gossamer.integrations import transformers as adapter
from gossamer.integrations.transformers import GossamerTrainer

APART = "DiLoCo(period=3) + Int8()"
TOPK = "TopK(0.05)"
ACCUMULATED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "max_steps": 4, "learning_rate": 1e-2}


def by_trainer(folder: Path) -> dict[str, Any]:
    """A training by the Trainer, and the same one by a plain loop over the batches that this rank was dealt."""
    seen: list[dict[str, Any]] = []

    def collate(features: list[Any]) -> dict[str, Any]:
        seen.append(default_data_collator(features))
        return seen[-1]

    model = tiny_gpt2()
    trainer = GossamerTrainer(
        model, arguments(folder, **ACCUMULATED), train_dataset=texts(), data_collator=collate, recipe=TOPK
    )
    trainer.train()
    return {
        "trainer": digest(model),
        "ranks": [trainer.args.world_size, trainer.args.process_index],
        "wrapped": isinstance(trainer.model_wrapped, DistributedDataParallel),
        "batches": [batch["input_ids"].sum().item() for batch in seen],
        "plain loop": digest(by_hand(folder, seen, norm=0.5)),
        "not clipped": digest(by_hand(folder, seen, norm=1e9)),
    }


def by_hand(folder: Path, batches: list[dict[str, Any]], *, norm: float) -> Any:
    model = tiny_gpt2()
    optimizer = GossamerTrainer(model, arguments(folder, **ACCUMULATED)).create_optimizer()
    scheduler = get_scheduler("linear", optimizer, 0, 4)
    with gossamer.attach(model, optimizer, TOPK) as session:
        for step in range(4):
            for place, batch in enumerate(batches[2 * step : 2 * step + 2]):
                with session.no_sync() if place == 0 else nullcontext():
                    words = 2 * batch["labels"].numel()  # as the Trainer counts them for a GPT-2
                    model(**batch, num_items_in_batch=torch.tensor(words)).loss.backward()
            clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            scheduler.step()
            model.zero_grad()
    return model


def resumed(folder: Path) -> dict[str, Any]:
    """Workers train apart, with dropout; one training without a break, one from the middle, one that forgets."""
    kinds = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}

    def train(resume: str | None) -> tuple[str, list[float]]:
        model = tiny_gpt2(dropout=0.1)
        options = arguments(folder, **kinds, learning_rate=1e-2)
        trainer = GossamerTrainer(model, options, train_dataset=texts(), eval_dataset=texts(8, 2), recipe=APART)
        trainer.train(resume_from_checkpoint=resume)
        return digest(model), [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]

    middle = str(folder / "checkpoint-4")
    at_once, losses = train(None)
    from_the_middle, _ = train(middle)
    with mock.patch.object(adapter, "load_within"):
        forgetful, _ = train(middle)
    told = {"at once": at_once, "from the middle": from_the_middle, "forgetful": forgetful, "eval losses": losses}
    evaluated = tiny_gpt2()
    evaluated.load_state_dict(load_file(f"{middle}/model.safetensors"), strict=False)  # tied parameters are there once
    plain = GossamerTrainer(evaluated, arguments(folder), eval_dataset=texts(8, 2))
    told["loss of the saved model"] = plain.evaluate()["eval_loss"]
    if gossamer.init().is_first:
        shutil.rmtree(f"{middle}/gossamer")
    gossamer.mean(0.0)  # all wait for it
    return told | {"without a folder": refusal(CheckpointError, lambda: train(middle))}


def best(folder: Path) -> dict[str, Any]:
    """Every step makes it worse, so that the first checkpoint is the best."""
    worse = {"learning_rate": 20.0, "optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    each = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    options = arguments(folder, **worse, **each, max_steps=4, load_best_model_at_end=True)
    model = tiny_gpt2()
    trainer = GossamerTrainer(
        model, options, train_dataset=texts(), eval_dataset=texts(8, 2), recipe="DiLoCo(period=1)"
    )
    trainer.train()
    kept = tiny_gpt2()
    kept.load_state_dict(load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors"), strict=False)
    return {"best": trainer.state.best_global_step, "loaded": digest(model), "in its file": digest(kept)}


def with_momentum(folder: Path) -> list[str]:
    """Notices of a training whose compressor has the momentum, and measures the norm without clipping."""
    told: list[str] = []
    end = events.subscribe(lambda event: told.append(event.message) if isinstance(event, events.Noticed) else None)
    options = arguments(folder, optim="sgd", max_grad_norm=0.0)
    GossamerTrainer(tiny_gpt2(), options, train_dataset=texts(), recipe="DGC(0.1, clip=1.0)").train()
    end()
    return told


def scaled(folder: Path) -> dict[str, Any]:
    """With a GradScaler, as fp16 has one, whose first scale overflows."""
    model = tiny_gpt2()
    options = arguments(folder, max_steps=8, max_grad_norm=0.0)  # theirs takes the scale out for fp16 only
    trainer = GossamerTrainer(model, options, train_dataset=texts(), recipe=TOPK)
    trainer.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    trainer.train()
    return {"model": digest(model), "scale": scaler.get_scale(), "untrained": digest(tiny_gpt2())}


def by_accelerate(folder: Path) -> dict[str, Any]:
    """A loop with accumulation and clipping by Accelerate: at once, from the middle, and by hand."""
    data = torch.stack([each["input_ids"] for each in texts(64)])

    def train(recipe: str, load: bool = False, refused: list[str] | None = None) -> tuple[str, list[Any], list[int]]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = tiny_gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        session = accelerate.attach(accelerator, model, optimizer, recipe)
        loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
        prepared, stepped, loader = accelerator.prepare(model, optimizer, loader)
        if load:
            accelerator.load_state(str(folder))
        batches = list(accelerator.skip_first_batches(loader, 2) if load else loader)
        for place, batch in enumerate(batches):
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(input_ids=batch, labels=batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                stepped.step()
                stepped.zero_grad()
            if place == 1 and not load:
                accelerator.save_state(str(folder))
        session.close()
        gathered = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index])).tolist()
        return digest(model), batches, gathered

    def by_hand(batches: list[Any]) -> str:
        model = tiny_gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with gossamer.attach(model, optimizer, TOPK) as session:
            for place, batch in enumerate(batches):
                with session.no_sync() if place % 2 == 0 else nullcontext():
                    (model(input_ids=batch, labels=batch).loss / 2).backward()
                if place % 2:
                    clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
        return digest(model)

    lock_step, batches, gathered = train(TOPK)
    at_once, from_the_middle = train(APART)[0], train(APART, load=True)[0]
    with mock.patch.object(accelerate, "load_within"):
        forgetful = train(APART, load=True)[0]
    return {
        "accelerated": lock_step,
        "plain loop": by_hand(batches),
        "gathered": gathered,
        "at once": at_once,
        "from the middle": from_the_middle,
        "forgetful": forgetful,
        "late": refusal(AttachError, attach_late),
    }


def attach_late() -> None:
    accelerator, model = Accelerator(cpu=True), tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    accelerate.attach(accelerator, accelerator.prepare(model), optimizer, TOPK)


def refusal(kind: type[Exception], act: Callable[[], Any]) -> str:
    try:
        act()
    except kind as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    noticed: list[str] = []
    events.subscribe(lambda event: noticed.append(event.message) if isinstance(event, events.Noticed) else None)
    for work in (by_trainer, resumed, best, with_momentum, scaled, by_accelerate):
        print("said", json.dumps({work.__name__: work(place / work.__name__)}), flush=True)
        AcceleratorState._reset_state()  # or the next one would have this one's settings,
        GradientState._reset_state()  # and its loader, as if that were at its end
    print("said", json.dumps({"noticed": noticed}), flush=True)
