"""Recipe: one strategy, one compressor and one topology; `resolve` completes a user's recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gossamer.algorithms.compressors import Compressor, Dense
from gossamer.algorithms.recipes.auto import Auto
from gossamer.algorithms.recipes.parser import parse
from gossamer.algorithms.recipes.registry import KINDS
from gossamer.algorithms.recipes.validation import LONGEST_TEXT, check_pair, check_place, check_term, check_type
from gossamer.algorithms.recipes.wrapping import compress_between_nodes, sharing_workers, tables_of, wrapped
from gossamer.algorithms.strategies import EveryStep, Strategy
from gossamer.algorithms.topologies import Complete, Topology
from gossamer.base.term import Term, Terms
from gossamer.errors import RecipeError


@dataclass(frozen=True, repr=False)
class Recipe:
    """A strategy, a compressor and a topology.

    Args:
        strategy: When the workers communicate, and the rule that applies a mean.
        compressor: The bytes that are sent for a tensor.
        topology: The neighbors of each worker.

    Raises:
        RecipeError: An argument is not a term of this kind; a text such as Recipe("TopK(0.01)") for example.

    repr(recipe) is text that `gossamer.recipe` reads.

    Example:
        >>> gossamer.Recipe(compressor=gossamer.Int8())
        EveryStep() + Int8() + Complete()
    """

    strategy: Strategy = field(default=EveryStep())
    compressor: Compressor = field(default=Dense())
    topology: Topology = field(default=Complete())

    def __post_init__(self) -> None:
        for name, kind in (("strategy", Strategy), ("compressor", Compressor), ("topology", Topology)):
            if not isinstance(given := getattr(self, name), kind):
                raise RecipeError(
                    f"{name} of Recipe must be a {kind.__name__}, got {given!r}. Write Recipe({name}=...) with a term, "
                    'or read a text: gossamer.recipe("LocalSGD(8) + Int8()").'
                )

    @property
    def terms(self) -> tuple[Strategy, Compressor, Topology]:
        return self.strategy, self.compressor, self.topology

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.terms))


def recipe(text: str) -> Terms:
    """Parse a recipe's text. The text is never evaluated.

    Args:
        text: Terms joined by `+`, such as "DiLoCo(period=20) + Float4()", or a preset: "lan", "wan" or "home".

    Returns:
        The terms, equal to the same sum in Python: `DiLoCo(period=20) + Float4()`. Pass it to `attach`.

    Raises:
        RecipeError: The text is not a recipe. The error shows the position in it and the line to write.

    Example:
        >>> import gossamer
        >>> gossamer.recipe("DiLoCo(20) + Float4()") == gossamer.DiLoCo(period=20) + gossamer.Float4()
        True
    """
    return parse(text)


def resolve(recipe: Recipe | Terms | Term | str | None, world: int | None = None) -> Recipe:
    """Complete a recipe: add default terms, and wrap its compressor. Resolving twice changes nothing.

    A biased compressor, also one inside Route, is wrapped in Feedback unless it has `feedback=False`. Compressors that
    do not handle every shape are then wrapped in Route, which sends small and one-dimensional tensors uncompressed. If
    `world` is known and it reduces the bytes, a codec with means that can be encoded again is wrapped in Sharded, and a
    sparse compressor inside Feedback in SparseSum: see `wrapping.cheapest`. Explicit wrappers are kept. A strategy that
    sends compression errors again gets Route only. For a recipe chosen while training, the result is the initial one.

    Args:
        recipe: A recipe, terms, or text.
        world: Number of workers; None: unknown.

    Raises:
        RecipeError: The terms cannot be combined.
    """
    chosen: dict[str, Any] = {}
    for term in () if automatic(recipe) else _terms(recipe):
        check_type(term)
        check_place(term, KINDS)
        if term.kind in chosen:
            first = chosen[term.kind]
            raise RecipeError(
                f"{recipe} has two terms of one kind, {first!r} and {term!r}, and a recipe has at most one "
                f"{term.kind}. Keep one of them: {first!r}, or {term!r}."
            )
        chosen[term.kind] = term
    written = Recipe(**chosen)
    compressor, topology = compress_between_nodes(*written.terms)
    written = replace(written, compressor=compressor, topology=topology)
    for term in written.terms:
        check_term(term, ())  # before the cost of an invalid recipe is computed
    if world is not None:
        for table in tables_of(compressor):
            table.check(world)
    sharing = sharing_workers(written.strategy, compressor, world)
    compressor = wrapped(compressor, sharing, resends_losses=written.strategy.resends_losses)
    resolved = replace(written, compressor=compressor)
    for term in resolved.terms:
        check_term(term, ())
    check_pair(resolved.strategy, resolved.compressor)
    resolved.strategy.check(resolved.compressor, resolved.topology)
    if len(repr(resolved)) > LONGEST_TEXT:
        raise RecipeError(
            f"The resolved recipe has {len(repr(resolved))} characters, and could not be parsed again: "
            f"a recipe's text has at most {LONGEST_TEXT}. Write fewer nested terms."
        )
    return resolved


def automatic(recipe: Recipe | Terms | Term | str | None) -> Auto | None:
    """Return the term that selects the recipe while training; None for a fixed recipe."""
    terms = _terms(recipe)
    found = [term for term in terms if isinstance(term, Auto)]
    if found and len(terms) > 1:
        raise RecipeError(
            f"{recipe} adds other terms to {found[0]!r}, which selects all terms itself. Write auto alone, or omit it."
        )
    return found[0] if found else None


def meaning(recipe: Recipe | Terms | Term | str | None, workers: int | None = None) -> Recipe | Auto:
    """Return the resolved recipe, or the term that selects one while training. Equal for two texts of one recipe."""
    return automatic(recipe) or resolve(recipe, workers)


def period_of(recipe: Recipe) -> int:
    """Steps between two rounds of a resolved recipe; 1: workers communicate in every step."""
    stage = recipe.strategy.steady_stage
    return stage.schedule.period if stage.local_parameters else 1


def _terms(recipe: Recipe | Terms | Term | str | None) -> Sequence[Term]:
    match recipe:
        case None:
            return ()
        case str():
            return parse(recipe).terms
        case Recipe() | Terms():
            return recipe.terms
        case _:
            return (recipe,)
