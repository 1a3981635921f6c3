"""Validation of recipes: checks for terms written in Python as for text."""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection
from inspect import isabstract

from gossamer.algorithms.compressors import Compressor, Feedback, Route
from gossamer.algorithms.recipes.catalog import NESTED, example_of, within
from gossamer.algorithms.recipes.fields import ACCEPTED, fields_of, hints_of, signature
from gossamer.algorithms.strategies import Strategy
from gossamer.base.layout import Slot
from gossamer.base.term import Term
from gossamer.errors import RecipeError

LONGEST_TEXT = 2_000
DEEPEST_NESTING = 8
LARGEST_NUMBER = 2**63
WEIGHTS = Slot("weight", (1024, 1024), 0, (1024, 1))


def check_type(term: object) -> None:
    if isinstance(term, Term):
        return
    hint = f"Write {term.__name__}(...), with brackets." if isinstance(term, type) else "Write 'TopK(density=0.01)'."
    raise RecipeError(f"{term!r} is no part of a recipe: terms such as TopK(density=0.01) and texts are. {hint}")


def check_place(term: Term, kinds: Collection[str]) -> None:
    """Check that a term may stand at the top of a recipe, beside others of such kinds."""
    if term.kind not in kinds:
        where = within(repr(term), type(term)) if term.kind in NESTED else " + ".join(("EveryStep()", "Dense()"))
        raise RecipeError(
            f"{term!r} stands within a federated strategy, as its {term.kind}, and beside other terms it would say "
            f"nothing of who it is for. Write {where}."
        )


def check_term(term: Term, above: tuple[Term, ...]) -> None:
    """Check a finished term and all it holds; `above` holds the terms around it."""
    if len(above) >= DEEPEST_NESTING:
        raise RecipeError(
            f"{type(above[0]).__name__}(...) nests more than {DEEPEST_NESTING} terms, counting those that "
            "resolving it adds, so its text could not be read back. Nest fewer."
        )
    if isinstance(term, Feedback) and any(isinstance(outer, Feedback) for outer in above):
        raise RecipeError(
            "Feedback inside Feedback would keep what was lost twice and send it twice. Write one of them, "
            "around the compressor that loses: Feedback(TopK(density=0.01))."
        )
    around = [type(outer).__name__ for outer in above if isinstance(outer, Compressor) and not isinstance(outer, Route)]
    if isinstance(term, Compressor) and term.must_be_outermost and around:
        between = around[0]
        raise RecipeError(
            f"{type(term).__name__} applies the optimizer's momentum and remembers what was not sent, and "
            f"{between} around it would come in between. Write {example_of(type(term))} alone, or in a "
            "Route."
        )
    for item in fields_of(type(term)):
        value = getattr(term, item.name)
        check_argument(type(term), item.name, value)
        if isinstance(value, Term):
            check_term(value, (*above, term))


def check_pair(strategy: Strategy, compressor: Compressor) -> None:
    """Refuse a compressor that would not get what it is made for: all workers' gradients, and at once where it applies
    the optimizer's momentum."""
    _check_continued(strategy, compressor)
    owned = compressor.owns_momentum(WEIGHTS)
    if owned is None or not any(stage.scheduled for stage in strategy.stages):
        return
    raise RecipeError(
        f"{compressor!r} applies the optimizer's momentum to gradients on their way, and with {strategy!r} "
        "gradients do not travel, or arrive a step too late for that. Write "
        f"{strategy!r} + TopK(density=0.01), or EveryStep() with this compressor."
    )


def _check_continued(strategy: Strategy, compressor: Compressor) -> None:
    """Refuse what goes on from messages that not everyone hears. And an answer that goes on from the last one is the
    newest estimate of a gradient: steps of parameters add up, and what it repeats would be made twice."""
    apart = any(stage.local_parameters or not stage.in_lock_step for stage in strategy.stages)
    overheard = strategy.agrees_on_means and not strategy.resends_losses
    fed_back = [inner for term in compressor.held() if isinstance(term, Feedback) for inner in term.held()]
    for term in (*compressor.held(), *strategy.held()):
        if isinstance(term, Compressor) and term.adapts and not (overheard and term in fed_back):
            raise RecipeError(
                f"{term!r} waits until what feedback owes has stopped growing, by what everyone tells of it, and with "
                f"{strategy!r} + {compressor!r} nothing is owed, or not everyone hears it. Write a number of steps: "
                "Warmup(..., steps=500)."
            )
        if isinstance(term, Compressor) and term.incremental and apart:
            raise RecipeError(
                f"{term!r} sends by how much a gradient differs from what everyone knows of it, and with {strategy!r} "
                "what travels is a step that would be made again, or is not heard by everyone. Write "
                f'EveryStep() + {term!r}, or leave rule="ef21" out.'
            )


def check_argument(noun: type[Term], name: str, value: object) -> None:
    options = hints_of(noun)[name]
    if not any(_is(value, option) for option in options):
        wanted = " or ".join(ACCEPTED[option][1] if option in ACCEPTED else _named(option) for option in options)
        raise RecipeError(
            f"{name} of {noun.__name__} is {wanted}, not {value!r}: {signature(noun)}. Write {example_of(noun)}."
        )
    if isinstance(value, float | int) and not abs(value) < LARGEST_NUMBER:
        raise RecipeError(
            f"{name} of {noun.__name__} is not finite, or too large for 64 bits. Write {example_of(noun)}."
        )


def _named(noun: type) -> str:
    """A kind of terms, or a term that is one of a kind."""
    if not isabstract(noun) and ABC not in noun.__bases__:
        return f"{noun.__name__}(...)"
    return f"a{'n' * (noun.__name__[0] in 'AEIOU')} {noun.__name__.lower()}"


def _is(value: object, option: type) -> bool:
    return isinstance(value, option) if option not in ACCEPTED else type(value) in ACCEPTED[option][0]
