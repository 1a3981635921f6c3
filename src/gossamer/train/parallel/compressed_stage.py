"""Compressed stage: a pipeline stage's module that decodes its inputs and encodes its outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gossamer.base.layout import accumulation_dtype
from gossamer.errors import CheckpointError, LayoutError, LoopError, MalformedError
from gossamer.train.parallel.carrier import REMEMBERED, MessageFormat
from gossamer.train.parallel.pipeline_boundary import Boundary


class BoundaryEnd(nn.Module):
    """One side of a boundary: encodes messages to the other side, and decodes its messages."""

    def __init__(self, boundary: Boundary) -> None:
        super().__init__()
        self.boundary, self.sent = boundary, 0
        self.memory: SampleMemory | None = None
        if boundary.feedback is not None:
            self.memory = SampleMemory(boundary.samples, boundary.shape[1:], boundary.dtype)

    def send_activation(self, x: Tensor, samples: Tensor | None, training: bool) -> Tensor:
        """Encode x: (microbatch, ...). training: both sides store it in their sample memory."""
        edge, flat, memory, ids = self.boundary, self._checked(x), self.memory, self._ids(samples)
        if memory is None or ids is None:
            if memory is not None and training:
                raise LoopError(
                    "this boundary sends differences to each sample's previous activations, but the sample ids are "
                    "missing. Write schedule.step(..., samples=ids) on every rank, ids: (batch,) int64."
                )
            return self._pack(edge.activation, flat.to(edge.activation.dtype))[0]
        known = memory.recall(ids, x.device)
        carrier, difference = self._pack(edge.activation, flat - known, memory.fingerprint(ids), training)
        if training and difference is not None:
            memory.remember(ids, known.add_(difference).view(x.shape))
        return carrier

    def receive_activation(self, carrier: Tensor, samples: Tensor | None) -> Tensor:
        """Decode activations: (microbatch, ...); NaN if the sender's values were not finite."""
        header, numbers = self.boundary.format.unpack(self.boundary.activation, carrier)
        if numbers is not None and header.base:
            memory, ids = self.memory, self._ids(samples)
            if memory is None or ids is None or memory.fingerprint(ids) != header.base:
                raise LoopError(
                    "received a difference to activations that this side does not have: its sample ids differ from the "
                    "sender's, or it has received other messages. Pass schedule.step(..., samples=ids) the same ids "
                    "on every rank, and load all stages from checkpoints of one step."
                )
            numbers = memory.recall(ids, carrier.device).add_(numbers)
            if header.flags & REMEMBERED:
                memory.remember(ids, numbers.view(self.boundary.shape))
        return self._shaped(numbers, carrier)

    def send_gradient(self, gradient: Tensor) -> Tensor:
        return self._pack(self.boundary.gradient, self._checked(gradient))[0]

    def receive_gradient(self, carrier: Tensor) -> Tensor:
        """Decode a gradient; zeros if the next stage had no gradient, for which torch sends zeros."""
        if not carrier.view(torch.int32).any():
            return self._shaped(carrier.new_zeros(self.boundary.layout.numel), carrier)
        return self._shaped(self.boundary.format.unpack(self.boundary.gradient, carrier)[1], carrier)

    def _pack(
        self, form: MessageFormat, flat: Tensor, base: int = 0, remembered: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        self.sent += 1
        return self.boundary.format.pack(form, flat, self.sent, base, remembered)

    def _ids(self, samples: Tensor | None) -> Tensor | None:
        if self.memory is None or samples is None:
            return None
        return self.memory.checked(samples, self.boundary.shape[0])

    def _shaped(self, numbers: Tensor | None, carrier: Tensor) -> Tensor:
        shape, dtype = self.boundary.shape, self.boundary.dtype
        if numbers is None:
            return torch.full(shape, torch.nan, dtype=dtype, device=carrier.device)
        return numbers.to(dtype).view(shape)

    def _checked(self, x: Tensor) -> Tensor:
        """Check x, and flatten it: (n,)."""
        shape, dtype = self.boundary.shape, self.boundary.dtype
        if x.shape != shape or x.dtype != dtype:
            raise LayoutError(
                f"a stage returned {tuple(x.shape)} of {x.dtype} at a boundary of {shape} of {dtype}, but all messages "
                f"have one size. Write boundary(..., shape={tuple(x.shape)}, dtype={x.dtype}), and drop a smaller last "
                "batch (drop_last=True)."
            )
        return x.detach().contiguous().view(-1)

    def get_extra_state(self) -> dict[str, Tensor]:
        """Number of messages sent and, with feedback, the sample memory."""
        memory = {} if self.memory is None else self.memory.state_dict()
        return {"sent": torch.tensor(self.sent), **memory}

    def set_extra_state(self, state: Mapping[str, Tensor]) -> None:
        if self.memory is not None:
            self.memory.load_state_dict(state)
        self.sent = int(state["sent"])


class CompressedStage(nn.Module):
    """A stage's module between two boundaries: decode, module, encode.

    The backward pass decodes the gradient of the output and encodes the gradient of the input. Encoding counts as the
    identity in gradients (straight-through).

    Args:
        module: the stage.
        before, after: its boundaries; None before the first stage and after the last one.

    Example:
        >>> edge = gossamer.parallel.boundary("Int8()", shape=(4, 1))
        >>> stage = gossamer.parallel.CompressedStage(model, before=None, after=edge)
        >>> carrier = stage(batch)
    """

    def __init__(self, module: nn.Module, *, before: Boundary | None, after: Boundary | None) -> None:
        super().__init__()
        self.module = module
        self.before = None if before is None else BoundaryEnd(before)
        self.after = None if after is None else BoundaryEnd(after)

    def forward(self, *inputs: Any, samples: Tensor | None = None, **options: Any) -> Any:
        """Run the stage. samples: (microbatch,) int64, ids of the samples; other arguments are the module's."""
        training = torch.is_grad_enabled()
        if self.before is not None:
            if len(inputs) != 1:
                raise MalformedError(
                    f"one carrier crosses a boundary, but the previous stage sent {len(inputs)} tensors. Return one "
                    "tensor from each stage, and pass others to schedule.step(...) by name."
                )
            inputs = (_Receive.apply(inputs[0], self.before, samples),)  # type: ignore[no-untyped-call]
        output = self.module(*inputs, **options)
        if self.after is None:
            return output
        if not isinstance(output, Tensor):
            raise LayoutError(
                f"a stage returned a {type(output).__name__}, but one tensor crosses a boundary. Return one tensor, "
                "such as torch.cat of several."
            )
        return _Send.apply(output, self.after, samples, training)  # type: ignore[no-untyped-call]


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, end: BoundaryEnd, samples: Tensor | None, training: bool) -> Tensor:
        ctx.end = end
        return end.send_activation(x, samples, training)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, carrier: Tensor) -> Any:
        return ctx.end.receive_gradient(carrier), None, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, end: BoundaryEnd, samples: Tensor | None) -> Tensor:
        ctx.end = end
        return end.receive_activation(carrier, samples)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.end.send_gradient(gradient), None, None


