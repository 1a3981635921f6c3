"""A private environment, a free port, and groups that are formed in name only."""

import os

import pytest
import torch.distributed as dist
from support.processes import free_port

from gossamer.comm.environment import rendezvous


@pytest.fixture
def environ(monkeypatch):
    """A private os.environ without a launcher's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    monkeypatch.setattr(
        os, "environ", {name: kept[name] for name in kept if not name.startswith(("TORCHELASTIC", "GOSSAMER"))}
    )
    return os.environ


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def formed(monkeypatch):
    """Groups that joining would form: threads of one process cannot have several."""
    backends = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: backends.append(backend))
    monkeypatch.setattr(rendezvous.atexit, "register", lambda *_: None)
    yield backends
    rendezvous.leave_meeting()
