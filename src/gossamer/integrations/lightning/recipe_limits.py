"""Recipe limits: refuses recipes that Lightning's loop would train wrongly, with the line to write instead."""

from __future__ import annotations

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import GradientStage, ServerStage
from gossamer.errors import AttachError
from gossamer.train.engine.parameter_views import trainable
from gossamer.train.moments.take_over import RULES, ownership
from gossamer.train.session.session import Session


def refuse_counted_passes(recipe: Recipe) -> None:
    """Raise AttachError for a recipe that counts backward passes of a step, as Lightning does itself."""
    for stage in recipe.strategy.stages:
        if isinstance(stage, GradientStage) and stage.accumulates:
            raise AttachError(
                f"{recipe} makes one step of several backward passes, and Lightning would count each as a step: its "
                "schedulers and max_steps would run ahead. Leave it out of the recipe and write "
                f"Trainer(accumulate_grad_batches={stage.accumulate if stage.batches is None else 'N'})."
            )


def refuse_clipping(session: Session, clip: float, world: int) -> None:
    """Raise AttachError where Trainer(gradient_clip_val=clip), which acts on what backward() leaves, does not act on
    what the optimizer uses."""
    recipe = session.recipe
    without = f"Leave gradient_clip_val={clip} out"
    owners = ownership(recipe.compressor, trainable(session.model)).values() if world > 1 else ()
    if any(RULES[owner.rule].arrives_with_momentum for owner in owners):
        raise AttachError(
            f"gradient_clip_val={clip} would cut off what was sent already and has momentum in it, so that it is lost. "
            f"{without} and write clip={clip} in {recipe.compressor!r}, which scales each fresh gradient down before "
            "momentum."
        )
    for stage in recipe.strategy.stages:
        if isinstance(stage, ServerStage) or (isinstance(stage, GradientStage) and stage.delay):
            raise AttachError(
                f"gradient_clip_val={clip} clips what backward() leaves, and with {recipe} the optimizer uses other "
                f"numbers. {without} and write GossamerStrategy(..., clip_norm={clip})."
            )
