"""Fingerprints: differences are named by key, with both values."""

from __future__ import annotations

import json

import pytest

from gossamer.comm.membership.known_worker import difference
from gossamer.errors import MalformedError


def test_what_is_alike_differs_in_nothing() -> None:
    assert difference('{"a": "1", "b": "2"}', '{"b": "2", "a": "1"}') == ""


def test_every_key_that_differs_is_named_with_both_values() -> None:
    said = difference(json.dumps({"a": "1", "b": "2", "c": "3"}), json.dumps({"a": "1", "b": "x", "d": "4"}))
    assert "b: '2' in the run, 'x' here; in c: '3' in the run, none here; in d: none in the run, '4' here" in said


def test_long_values_are_cut() -> None:
    assert len(difference('{"a": ""}', json.dumps({"a": "x" * 10**6}))) < 1000


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "{", "[" * 10**5, '{"a": {"b": "c"}}'])
def test_an_invalid_fingerprint_is_refused(text: str) -> None:
    with pytest.raises(MalformedError, match="a fingerprint must be a JSON object"):
        difference("{}", text)
