"""Tracked parts: schedulers, further optimizers and loaders in checkpoints, and notices about missing ones."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader

from gossamer import events
from gossamer.errors import AttachError, LoopError, MismatchError
from gossamer.train.checkpoint.state import Stateful, load_optimizer
from gossamer.train.sampler import HubStreamShard, Shard, StreamShard
from gossamer.train.session.foreign_optimizers import steps_through


class TrackedParts:
    """Objects that one session saves and loads in addition to model, optimizer and scaler, by name."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, scheduler: Stateful | None = None, *, gives_notice: bool
    ) -> None:
        """scheduler: the first part. gives_notice: whether this rank prints notices."""
        self._model, self._optimizer, self._gives_notice = model, optimizer, gives_notice
        self._parts: dict[str, Stateful] = {}
        self._loaded: frozenset[str] = frozenset()  # names in the loaded checkpoint
        self._functions: Mapping[str, str] = {}  # of other workers' schedulers that are not tracked here yet
        self._handed: dict[str, Any] = {}  # states received at attach, of parts that are not tracked here yet
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # in this process, except the attached one
        self._noticed: set[str] = set()
        self._rates: list[float] | None = None  # of the other workers, until this new worker has made a step
        if scheduler is not None:
            self._add("scheduler", scheduler)

    def track(self, loader: DataLoader[Any] | None, parts: Mapping[str, Any]) -> Any:
        """Add one part. Returns the object that the loop must use. Raises AttachError and LoopError."""
        given = len(parts) + (loader is not None)
        if given != 1:
            lines = "; ".join(f"session.track({name}={name})" for name in parts) or "session.track(scheduler=scheduler)"
            raise AttachError(
                f"session.track takes one loader, or one object by its name, in a call of its own, got {given}. Write "
                f"loader = session.track(loader), or {lines}."
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
            raise AttachError(f"an object is tracked as {name!r} already. Choose another name for this one.")
        if name in self._loaded:
            raise LoopError(
                f"session.load() was called before session.track({name}=...), so its state was not restored. Track it "
                "first, then load."
            )
        if isinstance(part, RestoredLoader) and isinstance(part.dataset, HubStreamShard):
            part.dataset.tracked = True
        self._parts[name] = part
        if name in self._handed:
            refuse_other_functions(name, part, self._functions)
            self._put_in(part, self._handed.pop(name))

    def see(self, optimizer: Optimizer) -> None:
        """Called when an optimizer other than the attached one makes a step."""
        self._stepped.add(optimizer)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._all().items()}

    def load_state_dict(self, saved: Mapping[str, Any], *, resharded: bool = False) -> None:
        """Restore saved states by name, and print a notice about states and parts without a counterpart.

        resharded: the checkpoint is of another number of workers, so positions of loaders do not apply; the world's
        shards have the position.
        """
        self._loaded, parts = frozenset(saved), self._all()
        for name in saved.keys() & parts.keys():
            if not (resharded and isinstance(parts[name], RestoredLoader)):
                _load(parts[name], saved[name])
        for name in sorted(saved.keys() - parts.keys()):
            self._notice_once(
                f"the checkpoint has a state of {name}, which this run does not track, so it is lost. Before "
                f"session.load() write session.track({_keyword(name)})"
            )
        for name in sorted(parts.keys() - saved.keys()):
            self._notice_once(f"the checkpoint has no state of {name}, which keeps its current state")

    def schedulers(self) -> list[Stateful]:
        """Schedulers of the attached optimizer."""
        return [part for part in self._all().values() if _schedules(part, self._optimizer)]

    def functions(self) -> dict[str, str]:
        """Values of the functions of tracked schedulers, which state_dict() lacks; they must be equal on all ranks."""
        found = {name: functions_text(part) for name, part in self._all().items()}
        return {f"functions of {name}": text for name, text in found.items() if text}

    def take_up(self, handed: Mapping[str, Any], functions: Mapping[str, str]) -> None:
        """Restore the states of other workers; those of parts that are not tracked yet are restored by `track`.
        functions: result of `functions()` on the other workers."""
        self._functions = functions
        parts, self._rates = self._all(), _rates(self._optimizer)
        for name, state in handed.items():
            if name in parts:
                self._put_in(parts[name], state)
            else:
                self._handed[name] = state

    def compare_rates(self) -> None:
        """Called before the first step of a new worker: print a notice if its learning rate differs from that of the
        other workers, or will differ because its scheduler is not tracked."""
        remote, self._rates = self._rates, None
        local = _rates(self._optimizer)
        tracked = any(_schedules(part, self._optimizer) for part in self._all().values())
        if remote is not None and (local != remote or (_has_scheduler(self._optimizer) and not tracked)):
            events.notice(
                f"this worker joined a run with learning rate {_listed(remote)} but makes its first step with "
                f"{_listed(local)}. Its scheduler did not receive the state of the other workers and starts from the "
                "beginning, so its rate would differ from theirs. Write gossamer.attach(..., scheduler=scheduler), or "
                "session.track(scheduler=scheduler) if it is created after attach"
            )

    def _put_in(self, part: Stateful, state: Any) -> None:
        if isinstance(part, RestoredLoader):
            return  # loaders of other workers are at other positions; the world's shards have this one
        _load(part, state)
        if _schedules(part, self._optimizer) and isinstance(state, Mapping):
            # A scheduler that was created after attach has set the initial rate
            for group, rate in zip(self._optimizer.param_groups, state.get("_last_lr", ()), strict=False):
                group["lr"] = rate

    def notice_missing(self, own: Mapping[str, Any]) -> None:
        """Print notices about schedulers and optimizers of this model that are neither tracked nor in `own`."""
        kept = [*self._all().values(), *_leaves(own)]
        if _has_scheduler(self._optimizer) and not any(_schedules(part, self._optimizer) for part in kept):
            self._notice_once(
                "the optimizer has a learning rate scheduler that is not in the checkpoint, so a resumed run would "
                "continue with another learning rate. Write session.track(scheduler=scheduler) before session.load(), "
                "or gossamer.attach(..., scheduler=scheduler)"
            )
        for other in self._unsaved_optimizers(kept):
            self._notice_once(
                f"{type(other).__name__} also trains {self._trained_by(other)}, but its state is not in the "
                "checkpoint, so a resumed run would differ. Write session.track(second=optimizer) before "
                "session.load()"
            )

    def report_accumulated(self) -> None:
        """Print a notice about gradients that `no_sync` has accumulated, which a checkpoint does not contain."""
        if any(parameter.grad is not None for parameter in self._model.parameters()):
            self._notice_once(
                "this checkpoint does not contain the gradients that session.no_sync() has accumulated, so a resumed "
                "run would skip these samples. Call session.save() after optimizer.step() and zero_grad(), and end an "
                "epoch with a step: number % 4 == 0 or number == len(data)"
            )

    def _all(self) -> dict[str, Stateful]:
        """All parts, including schedulers that are attributes of the attached optimizer."""
        hanging = {
            f"optimizer.{name}": value
            for name, value in vars(self._optimizer).items()
            if _stateful(value) and getattr(value, "optimizer", None) is self._optimizer
        }
        return {**hanging, **self._parts}

    def _unsaved_optimizers(self, kept: Iterable[Any]) -> Iterator[Optimizer]:
        """Optimizers of this model's parameters that are not saved."""
        known = {id(part) for part in kept}
        if any(isinstance(part, Mapping) and "param_groups" in part for part in kept):
            return  # the script saves some optimizer's state_dict itself
        for other in self._stepped:
            if id(other) not in known and not self._includes(other) and self._trained_by(other):
                yield other

    def _includes(self, inner: Optimizer) -> bool:
        """Whether the attached optimizer steps through `inner`, and its state_dict() contains the state of `inner`."""
        if not steps_through(self._optimizer, inner):
            return False
        saved = {id(leaf) for leaf in _leaves(self._optimizer.state_dict())}
        state = (leaf for leaf in _leaves(dict(inner.state)) if isinstance(leaf, Tensor))
        return all(id(tensor) in saved for tensor in state)

    def _trained_by(self, optimizer: Optimizer) -> str:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        names = [name for name, parameter in self._model.named_parameters() if id(parameter) in held]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def _notice_once(self, message: str) -> None:
        if self._gives_notice and message not in self._noticed:
            self._noticed.add(message)
            events.notice(message)


