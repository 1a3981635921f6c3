"""The alias: `import horovod` in a process that installed it, and in no other."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
from support.horovod_names import REFUSED_MODULES, TORCH, missing
from support.processes import of_this_checkout

from gossamer.horovod.alias import HorovodFinder, _module

IMPORTS = """
from gossamer.horovod.alias import install
install(); install()
import sys, horovod, horovod.torch as hvd, gossamer.horovod, gossamer.horovod.torch
assert horovod is gossamer.horovod and hvd is gossamer.horovod.torch, (horovod, hvd)
assert horovod.__version__ and gossamer.horovod.__spec__.name == "gossamer.horovod"
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import rank, HorovodInternalError as same
from horovod.torch.compression import Compression
from horovod.torch.elastic import TorchState
from horovod.torch.elastic.state import TorchState as of_part
import horovod.torch.elastic.sampler
assert of_part is TorchState and horovod.torch.elastic.sampler.ElasticSampler is hvd.elastic.ElasticSampler
from horovod.common.util import gloo_built
from horovod.common.elastic import State
assert HorovodInternalError is same and hvd.elastic.TorchState is TorchState and issubclass(TorchState, State)
for name in ("horovod.mxnet", "horovod.spark.keras", "horovod.ray", "horovod.nothing"):
    try:
        __import__(name)
    except ImportError as error:
        assert "is not available" in str(error), error
    else:
        raise AssertionError(name)
import os
assert (os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]) == ("0", "1")
"""


@pytest.mark.processes
def test_horovods_modules_are_found_by_their_names() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, env=of_this_checkout())


def test_it_finds_nothing_else_and_is_not_installed_by_an_import() -> None:
    finder = HorovodFinder()
    assert finder.find_spec("horovodish", None) is None
    assert not any(isinstance(each, HorovodFinder) for each in sys.meta_path)
    assert find_spec("horovod.torch.ops") is None or "gossamer" not in str(find_spec("horovod.torch.ops"))


@pytest.mark.parametrize(
    ("name", "about"), [("mxnet", "retired"), ("ray", "integrations.ray"), ("run", "gossamer run")]
)
def test_missing_modules_name_the_alternative(name: str, about: str) -> None:
    with pytest.raises(ImportError, match=about):
        _module(f"horovod.{name}")
    import gossamer.horovod

    with pytest.raises(AttributeError, match=about):
        getattr(gossamer.horovod, name)


@pytest.mark.parametrize("module", TORCH)
def test_every_name_of_horovod_for_torch_exists(module: str) -> None:
    assert missing(_module(module), TORCH[module]) == set()


@pytest.mark.parametrize("module", REFUSED_MODULES)
def test_modules_that_are_not_available_name_the_alternative(module: str) -> None:
    with pytest.raises(ImportError, match=r"is not available: \w+"):
        _module(module)
