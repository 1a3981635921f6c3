"""Tracked parts: schedulers, further optimizers and loaders that checkpoints hold; and notices of those they lack."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gossamer import events
from gossamer.errors import AttachError, LoopError, MismatchError
from gossamer.train.checkpoint.state import Stateful
from gossamer.train.sampler import HubStreamShard, Shard, StreamShard
from gossamer.train.session.foreign_optimizers import steps_through


class TrackedParts:
    """What one session saves and loads beside model, optimizer and scaler, by name."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, scheduler: Stateful | None = None, *, says: bool
    ) -> None:
        """scheduler: the first part. says: whether to tell the user, which one rank does."""
        self._model, self._optimizer, self._says = model, optimizer, says
        self._parts: dict[str, Stateful] = {}
        self._loaded: frozenset[str] = frozenset()  # names in the checkpoint that was loaded
        self._functions: Mapping[str, str] = {}  # of schedulers that are not tracked yet, on the others
        self._handed: dict[str, Any] = {}  # states that others gave at attach, of parts that are not tracked yet
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # in this process, beside the attached one
        self._told: set[str] = set()
        self._rates: list[float] | None = None  # the others', until this newcomer has made a step
        if scheduler is not None:
            self._add("scheduler", scheduler)

    def track(self, loader: DataLoader[Any] | None, parts: Mapping[str, Any]) -> Any:
        """Take one part up; returns what the loop should use in its place. Raises AttachError and LoopError."""
        given = len(parts) + (loader is not None)
        if given != 1:
            raise AttachError(
                "session.track takes one loader, or one part by its name. Write loader = session.track(loader), or "
                "session.track(scheduler=scheduler)."
            )
        if loader is not None:
            parts = {f"loader {sum(name.startswith('loader ') for name in self._parts)}": loader}
        ((name, part),) = parts.items()
        if isinstance(part, DataLoader) and _position_is_in_world(part):
            return TrackedLoader(part)
        if isinstance(part, DataLoader):
            part = RestoredLoader(part)
        self._add(name, part)
        return part

    def _add(self, name: str, part: Any) -> None:
        if not _stateful(part):
            what = f"the class {part.__name__}" if isinstance(part, type) else f"a {type(part).__name__}"
            raise AttachError(
                f"{name} is {what}, which has no state_dict() and load_state_dict(), so it cannot be "
                "saved and loaded. Numbers and text go into session.save(directory, name=value)."
            )
        if name in self._parts:
            raise AttachError(f"something is tracked as {name!r} already. Choose another name for this one.")
        if name in self._loaded:
            raise LoopError(
                f"session.load() came before session.track({name}=...), so its state was not taken up. Track it first, "
                "then load."
            )
        if isinstance(part, RestoredLoader) and isinstance(part.dataset, HubStreamShard):
            part.dataset.tracked = True
        self._parts[name] = part
        if name in self._handed:
            refuse_other_functions(name, part, self._functions)
            self._put_in(part, self._handed.pop(name))

    def see(self, optimizer: Optimizer) -> None:
        """An optimizer other than the attached one makes a step."""
        self._stepped.add(optimizer)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._all().items()}

    def load_state_dict(self, saved: Mapping[str, Any], *, resharded: bool = False) -> None:
        """Put saved states back by name, and say which have no counterpart.

        resharded: of another number of workers, whose loaders stood elsewhere; the world's shards have the position.
        """
        self._loaded, parts = frozenset(saved), self._all()
        for name in saved.keys() & parts.keys():
            if not (resharded and isinstance(parts[name], RestoredLoader)):
                parts[name].load_state_dict(saved[name])
        for name in sorted(saved.keys() - parts.keys()):
            self._tell(
                f"the checkpoint holds the state of {name}, which this run does not track, so it is lost. Before "
                f"session.load() write session.track({_keyword(name)})"
            )
        for name in sorted(parts.keys() - saved.keys()):
            self._tell(f"the checkpoint holds no state of {name}, which begins as it is")

    def schedulers(self) -> list[Stateful]:
        """Those of the attached optimizer."""
        return [part for part in self._all().values() if _schedules(part, self._optimizer)]

    def functions(self) -> dict[str, str]:
        """The functions of tracked schedulers, by values, which state_dict() lacks: every worker must have the same."""
        found = {name: functions_text(part) for name, part in self._all().items()}
        return {f"functions of {name}": text for name, text in found.items() if text}

    def take_up(self, handed: Mapping[str, Any], functions: Mapping[str, str]) -> None:
        """Put in what the others' parts hold, of which some may be tracked only from now on. functions: `functions()`
        of the others."""
        self._functions = functions
        parts, self._rates = self._all(), _rates(self._optimizer)
        for name, state in handed.items():
            if name in parts:
                self._put_in(parts[name], state)
            else:
                self._handed[name] = state

    def compare_rates(self) -> None:
        """This newcomer makes its first step. Say so, once, where its learning rate is not what the others use in it,
        or will not be: a scheduler that nobody tracks began anew."""
        theirs, self._rates = self._rates, None
        mine = _rates(self._optimizer)
        tracked = any(_schedules(part, self._optimizer) for part in self._all().values())
        if theirs is not None and (mine != theirs or (_has_scheduler(self._optimizer) and not tracked)):
            events.notice(
                f"this worker came to a run that trains with learning rate {_listed(theirs)} and makes its first step "
                f"with {_listed(mine)}. Its scheduler was not given the others' state and begins anew, so that its "
                "rate would be another than theirs. Write gossamer.attach(..., scheduler=scheduler), or "
                "session.track(scheduler=scheduler) where it is made after attach"
            )

    def _put_in(self, part: Stateful, state: Any) -> None:
        if isinstance(part, RestoredLoader):
            return  # others' stand elsewhere; the world's shards have the position
        part.load_state_dict(state)
        if _schedules(part, self._optimizer) and isinstance(state, Mapping):
            # A scheduler that was made after attach began with the first rate
            for group, rate in zip(self._optimizer.param_groups, state.get("_last_lr", ()), strict=False):
                group["lr"] = rate

    def tell_missing(self, mine: Mapping[str, Any]) -> None:
        """Say what trains this model and is neither tracked nor in `mine`, what the user saves along."""
        kept = [*self._all().values(), *_leaves(mine)]
        if _has_scheduler(self._optimizer) and not any(_schedules(part, self._optimizer) for part in kept):
            self._tell(
                "the optimizer has a learning rate scheduler that is not in the checkpoint, so a resumed run would go "
                "on with another learning rate. Write session.track(scheduler=scheduler) before session.load(), or "
                "gossamer.attach(..., scheduler=scheduler)"
            )
        for other in self._beside(kept):
            self._tell(
                f"{type(other).__name__} also trains {self._trained_by(other)}, and its state is not in the "
                "checkpoint, so a resumed run would go another way. Write session.track(second=optimizer) before "
                "session.load()"
            )

    def _all(self) -> dict[str, Stateful]:
        """With the schedulers that hang on the attached optimizer itself."""
        hanging = {
            f"optimizer.{name}": value
            for name, value in vars(self._optimizer).items()
            if _stateful(value) and getattr(value, "optimizer", None) is self._optimizer
        }
        return {**hanging, **self._parts}

    def _beside(self, kept: Iterable[Any]) -> Iterator[Optimizer]:
        """Optimizers of this model's parameters whose state is not saved."""
        known = {id(part) for part in kept}
        if any(isinstance(part, Mapping) and "param_groups" in part for part in kept):
            return  # the state of some optimizer
        for other in self._stepped:
            if id(other) not in known and not steps_through(self._optimizer, other) and self._trained_by(other):
                yield other

    def _trained_by(self, optimizer: Optimizer) -> str:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        names = [name for name, parameter in self._model.named_parameters() if id(parameter) in held]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def _tell(self, message: str) -> None:
        if self._says and message not in self._told:
            self._told.add(message)
            events.notice(message)


