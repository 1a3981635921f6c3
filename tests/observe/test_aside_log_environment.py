"""Rank environment: what matters is told, and nothing that is secret."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from gossamer.base.kernels import library
from gossamer.observe.aside_log import rank_environment


def test_versions_platform_and_settings_are_reported() -> None:
    told = rank_environment({"OMP_NUM_THREADS": "3"})
    assert told["torch"] == torch.__version__
    assert (told["byte order"], told["OMP_NUM_THREADS"]) == (sys.byteorder, "3")
    assert {"python", "gossamer", "kernels", "architecture", "system", "cores"} <= told.keys()


def test_no_secret_is_reported() -> None:
    """Broken twin: all variables that begin alike, among them the file of the run's token."""
    secret = {"GOSSAMER_TOKEN_FILE": "/run/token", "GOSSAMER_LOG_TO": "otlp:key@host", "WANDB_API_KEY": "hush"}
    told = rank_environment({**secret, "GOSSAMER_THREADS": "2"})
    assert not set(secret) & set(told)
    assert not set(secret.values()) & set(told.values())
    assert any(name.startswith("GOSSAMER_") for name in secret)  # what the twin tells


def test_missing_kernels_are_described_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LIBRARY", Path("nowhere.so"))
    assert rank_environment({})["kernels"] == "plain torch"
