"""Launched job: ranks as a launcher gave them; None where Lightning starts the workers; elastic runs are refused."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from gossamer.comm.environment import JobEnvironment
from gossamer.errors import AttachError
from gossamer.integrations.lightning import GossamerFabricStrategy, GossamerStrategy
from gossamer.integrations.lightning import joined_strategy as module
from gossamer.integrations.lightning.joined_strategy import LaunchedEnvironment, launched_job

LAUNCHED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}


def put(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in (*LAUNCHED, "NODE_RANK", "MASTER_PORT", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_ranks_are_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, **LAUNCHED, MASTER_PORT="2345")
    strategy = GossamerStrategy("Dense()")
    assert (strategy.global_rank, strategy.world_size, strategy.local_rank, strategy.node_rank) == (5, 8, 1, 1)
    assert not strategy.is_global_zero
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 8, "rank": 5}
    environment = strategy.cluster_environment
    assert (environment.main_address, environment.main_port) == ("10.0.0.1", 2345)
    environment.set_global_rank(0)
    environment.set_world_size(1)
    assert (environment.global_rank(), environment.world_size()) == (5, 8)
    assert environment.creates_processes_externally
    assert LaunchedEnvironment.detect()


@pytest.mark.parametrize("variables", [{}, {"NODE_RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}])
def test_lightning_may_start_the_workers(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    put(monkeypatch, **variables)
    assert launched_job() is None
    assert GossamerStrategy("Dense()").cluster_environment is None


def test_a_launched_world_of_one_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, RANK="0", WORLD_SIZE="1")
    job = launched_job()
    assert isinstance(job, JobEnvironment)
    assert LaunchedEnvironment(job).main_address == "127.0.0.1"


@pytest.mark.parametrize("strategy", [GossamerStrategy, GossamerFabricStrategy])
def test_an_elastic_run_is_refused(monkeypatch: pytest.MonkeyPatch, strategy: type) -> None:
    monkeypatch.setattr(module, "is_elastic", lambda: True)
    with pytest.raises(AttachError, match="gossamer run --workers 4 SCRIPT"):
        strategy("Dense()")