def _stateful(part: Any) -> bool:
    """Whether it can be saved and loaded; a class cannot, until it is built."""
    methods = (getattr(part, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(part, type) and all(map(callable, methods))


def _position_is_in_world(loader: DataLoader[Any]) -> bool:
    """Whether what the loop takes of it is to be counted: the world's shards then have the position."""
    return isinstance(loader.dataset, StreamShard) or isinstance(loader.sampler, Shard) or not _stateful(loader)


def _has_scheduler(optimizer: Optimizer) -> bool:
    """Whether a torch scheduler was made for it: that wraps its step, and leaves no way from it to the scheduler."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _listed(rates: list[float]) -> str:
    return ", ".join(f"{rate:.4g}" for rate in dict.fromkeys(rates))


def _schedules(part: Any, optimizer: Optimizer) -> bool:
    """Whether this is a scheduler of `optimizer`, also in a wrapper as AcceleratedScheduler is, or the state of one."""
    inner = getattr(part, "scheduler", part)
    return getattr(inner, "optimizer", None) is optimizer or (isinstance(part, Mapping) and "last_epoch" in part)


def _keyword(name: str) -> str:
    return f"{name}=..." if name.isidentifier() else "..."


def _leaves(tree: Any) -> Iterator[Any]:
    """Every value in containers, and the dicts themselves; of containers that hold themselves, too."""
    waiting, seen = [tree], set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value.values() if isinstance(value, Mapping) else value)
        if not isinstance(value, list | tuple):
            yield value


# -- functions of schedulers -------------------------------------------------------------------------------------------

# LambdaLR and MultiplicativeLR compute rates by functions of the user's, which state_dict() does not hold. A newcomer
# is given the others' state and computes with functions of its own, which may differ where they depend on len(loader).
# So functions are compared by their values.

Function = Callable[[int], Any]

SHOWN = (1, 100, 10_000)  # steps whose values a message names
LARGEST_STEP = 10**7
REMEDY = (
    "A scheduler's state_dict() does not hold the functions of LambdaLR or MultiplicativeLR, so each worker has its "
    "own. Compute them from numbers that are the same whenever a worker comes, such as total = 10_000; or from "
    "len(loader) before gossamer.attach, where world.size is the size with which the run began."
)


def functions_text(scheduler: Any) -> str:
    """The values of all functions of a scheduler, and of those that it chains; "" where it has none."""
    found = list(_functions(scheduler))
    if not found:
        return ""
    shown = "; ".join(", ".join(f"{_value(each, step)} at step {step}" for step in SHOWN) for each in found)
    digest = hashlib.sha256()
    for function in found:
        digest.update(" ".join(_value(function, step) for step in _steps()).encode())
    return f"factors {shown}, in all {digest.hexdigest()[:8]}"


def refuse_other_functions(name: str, scheduler: Any, others: Mapping[str, str]) -> None:
    """Raise MismatchError for a newcomer's scheduler whose functions return other values than those of `others`.

    others: `functions_text` of the schedulers of workers that train already, by "functions of " and their names.
    """
    mine, theirs = functions_text(scheduler), others.get(f"functions of {name}", "")
    if mine != theirs:
        raise MismatchError(
            f"the functions of {name} return {mine or 'nothing'} on this worker and {theirs or 'nothing'} on the "
            f"workers that train already, so learning rates would differ, and this worker does not go on. {REMEDY}"
        )


@contextmanager
def explained() -> Iterator[None]:
    """Add to a refusal within the block what to do about functions, if these differ."""
    try:
        yield
    except MismatchError as refusal:
        if "functions of" in str(refusal):
            raise MismatchError(f"{refusal} {REMEDY}") from None
        raise


def _functions(scheduler: Any) -> Iterator[Function]:
    inner = getattr(scheduler, "scheduler", scheduler)  # AcceleratedScheduler and the like
    for each in getattr(inner, "_schedulers", ()):
        yield from _functions(each)
    seen: dict[int, Function] = {id(each): each for each in getattr(inner, "lr_lambdas", ()) if callable(each)}
    yield from seen.values()


def _steps() -> Iterator[int]:
    """All small steps, then one in a hundred of as many: a difference of one percent in a length is found."""
    step = 0
    while step <= LARGEST_STEP:
        yield step
        step += max(1, step // 100)


def _value(function: Function, step: int) -> str:
    try:
        return f"{float(function(step)):.9g}"
    except Exception as error:  # a table that ends, or no number
        return type(error).__name__


# -- loaders, whose position is what the loop took ---------------------------------------------------------------------


class TrackedLoader:
    """A DataLoader over a shard, of a dataset or of a stream; its position is what the loop was given.

    Everything else is the loader's own. A resumed run is given the batches that the interrupted one was not, with any
    number of workers, persistent or not. What a dataset draws at random in workers starts anew there: seed it by the
    index. Where workers of the group come or go, batches that were fetched ahead are dropped, and those of the new deal
    are fetched.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Raises AttachError where batches taken do not tell which indices they hold."""
        self._loader, self._shard = loader, _shard_of(loader)
        self._batch_size = loader.batch_size or 1

    def __iter__(self) -> Iterator[Any]:
        shard = self._shard
        shard.let_loader_count()  # not before: a loop may go on with the loader itself
        as_loaded, resumed, before = shard.random_state, shard.resumed, torch.get_rng_state()
        batches = self._begun()
        # A new iterator draws a seed, which the run that was never interrupted did not: in the middle of an epoch, and
        # where its workers persist.
        if as_loaded is not None:
            torch.set_rng_state(as_loaded)
        elif resumed and self._loader.persistent_workers:
            torch.set_rng_state(before)
        while (yield from self._taken(batches)):
            shard.go_on()
            before = torch.get_rng_state()
            batches = self._begun()
            torch.set_rng_state(before)
        shard.finish()

    def _begun(self) -> Iterator[Any]:
        self._shard.begin(self._batch_size)
        return iter(self._loader)

    def _taken(self, batches: Iterator[Any]) -> Generator[Any, None, bool]:
        """Batches until they end, or until workers came or went: then true. What was fetched ahead under the deal
        before and not taken belongs to whoever has it now."""
        shard, changes = self._shard, self._shard.changes
        for count, batch in enumerate(batches, 1):
            if shard.changes != changes:  # while this batch was fetched
                break
            shard.take(count * self._batch_size)
            yield batch
            if shard.changes != changes:
                break
        return shard.changes != changes

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class RestoredLoader:
    """A loader that has state_dict() and load_state_dict(), such as torchdata's StatefulDataLoader; all is its own.

    Its iterators draw seeds from torch's generator. That of an epoch under way has drawn them before the checkpoint, so
    whatever a restored one draws as it is made is taken back.
    """

    def __init__(self, loader: Any) -> None:
        self._loader, self._restored = loader, False

    def __iter__(self) -> Iterator[Any]:
        if self._restored:
            before = torch.get_rng_state()
            self._loader.state_dict()  # makes the iterator that goes on
            torch.set_rng_state(before)
        self._restored = False
        return iter(self._loader)

    def state_dict(self) -> Any:
        return self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._loader.load_state_dict(state)
        self._restored = True

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _shard_of(loader: DataLoader[Any]) -> Shard | StreamShard[Any]:
    shard = loader.dataset if isinstance(loader.dataset, StreamShard) else _sampler_of(loader)
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise AttachError(
            "in_order=False hands out batches as workers finish them, so the number that was taken does not say which. "
            "Leave it out."
        )
    if isinstance(shard, StreamShard) and loader.persistent_workers:
        raise AttachError(
            "workers that persist keep the position in the stream at which they were started, so a resumed run would "
            "begin elsewhere. Leave persistent_workers out."
        )
    return shard


def _sampler_of(loader: DataLoader[Any]) -> Shard:
    if not isinstance(loader.sampler, Shard):
        raise AttachError(
            "this loader draws from a sampler or batch sampler of its own, so the number of batches that were taken "
            "does not say where it stands. Write DataLoader(dataset, batch_size=..., sampler=world.shard(dataset)), or "
            "give session.track a loader that has state_dict(), such as torchdata's StatefulDataLoader."
        )
    return loader.sampler
