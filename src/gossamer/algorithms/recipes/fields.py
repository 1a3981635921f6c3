"""Fields of terms: signatures and argument types, from their dataclass fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field
from functools import cache
from itertools import takewhile
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from gossamer.base.term import Term, default_of, ordered_fields
from gossamer.errors import RecipeError


def signature(noun: type[Term]) -> str:
    """Return the signature of a term: "TopK(density, feedback=True)"."""
    shown = [(item.name, default_of(item)) for item in fields_of(noun)]
    texts = [name if default is MISSING else f"{name}={default!r}" for name, default in shown]
    return f"{noun.__name__}({', '.join(texts)})"


# The exact types that an argument may have, so that its repr gives it back: numpy's numbers do not.
ACCEPTED: dict[type, tuple[tuple[type, ...], str]] = {
    float: ((float, int), "a number"),
    int: ((int,), "a whole number"),
    bool: ((bool,), "True or False"),
    str: ((str,), "a text in quotes"),
    NoneType: ((NoneType,), "None"),
}


def fields_of(noun: type[Term]) -> tuple[Field[Any], ...]:
    return ordered_fields(noun)


def hints_of(noun: type[Term]) -> Mapping[str, tuple[Any, ...]]:
    """Return the types of each argument: `float | None` is (float, NoneType).

    Raises RecipeError for a term of a user that names types which cannot be found.
    """
    try:
        return _hints_of(cast(Any, noun))
    except NameError as error:
        raise RecipeError(
            f"the types of {noun.__name__}'s arguments cannot be read ({error}). Import them where its module begins, "
            "without `if TYPE_CHECKING:`."
        ) from error


@cache
def _hints_of(noun: Any) -> Mapping[str, tuple[Any, ...]]:
    return {
        name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        for name, hint in get_type_hints(noun).items()
    }


def positional_count(noun: type[Term]) -> int:
    """Return the number of arguments that may be given without names: the first, or all leading required terms."""
    hints, items = hints_of(noun), fields_of(noun)
    terms = [default_of(item) is MISSING and hints[item.name][0] not in ACCEPTED for item in items]
    return max(len(list(takewhile(bool, terms))), min(len(items), 1))
