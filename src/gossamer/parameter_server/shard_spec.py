"""What a server must know before it can hold its part of a model, as text that nobody evaluates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.core.layout import FlatTensors, Layout, dtype_name
from gossamer.core.ops import Payload
from gossamer.errors import AttachError, MalformedError

DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
Options = dict[str, Any]  # an optimizer group's hyperparameters, without its parameters
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
HOW_NOT_WHAT = ("foreach", "fused", "capturable", "differentiable")  # a server decides these itself


@dataclass(frozen=True)
class Block:
    """Tensors of one dtype and optimizer group, side by side: ((name, shape), ...)."""

    dtype: str
    group: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def layout(self) -> Layout:
        return Layout.of(dict(self.tensors))

    def zeros(self, device: torch.device | str = "cpu") -> FlatTensors:
        return FlatTensors.zeros(self.layout, dtype=DTYPES[self.dtype], device=torch.device(device))


@dataclass(frozen=True)
class ShardSpec:
    """Shard `number` of `shards`: its blocks, the optimizer's class and groups, and what all workers agreed to run."""

    blocks: tuple[Block, ...]
    optimizer: str
    groups: tuple[Options, ...]
    recipe: str
    world: int
    seed: int
    number: int
    shards: int

    def text(self) -> str:
        """As JSON; equal descriptions have equal texts."""
        return json.dumps(
            {**vars(self), "blocks": [[block.dtype, block.group, block.tensors] for block in self.blocks]},
            sort_keys=True,
        )

    def agreed(self) -> str:
        """What is the same for every worker at all times, as JSON."""
        layout = ";".join(f"{block.dtype}{block.group}{block.layout.fingerprint()}" for block in self.blocks)
        same = {name: getattr(self, name) for name in ("recipe", "optimizer", "world", "seed", "number", "shards")}
        return json.dumps({**same, "layout": layout}, sort_keys=True)

    @classmethod
    def of_text(cls, text: str) -> ShardSpec:
        """Raises MalformedError."""
        try:
            return cls(**_fields(json.loads(text)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise MalformedError(f"a description of a shard came that cannot be read: {error}") from error

    def zeros(self, device: torch.device | str = "cpu") -> tuple[FlatTensors, ...]:
        return tuple(block.zeros(device) for block in self.blocks)

    def check_values(self, payload: Payload) -> None:
        """Raise MalformedError unless the payload is one flat tensor for each block, in its size and dtype."""
        due = [(block.layout.numel, DTYPES[block.dtype]) for block in self.blocks]
        came = [(tensor.numel(), tensor.dtype) for tensor in payload]
        if due != came:
            raise MalformedError(f"parameters came as {came}, and the shard has {due}")


def _fields(read: Mapping[str, Any]) -> dict[str, Any]:
    blocks = tuple(
        Block(_known(dtype), _count(group), tuple((str(name), tuple(map(_count, shape))) for name, shape in tensors))
        for dtype, group, tensors in read["blocks"]
    )
    groups = tuple(checked_options(group) for group in read["groups"])
    if any(block.group >= len(groups) for block in blocks):
        raise ValueError("a block belongs to a group that is not there")
    counts = {name: _count(read[name]) for name in ("world", "seed", "number", "shards")}
    texts = {"optimizer": _elementwise(read["optimizer"]), "recipe": str(read["recipe"])}
    return {**read, **counts, **texts, "blocks": blocks, "groups": groups}


def _known(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ValueError(f"{dtype} is no dtype of parameters")
    return dtype


def _count(number: int) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no count")
    return number


def _elementwise(name: str) -> str:
    if name not in ELEMENTWISE:
        raise ValueError(f"{name!r} is no elementwise optimizer of torch")
    return name


def name_of(optimizer: Optimizer) -> str:
    """The class by which servers make this optimizer again. Raises AttachError where they could not."""
    kind = type(optimizer)
    if kind.__name__ not in ELEMENTWISE or kind is not getattr(torch.optim, kind.__name__, None):
        raise AttachError(
            f"a {kind.__module__}.{kind.__name__} cannot live on parameter servers: each holds some rows of some "
            "tensors, which only a rule that treats every element alike does not notice, and is made again there by "
            f"its name in torch.optim. Train with one of {', '.join(ELEMENTWISE)}, or write EveryStep()."
        )
    return str(kind.__name__)


def options_of(optimizer: Optimizer) -> tuple[Options, ...]:
    """The groups' hyperparameters as they are now: numbers, tuples of numbers and None only. Raises AttachError.

    What others keep in the groups, such as names and a schedule's first rate, stays here.
    """
    told = [name for name in optimizer.defaults if name not in HOW_NOT_WHAT]
    return tuple(
        {name: _plain(name, group[name]) for name in told if name in group} for group in optimizer.param_groups
    )


def _plain(name: str, value: Any) -> Any:
    plain = tuple(map(_python_number, value)) if isinstance(value, list | tuple) else _python_number(value)
    try:
        return checked_options({name: plain})[name]
    except ValueError as error:
        raise AttachError(
            f"the optimizer's {name} is {value!r}, and only numbers, tuples of numbers and None can be told to a "
            "parameter server. Give its group a plain number, or write EveryStep()."
        ) from error


def _python_number(value: Any) -> Any:
    """The same number without numpy or torch, where it is one."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, bool | None):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def checked_options(options: Mapping[str, Any]) -> Options:
    """The same with tuples where JSON has lists. Raises ValueError for all but numbers, tuples of them and None."""
    return {str(name): _number_or_tuple(value) for name, value in options.items()}


def _number_or_tuple(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_number, value))
    return _number(value)


def _number(value: Any) -> bool | int | float | None:
    if value is None or type(value) in (bool, int, float):
        number: bool | int | float | None = value
        return number
    raise ValueError(f"{value!r} is no number")
