"""Parser of recipes: text to terms, by Python's syntax tree, without evaluation."""

from __future__ import annotations

import ast
import re
import threading
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from difflib import get_close_matches

from gossamer.algorithms.recipes.auto import Auto
from gossamer.algorithms.recipes.catalog import NOUNS, PRESETS, example_of
from gossamer.algorithms.recipes.fields import fields_of, positional_count, signature
from gossamer.algorithms.recipes.other_names import BY_NAME, normalized
from gossamer.algorithms.recipes.registry import load_entry_points
from gossamer.algorithms.recipes.validation import DEEPEST_NESTING, LONGEST_TEXT, check_argument
from gossamer.base.term import Term, Terms, default_of
from gossamer.errors import RecipeError


def parse(text: str) -> Terms:
    """Parse a recipe's text, such as "home" or "TopK(0.01) + EveryStep()". Nothing in it is evaluated."""
    reader = _Reader("".join(" " if letter.isspace() else letter for letter in text).strip())
    return Terms(tuple(reader.terms(reader.tree())))


@dataclass(frozen=True)
class _Reader:
    """Builds terms from the syntax tree of one text; every error shows the position in it."""

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
            raise self.refusal("An empty text is not a recipe. Write Dense() for uncompressed gradients.")
        for column, letter in enumerate(self.text):
            if letter in "#\\" or not letter.isprintable():
                raise self.refusal(f"{letter!r} has no meaning in a recipe. Remove it.", column=column)
        self.refuse_names_with_marks()
        try:
            with _one_at_a_time, warnings.catch_warnings():
                warnings.simplefilter("error")
                return ast.parse(self.text, mode="eval").body
        except SyntaxError as error:
            column = min(max((error.offset or 1) - 1, 0), len(self.text))
            raise self.refusal(
                f"This is not a recipe ({error.msg}). Write terms joined by +: {_SHAPE}.", column=column
            ) from None
        except (RecursionError, MemoryError):
            raise self.refusal(f"This text nests too deeply to be parsed. Write {_SHAPE}.") from None

    def refuse_names_with_marks(self) -> None:
        """Answer names such as 1bit-adam, which are not Python identifiers, with their recipe."""
        column = 0
        for piece in self.text.split("+"):
            name = piece.partition("(")[0].strip()
            if _WITH_MARKS.fullmatch(name) and not name.isidentifier() and normalized(name) in _known():
                raise self.refusal(_no_such(name), column=column + len(piece) - len(piece.lstrip()))
            column += len(piece) + 1

    def terms(self, tree: ast.expr) -> Iterator[Term]:
        """Return the terms of a sum from left to right, with those of presets."""
        waiting = [tree]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                waiting += [node.right, node.left]
            elif isinstance(node, ast.Name) and node.id in PRESETS:
                yield from PRESETS[node.id].terms
            elif isinstance(node, ast.Name) and node.id == AUTO:
                yield Auto()
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
        raise self.refusal(f"This is not a term. Write terms joined by +: {_SHAPE}.", node)

    def noun(self, node: ast.expr, name: str) -> type[Term]:
        if (known := _term_named(name)) is not None:
            return known
        if name in PRESETS:
            raise self.refusal(
                f"The preset {name} is a complete recipe: it takes no arguments and must be at the top of a recipe. "
                f"Write {name}, or its terms: {PRESETS[name]}.",
                node,
            )
        failures = load_entry_points()
        if (installed := _term_named(name)) is not None:
            return installed
        if name in failures:
            raise RecipeError(str(failures[name])) from failures[name].__cause__
        also = "".join(f" Also, {failure}" for failure in list(failures.values())[:1])
        raise UnknownTerm(name, self.refusal(_no_such(name) + also, node))

    def arguments(self, call: ast.Call, noun: type[Term], depth: int) -> dict[str, object]:
        names = [item.name for item in fields_of(noun)]
        bare = positional_count(noun)
        if len(call.args) > bare:
            raise self.refusal(
                "Only a first argument, or leading required terms, may be given without names. "
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
        missing = [item.name for item in fields_of(noun) if default_of(item) is MISSING and item.name not in given]
        if missing:
            raise self.refusal(f"{signature(noun)} needs {', '.join(missing)}. Write {example_of(noun)}.", node)
        try:
            for name, value in given.items():
                check_argument(noun, name, value)
            return noun(**given)
        except ValueError as error:
            raise self.refusal(str(error), node) from None


AUTO = "auto"  # the text of Auto()


class UnknownTerm(RecipeError):
    """A recipe text has a term that neither Gossamer nor the script nor an installed package defines.

    Attributes:
        name: The unknown name.
    """

    def __init__(self, name: str, refusal: RecipeError) -> None:
        super().__init__(str(refusal))
        self.name = name


def _term_named(name: str) -> type[Term] | None:
    return Auto if name == Auto.__name__ else NOUNS.get(name)


def _names_of_terms() -> dict[str, str]:
    """Return terms and presets by their normalized names, including registered terms."""
    return {normalized(name): name for name in (*NOUNS, Auto.__name__, *PRESETS)}


def _known() -> dict[str, str]:
    return _names_of_terms() | {name: name for name in BY_NAME}


def _no_such(name: str) -> str:
    """Return the error text for an unknown name: its recipe if other libraries use the name, else the most similar
    names.
    """
    if normalized(name) in BY_NAME:
        return BY_NAME[normalized(name)].answer(name)
    known = _known()
    same = [normalized(name)] if normalized(name) in known else []
    near = [known[each] for each in same or _misspelled(normalized(name))]
    shown = ", ".join(filter(None, dict.fromkeys(map(_shown, near))))
    others = (
        "a strategy such as LocalSGD(period=8), a compressor such as TopK(density=0.01); `gossamer recipes` lists all"
    )
    absent = f"There is no {name} in Gossamer, in the script or in an installed package."
    if near and not shown:  # methods that are not a recipe
        other = BY_NAME[near[0]]
        return f"{absent} {other.answer(next(each for each in other.names if normalized(each) == near[0]))}"
    return f"{absent} Write one of: {shown or others}."


def _misspelled(name: str) -> list[str]:
    """Return known names that `name` may be a misspelling of, the most similar first."""
    own_terms = get_close_matches(name, _names_of_terms(), cutoff=LEAST_LIKENESS)
    return own_terms or get_close_matches(name, [other for other in BY_NAME if len(other) >= SHORTEST_GUESSED])


def _shown(name: str) -> str:
    """Return the text of a known name."""
    if (term := _term_named(name)) is not None:
        return signature(term)
    return BY_NAME[name].recipe if name in BY_NAME else name


_SHAPE = "TopK(density=0.01) + EveryStep()"
_WITH_MARKS = re.compile(r"[\w .!/-]+")
LEAST_LIKENESS = 0.75  # of a misspelled name to a term, by difflib's ratio: Auot and Auto have 0.75, MPX and MPI 0.67
SHORTEST_GUESSED = 5  # letters of another library's name: "nope" is too similar to "none"
_one_at_a_time = threading.Lock()  # Python 3.11 counts the depth of all threads' trees together, and raises SystemError
