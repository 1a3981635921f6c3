"""Validation of recipes: the same checks for terms written in Python and as text."""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection
from inspect import isabstract

from gossamer.algorithms.compressors import Compressor, Feedback, Hierarchical, PerWorker, Route, Warmup
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
    raise RecipeError(f"{term!r} cannot be a part of a recipe, which has terms such as TopK(density=0.01). {hint}")


def check_place(term: Term, kinds: Collection[str]) -> None:
    """Check that a term may be at the top level of a recipe, next to others of these kinds."""
    if term.kind not in kinds:
        where = within(repr(term), type(term)) if term.kind in NESTED else " + ".join(("EveryStep()", "Dense()"))
        raise RecipeError(
            f"{term!r} is an argument of a federated strategy, {term.kind}=, and cannot be added to other terms. "
            f"Write {where}."
        )


def check_term(term: Term, above: tuple[Term, ...]) -> None:
    """Check a term and all terms that it holds; `above` has the terms around it."""
    if len(above) >= DEEPEST_NESTING:
        raise RecipeError(
            f"{type(above[0]).__name__}(...) nests more than {DEEPEST_NESTING} terms, including those that resolving "
            "adds, so its text could not be parsed again. Nest fewer."
        )
    if isinstance(term, Feedback) and any(isinstance(outer, Feedback) for outer in above):
        raise RecipeError(
            "Feedback inside Feedback would keep two residuals and send errors twice. Write one of them, "
            "around the lossy compressor: Feedback(TopK(density=0.01))."
        )
    around = [type(outer).__name__ for outer in above if isinstance(outer, Compressor) and not isinstance(outer, Route)]
    if isinstance(term, Compressor) and term.must_be_outermost and around:
        between = around[0]
        raise RecipeError(
            f"{type(term).__name__} applies the optimizer's momentum and keeps a residual, so no other compressor, "
            f"here {between}, may be around it. Write {example_of(type(term))} alone, or in a "
            "Route."
        )
    for item in fields_of(type(term)):
        value = getattr(term, item.name)
        check_argument(type(term), item.name, value)
        if isinstance(value, Term):
            check_term(value, (*above, term))


def check_pair(strategy: Strategy, compressor: Compressor) -> None:
    """Reject a compressor that needs all workers' gradients immediately with a strategy that does not send them so."""
    _check_continued(strategy, compressor)
    _check_tables(strategy, compressor)
    owned = compressor.owns_momentum(WEIGHTS)
    if owned is None or not any(stage.scheduled for stage in strategy.stages):
        return
    raise RecipeError(
        f"{compressor!r} applies the optimizer's momentum to gradients, and with {strategy!r} "
        "gradients are not sent, or arrive a step too late for that. Write "
        f"{strategy!r} + TopK(density=0.01), or EveryStep() with this compressor."
    )


def _check_continued(strategy: Strategy, compressor: Compressor) -> None:
    """Reject compressors with messages that depend on earlier ones if some workers do not receive all messages.

    Incremental answers are estimates of a gradient: as steps of parameters they would be applied repeatedly.
    """
    apart = any(stage.local_parameters or not stage.in_lock_step for stage in strategy.stages)
    overheard = strategy.agrees_on_means and not strategy.resends_losses
    fed_back = [inner for term in compressor.held() if isinstance(term, Feedback) for inner in term.held()]
    for term in (*compressor.held(), *strategy.held()):
        if isinstance(term, Compressor) and term.adapts:
            _check_adapting(term, strategy, compressor, overheard=overheard, fed_back=term in fed_back)
        if isinstance(term, Compressor) and term.incremental and apart:
            raise RecipeError(
                f"{term!r} sends the change of a gradient relative to the other workers' estimate, and {strategy!r} "
                "sends steps of parameters, or does not send all messages to all workers. Write "
                f'EveryStep() + {term!r}, or omit rule="ef21".'
            )


def _check_adapting(
    term: Compressor, strategy: Strategy, compressor: Compressor, *, overheard: bool, fed_back: bool
) -> None:
    """Reject a compressor with messages whose format depends on earlier ones, unless all workers receive these.

    A warm-up without a number of steps also needs a residual that it can measure.
    """
    if isinstance(term, Warmup) and not (overheard and fed_back):
        raise RecipeError(
            f"{term!r} waits until the residual of Feedback has stopped growing on all workers, and with "
            f"{strategy!r} + {compressor!r} there is no residual, or some workers do not receive all messages. "
            "Write a number of steps: Warmup(..., steps=500)."
        )
    if not overheard:
        raise RecipeError(
            f"{term!r} sends messages whose format depends on earlier ones, and with {strategy!r} some workers do not "
            f"receive all messages. Write EveryStep() + {term!r}, or a compressor with a fixed format, such as "
            "TopK(density=0.01)."
        )


def _check_tables(strategy: Strategy, compressor: Compressor) -> None:
    """Reject a codec per worker where messages are not all-gathered by all workers of the run."""
    agrees = strategy.agrees_on_means and not strategy.resends_losses
    nodes = any(isinstance(term, Hierarchical) and PerWorker in map(type, term.held()) for term in compressor.held())
    for term in (*compressor.held(), *strategy.held()):
        if isinstance(term, PerWorker) and (nodes or not agrees or term in strategy.held()):
            why = "its nodes send means of several workers" if nodes else "its messages do not go to all workers"
            raise RecipeError(
                f"{term!r} is a table of all workers, each of which decodes the messages of all others, and with "
                f"{strategy!r} + {compressor!r} {why}. Write EveryStep(), LocalSGD(period=8) or DiLoCo(period=50) with "
                f"{term!r}, or one codec: {term.slow!r}."
            )


def check_argument(noun: type[Term], name: str, value: object) -> None:
    options = hints_of(noun)[name]
    if not all(isinstance(option, type) for option in options):
        raise RecipeError(
            f"{name} of {noun.__name__} has a type that the text of a recipe cannot have. Write {name}: str, or one of "
            "int, float, bool, None and a term, joined by |."
        )
    if not any(_is(value, option) for option in options):
        wanted = " or ".join(ACCEPTED[option][1] if option in ACCEPTED else _named(option) for option in options)
        raise RecipeError(
            f"{name} of {noun.__name__} must be {wanted}, got {value!r}: {signature(noun)}. Write {example_of(noun)}."
        )
    if isinstance(value, float | int) and not abs(value) < LARGEST_NUMBER:
        raise RecipeError(
            f"{name} of {noun.__name__} is not finite, or too large for 64 bits. Write {example_of(noun)}."
        )


def _named(noun: type) -> str:
    """Return the name of a kind of terms, or of one term."""
    if not isabstract(noun) and ABC not in noun.__bases__:
        return f"{noun.__name__}(...)"
    return f"a{'n' * (noun.__name__[0] in 'AEIOU')} {noun.__name__.lower()}"


def _is(value: object, option: type) -> bool:
    return isinstance(value, option) if option not in ACCEPTED else type(value) in ACCEPTED[option][0]
