"""Every public name of Horovod for TensorFlow and Keras exists, or raises an error that names the alternative."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

from support.horovod_names import REFUSED, TENSORFLOW, missing

from gossamer.horovod.alias import _module


@pytest.mark.parametrize("module", TENSORFLOW)
def test_every_name_of_horovod_for_tensorflow_exists(module: str) -> None:
    refused = REFUSED.get(module, set())
    assert missing(_module(module), TENSORFLOW[module] - refused) == set()
    for name in refused:
        with pytest.raises(AttributeError, match=r"is not available: \w+"):
            getattr(_module(module), name)


@pytest.mark.parametrize("module", ["horovod.tensorflow.data", "horovod.tensorflow.gradient_aggregation"])
def test_modules_for_tensorflow_that_are_not_available_name_the_alternative(module: str) -> None:
    with pytest.raises(ImportError, match=r"is not available: \w+"):
        _module(module)
