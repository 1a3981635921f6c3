"""Remote call messages: requests to a remote module's owner and its answers, as checked JSON, separate from tensors.

Nothing is pickled: a module's inputs and outputs are trees of tensors, numbers, text, True, False and None in lists,
tuples and dicts. Named tuples arrive with their names. Tensors are in the frame's payload, and the tree has their
indices.
"""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from torch import Tensor

from gossamer.errors import MalformedError, PeerLost, RemoteError

AutocastType = Literal["", "bfloat16", "float16"]


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a call: its form, and the number of its tensors in the payload."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    parts: Annotated[int, msgspec.Meta(ge=0)]
    encoded: bool  # by the codec; False: the only part is the tensor itself
    needs_gradient: bool = False


ABSENT = TensorRecord(dtype="", shape=(), parts=0, encoded=False)  # for example the gradient of an unused output


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A client's request to a module's owner."""


class Describe(Request, frozen=True, kw_only=True):
    """Compare the settings of `remote(...)`; the answer has parameter names and sizes."""

    settings: str


class Forward(Request, frozen=True, kw_only=True):
    tree: Any  # of (args, kwargs)
    tensors: tuple[TensorRecord, ...]
    training: bool
    autocast: AutocastType = ""  # type to compute in, within torch.autocast; "" outside of it
    hold: bool  # keep the graph for a backward pass
    dropped: tuple[int, ...]  # calls with graphs that this client has freed


class Backward(Request, frozen=True, kw_only=True):
    of: int  # number of the forward call
    tensors: tuple[TensorRecord, ...]  # gradients of the outputs


class OptimizerStep(Request, frozen=True, kw_only=True):
    """Step the optimizer once all clients have sent this request."""

    settings: dict[str, float]  # of all its parameter groups


class ZeroGrad(Request, frozen=True, kw_only=True):
    """Clear the gradients of this client."""


class FetchState(Request, frozen=True, kw_only=True):
    """The answer is the module's state_dict, uncompressed."""


class ScriptEnded(Request, frozen=True, kw_only=True):
    """This rank's script makes no more calls."""


class Returned(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The owner's answer."""

    tree: Any = None
    tensors: tuple[TensorRecord, ...] = ()
    error: str = ""  # type name of an error
    message: str = ""


AnyRequest = Describe | Forward | Backward | OptimizerStep | ZeroGrad | FetchState | ScriptEnded


def encode(message: Request | Returned) -> str:
    return json.dumps(msgspec.to_builtins(message))


def decode_request(text: str) -> AnyRequest:
    """Parse a request. Raises MalformedError."""
    try:
        found: AnyRequest = msgspec.convert(json.loads(text), AnyRequest)
        return found
    except (ValueError, RecursionError) as fault:
        raise MalformedError(f"a request to a remote module cannot be read: {fault}") from None


def decode_returned(text: str, rank: int, layer: str) -> Returned:
    """Parse an answer. Raises the owner's error: PeerLost, or RemoteError with the type's name and the message."""
    try:
        found = msgspec.convert(json.loads(text), Returned)
    except (ValueError, RecursionError) as fault:
        raise MalformedError(f"rank {rank}'s answer for {layer} cannot be read: {fault}") from None
    if found.error == PeerLost.__name__:
        raise PeerLost(f"rank {rank}, for {layer}: {found.message}")
    if found.error:
        raise RemoteError(f"rank {rank} raised {found.error} for {layer}: {found.message}")
    return found


def flatten(value: Any, tensors: list[Tensor]) -> Any:
    """Convert a value to a tree as JSON, and append its tensors to `tensors`. Raises TypeError for other types."""
    match value:
        case Tensor():
            tensors.append(value)
            return {"tensor": len(tensors) - 1}
        case list():
            return [flatten(each, tensors) for each in value]
        case tuple() if names := _field_names(value):
            parts = [flatten(each, tensors) for each in value]
            return {"named": [type(value).__name__, names, parts]}
        case tuple():
            return {"tuple": [flatten(each, tensors) for each in value]}
        case dict() if all(isinstance(key, str) for key in value):
            return {"dict": {key: flatten(each, tensors) for key, each in value.items()}}
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(
        f"a {type(value).__name__} cannot be sent to or from a remote module, since nothing is pickled. Pass and "
        "return tensors, numbers, text, True, False and None, in lists, tuples and dicts with text as keys."
    )


def unflatten(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `flatten`. Raises MalformedError for an invalid tree."""
    match tree:
        case {"tensor": int(place)} if 0 <= place < len(tensors):
            return tensors[place]
        case {"tuple": list(each)}:
            return tuple(unflatten(inner, tensors) for inner in each)
        case {"named": [str(name), list(names), list(each)]}:
            return _named_tuple(name, names, [unflatten(inner, tensors) for inner in each])
        case {"dict": dict(items)}:
            return {key: unflatten(inner, tensors) for key, inner in items.items()}
        case list():
            return [unflatten(inner, tensors) for inner in tree]
        case None | bool() | int() | float() | str():
            return tree
    raise MalformedError(f"a remote call has an invalid value, {str(tree)[:80]}")


def _field_names(value: tuple[Any, ...]) -> list[str]:
    """The names of a named tuple, or of a result such as torch.return_types.max; none for other tuples."""
    return list(getattr(value, "_fields", ()) or getattr(type(value), "__match_args__", ()))


def _named_tuple(name: str, names: Sequence[Any], values: Sequence[Any]) -> Any:
    try:
        return _named_tuple_type(name, tuple(names))(*values)
    except (TypeError, ValueError) as fault:
        raise MalformedError(f"a remote call has an invalid named tuple: {fault}") from None


@lru_cache(maxsize=64)
def _named_tuple_type(name: str, names: tuple[str, ...]) -> Any:
    """A type with the same names: the sender's own type may not exist here, and nothing is imported for a message."""
    return namedtuple(name, names)
