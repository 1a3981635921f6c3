"""Recipes: one grammar in Python and as text, and what a recipe means once it is complete."""

from __future__ import annotations

import ast
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import partial
from inspect import isabstract
from itertools import takewhile
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from gossamer import compressors, strategies, topologies
from gossamer.cheapest import cheapest
from gossamer.compressors import Codec, Compressor, Dense, Feedback, Route, TopK
from gossamer.compressors.int8 import Int8
from gossamer.compressors.topk import Sparse
from gossamer.core.layout import Slot
from gossamer.core.term import Term, Terms
from gossamer.errors import RecipeError
from gossamer.strategies import EveryStep, Strategy
from gossamer.topologies import Complete, Topology

__all__ = ["KINDS", "LONGEST_TEXT", "PRESETS", "Recipe", "describe", "parse", "resolve", "signature"]

LONGEST_TEXT = 2_000
DEEPEST_NESTING = 8
LARGEST_NUMBER = 2**63


@dataclass(frozen=True, repr=False)
class Recipe:
    """One of each: when to talk, what travels, who talks to whom. Its repr is text that `parse` reads."""

    strategy: Strategy = field(default=EveryStep())
    compressor: Compressor = field(default=Dense())
    topology: Topology = field(default=Complete())

    @property
    def terms(self) -> tuple[Term, ...]:
        return self.strategy, self.compressor, self.topology

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.terms))


KINDS = tuple(item.name for item in fields(Recipe))

NOUNS: dict[str, type[Term]] = {
    name: noun
    for module in (strategies, compressors, topologies)
    for name, noun in ((name, getattr(module, name)) for name in module.__all__)
    if isinstance(noun, type) and issubclass(noun, Term) and is_dataclass(noun) and not isabstract(noun)
}

PRESETS = {
    "lan": Terms((Dense(dtype="bfloat16"),)),
    "wan": Terms((compressors.PowerSGD(rank=4),)),
    "home": Terms((TopK(density=0.01),)),
}


def parse(text: str) -> Terms:
    """Read a recipe's text, such as "home" or "TopK(0.01) + EveryStep()". Nothing in it is evaluated."""
    reader = _Reader("".join(" " if letter.isspace() else letter for letter in text).strip())
    return Terms(tuple(reader.terms(reader.tree())))


def resolve(recipe: Recipe | Terms | Term | str | None, world: int | None = None) -> Recipe:
    """Complete a recipe: add what is missing, and wrap its compressor. Resolving twice changes nothing.

    A biased compressor, also one that a Route holds, is wrapped in Feedback unless it says `feedback=False`; then
    anything but Dense and Route is wrapped in Route, which sends tensors of one dimension and tiny ones dense. A codec
    that is wrapped so and whose means can be encoded again is wrapped in Sharded first, and few entries inside Feedback
    in SparseSum, where `world` is known and so many workers then send less (see cheapest.py). What comes with its
    wrappers stays; a strategy that repeats what was lost gets Route.
    """
    chosen: dict[str, Any] = {}
    for term in _terms(recipe):
        _check_type(term)
        if term.kind in chosen:
            first = chosen[term.kind]
            raise RecipeError(
                f"{recipe} has two terms of one kind, {first!r} and {term!r}, and a recipe has at most one "
                f"{term.kind}. Keep one of them: {first!r}, or {term!r}."
            )
        chosen[term.kind] = term
    written = Recipe(**chosen)
    compressor, topology = written.strategy.carried(written.compressor, written.topology)
    written = replace(written, compressor=compressor, topology=topology)
    resolved = replace(written, compressor=_wrapped(written, written.strategy.shared_by(compressor, world)))
    for term in resolved.terms:
        _check(term, ())
    _check_pair(resolved.strategy, resolved.compressor)
    resolved.strategy.check(resolved.compressor, resolved.topology)
    if len(repr(resolved)) > LONGEST_TEXT:
        raise RecipeError(
            f"The resolved recipe has {len(repr(resolved))} characters, and could not be read back: "
            f"a recipe's text has at most {LONGEST_TEXT}. Write fewer nested terms."
        )
    return resolved


def describe(kind: str | None = None) -> list[tuple[str, str]]:
    """A copyable example and one sentence for every noun there is, or for every noun of one kind."""
    return [
        (_pasted(noun), (noun.__doc__ or "").partition("\n")[0])
        for noun in NOUNS.values()
        if kind is None or noun.kind == kind
    ]


def signature(noun: type[Term]) -> str:
    """How to write a noun: "TopK(density, feedback=True)"."""
    shown = [item.name if item.default is MISSING else f"{item.name}={item.default!r}" for item in _fields(noun)]
    return f"{noun.__name__}({', '.join(shown)})"


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


def _wrapped(recipe: Recipe, world: int | None) -> Compressor:
    if recipe.strategy.repeats_itself:
        return recipe.compressor if recipe.compressor.routes else Route(recipe.compressor)
    completed = recipe.compressor.completed(partial(_fed_back, world=world))
    return completed if completed.routes else Route(cheapest(completed, world))