# -- memory of samples -------------------------------------------------------------------------------------------------


class SampleMemory:
    """known: (samples, *shape) in host memory, zero until a sample's first visit; visits: (samples,) int64."""

    def __init__(self, samples: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.known = torch.zeros((samples, *shape), dtype=dtype)
        self.visits = torch.zeros(samples, dtype=torch.int64)

    def checked(self, samples: Tensor, due: int) -> Tensor:
        """The ids of a microbatch's samples: (due,) int64 in host memory. Raises LoopError."""
        ids = samples.detach().to("cpu", torch.int64)
        lowest, highest = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if ids.shape != (due,):
            raise LoopError(
                f"a microbatch of {due} samples has ids of shape {tuple(ids.shape)}, but each sample's previous "
                "activations are found by its id. Pass schedule.step(..., samples=ids) one int64 id per sample."
            )
        if lowest < 0 or highest >= len(self.visits):
            raise LoopError(
                f"sample ids {lowest} to {highest} are outside of the boundary's memory of samples 0 to "
                f"{len(self.visits) - 1}. Write boundary(..., samples={max(highest, 0) + 1}), or number samples from 0."
            )
        if len(ids.unique()) < due:
            raise LoopError(
                "a sample occurs twice in a microbatch, but only one of its activations can be stored. Draw "
                "samples without replacement."
            )
        return ids

    def recall(self, ids: Tensor, device: torch.device) -> Tensor:
        """Known activations of these samples: (n,), at least in float32."""
        return self.known[ids].to(device, accumulation_dtype(self.known.dtype)).view(-1)

    def remember(self, ids: Tensor, values: Tensor) -> None:
        """Store values: (len(ids), *shape)."""
        self.known[ids] = values.to(self.known)
        self.visits[ids] += 1

    def fingerprint(self, ids: Tensor) -> int:
        """A hash of ids and visits, never 0; equal on both sides if they have processed the same messages."""
        text = torch.stack([ids, self.visits[ids]]).numpy().tobytes()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big") + 1

    def state_dict(self) -> dict[str, Tensor]:
        return {"known": self.known, "visits": self.visits}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state. Raises CheckpointError for other samples or shapes."""
        for name, mine in self.state_dict().items():
            if name not in state or state[name].shape != mine.shape:
                came = tuple(state[name].shape) if name in state else "nothing"
                raise CheckpointError(
                    f"this boundary's memory {name!r} is {tuple(mine.shape)}, but that of the checkpoint is {came}: "
                    "data or model differ. Pass boundary(...) the shape and samples that it was saved with."
                )
            mine.copy_(state[name])
