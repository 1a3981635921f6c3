"""Deduplication: past answers, so that a repeated contribution gets the same answer and is never applied twice."""

from __future__ import annotations

from gossamer.base.peer_ops import Stamp

REMEMBERED = 64  # answers kept per worker
REMEMBERED_OF_LOST = 4  # of a lost worker, which has at most one unanswered contribution
LATE = -1  # the version of a contribution that arrived too late to be applied


class AnswerLog:
    """(worker, step) -> version. A worker's steps ascend: a step up to its last one was answered before."""

    def __init__(self) -> None:
        self._answers: dict[int, dict[int, int]] = {}

    def last_step(self, worker: int) -> int:
        """The last answered step; -1 without one."""
        return max(self._answers.get(worker, {}), default=-1)

    @property
    def next_step(self) -> int:
        """The step after the last one of all workers."""
        return max(map(self.last_step, self._answers), default=-1) + 1

    def version_of(self, stamp: Stamp) -> int | None:
        """The version in the earlier answer; None for a new contribution.

        A contribution so old that its answer was dropped is late: no worker waits for it.
        """
        if stamp.step > self.last_step(stamp.worker):
            return None
        return self._answers[stamp.worker].get(stamp.step, LATE)

    def record(self, stamp: Stamp, version: int) -> None:
        answers = self._answers.setdefault(stamp.worker, {})
        answers[stamp.step] = version
        if len(answers) > REMEMBERED:
            del answers[min(answers)]

    def shorten(self, worker: int) -> None:
        """Keep the newest answers only: of a worker that may not return, but whose contributions may be repeated."""
        answers = self._answers.get(worker, {})
        self._answers[worker] = {step: answers[step] for step in sorted(answers)[-REMEMBERED_OF_LOST:]}

    def state_dict(self) -> dict[int, list[tuple[int, int]]]:
        return {worker: list(answers.items()) for worker, answers in self._answers.items()}

    def load_state_dict(self, state: dict[int, list[tuple[int, int]]]) -> None:
        self._answers = {worker: dict(answers) for worker, answers in state.items()}
