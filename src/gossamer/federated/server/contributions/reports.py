"""Reports: those that are a part of a version, and the answers that their devices hear."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gossamer.base.peer_ops import Answer, Ask, Pull, Pulled, Receipt, Reply, Stamp
from gossamer.federated.messages import NOT_COUNTED, Fate, Report, Task, encode
from gossamer.federated.server.roster import MOST_ASKS

LONGEST_REFUSAL = 500  # characters


@dataclass
class Reported:
    """A report that was added, and the asks that wait to hear its fate."""

    report: Report
    stamp: Stamp
    moment: float
    tokens: list[int] = field(default_factory=list)

    def hold(self, token: int) -> None:
        self.tokens.append(token)
        del self.tokens[:-MOST_ASKS]


@dataclass(frozen=True)
class Committed:
    """A version that was made, for the record."""

    version: int
    moment: float
    reports: Mapping[int, Report]  # by client
    refused: Mapping[int, str] = field(default_factory=dict)  # why, by client, since the version before
    staleness: Mapping[int, int] = field(default_factory=dict)  # versions made since it began, by client
    epsilon: float | None = None  # what all versions so far tell of any one device; None: without privacy


def told(done: Mapping[int, Reported], version: int) -> Iterator[Reply]:
    """Receipts for all who wait to hear what became of their reports."""
    for each in done.values():
        for token in each.tokens:
            yield Reply(token=token, answer=Receipt(version=version, about=encode(Fate())))


def refusal(op: Ask, why: str, lineage: str = "") -> Answer:
    """The answer to what is not done, of the kind that its asker waits for. lineage: of this server's versions."""
    if isinstance(op, Pull):
        task = Task(round=0, version=0, refused=why[:LONGEST_REFUSAL], lineage=lineage)
        return Pulled(version=-1, about=encode(task))
    return Receipt(version=NOT_COUNTED, about=encode(Fate(refused=why[:LONGEST_REFUSAL])))


def printable(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(each if each.isprintable() else " " for each in text)
