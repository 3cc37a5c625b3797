"""The recipes for clusters, checked as far as that goes without the services that they are for."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from depthlaw.platform.cli import app

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "tune_configs" / "clusters"

# Of `kubectl explain rayjob.spec` and `rayjob.spec.rayClusterSpec`, KubeRay 1.1: those that a recipe may use.
JOB = {"entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit", "activeDeadlineSeconds",
       "runtimeEnvYAML", "rayClusterSpec", "submissionMode", "jobId", "suspend"}  # fmt: skip
CLUSTER = {"rayVersion", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling", "autoscalerOptions"}
WORKERS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


def test_the_ray_job_has_the_keys_of_its_kind_and_its_pods_share_what_they_must():
    job = yaml.safe_load((RECIPES / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert set(job["spec"]) <= JOB
    cluster = job["spec"]["rayClusterSpec"]
    assert set(cluster) <= CLUSTER
    assert set(cluster["headGroupSpec"]) <= {"rayStartParams", "template", "serviceType"}
    (workers,) = cluster["workerGroupSpecs"]
    assert set(workers) <= WORKERS
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], workers)]
    (head,), (worker,) = (pod["containers"] for pod in pods)
    assert head["image"] == worker["image"]
    for pod, container in zip(pods, (head, worker), strict=True):
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted == {"shared": "/shared"}
        assert {volume["name"] for volume in pod["volumes"]} == {"shared"}
        assert container["resources"]["requests"] == container["resources"]["limits"]
    assert cluster["rayVersion"] == pinned("ray")


def pinned(package: str) -> str:
    """Its version in constraints.txt."""
    (line,) = re.findall(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return line


def test_the_file_for_ray_up_is_what_ray_itself_accepts():
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((RECIPES / "ray_up.yaml").read_text())
    validate_config(prepare_config(config))
    config["colour"] = "blue"
    with pytest.raises(Exception, match="colour"):
        validate_config(config)


def test_the_script_for_slurm_parses_and_runs_its_command_with_what_it_was_given(tmp_path):
    """Against stand-ins for SLURM's commands and for Ray's, which print what they are called with."""
    script = RECIPES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    stand_ins = {
        "activate": "",
        "scontrol": "printf 'node1\\nnode2\\n'",
        "srun": 'for last; do :; done; [ "$last" = --ip-address ] && echo 10.0.0.1 || echo "$@"',
    }
    for name, body in stand_ins.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2",
             "SLURM_CPUS_PER_TASK": "64", "SLURM_GPUS_ON_NODE": "8"}  # fmt: skip
    done = subprocess.run(
        [str(script), "my sweep.yaml", "/shared/runs", "--json"],
        cwd=tmp_path, env={"PATH": f"{folder}:/usr/bin:/bin", **slurm}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "--min-nodes 2" in done.stdout
    assert "--num-cpus 64 --num-gpus 8" in done.stdout
    command = done.stdout.strip().split(" -- ")[1]
    assert command == "depthlaw sweep my sweep.yaml --address 10.0.0.1:6379 --storage /shared/runs --json"
    refused = subprocess.run([str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "the YAML of the sweep" in refused.stderr


def test_options_of_the_sweep_command_in_recipes_and_their_page_exist():
    texts = [path.read_text() for path in (*RECIPES.iterdir(), ROOT / "docs" / "clusters.md")]
    used = {
        option
        for text in texts
        for line in re.findall(r"depthlaw sweep [^`'\n]*", text)
        for option in re.findall(r"--[a-z-]+", line)
    }
    help_text = CliRunner().invoke(app, ["sweep", "--help"], env={"COLUMNS": "200"}).output
    assert used >= {"--address", "--storage"}
    assert all(option in help_text for option in used), used


def commands() -> list[list[str]]:
    """The words after `depthlaw sweep` wherever a recipe or the page on clusters says to run it, comments included."""
    found = []
    for path in (*sorted(RECIPES.iterdir()), ROOT / "docs" / "clusters.md"):
        text = re.sub(r"\\\n[# ]*", " ", path.read_text())  # a line that goes on
        for line in re.findall(r"depthlaw sweep ([^`'\n]*)", text):
            if words := [word for word in shlex.split(line) if word != "$@"]:
                found.append(words)
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_command_of_a_recipe_is_one_that_the_command_line_takes(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEPTHLAW_DATA", str(tmp_path / "data"))
    given = {"$config": "demo.yaml", "CONFIG": "demo.yaml", "$store": "/shared/runs", "ADDRESS": "auto"}
    config, *options = [given.get(word, word) for word in words]
    config = ROOT / "tune_configs" / Path(config).name
    assert config.exists()
    done = CliRunner().invoke(app, ["sweep", str(config), *options, "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.output)["trials"]) > 1
    assert "--address" in words


def test_every_recipe_has_a_command():
    assert len(commands()) >= 5
