"""Launcher variables: which job they describe."""

import json

import pytest

from gossamer.comm.environment import JobEnvironment, detect
from gossamer.comm.environment.launcher_env import first_host, run_identity
from gossamer.errors import ConnectError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4711",
    "TORCHELASTIC_RUN_ID": "none",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "2081947649",
    "PMIX_NAMESPACE": "2081947649",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_JOB_NODELIST": "big[1-9]",
    "SLURM_STEP_NODELIST": "node[03-04]",
}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"},
        {"RANK": "", "WORLD_SIZE": ""},
        SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        without(SRUN, "SLURM_PROCID"),
        without(SRUN, "SLURM_STEP_ID"),  # a batch script: SLURM_PROCID is 0 and nobody else was started
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # the shell of an interactive allocation
    ],
)
def test_a_plain_run_is_a_world_of_one(environ):
    assert detect(environ) == JobEnvironment(rank=0, world=1, local_rank=0, local_world=1, launcher="python")


def test_torchrun():
    assert detect(TORCHRUN) == JobEnvironment(
        rank=3,
        world=4,
        local_rank=1,
        local_world=2,
        master_address="10.0.0.1",
        master_port=4711,
        launcher="torchrun",
    )


@pytest.mark.parametrize(("address", "local_rank", "local_world"), [("127.0.0.1", 1, 2), ("10.0.0.1", 0, 1)])
def test_rank_and_world_size_alone_are_enough(address, local_rank, local_world):
    job = detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address})
    assert (job.local_rank, job.local_world, job.master_port) == (local_rank, local_world, 29500)


@pytest.mark.parametrize("other", [OPEN_MPI, MPICH, SRUN])
def test_an_explicit_rank_wins(other):
    assert detect(other | TORCHRUN) == detect(TORCHRUN)


def test_open_mpi_on_one_machine_needs_no_address_and_agrees_on_a_port():
    first, second = detect(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"}), detect(OPEN_MPI)
    assert (second.rank, second.world, second.local_rank, second.launcher) == (1, 2, 1, "mpirun")
    assert first.master_address == second.master_address == "127.0.0.1"
    assert first.master_port == second.master_port
    another = detect(OPEN_MPI | {"OMPI_MCA_ess_base_jobid": "5"})
    assert another.master_port != second.master_port
    assert 1024 < second.master_port < 32768


def test_open_mpi_inside_slurm_is_open_mpi():
    assert detect(OPEN_MPI | SRUN | {"SLURM_PROCID": "0"}) == detect(OPEN_MPI)


def test_mpich_inside_slurm_is_mpich_but_pmi_of_srun_is_srun():
    assert detect(MPICH | SRUN).launcher == "mpirun"
    assert detect({"PMI_RANK": "2", "PMI_SIZE": "3"} | SRUN).launcher == "srun"


@pytest.mark.parametrize(
    ("environ", "option"),
    [
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"},
            "-x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500",
        ),
        (MPICH | {"PMI_SIZE": "4"}, "-genv MASTER_ADDR <host of rank 0>"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR=<host of rank 0>"),
        (without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "--export=ALL,MASTER_ADDR="),
    ],
)
def test_several_machines_need_an_address(environ, option):
    with pytest.raises(ConnectError, match="no variable has the address of rank 0") as caught:
        detect(environ)
    assert option in str(caught.value)
    assert detect(environ | {"MASTER_ADDR": "10.0.0.1"}).master_address == "10.0.0.1"


def test_srun():
    job = detect(SRUN)
    assert (job.rank, job.world, job.local_rank, job.local_world) == (2, 3, 0, 1)
    assert (job.master_address, job.launcher) == ("node03", "srun")
    assert job.master_port != detect(SRUN | {"SLURM_JOB_ID": "78"}).master_port
    assert job.master_port != detect(SRUN | {"SLURM_STEP_ID": "1"}).master_port
    assert detect(SRUN | {"SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}).local_world == 2


def test_srun_counts_repeated_nodes():
    environ = SRUN | {"SLURM_NTASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    assert [detect(environ | {"SLURM_NODEID": str(node)}).local_world for node in range(4)] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node[01-03,07]", "node01"),
        ("node[07,01-03],gpu1", "node07"),
        ("alone", "alone"),
        ("a,b", "a"),
        ("rack[2-3]n[01-04],x", "rack2n01"),
        ("gpu-node-[003-004]", "gpu-node-003"),
        ("node[1-2]-ib,x", "node1-ib"),
    ],
)
def test_first_host(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "0"}, "at least 1"),
        ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, "at most nine digits"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a valid port"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a valid port"),
        ({"RANK": "1"}, "RANK is set and WORLD_SIZE is not.*unset RANK"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not.*unset WORLD_SIZE"),
        (TORCHRUN | {"RANK": "one"}, "RANK='one' is not a whole number"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4"),
        (TORCHRUN | {"RANK": "-1"}, "rank -1 of 4"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 of 2"),
    ],
)
def test_variables_that_make_no_sense_are_refused(environ, message):
    with pytest.raises(ConnectError, match=message):
        detect(environ)


@pytest.mark.parametrize(
    ("environ", "identity"),
    [
        ({"GOSSAMER_RUN": "mine", "TORCHELASTIC_RUN_ID": "other"}, "mine, start 1"),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}, "none, start 3"),
        (OPEN_MPI | {"MASTER_ADDR": "10.0.0.1"}, "2081947649, start 1"),
        (SRUN, "77.0, start 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "without a name, start 1"),
    ],
)
def test_a_run_is_known_by_the_name_that_its_user_or_launcher_gave_it(environ, identity):
    assert run_identity(environ) == identity


