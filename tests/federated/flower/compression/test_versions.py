"""Versions: a node that follows differences holds what the server thinks, and another hears what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gossamer.errors import LayoutError, MalformedError
from gossamer.federated.flower.arrays import ArrayLayout
from gossamer.federated.flower.codec import PullCodec, Versions, brought

LAYOUT = ArrayLayout.of({"w": np.zeros((24, 16), np.float32)})
CODEC = PullCodec.of("TopK(0.1)", seed=2)


def random(seed: int) -> torch.Tensor:
    return torch.randn(24 * 16, generator=torch.Generator().manual_seed(seed))


def published(count: int) -> Versions:
    versions = Versions(CODEC, LAYOUT, random(0))
    for seed in range(1, count):
        versions.publish(random(seed))
    return versions


def test_who_follows_differences_holds_the_servers_bits() -> None:
    versions = Versions(CODEC, LAYOUT, random(0))
    held, flat = 0, versions.sent_to(-1).whole.clone()
    for seed in range(1, 8):
        versions.publish(random(seed))
        sent = versions.sent_to(held)
        assert sent.difference is not None
        held, flat = brought(CODEC, LAYOUT, (flat,), held, sent.difference)
        assert (held, sent.version) == (seed, seed)
        assert torch.equal(flat, sent.whole)
        assert not torch.equal(flat, random(seed))  # so something was lost on the way, on both sides alike


def test_the_same_arrays_are_the_same_version() -> None:
    versions = published(3)
    versions.publish(random(2))
    assert versions.version == 2
    sent = versions.sent_to(2)
    assert sent.difference is not None
    held, flat = brought(CODEC, LAYOUT, (sent.whole,), 2, sent.difference)
    assert held == 2
    assert torch.equal(flat, sent.whole)


def test_links_that_were_followed_are_passed_over() -> None:
    """The server heard of version 1 only; the node is at 2 already, since its last reply was lost."""
    versions = published(3)
    at_two = versions.sent_to(-1).whole.clone()
    versions.publish(random(3))
    sent = versions.sent_to(1)
    assert sent.difference is not None
    held, flat = brought(CODEC, LAYOUT, (at_two,), 2, sent.difference)
    assert held == 3
    assert torch.equal(flat, sent.whole)


def test_who_holds_too_old_a_version_is_sent_the_whole() -> None:
    versions = published(12)
    assert versions.sent_to(0).difference is None
    assert versions.sent_to(-1).difference is None
    assert versions.sent_to(10).difference is not None


def test_what_does_not_follow_is_refused() -> None:
    versions = published(4)
    whole, data = versions.sent_to(-1).whole, versions.sent_to(2).difference
    assert data is not None
    with pytest.raises(MalformedError):
        brought(CODEC, LAYOUT, (whole,), 1, data)  # it begins later
    with pytest.raises(MalformedError):
        brought(PullCodec.of("TopK(0.2)", seed=2), LAYOUT, (whole,), 2, data)
    with pytest.raises(MalformedError):
        brought(CODEC, LAYOUT, (), 2, data)
    with pytest.raises(MalformedError):
        brought(CODEC, LAYOUT, (whole,), 2, data[:-8])
    for links in (b'"links": 7}', b'"links": [[1]]}', b'"links": {}}'):
        begin = data.index(b'\\"links')
        assert begin
        with pytest.raises(MalformedError):
            brought(CODEC, LAYOUT, (whole,), 2, with_about(data, "{" + links.decode()))


def with_about(data: bytes, about: str) -> bytes:
    import msgspec

    from gossamer.federated.flower.arrays import frame, unframe

    header, payload = unframe(data)
    return frame(msgspec.structs.replace(header, about=about), payload)


def test_halves_are_refused() -> None:
    halves = ArrayLayout.of({"w": np.zeros((24, 16), np.float16)})
    with pytest.raises(LayoutError, match="float16"):
        Versions(CODEC, halves, random(0))
