"""Shard spec: a server's part of a model, its optimizer and the run's settings, as JSON that is checked when read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from math import inf
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.base.json_text import read_json
from gossamer.base.layout import FlatTensors, Layout, dtype_name
from gossamer.base.ops import Payload
from gossamer.errors import AttachError, MalformedError
from gossamer.train.parameter_server.delayed_nesterov import DelayedNesterov

DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
Options = dict[str, Any]  # an optimizer group's hyperparameters, without its parameters
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
ELASTIC = 0  # in place of the number of workers: they come and go, each with a number of its own
IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")  # chosen by each server


@dataclass(frozen=True)
class Block:
    """Tensors of one dtype and optimizer group in one flat buffer."""

    dtype: str
    group: int  # of the optimizer
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # ((name, shape), ...)

    @property
    def layout(self) -> Layout:
        return Layout.of(dict(self.tensors))

    def zeros(self, device: torch.device | str = "cpu") -> FlatTensors:
        return FlatTensors.zeros(self.layout, dtype=DTYPES[self.dtype], device=torch.device(device))


@dataclass(frozen=True)
class ShardSpec:
    """A shard of a model, and the settings that are equal on all workers."""

    blocks: tuple[Block, ...]
    optimizer: str  # name of its class in torch.optim
    groups: tuple[Options, ...]  # its hyperparameters
    recipe: str
    world: int  # number of workers; ELASTIC: it changes
    seed: int
    number: int  # of this shard
    shards: int

    @property
    def is_elastic(self) -> bool:
        """Whether workers come and go. Each process then has a number of its own, which is never used again."""
        return self.world == ELASTIC

    def to_json(self) -> str:
        """As JSON; equal specs have equal texts."""
        return json.dumps(
            {**vars(self), "blocks": [[block.dtype, block.group, block.tensors] for block in self.blocks]},
            sort_keys=True,
        )

    def agreed_settings(self) -> str:
        """The settings that are always equal on all workers, as JSON."""
        layout = ";".join(f"{block.dtype}{block.group}{block.layout.fingerprint()}" for block in self.blocks)
        same = {name: getattr(self, name) for name in ("recipe", "optimizer", "world", "seed", "number", "shards")}
        return json.dumps({**same, "layout": layout}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ShardSpec:
        """Parse JSON. Raises MalformedError."""
        try:
            return cls(**_fields(read_json(text)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise MalformedError(
                f"the description of a shard cannot be read: {error}. Install the same version of Gossamer everywhere"
            ) from error

    def zeros(self, device: torch.device | str = "cpu") -> tuple[FlatTensors, ...]:
        return tuple(block.zeros(device) for block in self.blocks)

    def blocks_of(self, fragment: int | None) -> list[int]:
        """The numbers of the blocks of a fragment, which is a group of the optimizer; None: of all blocks."""
        return [number for number, block in enumerate(self.blocks) if fragment in (None, block.group)]

    @property
    def fragments(self) -> list[int]:
        """The fragments of which this shard has blocks."""
        return sorted({block.group for block in self.blocks})

    def check_values(self, payload: Payload) -> None:
        """Raise MalformedError unless the payload has one flat tensor per block, with its size and dtype."""
        due = [(block.layout.numel, DTYPES[block.dtype]) for block in self.blocks]
        came = [(tensor.numel(), tensor.dtype) for tensor in payload]
        if due != came:
            raise MalformedError(f"shard {self.number} has parameters {due}, but received {came}: nothing was applied")


def _fields(read: Mapping[str, Any]) -> dict[str, Any]:
    blocks = tuple(
        Block(_known(dtype), _count(group), tuple((str(name), tuple(map(_count, shape))) for name, shape in tensors))
        for dtype, group, tensors in read["blocks"]
    )
    groups = tuple(checked_options(group) for group in read["groups"])
    if any(block.group >= len(groups) for block in blocks):
        raise ValueError("a block has an unknown group")
    counts = {name: _count(read[name]) for name in ("world", "number", "shards")}
    if type(read["seed"]) is not int:
        raise ValueError(f"{read['seed']!r} is not a seed")
    texts = {"optimizer": _elementwise(read["optimizer"]), "recipe": str(read["recipe"])}
    return {**read, **counts, **texts, "blocks": blocks, "groups": groups}


def _known(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ValueError(f"{dtype} is not a dtype of parameters")
    return dtype


def _count(number: int) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a count")
    return number


def _elementwise(name: str) -> str:
    if name not in (*ELEMENTWISE, DelayedNesterov.__name__):
        raise ValueError(f"{name!r} is not an elementwise optimizer of torch")
    return name


def optimizer_class(name: str) -> Callable[..., Optimizer]:
    """The class of an optimizer that servers can rebuild."""
    found: Callable[..., Optimizer] = (
        DelayedNesterov if name == DelayedNesterov.__name__ else getattr(torch.optim, name)
    )
    return found


def name_of(optimizer: Optimizer) -> str:
    """The name of the optimizer's class, from which servers rebuild it. Raises AttachError if they cannot."""
    kind = type(optimizer)
    if kind is DelayedNesterov:
        return kind.__name__
    if kind.__name__ not in ELEMENTWISE or kind is not getattr(torch.optim, kind.__name__, None):
        raise AttachError(
            f"{kind.__module__}.{kind.__name__} cannot run on parameter servers: each server holds some rows of some "
            "tensors, so the update rule must be elementwise, and servers rebuild the optimizer by its name in "
            f"torch.optim. Train with one of {', '.join(ELEMENTWISE)}, or write EveryStep()."
        )
    return str(kind.__name__)