def _fed_back(compressor: Compressor, world: int | None) -> Compressor:
    return Feedback(cheapest(compressor, world)) if compressor.wants_feedback else compressor


# -- checks, for terms written in Python as for text


def _check_type(term: object) -> None:
    if isinstance(term, Term):
        return
    hint = f"Write {term.__name__}(...), with brackets." if isinstance(term, type) else "Write 'TopK(density=0.01)'."
    raise RecipeError(f"{term!r} is no part of a recipe: terms such as TopK(density=0.01) and texts are. {hint}")


def _check(term: Term, above: tuple[Term, ...]) -> None:
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
    if isinstance(term, Compressor) and term.stands_alone and not all(isinstance(outer, Route) for outer in above):
        between = next(type(outer).__name__ for outer in above if not isinstance(outer, Route))
        raise RecipeError(
            f"{type(term).__name__} applies the optimizer's momentum and remembers what was not sent, and "
            f"{between} around it would come in between. Write {_example(type(term))} alone, or in a "
            "Route."
        )
    for item in _fields(type(term)):
        value = getattr(term, item.name)
        _check_argument(type(term), item.name, value)
        if isinstance(value, Term):
            _check(value, (*above, term))


WEIGHTS = Slot("weight", (1024, 1024), 0, (1024, 1))


def _check_pair(strategy: Strategy, compressor: Compressor) -> None:
    """Whether a compressor that applies the optimizer's momentum gets what it applies it to: gradients, at once."""
    owned = compressor.owns_momentum(WEIGHTS)
    if owned is None or not any(stage.apart or stage.delay for stage in strategy.stages):
        return
    raise RecipeError(
        f"{compressor!r} applies the optimizer's momentum to gradients on their way, and with {strategy!r} "
        "gradients do not travel, or arrive a step too late for that. Write "
        f"{strategy!r} + TopK(density=0.01), or EveryStep() with this compressor."
    )


# The exact types that an argument may have, so that its repr gives it back: numpy's numbers do not.
ACCEPTED: dict[type, tuple[tuple[type, ...], str]] = {
    float: ((float, int), "a number"),
    int: ((int,), "a whole number"),
    bool: ((bool,), "True or False"),
    str: ((str,), "a text in quotes"),
    NoneType: ((NoneType,), "None"),
}


def _check_argument(noun: type[Term], name: str, value: object) -> None:
    options = _hints(noun)[name]
    if not any(_is(value, option) for option in options):
        wanted = " or ".join(ACCEPTED[o][1] if o in ACCEPTED else f"a {o.__name__.lower()}" for o in options)
        raise RecipeError(
            f"{name} of {noun.__name__} is {wanted}, not {value!r}: {signature(noun)}. Write {_example(noun)}."
        )
    if isinstance(value, float | int) and not abs(value) < LARGEST_NUMBER:
        raise RecipeError(f"{name} of {noun.__name__} is not finite, or too large for 64 bits. Write {_example(noun)}.")


def _is(value: object, option: type) -> bool:
    return isinstance(value, option) if option not in ACCEPTED else type(value) in ACCEPTED[option][0]


# -- what the nouns' own fields say about them


def _fields(noun: type[Term]) -> tuple[Field[Any], ...]:
    return fields(noun)  # type: ignore[arg-type]


def _hints(noun: type[Term]) -> dict[str, tuple[Any, ...]]:
    """What each argument may be: `float | None` is (float, NoneType)."""
    return {
        name: get_args(hint) if get_origin(hint) is UnionType else (hint,)
        for name, hint in get_type_hints(noun).items()
    }


def _bare(noun: type[Term]) -> int:
    """How many arguments may come without their names: the first, or all leading ones that are required terms."""
    hints, items = _hints(noun), _fields(noun)
    terms = [item.default is MISSING and hints[item.name][0] not in ACCEPTED for item in items]
    return max(len(list(takewhile(bool, terms))), min(len(items), 1))


_sparse = TopK(density=0.01)
EXAMPLES: dict[type, object] = {float: 0.01, int: 4, Compressor: _sparse, Sparse: _sparse, Codec: Int8()}


def _pasted(noun: type[Term]) -> str:
    """Its example, beside a strategy that can use it: not all neighbours can agree on one mean."""
    return "Gossip() + " * (issubclass(noun, Topology) and not noun().agrees) + _example(noun)


def _example(noun: type[Term]) -> str:
    """The noun with its required arguments and its numbers."""
    shown: list[str] = []
    for place, item in enumerate(_fields(noun)):
        required = item.default is MISSING
        value = EXAMPLES[_hints(noun)[item.name][0]] if required else item.default
        if place < _bare(noun) and isinstance(value, Term):
            shown.append(repr(value))
        elif required or type(value) in (int, float):
            shown.append(f"{item.name}={value!r}")
    return f"{noun.__name__}({', '.join(shown)})"


# -- text


