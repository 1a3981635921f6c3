"""What a reduction was given, from which it can be made again."""

from __future__ import annotations

import torch

from gossamer.train.engine.bucket import KeptInputs


def test_copies_are_put_back_as_often_as_asked_for() -> None:
    kept, flat = KeptInputs(), torch.arange(4.0)
    kept.keep(0, flat)
    for _ in range(2):
        flat.fill_(-1.0)
        assert kept.restores(0, flat)
        assert torch.equal(flat, torch.arange(4.0))
    kept.clear()
    assert not kept.restores(0, flat)


def test_what_stays_is_there_and_is_not_copied() -> None:
    kept, flat = KeptInputs(), torch.arange(4.0)
    kept.trust(0)
    assert kept.restores(0, flat)
    assert torch.equal(flat, torch.arange(4.0))
    assert not kept.restores(1, flat)
    kept.clear()
    assert not kept.restores(0, flat)


def test_what_stayed_and_is_now_to_be_written_over_is_copied_first() -> None:
    kept, flat = KeptInputs(), torch.arange(4.0)
    kept.trust(0)
    kept.keep(0, flat)
    flat.zero_()
    assert kept.restores(0, flat)
    assert torch.equal(flat, torch.arange(4.0))


def test_what_was_copied_once_is_not_copied_again_as_it_is_by_now() -> None:
    kept, flat = KeptInputs(), torch.arange(4.0)
    kept.keep(0, flat)
    flat.mul_(2.0)
    kept.keep(0, flat)
    assert torch.equal(flat, torch.arange(4.0))
