"""Training check: finds a loop that trained another model, found no batch, or goes on for as long as it likes."""

from __future__ import annotations

from gossamer.algorithms.strategies.federated import FederatedStrategy, LocalWork
from gossamer.errors import LoopError
from gossamer.events import notice
from gossamer.federated.client.functions import Round


class TrainingCheck:
    """Of one process, which notices each thing once, however many devices and rounds it trains."""

    def __init__(self, strategy: FederatedStrategy) -> None:
        self._strategy = strategy
        self._noticed: set[str] = set()

    def samples(self, told: Round, work: LocalWork, touched: bool) -> int:
        """The samples that count: none of a device that has no batch to train on.

        touched: whether the model is another than it was given, or has gradients. Raises LoopError where it is not, and
        its device says that it trained.
        """
        if not work.samples:
            return 0
        if work.steps or touched:
            self._check_length(told, work)
            return work.samples
        if told.batches_given == 0:
            self._notice(
                "no batch",
                f"Client {told.client} has {work.samples} samples and no batch to train on in round {told.index}: its "
                "loader is empty, or was used up by a round before. Such devices do not count. Give round.batches() a "
                "DataLoader or a list, and leave drop_last off.",
            )
            return 0
        raise LoopError(
            f"Client {told.client} says that it trained on {work.samples} samples in round {told.index}, and the model "
            "that it was given is as it was, so nothing would be learned of them. Train that model, and no copy or "
            "other network: torch.optim.SGD(model.parameters(), lr=0.1). Of a device that has nothing to train on, "
            "return Update(samples=0)."
        )

    def _check_length(self, told: Round, work: LocalWork) -> None:
        """Notice a function that cannot know how long the recipe wants it to train."""
        strategy = self._strategy
        name = "local_steps" if strategy.local_steps is not None else "local_epochs"
        length = getattr(strategy, name)
        if length is None or told.batches_given is not None or work.steps == strategy.local_steps:
            return
        self._notice(
            "length",
            f"The recipe says {name}={length}, and the client function never called round.batches(), so devices train "
            f"for as long as it likes. Write `for batch in round.batches(loader):`, or leave {name} out of the recipe. "
            f"(A function that goes by round.{name} itself is right as it is.)",
        )

    def _notice(self, about: str, text: str) -> None:
        if about not in self._noticed:
            self._noticed.add(about)
            notice(text)
