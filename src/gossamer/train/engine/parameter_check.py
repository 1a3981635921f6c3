"""Parameter check: detects during a run that parameters or step counts of the ranks differ.

In lock step, ranks apply the same mean to the same parameters, so parameters stay equal bit for bit without being sent.
A change on one rank only (an assigned weight, load_state_dict, a missing optimizer.step()) has no visible symptom: the
loss continues to fall, and the run ends with two different models. Therefore, the report of every fourth step carries a
checksum of the next 25th of all parameters. All ranks receive the same reports, so they detect a difference at the same
step, within 100 steps, and then exchange a checksum of each tensor to name it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn import Parameter

from gossamer.base.kernels.checks import crc32
from gossamer.base.layout import bytes_of, dense_stride
from gossamer.base.units import ranks_text
from gossamer.errors import AttachError, LayoutError, LoopError, MismatchError, require
from gossamer.events import ParametersDiffer, emit, notice
from gossamer.train.engine.extension import Extension

Verify = Literal["warn", "stop", "off"]

EVERY_STEPS, PARTS = 4, 25
_ranks = partial(ranks_text, last=" and ")
NAMED = 3  # tensors in a message
CHUNK_BYTES = 2**26


def check_verify(verify: str, every: int | None = None) -> None:
    require(verify in ("warn", "stop", "off"), f'verify must be "warn", "stop" or "off", got {verify!r}')
    whole = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    require(
        every is None or whole,
        f"verify_every is the number of steps between two comparisons of all parameters and must be at least 1, got "
        f"{every!r}. Example: attach(..., verify_every=100)",
    )
    require(
        every is None or verify != "off",
        f'verify="off" disables all comparisons, so verify_every={every!r} has no effect: leave one of them out',
    )


class ParameterCheck(Extension):
    """Compares parameters and step counts of ranks that train in lock step.

    Args:
        verify: "warn" reports the first difference and continues, "stop" raises MismatchError on every rank, "off"
            disables all comparisons.
        rank: of this worker, among those that average gradients together.
        first_rank: rank of the first of these among all workers.
        every: number of steps between two comparisons of all parameters; None compares only the parts in reports.
    """

    def __init__(
        self,
        model: nn.Module | None,
        parameters: Mapping[str, Parameter],
        verify: Verify,
        rank: int,
        first_rank: int = 0,
        every: int | None = None,
    ) -> None:
        self._model, self._verify, self._every = model, verify, every
        self._rank, self._first_rank = rank, first_rank
        self.hold(parameters)

    def hold(self, parameters: Mapping[str, Parameter]) -> None:
        """Use these parameters from now on, and forget earlier reports."""
        self._parameters = parameters
        self._numel = sum(parameter.numel() for parameter in parameters.values())
        self._holders = _holders(self._model, parameters)
        self._reported: set[str] = set()
        self._alike: dict[int, int] = {}  # by part: the last step at which its checksum was equal on all ranks

    @property
    def looks(self) -> bool:
        return self._verify != "off"

    def within_site(self, rank: int, first_rank: int) -> ParameterCheck:
        """A check with the same options among the ranks of one site."""
        return ParameterCheck(self._model, self._parameters, self._verify, rank, first_rank, self._every)

    # -- one part in every report --------------------------------------------------------------------------------------

    def sample(self, step: int) -> int:
        """The checksum for a step's report: of a part of the parameters, of all parameters if due, or 0.

        It waits for parameters on a GPU, so it is called on the communication thread.
        """
        return _checksums(self._due(step))

    def sampled(self, step: int) -> Callable[[], int]:
        """`sample` of the current parameters, to be called on another thread while training continues. Parameters on a
        GPU are copied there; those on the CPU are read at once."""
        due = self._due(step)
        if all(part.is_cpu for part in due):
            found = _checksums(due)
            return lambda: found
        return partial(_checksums, [part.clone() for part in due])

    def _due(self, step: int) -> Sequence[Tensor]:
        """Elements of parameters that are compared at a step, in memory order."""
        parts = self._parts(step)
        if not parts or self._verify == "off" or "parameters" in self._reported:
            return ()
        size, start = -(-self._numel // PARTS), 0
        begin, end = parts.start * size, parts.stop * size
        due = []
        for parameter in self._parameters.values():
            stop = start + parameter.numel()
            if start < end and stop > begin:
                due.append(_flat(parameter)[max(begin - start, 0) : end - start])
            start = stop
        return due

    def _parts(self, step: int) -> range:
        """Parts that are compared at a step."""
        if self._every is not None and step and step % self._every == 0:
            return range(PARTS)
        turn, rest = divmod(step, EVERY_STEPS)
        return range(0) if rest else range(turn % PARTS, turn % PARTS + 1)

    def note_alike(self, step: int) -> None:
        """Record that all ranks' reports of a step had the same checksum."""
        if self._verify != "off":
            self._alike |= dict.fromkeys(self._parts(step), step)

    def _last_alike(self, name: str) -> int | None:
        """The last step at which a tensor was equal on all ranks; None if it was not compared since attach."""
        size, start = -(-self._numel // PARTS), 0
        for each, parameter in self._parameters.items():
            if each == name:
                parts = range(start // size, -(-(start + max(1, parameter.numel())) // size))
                seen = [self._alike.get(part) for part in parts]
                return None if None in seen else min(step for step in seen if step is not None)
            start += parameter.numel()
        return None

    def text(self) -> str:
        """A checksum of each tensor, for `compare`."""
        return json.dumps([_checksums([_flat(parameter)]) for parameter in self._parameters.values()])

    def compare(self, texts: Mapping[int, str], when: str, kind: str = "parameters") -> None:
        """Report the tensors that differ between ranks, from their `text` by rank; do nothing if none differs.

        Raises MismatchError with verify="stop".
        """
        by_rank = {self._first_rank + rank: tuple(json.loads(text)) for rank, text in texts.items()}
        if len(set(by_rank.values())) == 1:
            return
        sums_by_tensor = zip(self._parameters, *by_rank.values(), strict=True)
        differing = [name for name, *sums in sums_by_tensor if len(set(sums)) > 1]
        agreed = self._last_alike(differing[0]) if kind == "parameters" else None
        held = _held(by_rank, [*self._parameters].index(differing[0]))
        if self._rank == 0 and kind not in self._reported:
            emit(ParametersDiffer(when=when, tensor=differing[0], held=held, agreed=agreed))
        self._report(
            kind,
            f"the parameters of {_odd(by_rank)} {when}: {listed(differing)}. {_first(differing[0], held, agreed)} "
            "All ranks apply the same averages, so parameters stay equal bit for bit unless one rank alone changes "
            "them: by assigning a weight, load_state_dict(), zero_grad() before the step, or a missing "
            "optimizer.step(). Make the change on every rank, and resume from an earlier checkpoint, "
            'session.load(directory). attach(..., verify="stop") ends the run when '
            'this happens; verify="off" disables the check.',
        )

    # -- steps ---------------------------------------------------------------------------------------------------------

    def agree_on_steps(self, made: Mapping[int, int]) -> int:
        """The common number of steps to continue from, given the number of each rank. Raises MismatchError if they
        differ and verify="stop"."""
        if len(set(made.values())) > 1 and self._verify != "off":
            counts = ", ".join(f"{steps} on rank {self._first_rank + rank}" for rank, steps in made.items())
            self._report(
                f"steps {sorted(made.items())}",
                f"the ranks have made different numbers of steps: {counts}. Every rank applies the averages itself, so "
                "parameters differ when one rank skips a step or makes it twice. Call optimizer.step() once after "
                "backward() on every rank, or on no rank.",
            )
        return max(made.values())

    # -- data ----------------------------------------------------------------------------------------------------------

    def note_apart_in_data(self, epochs: Mapping[int, float]) -> None:
        """Warn once that ranks train on different epochs of their data. epochs: lead of each rank over the others."""
        if self._verify == "off" or "data" in self._reported:
            return
        self._reported.add("data")
        behind = min(epochs.values())
        ahead = [self._first_rank + rank for rank, epoch in epochs.items() if epoch > behind]
        if self._rank == 0:  # all ranks detect the same
            notice(
                f"{_ranks(ahead)} trained on a later epoch of the data than the other ranks: a loader was iterated "
                "more often there, for example by next(iter(loader)) or by an evaluation on one rank. Epochs are "
                "shuffled differently, so some samples are drawn twice and others never. Write `with session.epoch():` "
                "around the loop over batches on every rank, and draw batches for other purposes outside of that block"
            )

    # -- checks of one rank --------------------------------------------------------------------------------------------

    def before_exchange(self, steps: int) -> None:
        """Check whether attached parameters are still in the model. Raises LoopError if one is not and
        verify="stop"."""
        turn, rest = divmod(steps, EVERY_STEPS)
        if rest:
            return
        for name, holder, leaf in self._holders[turn % PARTS :: PARTS]:
            if holder.get(leaf) is not self._parameters[name]:
                if self._renamed(name):
                    continue
                message = (
                    f'the model has another "{name}" on rank {self._first_rank + self._rank} than at attach: the '
                    "optimizer and the averages use the old one, and the new one is not trained. Write into the old "
                    "one, `with torch.no_grad(): parameter.copy_(...)`, or create a new optimizer and call "
                    f'session.reset_compressor_state("{name}") on every rank.'
                )
                if self._verify == "stop":
                    raise LoopError(message)
                if name not in self._reported:
                    self._reported.add(name)
                    notice(message)

    def _renamed(self, name: str) -> bool:
        """Whether the model holds the parameter under another name, as after torch.nn.utils.prune. Searches the model
        after such a change only."""
        now = _holders(self._model, {name: self._parameters[name]})
        if now:
            self._holders = [now[0] if each[0] == name else each for each in self._holders]
        return bool(now)

    def note_missing_pass(self) -> None:
        """Report an optimizer step without new gradients. Raises LoopError with verify="stop"."""
        if self._verify == "off" or "missing pass" in self._reported:
            return
        self._reported.add("missing pass")
        message = (
            f"optimizer.step() was called on rank {self._first_rank + self._rank} without a backward() before it. The "
            "other ranks average with this rank once per step, so from now on it is one step ahead of them and "
            "contributes no gradient to this average, unless every rank does the same. Call step() once after every "
            "backward()."
        )
        if self._verify == "stop":
            raise LoopError(message)
        notice(message)

    def _report(self, kind: str, message: str) -> None:
        if self._verify == "stop":
            raise MismatchError(message)
        if kind not in self._reported and self._rank == 0:  # all ranks detect the same
            notice(message)
        self._reported.add(kind)


def _holders(
    model: nn.Module | None, parameters: Mapping[str, Parameter]
) -> list[tuple[str, Mapping[str, Parameter | None], str]]:
    """(name, the dictionary of the module that holds it, its name there) of every parameter."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [
        (names.pop(id(parameter)), module._parameters, leaf)
        for module in (() if model is None else model.modules())
        for leaf, parameter in module._parameters.items()
        if id(parameter) in names
    ]


def _odd(by_rank: Mapping[int, tuple[int, ...]]) -> str:
    """Text for the ranks with differing parameters: all except those of the majority, if there is one."""
    usual, times = Counter(by_rank.values()).most_common(1)[0]
    odd = [rank for rank, sums in by_rank.items() if sums != usual]
    return f"{_ranks(odd)} are not those of the others" if 2 * times > len(by_rank) else f"{_ranks([*by_rank])} differ"


def _held(by_rank: Mapping[int, tuple[int, ...]], place: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(checksum, ranks) of one tensor, that of most ranks first."""
    ranks: dict[int, list[int]] = {}
    for rank, sums in by_rank.items():
        ranks.setdefault(sums[place], []).append(rank)
    return tuple((f"{value:08x}", tuple(each)) for value, each in sorted(ranks.items(), key=lambda one: -len(one[1])))


def _first(name: str, held: Sequence[tuple[str, Sequence[int]]], agreed: int | None) -> str:
    """Checksums of the first differing tensor by rank, and the last step at which they were equal."""
    counts = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in held)
    since = "" if agreed is None else f"; it was the same everywhere at step {agreed}"
    return f'The checksum of "{name}" is {counts}{since}.'


def _flat(parameter: Tensor) -> Tensor:
    """The elements in memory order: (n,)."""
    values = parameter.detach()
    if values.is_contiguous() or dense_stride(values) != tuple(values.stride()):
        return values.reshape(-1)
    return values.as_strided((values.numel(),), (1,))


def _checksums(parts: Iterable[Tensor]) -> int:
    """Checksum of the concatenated parts; 0 without parts."""
    found = 0
    for part in parts:
        for chunk in bytes_of(part).split(CHUNK_BYTES):
            found = crc32(memoryview(chunk.cpu().numpy()), found)
    return found


def listed(names: Sequence[str]) -> str:
    """The first few of several names, in quotes."""
    more = len(names) - NAMED
    return ", ".join(f'"{name}"' for name in names[:NAMED]) + (f" and {more} more" if more > 0 else "")


# -- shapes, dtypes and devices ----------------------------------------------------------------------------------------


class ParameterForm(Extension):
    """Refuses parameters with another shape, dtype or device than when the session was opened."""

    order = 2

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._kept = [(name, each, each.dtype, each.device) for name, each in parameters.items()]

    def pass_began(self) -> None:
        """Raise LayoutError if the model was moved or cast, for example by model.double()."""
        for name, parameter, dtype, device in self._kept:
            if parameter.dtype is not dtype or parameter.device != device:
                raise LayoutError(
                    f'"{name}" was {dtype} on {device} at attach and is {parameter.dtype} on {parameter.device} now, '
                    "but its averaging buffers are not, so the ranks would silently diverge. Write model.to(...) "
                    "before gossamer.attach(model, optimizer); during a run call session.close() first, and attach "
                    "again."
                )

    def refuse_unnamed(self, names: Collection[str], parameters: Mapping[str, Parameter]) -> None:
        """Raise unless `names`, passed to reset_compressor_state, include all parameters with a changed shape."""
        if unknown := [name for name in names if not isinstance(name, str) or name not in parameters]:
            raise AttachError(
                f"the model has no trainable parameters {unknown}. Names are those of model.named_parameters(), each "
                "an argument of its own: session.reset_compressor_state('head.weight', 'head.bias')."
            )
        changed = [name for name, p in parameters.items() if name not in names and p.shape != self._shapes.get(name)]
        if changed:
            raise LayoutError(
                f"{changed} have changed shapes as well. Name them in the same call: "
                "session.reset_compressor_state('a', 'b')."
            )
