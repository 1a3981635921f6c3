"""Trainer recipes: refuse what a recipe and a Trainer's arguments contradict each other in, with the line to write."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import DataLoaderDispatcher

from gossamer import events
from gossamer.algorithms.strategies import GradientStage
from gossamer.errors import AttachError
from gossamer.train.engine.parameter_views import trainable
from gossamer.train.moments.take_over import RULES, ownership
from gossamer.train.session.session import Session


def refuse_contradictions(session: Session, args: Any) -> None:
    """Raise AttachError where the Trainer's loop would do what the recipe cannot bear. args: TrainingArguments."""
    for stage in session.recipe.strategy.stages:
        if isinstance(stage, GradientStage) and stage.accumulates:
            raise AttachError(
                f"{session.recipe} makes a step of several backward passes, and the Trainer counts one for each batch, "
                "with its scheduler and its checkpoints. Leave that to it: "
                f"TrainingArguments(..., gradient_accumulation_steps={stage.accumulate}), and EveryStep()."
            )
        if not stage.in_lock_step:
            raise AttachError(
                f"with {session.recipe} no worker waits for another, and the Trainer gathers losses, metrics and "
                "checkpoints from all of them: everyone would wait for the slowest, and for ever for a lost one. Use "
                "DiLoCo(period=50) or LocalSGD(period=8), or write the loop yourself, with gossamer.attach."
            )
    if args.max_grad_norm and _arrives_with_momentum(session):
        raise AttachError(
            f"max_grad_norm={args.max_grad_norm} would clip what {session.recipe} has averaged with momentum in it: "
            "what is cut off was sent already, and is lost. Write TrainingArguments(..., max_grad_norm=0), and let the "
            f"compressor clip before it sends, such as DGC(density=0.01, clip={args.max_grad_norm})."
        )


def _arrives_with_momentum(session: Session) -> bool:
    owners = ownership(session.recipe.compressor, trainable(session.model)).values()
    return any(RULES[owner.rule].arrives_with_momentum for owner in owners)


def trains_apart(session: Session) -> bool:
    """Whether workers hold different parameters at times."""
    return any(stage.local_parameters for stage in session.recipe.strategy.stages)


def keep_step_local(session: Session, args: Any) -> None:
    """Where workers train apart, count a batch's tokens here: the Trainer would gather them before every step."""
    if trains_apart(session):
        args.average_tokens_across_devices = False


def tell_of_dispatching(train_dataloader: Any) -> None:
    """Notice a loader of rank 0 that sends every batch to all others, which may be more than gradients are."""
    if isinstance(train_dataloader, DataLoaderDispatcher):
        events.notice(
            "rank 0 reads the data and sends each batch to the others, beside what the recipe sends, since the dataset "
            "is iterable. Let every rank read its own part: accelerator_config={'dispatch_batches': False}"
        )
