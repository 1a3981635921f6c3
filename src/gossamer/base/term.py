"""The terms of a recipe: frozen hyperparameters that can be added, with a repr that rebuilds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar, NamedTuple


class Inelastic(NamedTuple):
    """Why an elastic run, whose workers join and leave, cannot use a term."""

    why: str
    instead: str  # the line to write


class Term:
    """A part of a recipe. Subclasses are frozen dataclasses; the first field may be given by position,
    and so may all leading fields that are terms and have no default."""

    kind: ClassVar[str]
    needs_arguments: ClassVar[str] = ""  # arguments that one within a strategy cannot go without, as "secure=..."

    def __add__(self, other: Term | Terms) -> Terms:
        return Terms((self,)) + other

    def held(self) -> Iterator[Term]:
        """Itself, and all terms that it holds."""
        yield self
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if isinstance(value, Term):
                yield from value.held()

    @property
    def inelastic(self) -> Inelastic | None:
        """Why an elastic run cannot use the term; None if it can."""
        return None

    def __repr__(self) -> str:
        shown: list[str] = []
        bare = True  # terms that lead need no name
        for item in ordered_fields(type(self)):
            value = getattr(self, item.name)
            default = default_of(item)
            bare = bare and isinstance(value, Term) and (default is MISSING or not shown)
            if value != default:
                shown.append(repr(value) if bare else f"{item.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def default_of(item: Field[Any]) -> Any:
    """Return the default of an argument; MISSING for a required one."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def ordered_fields(noun: type[Term]) -> tuple[Field[Any], ...]:
    """Return a term's fields in the order of its arguments: positional ones, then keyword-only ones."""
    return tuple(sorted(fields(noun), key=lambda item: item.kw_only is True))  # type: ignore[arg-type]


@dataclass(frozen=True, repr=False)
class Terms:
    """Several terms joined by `+`, not yet checked: a recipe in the making."""

    terms: tuple[Term, ...]

    def __add__(self, other: Term | Terms) -> Terms:
        return Terms(self.terms + (other.terms if isinstance(other, Terms) else (other,)))

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.terms))
