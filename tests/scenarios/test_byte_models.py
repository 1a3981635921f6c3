"""Models of bytes: what a guess may see, and that workers can train them."""

import pytest
import torch
from benchmarks.byte_models import ByteLSTM, ByteMLP
from benchmarks.tasks import TASKS, UNLIKE
from benchmarks.training import train

pytestmark = pytest.mark.nightly

TEXT = torch.zeros(1, 65, dtype=torch.uint8)


def guesses(model: ByteLSTM | ByteMLP, text: torch.Tensor) -> torch.Tensor:
    """(1, guesses, 256)"""
    seen: list[torch.Tensor] = []
    handle = model.guess.register_forward_hook(lambda _, __, guess: seen.append(guess))
    model(text)
    handle.remove()
    return seen[0]


def changed(model: ByteLSTM | ByteMLP, text: torch.Tensor) -> list[int]:
    """Which guesses are others than those of TEXT."""
    return (guesses(model, TEXT) != guesses(model, text)).any(2).nonzero()[:, 1].tolist()


def at_byte(place: int) -> torch.Tensor:
    text = TEXT.clone()
    text[:, place] = 1
    return text


def test_the_lstm_guesses_the_next_byte_from_the_past_only() -> None:
    torch.manual_seed(0)
    model = ByteLSTM()
    assert 200_000 < sum(p.numel() for p in model.parameters()) < 300_000
    assert changed(model, at_byte(40)) == list(range(40, 64))


def test_the_check_notices_an_lstm_that_sees_what_follows() -> None:
    torch.manual_seed(0)
    model = ByteLSTM()
    model.past = torch.nn.LSTM(64, 96, batch_first=True, bidirectional=True)
    assert changed(model, at_byte(40)) != list(range(40, 64))


@pytest.mark.parametrize("past", [8, 3])
def test_two_layers_guess_a_byte_from_so_many_before_it(past: int) -> None:
    torch.manual_seed(0)
    model = ByteMLP(past)
    assert guesses(model, TEXT).shape == (1, 65 - past, 256)
    assert changed(model, at_byte(40)) == [byte - past for byte in range(41, 41 + past)]


def test_two_layers_are_small() -> None:
    assert 200_000 < sum(p.numel() for p in ByteMLP().parameters()) < 220_000


@pytest.mark.parametrize("name", UNLIKE)
def test_their_tasks_can_be_trained(name: str) -> None:
    assert name not in TASKS
    run = train(name, UNLIKE[name], "TopK(density=0.05)", 0, 1, 2, 1)
    assert [step for step, _, _ in run["curve"]] == [0, 1]
