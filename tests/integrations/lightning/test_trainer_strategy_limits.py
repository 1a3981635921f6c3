"""Recipe limits: what a Trainer cannot be given together with a recipe, refused before the first batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightning")

from support.lightning_training import network

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import AttachError
from gossamer.integrations.lightning.trainer_strategy import refuse_clipping, refuse_counted_passes


def session(recipe: str) -> Any:
    return SimpleNamespace(recipe=resolve(recipe, 2), model=network())


@pytest.mark.parametrize(
    ("recipe", "write"),
    [
        ("DGC(density=0.3)", "write clip=0.5 in Route"),
        ("EveryStep(delay=1)", r"GossamerStrategy\(\.\.\., clip_norm=0.5\)"),
        ("ParameterServer()", r"GossamerStrategy\(\.\.\., clip_norm=0.5\)"),
    ],
)
def test_clipping_of_what_the_optimizer_does_not_use_is_refused(recipe: str, write: str) -> None:
    with pytest.raises(AttachError, match=write):
        refuse_clipping(session(recipe), 0.5, 2)


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(density=0.3)", "DiLoCo(period=3)", "Gossip()"])
def test_others_are_clipped_by_lightning(recipe: str) -> None:
    refuse_clipping(session(recipe), 0.5, 2)


def test_alone_nothing_travels() -> None:
    refuse_clipping(session("DGC(density=0.3)"), 0.5, 1)


def test_recipes_that_count_backward_passes_are_refused() -> None:
    with pytest.raises(AttachError, match=r"Trainer\(accumulate_grad_batches=3\)"):
        refuse_counted_passes(resolve("EveryStep(accumulate=3)", 2))
    refuse_counted_passes(resolve("EveryStep()", 2))