def _stateful(part: Any) -> bool:
    """Whether it can be saved and loaded; a class cannot, only its instances."""
    methods = (getattr(part, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(part, type) and all(map(callable, methods))


def _load(part: Stateful, state: Any) -> None:
    if isinstance(part, Optimizer):
        load_optimizer(part, state)
    else:
        part.load_state_dict(state)


def _position_is_in_world(loader: DataLoader[Any]) -> bool:
    """Whether to count the batches that the loop takes from it: the world's shards then have the position."""
    return isinstance(loader.dataset, StreamShard) or _dealt_by(loader) is not None or not _stateful(loader)


def _has_scheduler(optimizer: Optimizer) -> bool:
    """Whether a torch scheduler was created for it, which wraps its step without a reference to the scheduler."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _listed(rates: list[float]) -> str:
    return ", ".join(f"{rate:.4g}" for rate in dict.fromkeys(rates))


def _schedules(part: Any, optimizer: Optimizer) -> bool:
    """Whether this is a scheduler of `optimizer`, possibly in a wrapper such as AcceleratedScheduler, or its state."""
    inner = getattr(part, "scheduler", part)
    return getattr(inner, "optimizer", None) is optimizer or (isinstance(part, Mapping) and "last_epoch" in part)


def _keyword(name: str) -> str:
    return f"{name}=..." if name.isidentifier() else "..."


def _leaves(tree: Any) -> Iterator[Any]:
    """Every value in containers, and the dicts themselves; supports containers that contain themselves."""
    waiting, seen = [tree], set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value.values() if isinstance(value, Mapping) else value)
        if not isinstance(value, list | tuple):
            yield value


# -- functions of schedulers -------------------------------------------------------------------------------------------

# LambdaLR and MultiplicativeLR compute rates by functions of the script, which state_dict() does not contain. A new
# worker receives the state of the others but uses its own functions, which may differ if they depend on len(loader).
# Therefore, functions are compared by their values.

Function = Callable[[int], Any]

SHOWN = (1, 100, 10_000)  # steps with values in a message
LARGEST_STEP = 10**7
REMEDY = (
    "A scheduler's state_dict() does not contain the functions of LambdaLR or MultiplicativeLR, so each worker has its "
    "own. Compute them from numbers that do not depend on the time at which a worker joins, such as total = 10_000; or "
    "from len(loader) before gossamer.attach, where world.size is the size with which the run started."
)


def functions_text(scheduler: Any) -> str:
    """The values of all functions of a scheduler, and of schedulers that it chains; "" without functions."""
    found = list(_functions(scheduler))
    if not found:
        return ""
    shown = "; ".join(", ".join(f"{_value(each, step)} at step {step}" for step in SHOWN) for each in found)
    digest = hashlib.sha256()
    for function in found:
        digest.update(" ".join(_value(function, step) for step in _steps()).encode())
    return f"factors {shown}, in all {digest.hexdigest()[:8]}"


def refuse_other_functions(name: str, scheduler: Any, others: Mapping[str, str]) -> None:
    """Raise MismatchError for a new worker's scheduler with functions that return other values than those of `others`.

    others: `functions_text` of the schedulers of workers that train already, by "functions of " and their names.
    """
    local, remote = functions_text(scheduler), others.get(f"functions of {name}", "")
    if local != remote:
        raise MismatchError(
            f"the functions of {name} return {local or 'nothing'} on this worker and {remote or 'nothing'} on the "
            f"workers that train already, so learning rates would differ. This worker does not join. {REMEDY}"
        )


@contextmanager
def explained() -> Iterator[None]:
    """Context manager that adds the remedy for differing functions to a MismatchError about them."""
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
    """All small steps, then every hundredth part of the previous one, which reveals a difference of one percent."""
    step = 0
    while step <= LARGEST_STEP:
        yield step
        step += max(1, step // 100)


def _value(function: Function, step: int) -> str:
    try:
        return f"{float(function(step)):.9g}"
    except Exception as error:  # for example a table that ends
        return type(error).__name__


# -- loaders, with positions that count the batches taken by the loop --------------------------------------------------


class TrackedLoader:
    """A DataLoader over a shard of a dataset or a stream; its position counts the batches that the loop has taken.

    All other attributes are those of the loader. A resumed run continues with the next batch, with any number of loader
    workers, persistent or not. Random numbers that a dataset draws in loader workers start again there: seed them by
    the index. When workers of the group join or leave, prefetched batches are dropped, and those of the new deal are
    fetched.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Raises AttachError if the number of batches taken does not determine their indices."""
        self._loader = loader
        self._shard, self._batch_size = _shard_of(loader)  # and the number of its entries in a batch

    def __iter__(self) -> Iterator[Any]:
        shard = self._shard
        shard.let_loader_count()  # only now: a loop may continue with the original loader
        as_loaded, resumed, before = shard.random_state, shard.resumed, torch.get_rng_state()
        batches = self._begun()
        # A new iterator draws a seed, which an uninterrupted run would not have drawn: in the middle of an epoch, and
        # with persistent workers.
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
        """Yield batches until they end or workers join or leave; returns True in the latter case. Prefetched batches of
        the old deal that were not taken are left to their new owners."""
        shard, changes = self._shard, self._shard.changes
        for count, batch in enumerate(batches, 1):
            if shard.changes != changes:  # in the meantime
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
    """A loader with state_dict() and load_state_dict(), such as torchdata's StatefulDataLoader, which stores its state.

    Its iterators draw seeds from torch's generator. The iterator of an interrupted epoch had drawn its seeds before the
    checkpoint, so draws of a restored iterator at its creation are undone.
    """

    def __init__(self, loader: Any) -> None:
        self._loader, self._restored = loader, False

    def __iter__(self) -> Iterator[Any]:
        if self._restored:
            before = torch.get_rng_state()
            self._loader.state_dict()  # creates the iterator that continues
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


def _shard_of(loader: DataLoader[Any]) -> tuple[Shard | StreamShard[Any], int]:
    """The shard that the loader draws from, and the number of its entries in a batch. Raises AttachError."""
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise AttachError(
            "in_order=False returns batches in the order in which workers finish them, so the number of batches taken "
            "does not determine their indices. Leave it out."
        )
    if isinstance(loader.dataset, StreamShard):
        if loader.persistent_workers:
            raise AttachError(
                "persistent workers keep the position in the stream at which they were started, so a resumed run would "
                "start at another position. Leave persistent_workers out."
            )
        return loader.dataset, loader.batch_size or 1
    if (found := _dealt_by(loader)) is None:
        raise AttachError(
            "this loader has its own sampler or batch sampler, so the number of batches taken does not determine its "
            "position. Write DataLoader(dataset, batch_size=..., sampler=world.shard(dataset)); or "
            "DataLoader(dataset, batch_sampler=world.shard(batch_sampler)), which divides whole batches; or pass "
            "session.track a loader with state_dict(), such as torchdata's StatefulDataLoader."
        )
    return found


def _dealt_by(loader: DataLoader[Any]) -> tuple[Shard, int] | None:
    """The shard of indices or of whole batches that the loader draws from, and the number of its entries in a batch."""
    batches = loader.batch_sampler
    if isinstance(batches, Shard):
        return batches, 1
    if isinstance(loader.sampler, Shard):  # in batches of the loader's own making
        return loader.sampler, loader.batch_size or 1
    if type(batches) is BatchSampler and isinstance(batches.sampler, Shard):
        return batches.sampler, batches.batch_size
    return None
