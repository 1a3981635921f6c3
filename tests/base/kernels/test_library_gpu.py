"""Which kernels serve tensors of a GPU: Triton's, or plain torch with a notice that says why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from gossamer.base import kernels
from gossamer.base.kernels import library

CUDA = torch.device("cuda", 0)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Begin anew with variables as given."""

    def forget() -> None:
        library.wanted_kernels.cache_clear()
        library._module.cache_clear()

    def chosen(**variables: str) -> None:
        forget()
        for name in ("GOSSAMER_KERNELS", "TRITON_INTERPRET"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    yield chosen
    monkeypatch.undo()
    forget()


def test_tensors_of_processors_go_to_compiled_loops(choose: Callable[..., None]) -> None:
    choose(TRITON_INTERPRET="1")
    assert library.gpu((torch.ones(3), 4.0), {}) is None


def test_the_interpreter_serves_processors_where_it_is_asked_to(
    choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("gossamer.base.kernels.triton")
    asked: list[float] = []
    monkeypatch.setattr(triton, "within_range", lambda x, terms: asked.append(terms) or True)
    choose(GOSSAMER_KERNELS="triton", TRITON_INTERPRET="1")
    assert kernels.within_range(torch.ones(3), 4.0)
    assert kernels.within_range(x=torch.ones(3), terms=5.0)
    assert asked == [4.0, 5.0]
    kernels.within_range(torch.ones(3, device="meta"), 6.0)  # a price is plain torch's
    assert asked == [4.0, 5.0]


def test_processors_without_the_interpreter_are_refused(choose: Callable[..., None]) -> None:
    choose(GOSSAMER_KERNELS="triton")
    with pytest.raises(library.KernelsError, match="TRITON_INTERPRET=1"):
        kernels.within_range(torch.ones(3), 4.0)


@pytest.mark.parametrize("wish", ["native", "reference"])
def test_other_kernels_asked_for_by_name_keep_triton_out(choose: Callable[..., None], wish: str) -> None:
    choose(GOSSAMER_KERNELS=wish, TRITON_INTERPRET="1")
    assert library._module(CUDA) is None


def test_a_gpu_without_triton_is_served_by_plain_torch_with_one_notice(
    choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(TRITON_INTERPRET="1")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(UserWarning, match=r"pip install 'gossamer\[gpu\]'"):
        assert library._module(CUDA) is None
    assert library._module(CUDA) is None  # a second notice would be an error here


def test_a_gpu_that_is_too_old_is_served_by_plain_torch_with_one_notice(
    choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    with pytest.warns(UserWarning, match=r"capability 7\.0, and this GPU has 6\.1"):
        assert library._module(CUDA) is None


def test_every_kernel_of_triton_has_a_public_name() -> None:
    triton = pytest.importorskip("gossamer.base.kernels.triton")
    assert set(triton.__all__) <= set(kernels.__all__)


def test_kernels_start_on_the_device_of_their_tensors(
    choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("gossamer.base.kernels.triton")
    choose(TRITON_INTERPRET="1")
    second, current = torch.device("cuda", 1), [torch.device("cuda", 0)]

    @contextmanager
    def become(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", become)
    monkeypatch.setattr(library, "gpu", lambda arguments, named: second)
    monkeypatch.setattr(triton, "within_range", lambda x, terms: current[0] == second)
    assert kernels.within_range(torch.ones(3), 4.0)
