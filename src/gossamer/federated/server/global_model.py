"""Global model: the parameters of a federation, what devices can pull of them, and the step to the next version."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.strategies.federated import CohortSummary, FederatedStrategy
from gossamer.base.kernels import all_finite
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import Payload, payload_bytes
from gossamer.base.peer_ops import Pulled, Stamp
from gossamer.errors import NotFinite
from gossamer.federated.client.contribution import contribution_context
from gossamer.federated.model_state import ModelState
from gossamer.train.parameter_server import shard_message
from gossamer.train.parameter_server.delta_chain import DeltaChain, PublicParameters, Snapshot


@dataclass(frozen=True)
class ContributionSize:
    """What is sent of one contribution."""

    nbytes: int
    empty: int  # tensors without elements


class GlobalModel:
    """Parameters (n,) of `version`, the strategy's memory, and what is published of both.

    lineage: names the past that versions come from, drawn where they begin anew. A device that holds a version of
    another one begins anew as well, since its number says nothing here.
    """

    def __init__(
        self,
        strategy: FederatedStrategy,
        compressor: Compressor,
        pull: Compressor | None,
        state: ModelState,
        parameters: Tensor,
        seed: int = 0,
    ) -> None:
        """parameters: (n,), copied. pull: complete for every shape, or None."""
        self.strategy, self.state, self.seed = strategy, state, seed
        self._tensors, self._shared_keys = strategy.contribution_count, strategy.shared_keys
        self.compressor = compressor
        self.begin_anew()
        self._sizes: dict[int, ContributionSize] = {}  # by round
        self.parameters = parameters.to(state.dtype, copy=True)
        self.memory = strategy.server_memory(self.parameters)
        self.version = 0
        blocks = self._public_blocks()
        self.public: PublicParameters = Snapshot(blocks) if pull is None else DeltaChain(pull, blocks, seed)

    def begin_anew(self) -> None:
        """What devices have of versions so far is of another past."""
        self.lineage = secrets.token_hex(8)

    def pulled_since(self, known: int) -> Pulled:
        """What brings a device from the version `known` to this one; -1: it has none."""
        return self.public.pulled_since(known)

    def decode(self, stamp: Stamp, payload: Payload, counts: Sequence[int]) -> tuple[Tensor, ...]:
        """A contribution's tensors: (n,) each, fresh and finite. Raises MalformedError."""
        at = contribution_context(self.seed, stamp.worker, stamp.step)
        like = [FlatTensors(self.parameters, self.state.layout)] * self._tensors
        return shard_message.decode(self.compressor, payload, counts, like, at)

    def contribution_size(self, index: int) -> ContributionSize:
        """What the compressor sends of a contribution in a round: shapes depend on the layout only."""
        if index not in self._sizes:
            if len(self._sizes) >= 64:
                self._sizes.clear()
            at = contribution_context(self.seed, 0, index)
            block = FlatTensors(self.parameters.to("meta"), self.state.layout)
            blocks = [block] * self._tensors
            states = shard_message.initial_states(self.compressor, blocks, at)
            sent = shard_message.encode(self.compressor, blocks, states, [at] * len(blocks)).payload
            self._sizes[index] = ContributionSize(payload_bytes(sent), sum(not tensor.numel() for tensor in sent))
        return self._sizes[index]

    def identity(self) -> dict[str, Any]:
        """What all servers and devices of a federation have alike."""
        return {
            "model": self.state.fingerprint,
            "recipe": f"{self.strategy!r} + {self.compressor!r}",
            "seed": self.seed,
        }

    def apply(self, means: Sequence[Tensor], cohort: CohortSummary) -> int:
        """Make and publish the next version; returns its number. Averaged buffers are averaged, whatever a strategy
        makes of parameters: an optimizer would make variances negative.

        Raises NotFinite, and stays at this version, where a number of the next one would leave its range."""
        trained, parameters = self.state.trained, self.parameters.clone()
        memory = {key: each.clone() for key, each in self.memory.items()}
        self.strategy.apply(parameters, memory, means, cohort)
        parameters[trained:] = self.parameters[trained:] - means[0][trained:]
        if not all(map(all_finite, (*means, parameters, *memory.values()))):
            raise NotFinite("what devices sent, or what the server makes of it, left the range of its numbers")
        self.parameters, self.memory = parameters, memory
        self.version += 1
        self.public.publish(self.version, self._public_blocks())
        return self.version

    def _public_blocks(self) -> list[FlatTensors]:
        shared = [self.memory[key] for key in self._shared_keys]
        return [FlatTensors(flat, self.state.layout) for flat in (self.parameters, *shared)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "memory": dict(self.memory),
            "public": self.public.state_dict(),
            "lineage": self.lineage,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parameters.copy_(state["parameters"])
        self.memory = dict(state["memory"])
        self.public.load_state_dict(state["public"])
        self.version = self.public.version
        self.lineage = state.get("lineage", "")