@dataclass(frozen=True)
class _Reader:
    """Builds terms from the syntax tree of one text; every refusal points at the place in it."""

    text: str

    def refusal(self, message: str, node: ast.expr | None = None, column: int | None = None) -> RecipeError:
        if node is not None:
            column = len(self.text.encode()[: node.col_offset].decode())
        if column is None:
            return RecipeError(message)
        start = max(column - 60, 0)
        shown = self.text[start : column + 40]
        return RecipeError(f"{message}\n    {shown}\n    {' ' * (column - start)}^ character {column + 1}")

    def tree(self) -> ast.expr:
        if len(self.text) > LONGEST_TEXT:
            raise self.refusal(f"A recipe has at most {LONGEST_TEXT} characters, and this text has {len(self.text)}.")
        if not self.text:
            raise self.refusal("An empty text is no recipe. Write Dense() to send gradients as they are.")
        for column, letter in enumerate(self.text):
            if letter in "#\\" or not letter.isprintable():
                raise self.refusal(f"{letter!r} has no meaning in a recipe. Leave it out.", column=column)
        try:
            with _one_at_a_time, warnings.catch_warnings():
                warnings.simplefilter("error")
                return ast.parse(self.text, mode="eval").body
        except SyntaxError as error:
            column = min(max((error.offset or 1) - 1, 0), len(self.text))
            raise self.refusal(
                f"This is no recipe ({error.msg}). Write terms joined by +: {_SHAPE}.", column=column
            ) from None
        except (RecursionError, MemoryError):
            raise self.refusal(f"This text nests too deeply to be read. Write {_SHAPE}.") from None

    def terms(self, tree: ast.expr) -> Iterator[Term]:
        """The terms of a sum from left to right; a preset gives all of its own."""
        waiting = [tree]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                waiting += [node.right, node.left]
            elif isinstance(node, ast.Name) and node.id in PRESETS:
                yield from PRESETS[node.id].terms
            else:
                yield self.term(node, 1)

    def term(self, node: ast.expr, depth: int) -> Term:
        if depth > DEEPEST_NESTING:
            raise self.refusal(f"Terms nest at most {DEEPEST_NESTING} deep. Nest fewer.", node)
        match node:
            case ast.Name(name):
                return self.build(node, self.noun(node, name), {})
            case ast.Call(ast.Name(name)):
                noun = self.noun(node, name)
                return self.build(node, noun, self.arguments(node, noun, depth))
        raise self.refusal(f"This is no term. Write terms joined by +: {_SHAPE}.", node)

    def noun(self, node: ast.expr, name: str) -> type[Term]:
        if name in NOUNS:
            return NOUNS[name]
        if name in PRESETS:
            raise self.refusal(
                f"The preset {name} takes no arguments and stands at the top of a recipe, because it is one. "
                f"Write {name}, or what it stands for: {PRESETS[name]}.",
                node,
            )
        known = {each.lower(): each for each in (*NOUNS, *PRESETS)}
        near = [known[each] for each in get_close_matches(name.lower(), known)]
        shown = ", ".join(signature(NOUNS[each]) if each in NOUNS else each for each in near)
        others = f"{', '.join(sorted(NOUNS))}; `gossamer recipes` says what they do"
        raise self.refusal(f"There is no {name}, so this recipe means nothing. Write one of: {shown or others}.", node)

    def arguments(self, call: ast.Call, noun: type[Term], depth: int) -> dict[str, object]:
        names = [item.name for item in _fields(noun)]
        bare = _bare(noun)
        if len(call.args) > bare:
            raise self.refusal(
                "Only a first argument, or required terms that lead, may come without their names. "
                f"Write {signature(noun)}.",
                call.args[bare],
            )
        given: dict[str, object] = {}
        pairs = [*zip(names, call.args, strict=False), *((item.arg, item.value) for item in call.keywords)]
        for name, node in pairs:
            if name is None or name not in names:
                wrong = "**" if name is None else name
                raise self.refusal(f"{noun.__name__} takes no argument {wrong}. Write {signature(noun)}.", node)
            if name in given:
                raise self.refusal(f"{noun.__name__} is given {name} twice. Write {signature(noun)}.", node)
            given[name] = self.value(node, depth)
        return given

    def value(self, node: ast.expr, depth: int) -> object:
        match node:
            case ast.Constant(value):
                return value
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
                return -number
        return self.term(node, depth + 1)

    def build(self, node: ast.expr, noun: type[Term], given: dict[str, object]) -> Term:
        missing = [item.name for item in _fields(noun) if item.default is MISSING and item.name not in given]
        if missing:
            raise self.refusal(f"{signature(noun)} needs {', '.join(missing)}. Write {_example(noun)}.", node)
        try:
            for name, value in given.items():
                _check_argument(noun, name, value)
            return noun(**given)
        except ValueError as error:
            raise self.refusal(str(error), node) from None


_SHAPE = "TopK(density=0.01) + EveryStep()"
_one_at_a_time = threading.Lock()  # Python 3.11 counts the depth of all threads' trees together, and raises SystemError
