"""Round config: a round's values by its index, and what devices could not be sent is refused."""

from __future__ import annotations

import pytest
import torch

from gossamer.federated.federation import config_by_round


def test_it_is_the_same_or_goes_by_the_index() -> None:
    assert config_by_round(None)(3) == {}
    assert config_by_round({"rate": 0.5, "warm": True, "name": "a", "none": None})(3)["rate"] == 0.5
    assert config_by_round(lambda index: {"rate": 0.5**index})(3) == {"rate": 0.125}


def test_what_devices_could_not_be_sent_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'rate' is tensor\(1\.\).* write float"):
        config_by_round({"rate": torch.tensor(1.0)})  # type: ignore[dict-item]
    tells = config_by_round(lambda index: {"rate": [index]})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="'rate' is"):
        tells(0)
