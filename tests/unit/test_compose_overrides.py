"""The compose overrides, as the docker command reads them: what they change, and that they loosen nothing else."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

OURS = ("nginx", "api", "api-backup", "dispatcher", "worker", "migrations", "bucket", "credentials")
GPU = {"LATENTMILL_MODEL": "wan2.2-ti2v-5b", "LATENTMILL_MODEL_DIR": "/srv/weights"}
MINIO = {"MINIO_IMAGE": "registry.example/minio:1"}


def _compose(override: str | None, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    files = ["-f", "docker-compose.yml", *(["-f", override] if override else [])]
    # An empty .env: what the user of this machine has chosen is not under test.
    command = ["docker", "compose", "--env-file", os.devnull, *files, *arguments]
    return subprocess.run(
        command,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module", autouse=True)
def _needs_compose() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("there is no docker compose here")


def _services(override: str | None, **variables: str) -> dict[str, Any]:
    ended = _compose(override, "--profile", "*", "config", "--format", "json", **variables)
    assert ended.returncode == 0, ended.stderr
    services: dict[str, Any] = json.loads(ended.stdout)["services"]
    return services


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    return _services(None)


@pytest.fixture(scope="module")
def gpu() -> dict[str, Any]:
    return _services("docker-compose.gpu.yml", **GPU)


@pytest.fixture(scope="module")
def minio() -> dict[str, Any]:
    return _services("infra/docker/minio.yml", **MINIO)


@pytest.fixture(scope="module")
def dev() -> dict[str, Any]:
    return _services("infra/docker/dev.yml")


def _all(*stacks: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for stack in stacks:
        yield from stack.items()


def test_every_container_stays_locked(gpu: dict[str, Any], minio: dict[str, Any], dev: dict[str, Any]) -> None:
    for name, service in _all(gpu, minio, dev):
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["logging"]["options"]["max-size"], name


def test_nothing_more_is_published(
    base: dict[str, Any], gpu: dict[str, Any], minio: dict[str, Any], dev: dict[str, Any]
) -> None:
    published = base["nginx"]["ports"]
    for name, service in _all(gpu, minio, dev):
        assert service.get("ports", []) == (published if name == "nginx" else []), name


def test_no_service_joins_another_network(
    base: dict[str, Any], gpu: dict[str, Any], minio: dict[str, Any], dev: dict[str, Any]
) -> None:
    expected = {name: service.get("networks") for name, service in base.items()}
    expected["minio"] = expected["seaweedfs"]
    for name, service in _all(gpu, minio, dev):
        assert service.get("networks") == expected[name], name


def test_each_gpu_worker_is_given_all_gpus_and_claims_one(gpu: dict[str, Any]) -> None:
    worker = gpu["worker"]
    (devices,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (devices["driver"], devices["count"], devices["capabilities"]) == ("nvidia", -1, ["gpu"])  # -1: all
    assert worker["environment"]["LATENTMILL_GPU"] == "auto"
    locks = worker["environment"]["LATENTMILL_GPU_LOCK_DIR"]
    assert [volume["source"] for volume in worker["volumes"] if volume["target"] == locks] == ["gpu-locks"]


def test_a_gpu_worker_serves_the_folder_that_the_variable_names(gpu: dict[str, Any]) -> None:
    environment = gpu["worker"]["environment"]
    (weights,) = [volume for volume in gpu["worker"]["volumes"] if volume["type"] == "bind"]
    assert (weights["source"], weights["read_only"]) == (GPU["LATENTMILL_MODEL_DIR"], True)
    assert weights["target"] == environment["LATENTMILL_MODEL_PATH"]
    assert environment["LATENTMILL_MODEL"] == gpu["cli"]["environment"]["LATENTMILL_MODEL"] == GPU["LATENTMILL_MODEL"]


def test_a_gpu_worker_is_built_with_cuda_and_none_of_the_limits_for_a_cpu(gpu: dict[str, Any]) -> None:
    worker = gpu["worker"]
    assert worker["build"]["args"]["VARIANT"] == "cuda"
    assert worker["image"] == "latentmill/worker:cuda"
    assert "memory" not in worker["deploy"]["resources"]["limits"]
    assert "OMP_NUM_THREADS" not in worker["environment"]
    assert worker["environment"]["LATENTMILL_MAX_BATCH"] == "1"


def test_a_gpu_worker_is_not_killed_before_its_drain_is_over(gpu: dict[str, Any]) -> None:
    longest_job_s = 17 * 60
    drain_s = float(gpu["worker"]["environment"]["LATENTMILL_DRAIN_GRACE_S"])
    assert gpu["worker"]["stop_grace_period"] == "22m0s"
    assert longest_job_s < drain_s < 22 * 60


@pytest.mark.parametrize("missing", sorted(GPU))
def test_a_gpu_stack_without_a_model_says_what_to_name(missing: str) -> None:
    given = {name: value for name, value in GPU.items() if name != missing}
    ended = _compose("docker-compose.gpu.yml", "config", "-q", **given)
    assert ended.returncode != 0
    assert f"{missing} is missing a value: name the" in ended.stderr


def test_with_minio_nothing_of_seaweedfs_is_started_or_asked(minio: dict[str, Any]) -> None:
    assert "seaweedfs" not in minio
    assert minio["nginx"]["environment"]["S3_SERVER"] == "minio:9000"
    for name in ("api", "api-backup", "worker", "bucket"):
        assert minio[name]["environment"]["LATENTMILL_S3_ENDPOINT"] == "http://minio:9000", name


def test_with_minio_all_that_waited_for_seaweedfs_waits_for_minio(base: dict[str, Any], minio: dict[str, Any]) -> None:
    for name in OURS:
        needs = set(base[name].get("depends_on", {}))
        expected = needs - {"seaweedfs"} | ({"minio"} if "seaweedfs" in needs else set())
        assert set(minio[name].get("depends_on", {})) == expected, name


def test_minio_reads_its_credentials_from_files(minio: dict[str, Any]) -> None:
    environment = minio["minio"]["environment"]
    assert environment["MINIO_ROOT_USER_FILE"] == "/run/credentials/access_key"
    assert environment["MINIO_ROOT_PASSWORD_FILE"] == "/run/credentials/secret_key"
    assert minio["credentials"]["environment"]["LATENTMILL_S3_KEYS"] == "one"


def test_without_an_image_of_minio_there_is_no_guess() -> None:
    ended = _compose("infra/docker/minio.yml", "config", "-q")
    assert ended.returncode != 0
    assert "MINIO_IMAGE is missing a value" in ended.stderr


def test_in_development_each_service_runs_its_source_and_watches_all_that_is_mounted(dev: dict[str, Any]) -> None:
    for name in ("api", "api-backup", "dispatcher", "worker"):
        mounted = {volume["target"]: volume for volume in dev[name]["volumes"] if volume["type"] == "bind"}
        assert all(volume["read_only"] for volume in mounted.values()), name
        command = dev[name]["command"]
        assert command[:3] == ["python", "-m", "infra.docker.reload"]
        module, *folders = command[3:]
        assert module in folders
        assert {f"/app/{folder}" for folder in folders} | {"/app/infra"} == set(mounted)


def test_what_development_mounts_is_there(dev: dict[str, Any]) -> None:
    sources = {
        Path(volume["source"])
        for service in dev.values()
        for volume in service.get("volumes", [])
        if volume["type"] == "bind"
    }
    assert all(source.exists() for source in sources)
    assert REPOSITORY / "worker" in sources
