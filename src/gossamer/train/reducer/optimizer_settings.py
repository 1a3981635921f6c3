"""Optimizer settings: hyperparameters as text, compared between ranks, which must have the same in every step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from gossamer.errors import MismatchError
from gossamer.events import notice


def by_value(values: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value!r} on rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}" for value, who in ranks.items()
    )


def settings(optimizer: Optimizer) -> str:
    """The optimizer's hyperparameters as text, group by group: learning rates, momenta, decays."""
    groups = [
        {key: value for key, value in group.items() if isinstance(value, (bool, int, float, tuple, Tensor))}
        for group in optimizer.param_groups
    ]
    return "; ".join(
        ", ".join(f"{key}={float(value) if isinstance(value, Tensor) else value!r}" for key, value in group.items())
        for group in groups
    )


def with_weights(settings: str, *, said: bool) -> str:
    """The same, and whether the loop says how much its batches count, which is compared along."""
    return f"{settings}\nsession.set_batch_weight(...) was {'' if said else 'not '}called"


def refuse_newcomers(texts: Sequence[str], joined: Sequence[bool], active: Sequence[int], rank: int) -> None:
    """Raise MismatchError where the members that began a run differ; else on the newcomers alone that differ from them.

    texts: of `with_weights`, by rank. joined: whether a rank came later. active: the ranks that train. rank: this one.
    """
    began = [each for each in active if not joined[each]] or list(active[:1])
    if len({texts[each] for each in began}) > 1:
        compare_settings(texts)
    odd = [each for each in active if texts[each] != texts[began[0]]]
    if rank in odd:
        compare_settings([texts[began[0]] if each not in odd else texts[each] for each in range(len(texts))])
    if odd and rank == began[0]:
        notice(
            f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} joined this run with other settings of the "
            f"optimizer and must not go on: {by_value([text.rsplit(chr(10), 1)[0] for text in texts])}. The others do"
        )


def compare_settings(texts: Sequence[str]) -> None:
    """Raise MismatchError for the texts of `with_weights` by rank, which differ."""
    settings, weights = zip(*(text.rsplit("\n", 1) for text in texts), strict=True)
    if len({*weights}) > 1:
        raise MismatchError(
            "a rank's batch counts for one until its weight is said, so beside numbers of samples it would count for "
            f"nearly nothing: {by_value(weights)}. Write session.set_batch_weight(len(batch)) before backward() on "
            "every rank, or on none."
        )
    raise MismatchError(
        "the ranks would take different steps from the same gradient, so their parameters would drift apart: the "
        f"optimizer's settings are {by_value(settings)}. Step learning-rate schedulers equally often on every rank; "
        "where ranks have different numbers of batches, once an epoch instead of once a batch. In an elastic run, "
        "track them, or a newcomer's begin anew: session.track(scheduler=scheduler)."
    )