def options_of(optimizer: Optimizer) -> tuple[Options, ...]:
    """The groups' current hyperparameters: only numbers, tuples of numbers and None. Raises AttachError.

    Other entries of the groups, such as names and a schedule's initial rate, are left out.
    """
    names = [name for name in optimizer.defaults if name not in IMPLEMENTATION_OPTIONS]
    return tuple(
        {name: _plain(name, group[name]) for name in names if name in group} for group in optimizer.param_groups
    )


def _plain(name: str, value: Any) -> Any:
    plain = tuple(map(_python_number, value)) if isinstance(value, list | tuple) else _python_number(value)
    try:
        return checked_options({name: plain})[name]
    except ValueError as error:
        raise AttachError(
            f"the optimizer's {name} is {value!r}, but only numbers, tuples of numbers and None can be sent to a "
            "parameter server. Give its group a plain number, or write EveryStep()."
        ) from error


def _python_number(value: Any) -> Any:
    """A number of numpy or torch as a Python number; other values unchanged."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, bool | None):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def checked_options(options: Mapping[str, Any]) -> Options:
    """The options with tuples in place of lists. Raises ValueError for other values than numbers, tuples and None."""
    return {str(name): _number_or_tuple(value) for name, value in options.items()}


def check_taken(optimizer: str, options: Options, begun_with: Options) -> None:
    """Raise MalformedError for options with which an optimizer created with `begun_with` cannot step.

    Numbers may change by schedules. Booleans may not, since they determine the layout of the optimizer's state.
    """
    try:
        switched = [name for name, value in options.items() if type(value) is bool and value != begun_with.get(name)]
        if switched:
            raise ValueError(f"{switched[0]!r} was {begun_with.get(switched[0])} when it began")
        if not 0 <= options.get("lr", 0.0) < inf:
            raise ValueError(f"a learning rate of {options['lr']}")
        _try_step(optimizer, tuple({**begun_with, **options, "lr": 1.0}.items()))  # schedules mostly change lr
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise MalformedError(
            f"a contribution has the options {options}, with which {optimizer} cannot step: {error}; nothing of it was "
            "applied"
        ) from error


@lru_cache(maxsize=64)
def _try_step(optimizer: str, options: tuple[tuple[str, Any], ...]) -> None:
    """Make a step with one parameter. Raises the optimizer's errors."""
    kind = optimizer_class(optimizer)
    one = Parameter(torch.zeros(1))
    tried = kind([one], **{name: value for name, value in options if name in signature(kind).parameters})
    one.grad = torch.ones(1)
    tried.step()


def _number_or_tuple(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_number, value))
    return _number(value)


def _number(value: Any) -> bool | int | float | None:
    if value is None or type(value) in (bool, int, float):
        number: bool | int | float | None = value
        return number
    raise ValueError(f"{value!r} is not a number")
