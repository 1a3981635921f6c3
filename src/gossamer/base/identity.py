"""Identity keys: cache entries for one object, compared by identity instead of equality."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Itself(Generic[T]):
    """One object, hashed and compared by identity: to hash a layout of many tensors takes as long as a small message.

    A cache keeps the object with its key, so that no other can take its place.
    """

    __slots__ = ("item",)

    def __init__(self, item: T) -> None:
        self.item = item

    def __hash__(self) -> int:
        return id(self.item)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.item is self.item
