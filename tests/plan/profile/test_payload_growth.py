import pytest
import torch

from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, Coalesced
from gossamer.plan.profile.payload_growth import grown, heard_bytes


def octets(count):
    return torch.empty(count, dtype=torch.uint8, device="meta")


def test_payloads_are_heard_one_by_one_and_means_added_up():
    gather, mean = AllGather((octets(10),)), AllReduceMean(octets(10))
    assert heard_bytes(gather, 100) == 1000
    assert heard_bytes(mean, 100) == 0
    assert heard_bytes(AllToAll(((octets(3),),) * 100), 100) == 300
    assert heard_bytes(Coalesced((gather, mean)), 100) == 1000


def timing(*seconds):
    return {"computing_seconds": list(seconds), "engine_seconds": [0.0]}


def check_linear(rule):
    """Decoding takes 2 seconds and 1 for each payload of 10 bytes: of 4, of 16, and so of 1,000."""
    found = rule(timing(5.0, 6.0), timing(5.0, 18.0), [[40], [160], [10_000]])
    assert found["computing_seconds"] == pytest.approx([5.0, 1002.0])


def test_decoding_grows_with_the_payloads():
    check_linear(grown)
    for broken in (lambda few, many, heard: many, lambda few, many, heard: grown(many, many, heard)):
        with pytest.raises(AssertionError):
            check_linear(broken)


def test_what_does_not_grow_stays():
    """As for a part of a reduce-scatter: more workers, each with less; noise makes nothing of it."""
    assert grown(timing(5.0, 6.0), timing(5.0, 7.0), [[100], [100], [100]]) == timing(5.0, 7.0)
    assert grown(timing(5.0, 7.0), timing(5.0, 6.0), [[40], [160], [1000]]) == timing(5.0, 6.0)
