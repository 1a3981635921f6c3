"""Registry: terms that are defined outside of this package, in a script or in an installed package."""

from __future__ import annotations

import keyword
from abc import ABC
from collections.abc import Mapping
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract
from typing import TypeVar

from gossamer.algorithms.recipes.catalog import NOUNS, PRESETS
from gossamer.algorithms.recipes.other_names import BY_NAME, normalized
from gossamer.base.term import Term
from gossamer.errors import RecipeError

ENTRY_POINTS = "gossamer.terms"  # the group of entry points that name terms of installed packages
KINDS = ("strategy", "compressor", "topology")

_Registered = TypeVar("_Registered", bound=type[Term])
_loaded: set[str] = set()  # groups of entry points that were read
_failures: dict[str, RecipeError] = {}  # of entry points that were read, by their name


def register(term: _Registered) -> _Registered:
    """Make a compressor, strategy or topology known by its class name in recipe texts.

    Recipe texts occur in `attach`, `gossamer run --recipe`, `explain`, `compare`, `simulate` and `advise`. Call it
    before `attach`, or use it as a decorator of the class. An installed package needs no call: it declares its terms as
    entry points of the group "gossamer.terms".

    Args:
        term: A frozen dataclass that subclasses Compressor, Codec, Strategy or Topology.

    Returns:
        The same class.

    Raises:
        RecipeError: The class is not a term, or another term or preset has its name.

    Example:
        >>> from dataclasses import dataclass
        >>> import gossamer
        >>> @gossamer.register
        ... @dataclass(frozen=True, repr=False)
        ... class Coarse(gossamer.Int8):
        ...     block: int = 512
        >>> gossamer.recipe("Coarse(block=64) + Ring()")
        Coarse(block=64) + Ring()
    """
    name = getattr(term, "__name__", repr(term))
    if not (isinstance(term, type) and issubclass(term, Term)) or getattr(term, "kind", None) not in KINDS:
        raise RecipeError(
            f"{name} cannot be registered: it is not a subclass of gossamer.Compressor, gossamer.Strategy or "
            "gossamer.Topology. Write class MyCompressor(gossamer.Compressor): ... and gossamer.register(MyCompressor)."
        )
    if isabstract(term) or ABC in term.__bases__:
        missing = ", ".join(sorted(getattr(term, "__abstractmethods__", ())))
        raise RecipeError(f"{name} cannot be registered: it is abstract. Write its methods: {missing or 'a subclass'}.")
    if not is_dataclass(term) or not getattr(term, "__dataclass_params__").frozen:  # noqa: B009 (not in its type)
        raise RecipeError(
            f"{name} cannot be registered: it is not a frozen dataclass, so its arguments could not be written in a "
            "recipe. Write @dataclass(frozen=True, repr=False) above the class."
        )
    if not name.isidentifier() or keyword.iskeyword(name):
        raise RecipeError(f"{name} cannot be registered: a recipe text cannot contain this name. Rename the class.")
    known = NOUNS.get(name)
    if name in PRESETS or normalized(name) in BY_NAME or (known is not None and not _same(known, term)):
        raise RecipeError(
            f"{name} cannot be registered: the name already has a meaning in recipes. Rename the class, "
            f"for example to My{name}."
        )
    NOUNS[name] = term
    return term


def unknown_to_servers(name: str) -> str:
    """The error text for a term that only the training script registers, in a run with server processes."""
    return (
        f"parameter servers (--servers) do not run the training script, so the term {name} that it registers is "
        f"unknown to them. Move {name} into an installed package, and declare it in its pyproject.toml: "
        f'[project.entry-points."{ENTRY_POINTS}"] {name} = "my_package:{name}". Or omit --servers: each worker '
        "then holds a part of the parameters."
    )


def load_entry_points() -> Mapping[str, RecipeError]:
    """Register the terms of installed packages, once per process.

    Returns:
        An error for each entry point that cannot be imported or is not a term, by the entry point's name.
    """
    if ENTRY_POINTS not in _loaded:
        found = entry_points(group=ENTRY_POINTS)
        _loaded.add(ENTRY_POINTS)  # first, since the packages may read recipes while they are imported
        _failures.clear()
        for each in found:
            try:
                register(_imported(each))
            except RecipeError as error:
                _failures[each.name] = error
    return _failures


def _imported(point: EntryPoint) -> type[Term]:
    try:
        return point.load()  # type: ignore[no-any-return]
    except Exception as error:
        raise RecipeError(
            f"the entry point {point.name} = {point.value} of an installed package cannot be imported: "
            f"{type(error).__name__}: {error}. Repair or uninstall the package."
        ) from error


def _same(known: type[Term], term: type[Term]) -> bool:
    """Whether both are the same class, defined again: a notebook's cell or a script that runs twice in a process."""
    return (known.__module__, known.__qualname__) == (term.__module__, term.__qualname__)
