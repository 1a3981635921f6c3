"""Kernel selection: compiled loops, plain torch, or neither, with a reason."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.paths import ROOT

from gossamer.base import kernels
from gossamer.base.kernels import Residual, library
from gossamer.base.kernels import checks as native_finite
from gossamer.base.kernels import quantize as native_half
from gossamer.base.kernels import select as native_select
from gossamer.base.kernels.reference import finite, half, index_coding, select

PAIRS = [
    (native_select.largest, select.largest),
    (native_select.largest_with_momentum, select.largest_with_momentum),
    (native_select.above, select.above),
    (native_select.encode_places, index_coding.encode_places),
    (native_select.decode_places, index_coding.decode_places),
    (native_select.sparse_decode, index_coding.sparse_decode),
    (native_select.scatter, index_coding.scatter),
    (native_half.half_encode, half.half_encode),
    (native_half.half_decode, half.half_decode),
    (native_finite.within_range, finite.within_range),
]
built = pytest.mark.skipif(not library.LIBRARY.exists(), reason="the compiled loops were not built")


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], None]]:
    """Begin anew with GOSSAMER_KERNELS as given."""

    def forget() -> None:
        library.wanted_kernels.cache_clear()
        library.library.cache_clear()

    def chosen(name: str | None) -> None:
        forget()
        monkeypatch.delenv("GOSSAMER_KERNELS", raising=False)
        if name is not None:
            monkeypatch.setenv("GOSSAMER_KERNELS", name)

    yield chosen
    monkeypatch.undo()
    forget()


@built
@pytest.mark.parametrize("name", [None, "", "native"])
def test_compiled_loops_serve_where_they_can(choose: Callable[[str | None], None], name: str | None) -> None:
    choose(name)
    assert library.serves(torch.zeros(3), torch.zeros(3, dtype=torch.int8))
    assert library.serves(torch.zeros(9)[1:])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(6)[::2],
        torch.zeros(3, device="meta"),
        torch.zeros(3).to_sparse(),
    ],
    ids=["float64", "bfloat16", "strided", "meta", "sparse"],
)
def test_plain_torch_serves_the_rest(tensor: torch.Tensor) -> None:
    assert not library.serves(torch.zeros(3), tensor)


def test_plain_torch_can_be_asked_for(choose: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch) -> None:
    choose("reference")
    monkeypatch.setattr(library, "LIBRARY", ROOT / "nowhere.so")  # which nobody looks for
    assert not library.serves(torch.zeros(3))
    assert kernels.largest(torch.arange(5.0), [5], [2])[0].tolist() == [3, 4]


def test_other_names_are_refused(choose: Callable[[str | None], None]) -> None:
    choose("fast")
    for x in (torch.arange(5.0), torch.arange(5.0, device="meta")):
        with pytest.raises(library.KernelsError, match="must be native, reference or triton"):
            kernels.largest(x, [5], [2])


def test_without_a_library_one_warning_and_the_same_result(
    choose: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(None)
    monkeypatch.setattr(library, "LIBRARY", ROOT / "nowhere.so")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(3):
            assert kernels.largest(torch.arange(5.0), [5], [2])[0].tolist() == [3, 4]
    assert len(heard) == 1
    assert "C++ compiler" in str(heard[0].message)


def test_a_missing_part_is_reported_with_the_line_to_write_and_then_warned_of_no_more(
    choose: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "LIBRARY", ROOT / "nowhere.so")
    choose(None)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert not library.are_built()
        told = library.missing_kernels()
        assert kernels.largest(torch.arange(5.0), [5], [2])[0].tolist() == [3, 4]
    assert heard == []
    assert told is not None
    assert told.startswith(
        "nowhere.so was not built when Gossamer was installed: encoding takes 10 to 130 times as long"
    )
    assert "C++ compiler" in told
    for name in ("reference", "triton"):
        choose(name)
        assert library.missing_kernels() is None


@built
def test_nothing_is_said_of_kernels_that_are_there(choose: Callable[[str | None], None]) -> None:
    choose(None)
    assert library.are_built()
    assert library.missing_kernels() is None


def test_without_a_library_a_wish_for_it_is_refused(
    choose: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose("native")
    monkeypatch.setattr(library, "LIBRARY", ROOT / "nowhere.so")
    with pytest.raises(library.KernelsError, match=r"pip install -e \."):
        kernels.largest(torch.arange(5.0), [5], [2])


@built
def test_a_library_of_other_sources_does_not_serve(
    choose: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(None)
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    with pytest.warns(UserWarning, match="other sources"):
        assert not library.serves(torch.zeros(3))
    choose("native")
    with pytest.raises(library.KernelsError, match="other sources"):
        library.serves(torch.zeros(3))


@pytest.mark.parametrize(("fast", "plain"), PAIRS, ids=lambda function: function.__module__.split(".")[-1])
def test_signatures_and_docstrings_are_those_of_plain_torch(fast: Any, plain: Any) -> None:
    assert getattr(kernels, plain.__name__) is fast
    assert inspect.signature(fast) == inspect.signature(plain)
    assert fast.__doc__ == plain.__doc__


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types_come_to_the_same(dtype: torch.dtype) -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    mine, due = (Residual(torch.ones(300, dtype=wide), torch.empty(300, dtype=wide)) for _ in range(2))
    for a, b in zip(kernels.largest(x, [300], [9], mine), select.largest(x, [300], [9], due), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert torch.equal(mine.after, due.after)


def test_shapes_are_known_without_data() -> None:
    found = kernels.largest(torch.empty(300, device="meta"), [100, 200], [3, 4])
    assert [tensor.shape for tensor in found] == [(7,), (7,)]
    assert kernels.encode_places(found[0], 300).shape == (kernels.coded_bytes(7, 300),)


def test_buffers_of_unequal_size_never_reach_the_compiled_loops() -> None:
    with pytest.raises(RuntimeError):
        kernels.largest(torch.zeros(10), [10], [1], Residual(torch.zeros(9), torch.zeros(10)))
    with pytest.raises(RuntimeError):
        kernels.above(torch.zeros(10), 1.0, 3, Residual(torch.zeros(10), torch.zeros(11)))


def build(*products: str, compiler: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "kernels-src" / "build.py"), *products],
        env={"CXX": compiler, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_compiler_the_build_says_what_is_missing() -> None:
    done = build("kernels", compiler="")
    assert done.returncode
    assert "kernels is left out: it needs a C++ compiler" in done.stderr


def test_a_compiler_that_fails_leaves_the_library_as_it_was() -> None:
    before = library.LIBRARY.stat().st_mtime_ns if library.LIBRARY.exists() else None
    done = build("kernels", compiler=str(shutil.which("false")))
    assert done.returncode
    assert "failed" in done.stderr
    assert before == (library.LIBRARY.stat().st_mtime_ns if library.LIBRARY.exists() else None)


def _not_sanitized(exporting: str, sanitizing: str) -> set[str]:
    """Exported functions that the program of `make sanitize` declares at most, but does not use."""
    declaration = r"^(?:int64_t|void\*) gossamer_\w+\("
    used = set(re.findall(r"\bgossamer_\w+", re.sub(declaration, "", sanitizing, flags=re.MULTILINE)))
    return set(re.findall(r"^GOSSAMER_EXPORT .*?\b(gossamer_\w+)\(", exporting, re.MULTILINE)) - used


def test_every_exported_function_runs_under_the_sanitizers() -> None:
    sources = {path.name: path.read_text() for path in (ROOT / "kernels-src").glob("*.[ch]pp")}
    sanitizing = "".join(text for name, text in sources.items() if name.startswith("sanitize"))
    exporting = "".join(text for name, text in sources.items() if not name.startswith("sanitize"))
    assert exporting.count("\nGOSSAMER_EXPORT ") > 50
    assert _not_sanitized(exporting, sanitizing) == set()


def test_an_exported_function_that_is_only_declared_there_is_seen() -> None:
    exporting = "GOSSAMER_EXPORT int64_t gossamer_a(int64_t n) {\nGOSSAMER_EXPORT void* gossamer_b() {\n"
    sanitizing = "int64_t gossamer_a(int64_t);\nvoid* gossamer_b();\nmust(gossamer_b() != nullptr);\n"
    assert _not_sanitized(exporting, sanitizing) == {"gossamer_a"}
