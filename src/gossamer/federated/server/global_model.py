"""Global model: the parameters of a federation, their published form, and the step to the next version."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.strategies.federated_rules import CohortSummary, FederatedStrategy
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
    """Size of one encoded contribution."""

    nbytes: int
    empty: int  # tensors without elements


class GlobalModel:
    """Parameters (n,) of `version`, the strategy's memory, and the published form of both.

    `lineage` is a random name of this sequence of versions. A device with a version of another lineage resets its
    state, since its version number is meaningless here.

    Args:
        strategy: the federated strategy.
        compressor: of the contributions.
        pull: compressor of the published versions, which must be complete for every shape, or None.
        state: of the model.
        parameters: (n,), copied.
        seed: of the federation.
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
        self.strategy, self.state, self.seed = strategy, state, seed
        self._tensors, self._shared_keys = strategy.contribution_count, strategy.shared_keys
        self.compressor = compressor
        self.start_over()
        self._sizes: dict[int, ContributionSize] = {}  # by round
        self.parameters = parameters.to(state.dtype, copy=True)
        self.memory = strategy.server_memory(self.parameters)
        self.version = 0
        blocks = self._public_blocks()
        self.public: PublicParameters = Snapshot(blocks) if pull is None else DeltaChain(pull, blocks, seed)

    def start_over(self) -> None:
        """Start a new lineage: versions that devices hold are not of this one."""
        self.lineage = secrets.token_hex(8)

    def pulled_since(self, known: int) -> Pulled:
        """The update from version `known` to this one; known=-1: the device has no version."""
        return self.public.pulled_since(known)

    def decode(self, stamp: Stamp, payload: Payload, counts: Sequence[int]) -> tuple[Tensor, ...]:
        """A contribution's tensors: (n,) each, fresh and finite. Raises MalformedError."""
        at = contribution_context(self.seed, stamp.worker, stamp.step)
        like = [FlatTensors(self.parameters, self.state.layout)] * self._tensors
        return shard_message.decode(self.compressor, payload, counts, like, at)

    def contribution_size(self, index: int) -> ContributionSize:
        """Size of a contribution in a round, which depends on the layout only."""
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
        """Properties that the server and all devices of a federation share."""
        return {
            "model": self.state.fingerprint,
            "recipe": f"{self.strategy!r} + {self.compressor!r}",
            "seed": self.seed,
        }

    def apply(self, means: Sequence[Tensor], cohort: CohortSummary) -> int:
        """Make and publish the next version.

        Buffers (such as batch-norm statistics) are always averaged, since a server optimizer could make variances
        negative.

        Returns:
            The number of the version.

        Raises:
            NotFinite: a value would not be finite; the model stays at its version.
        """
        trained, parameters = self.state.trained, self.parameters.clone()
        memory = {key: each.clone() for key, each in self.memory.items()}
        self.strategy.apply(parameters, memory, means, cohort)
        parameters[trained:] = self.parameters[trained:] - means[0][trained:]
        if not all(map(all_finite, (*means, parameters, *memory.values()))):
            raise NotFinite("a contribution, or the server's step with it, left the range of finite numbers")
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
