"""What is shown of an error that nobody caught."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import TracebackType

import pytest
import torch

from gossamer.comm.runtime import uncaught_errors
from gossamer.comm.runtime.uncaught_errors import shortened
from gossamer.errors import PeerLost, require


def broken_in_backward(kind: type[Exception]) -> Exception:
    """An error with a cause, raised by a hook of a gradient, four frames of torch below this function's own line."""

    def hook(gradient: torch.Tensor) -> None:
        try:
            raise ConnectionResetError("reset by peer")
        except ConnectionResetError as cause:
            raise kind("rank 1 is gone. Its own output says why.") from cause

    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(hook)
    try:
        weight.sum().backward()
    except kind as error:
        return error
    raise AssertionError


def shown(error: Exception) -> str:
    return "".join(traceback.format_exception(type(error), error, shortened(error, error.__traceback__)))


def as_if_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hook above count as the library's."""
    is_users = uncaught_errors.is_users
    monkeypatch.setattr(
        uncaught_errors, "is_users", lambda frame: is_users(frame) and frame.tb_frame.f_code.co_name != "hook"
    )


def test_the_sentence_stands_below_the_users_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_ours(monkeypatch)
    lines = [line for line in shown(broken_in_backward(PeerLost)).splitlines() if "^" not in line]
    assert lines[2:] == [
        "    weight.sum().backward()",
        "gossamer.errors.PeerLost: rank 1 is gone. Its own output says why.",
    ]
    assert len(lines) == 4


def test_all_is_shown_of_other_errors_and_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_ours(monkeypatch)
    assert "reset by peer" in shown(broken_in_backward(ValueError))
    monkeypatch.setenv("GOSSAMER_TRACEBACK", "full")
    everything = shown(broken_in_backward(PeerLost))
    assert "reset by peer" in everything
    assert "_engine_run_backward" in everything


def test_without_a_frame_of_the_users_all_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncaught_errors, "is_users", lambda frame: False)
    assert "reset by peer" in shown(broken_in_backward(PeerLost))


def test_a_users_function_within_the_library_is_the_last_frame() -> None:
    assert "in hook" in shown(broken_in_backward(PeerLost))


def test_frames_of_the_library_are_not_the_users() -> None:
    with pytest.raises(ValueError, match="wrong") as raised:
        require(False, "wrong")
    users = [uncaught_errors.is_users(frame) for frame in uncaught_errors._frames(raised.tb)]
    assert users == [True, False]


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], None]


def test_the_hook_hands_what_is_left_to_the_one_before_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_ours(monkeypatch)
    seen: list[int] = []

    def before(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        assert error.__traceback__ is where
        seen.append(len(list(uncaught_errors._frames(where))))

    monkeypatch.setattr(sys, "excepthook", before)
    uncaught_errors.install()
    uncaught_errors.install()
    error = broken_in_backward(PeerLost)
    sys.excepthook(PeerLost, error, error.__traceback__)
    assert seen == [1]
