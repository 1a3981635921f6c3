"""Round config: what the user tells all devices of a round: the same in every round, or by the round's index."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gossamer.errors import require
from gossamer.federated.messages import Scalar

Config = Mapping[str, Scalar]
RoundConfig = Config | Callable[[int], Config]


def config_by_round(config: RoundConfig | None) -> Callable[[int], dict[str, Scalar]]:
    """Tells a round's by its index, from 0. Raises ValueError for what cannot travel."""
    if callable(config):
        return lambda index: _checked(config(index))
    same = _checked(config or {})
    return lambda index: same


def _checked(config: Config) -> dict[str, Scalar]:
    for key, value in config.items():
        require(
            isinstance(key, str) and (value is None or type(value) in (bool, int, float, str)),
            f"a round's config has numbers, booleans and texts by name, and {key!r} is {value!r}, which devices could "
            f"not be sent: write float(...) or str(...) of it",
        )
    return dict(config)