# -- TF_CONFIG ---------------------------------------------------------------------------------------------------------


def tf_config(kind="worker", index=0, **cluster):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_tf_config_has_the_chief_before_the_workers_and_the_chiefs_port():
    cluster = {"chief": ["a:2222"], "worker": ["b:2223", "b:2224"], "ps": ["c:2222"]}
    assert detect(tf_config("chief", 0, **cluster)).rank == 0
    assert detect(tf_config("worker", 1, **cluster)) == JobEnvironment(
        rank=2, world=3, local_rank=1, local_world=2, master_address="a", master_port=2222, launcher="TF_CONFIG"
    )


def test_tf_config_on_one_machine_meets_at_loopback():
    job = detect(tf_config("worker", 1, worker=["localhost:12345", "localhost:23456"]))
    assert (job.rank, job.local_world, job.master_address, job.master_port) == (1, 2, "127.0.0.1", 12345)


def test_runs_with_other_clusters_have_other_identities():
    first, again, other = (tf_config(worker=[f"a:{port}", "b:1"]) for port in (1, 1, 2))
    assert run_identity(first) == run_identity(again) != run_identity(other)


@pytest.mark.parametrize("config", ["", "{}", '{"task": {"type": "worker", "index": 0}}', '{"cluster": {}}'])
def test_tf_config_without_a_cluster_is_a_world_of_one(config):
    assert detect({"TF_CONFIG": config}).launcher == "python"


@pytest.mark.parametrize("other", [TORCHRUN, OPEN_MPI, MPICH, SRUN])
def test_other_launchers_win_over_tf_config(other):
    assert detect(other | tf_config(worker=["x:1", "y:1"])) == detect(other)


@pytest.mark.parametrize(("kind", "index"), [("ps", 0), ("evaluator", 0), ("worker", 2)])
def test_a_task_of_tf_config_that_does_not_train_is_refused(kind, index):
    with pytest.raises(ConnectError, match=kind):
        detect(tf_config(kind, index, worker=["a:1", "b:1"], ps=["c:1"]))


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        '{"cluster": {"worker": ["a:1"]}}',
        '{"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}}',
    ],
)
def test_a_tf_config_that_cannot_be_read_is_refused_with_an_example(config):
    with pytest.raises(ConnectError, match=r'"worker": \["host0:2222"'):
        detect({"TF_CONFIG": config})
