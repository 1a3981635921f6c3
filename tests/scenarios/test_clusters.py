"""Cluster manifests in examples/clusters: fields that their readers know, and commands that their programs take.

The schemas are our own and hold only the fields that the manifests may use, with the types that Kubeflow Trainer's
custom resource definitions (v1alpha1) and SkyPilot's task schema give them; any other field is refused.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.page_commands import Line, check_line, read_script, read_torchrun
from support.paths import ROOT
from support.slurm_cluster import slurm_cluster

CLUSTERS = ROOT / "examples" / "clusters"
TEXT: dict[str, Any] = {"type": "string"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 1}
WORDS: dict[str, Any] = {"type": "array", "items": TEXT}


def record(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def listed(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


TEXTS: dict[str, Any] = {"type": "object", "additionalProperties": TEXT}
CONTAINER = record("name image", name=TEXT, image=TEXT, volumeMounts=listed(record(name=TEXT, mountPath=TEXT)))
VOLUME = record("name", name=TEXT, persistentVolumeClaim=record("claimName", claimName=TEXT))
JOB = record("spec", spec=record("containers", containers=listed(CONTAINER), volumes=listed(VOLUME)))
REPLICATED = record(
    "name template", name=TEXT, template=record(metadata=record(labels=TEXTS), spec=record(template=JOB))
)
KINDS = {
    "TrainingRuntime": record(
        mlPolicy=record(numNodes=COUNT, torch={"type": "object", "maxProperties": 0}),
        template=record(spec=record(replicatedJobs=listed(REPLICATED))),
    ),
    "TrainJob": record(
        "runtimeRef",
        runtimeRef=record("name", apiGroup=TEXT, kind=TEXT, name=TEXT),
        trainer=record(
            image=TEXT,
            numNodes=COUNT,
            numProcPerNode=COUNT,
            command=WORDS,
            args=WORDS,
            resourcesPerNode=record(requests=TEXTS),
        ),
    ),
}
TASK = record(
    name=TEXT,
    num_nodes=COUNT,
    resources=record(
        cpus=TEXT,
        use_spot={"type": "boolean"},
        job_recovery=record(max_restarts_on_errors={"type": "integer", "minimum": 0}),
    ),
    workdir=TEXT,
    file_mounts={"type": "object", "additionalProperties": record(name=TEXT, mode={"enum": ["MOUNT", "COPY"]})},
    setup=TEXT,
    run=TEXT,
)


def documents(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return [*yaml.safe_load_all((CLUSTERS / name).read_text(encoding="utf-8"))]


def wrong(schema: dict[str, Any], value: Any) -> list[str]:
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema)
    return [error.message for error in validator.iter_errors(value)]


def test_a_train_job_names_its_runtime_and_both_have_known_fields() -> None:
    runtime, job = documents("kubeflow_trainjob.yaml")
    for each in (runtime, job):
        assert each["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        assert wrong(KINDS[each["kind"]], each["spec"]) == []
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    job["spec"]["trainer"]["nodes"] = 2
    assert wrong(KINDS["TrainJob"], job["spec"]), "a field that nobody knows"


def test_a_train_jobs_command_is_one_that_torchrun_and_the_script_take() -> None:
    _, job = documents("kubeflow_trainjob.yaml")
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["torchrun"]
    read_torchrun(trainer["args"], fragment=False)
    (script,) = re.findall(r"^COPY (\S+) train.py$", (CLUSTERS / "Containerfile").read_text(), re.MULTILINE)
    read_script(ROOT / script, trainer["args"][1:])
    with pytest.raises(ValueError, match="nobody-knows"):
        read_script(ROOT / script, ["--nobody-knows"])


def test_a_skypilot_task_has_known_fields_and_commands() -> None:
    (task,) = documents("skypilot.yaml")
    assert wrong(TASK, task) == []
    assert wrong(TASK, {**task, "nodes": 2})
    commands = [line for line in task["run"].splitlines() if line.startswith("gossamer ")]
    values = {"$SKYPILOT_NUM_NODES": "2", "$SKYPILOT_NODE_RANK": "1", "$first": "first"}
    for command in commands:
        for name, value in values.items():
            command = command.replace(name, value)
        check_line(Line(command, fragment=True))
        check_line(Line(command.partition(" train.py")[0] + " examples/bytelm.py"))
    assert len(commands) == 1
    (arguments,) = re.findall(r" train.py (.*)$", task["run"], re.MULTILINE)
    read_script(ROOT / "examples" / "bytelm.py", arguments.split())


# -- Slurm -------------------------------------------------------------------------------------------------------------

PROGRAM = """
import torch, gossamer
torch.set_num_threads(1)
world = gossamer.init()
total = gossamer.mean(float(world.rank))
print("worker", world.rank, "of", world.size, "mean", total, flush=True)
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    with slurm_cluster(tmp_path) as environ:
        yield environ


@pytest.mark.processes
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two tasks need two cores")
def test_the_batch_script_starts_workers_that_find_each_other(slurm: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    output = tmp_path / "output"
    path = f"{Path(sys.executable).parent}{os.pathsep}{slurm['PATH']}"
    environ = {**slurm, "SCRIPT": str(script), "PATH": path, "PYTHONPATH": str(ROOT / "src")}
    options = ["--wait", "--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", f"--output={output}"]
    batch = subprocess.run(
        ["sbatch", *options, str(CLUSTERS / "slurm.sbatch")],
        env=environ, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = output.read_text() if output.exists() else (tmp_path / "daemons.log").read_text()
    assert batch.returncode == 0, batch.stderr + said
    assert sorted(re.findall(r"worker (\d) of 2 mean 0.5", said)) == ["0", "1"]


def test_the_batch_script_runs_a_command_of_ours() -> None:
    lines = (CLUSTERS / "slurm.sbatch").read_text().splitlines()
    (command,) = [line for line in lines if line.startswith("srun ")]
    check_line(Line(command.replace('"${SCRIPT:-train.py}"', "train.py")))
