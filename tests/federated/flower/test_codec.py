"""Codecs: contributions, the state of nodes, and differences between versions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gossamer.errors import LayoutError, MalformedError, NotFinite, RecipeError
from gossamer.federated.flower.arrays import ArrayLayout, frame, unframe
from gossamer.federated.flower.codec import (
    ContributionCodec,
    KeptNote,
    NodeState,
    PullCodec,
    Residuals,
    Versions,
    brought,
)
from gossamer.federated.flower.records import NodeInvitation

BEFORE, AFTER = ({"residual": torch.zeros(3)},), ({"residual": torch.ones(3)},)
STATE = NodeState(KeptNote(run="r", recipe="c", step=4, version=2), BEFORE, AFTER, (torch.arange(3.0),))


def told(**changed: object) -> NodeInvitation:
    return NodeInvitation(**{"run": "r", "recipe": "c", "step": 5, "counted": 4} | changed)  # type: ignore[arg-type]


def test_feedback_moves_on_with_what_was_counted() -> None:
    assert STATE.for_invitation(told()).before is AFTER
    assert STATE.for_invitation(told(counted=3)).before is BEFORE
    assert STATE.for_invitation(told(counted=-1)).before is BEFORE
    settled = STATE.for_invitation(told())
    assert (settled.after, settled.note.step) == ((), -1)
    assert settled.for_invitation(told(step=6, counted=4)).before is AFTER  # not settled twice


def test_evaluation_settles_nothing() -> None:
    assert STATE.for_invitation(told(step=-1)) is STATE


def test_another_run_or_recipe_begins_again() -> None:
    for other in (told(run="s"), told(recipe="d")):
        assert STATE.for_invitation(other) == NodeState(KeptNote(run=other.run, recipe=other.recipe))


def test_feedback_of_other_arrays_is_dropped() -> None:
    layout = ArrayLayout.of({"w": np.zeros(3)})
    first = STATE.holding(told(pull="p", version=3), layout, ("w",), torch.zeros(3))
    assert (first.before, first.note.version, len(first.replica)) == ((), 3, 1)
    kept = NodeState(first.note, BEFORE).holding(told(), layout, ("w",), torch.zeros(3))
    assert (kept.before, kept.note.version, kept.replica) == (BEFORE, -1, ())


def test_what_is_written_is_read() -> None:
    found = NodeState.from_bytes(*STATE.to_bytes())
    assert found.note == STATE.note
    for mine, theirs in ((found.before, BEFORE), (found.after, AFTER)):
        assert [list(block) for block in mine] == [list(block) for block in theirs]
        assert torch.equal(mine[0]["residual"], theirs[0]["residual"])
    assert torch.equal(found.replica[0], STATE.replica[0])
    assert NodeState.from_bytes(*NodeState().to_bytes()) == NodeState()


def test_damage_is_refused() -> None:
    text, arrays = STATE.to_bytes()
    with pytest.raises(MalformedError):
        NodeState.from_bytes(text[:-1], arrays)
    with pytest.raises(MalformedError):
        NodeState.from_bytes(text, arrays | {"after": arrays["after"][:-1]})
    with pytest.raises(MalformedError):
        NodeState.from_bytes(text, arrays | {"after": arrays["replica"]})


LAYOUT = ArrayLayout.of({"w": np.zeros((24, 16), np.float32), "b": np.zeros(5, np.float32)})
SIZE = 24 * 16 + 5


def random(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("recipe", ["TopK(0.05)", "Chain(TopK(0.1), Int8())"])
def test_what_is_decoded_and_what_is_owed_add_up(recipe: str) -> None:
    codec = ContributionCodec.of(recipe, seed=3)
    residuals: Residuals = ()
    decoded, given = torch.zeros(SIZE), torch.zeros(SIZE)
    for step in range(5):
        data, residuals = codec.encode(random(step), LAYOUT, residuals, node=7, step=step)
        decoded += codec.decode(data, LAYOUT, node=7, step=step)
        given += random(step)
    owed = torch.zeros(SIZE)
    owed[: 24 * 16] = next(iter(residuals[0].values()))[: 24 * 16]  # of "w"; "b" travels dense
    assert torch.allclose(decoded + owed, given, rtol=0, atol=1e-4)
    assert not torch.allclose(decoded, given, rtol=0, atol=1e-2)


def test_few_bytes_travel() -> None:
    data, _ = ContributionCodec.of("TopK(0.05)").encode(random(0), LAYOUT, (), node=0, step=0)
    assert len(data) < SIZE * 4 / 3


def test_what_belongs_elsewhere_is_refused() -> None:
    codec = ContributionCodec.of("TopK(0.05)")
    data, _ = codec.encode(random(0), LAYOUT, (), node=7, step=2)
    codec.decode(data, LAYOUT, node=7, step=2)
    other = ArrayLayout.of({"w": np.zeros((16, 24), np.float32), "b": np.zeros(5, np.float32)})
    for reader, layout, step in [
        (codec, LAYOUT, 3),
        (codec, other, 2),
        (ContributionCodec.of("TopK(0.04)"), LAYOUT, 2),
    ]:
        with pytest.raises(MalformedError, match="node 7"):
            reader.decode(data, layout, node=7, step=step)


def test_payloads_that_no_encoder_made_are_refused() -> None:
    codec = ContributionCodec.of("TopK(0.05)")
    header, payload = unframe(codec.encode(random(0), LAYOUT, (), node=7, step=2)[0])
    nan = tuple(each * torch.nan if each.is_floating_point() else each for each in payload)
    ones = tuple(torch.full_like(each, 255) if each.dtype == torch.uint8 else each for each in payload)
    for bad in (payload[:-1], payload + payload, nan, ones, tuple(each.double() for each in payload)):
        with pytest.raises(MalformedError):
            codec.decode(frame(header, bad), LAYOUT, node=7, step=2)


def test_numbers_that_are_not_finite_are_not_sent() -> None:
    with pytest.raises(NotFinite):
        ContributionCodec.of("TopK(0.05)").encode(random(0) * torch.nan, LAYOUT, (), node=7, step=2)


@pytest.mark.parametrize("recipe", ["FedAvg()", "Feedback(TopK(0.1), ef21=True)", "NoSuch()"])
def test_what_devices_cannot_send_is_refused(recipe: str) -> None:
    with pytest.raises(RecipeError):
        ContributionCodec.of(recipe)


WEIGHTS = ArrayLayout.of({"w": np.zeros((24, 16), np.float32)})
CODEC = PullCodec.of("TopK(0.1)", seed=2)


def random_weights(seed: int) -> torch.Tensor:
    return torch.randn(24 * 16, generator=torch.Generator().manual_seed(seed))


def published(count: int) -> Versions:
    versions = Versions(CODEC, WEIGHTS, random_weights(0))
    for seed in range(1, count):
        versions.publish(random_weights(seed))
    return versions


def test_who_follows_differences_holds_the_servers_bits() -> None:
    versions = Versions(CODEC, WEIGHTS, random_weights(0))
    held, flat = 0, versions.sent_to(-1).whole.clone()
    for seed in range(1, 8):
        versions.publish(random_weights(seed))
        sent = versions.sent_to(held)
        assert sent.difference is not None
        held, flat = brought(CODEC, WEIGHTS, (flat,), held, sent.difference)
        assert (held, sent.version) == (seed, seed)
        assert torch.equal(flat, sent.whole)
        assert not torch.equal(flat, random_weights(seed))  # so something was lost on the way, on both sides alike


def test_the_same_arrays_are_the_same_version() -> None:
    versions = published(3)
    versions.publish(random_weights(2))
    assert versions.version == 2
    sent = versions.sent_to(2)
    assert sent.difference is not None
    held, flat = brought(CODEC, WEIGHTS, (sent.whole,), 2, sent.difference)
    assert held == 2
    assert torch.equal(flat, sent.whole)


def test_links_that_were_followed_are_passed_over() -> None:
    """The server heard of version 1 only; the node is at 2 already, since its last reply was lost."""
    versions = published(3)
    at_two = versions.sent_to(-1).whole.clone()
    versions.publish(random_weights(3))
    sent = versions.sent_to(1)
    assert sent.difference is not None
    held, flat = brought(CODEC, WEIGHTS, (at_two,), 2, sent.difference)
    assert held == 3
    assert torch.equal(flat, sent.whole)


def test_a_device_that_holds_too_old_a_version_is_sent_the_whole() -> None:
    versions = published(12)
    assert versions.sent_to(0).difference is None
    assert versions.sent_to(-1).difference is None
    assert versions.sent_to(10).difference is not None


def test_what_does_not_follow_is_refused() -> None:
    versions = published(4)
    whole, data = versions.sent_to(-1).whole, versions.sent_to(2).difference
    assert data is not None
    with pytest.raises(MalformedError):
        brought(CODEC, WEIGHTS, (whole,), 1, data)  # it begins later
    with pytest.raises(MalformedError):
        brought(PullCodec.of("TopK(0.2)", seed=2), WEIGHTS, (whole,), 2, data)
    with pytest.raises(MalformedError):
        brought(CODEC, WEIGHTS, (), 2, data)
    with pytest.raises(MalformedError):
        brought(CODEC, WEIGHTS, (whole,), 2, data[:-8])
    for links in (b'"links": 7}', b'"links": [[1]]}', b'"links": {}}'):
        begin = data.index(b'\\"links')
        assert begin
        with pytest.raises(MalformedError):
            brought(CODEC, WEIGHTS, (whole,), 2, with_about(data, "{" + links.decode()))


def with_about(data: bytes, about: str) -> bytes:
    import msgspec

    from gossamer.federated.flower.arrays import frame, unframe

    header, payload = unframe(data)
    return frame(msgspec.structs.replace(header, about=about), payload)


def test_halves_are_refused() -> None:
    halves = ArrayLayout.of({"w": np.zeros((24, 16), np.float16)})
    with pytest.raises(LayoutError, match="float16"):
        Versions(CODEC, halves, random_weights(0))
