"""What a worker knows of its GPUs. NVML itself is made up: most machines that run the tests have none."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pynvml
import pytest

from common.telemetry import gpu_memory, gpu_utilization
from tests.unit.test_api_app import SETTINGS
from worker import gpu
from worker.gpu import NoGpuError, gpu_uuids, watch_gpus

UUIDS = ["GPU-aaaa1111", "GPU-bbbb2222"]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A driver with two GPUs whose handles are their UUIDs; the second uses twice as much as the first."""
    made_up = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(UUIDS),
        "nvmlDeviceGetHandleByIndex": lambda index: UUIDS[index],
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetUUID": lambda handle: handle,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=1 + UUIDS.index(handle), total=8),
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=25 * (1 + UUIDS.index(handle))),
    }
    for name, function in made_up.items():
        monkeypatch.setattr(pynvml, name, function)
    return monkeypatch


@pytest.fixture
def watched(nvml: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The same, sampled without waiting, until the test has ended."""
    nvml.setattr(gpu, "_EVERY_S", 0.01)
    yield nvml
    gpu_utilization.clear()
    gpu_memory.clear()


def _shown(metric: object, wanted: int) -> dict[str, float]:
    """The samples of a metric by GPU and kind, as soon as there are so many."""
    until = time.monotonic() + 10
    while True:
        samples = next(iter(metric.collect())).samples  # type: ignore[attr-defined]
        shown = {" ".join(sample.labels.values()): sample.value for sample in samples}
        if len(shown) >= wanted or time.monotonic() > until:
            return shown
        time.sleep(0.01)


def _raise(kind: int) -> None:
    raise pynvml.NVMLError(kind)


def test_every_gpu_is_listed(nvml: pytest.MonkeyPatch) -> None:
    assert gpu_uuids() == UUIDS


def test_a_gpu_of_another_container_is_counted_but_not_listed(nvml: pytest.MonkeyPatch) -> None:
    def handle(index: int) -> str:
        if index == 0:
            _raise(pynvml.NVML_ERROR_NO_PERMISSION)
        return UUIDS[index]

    nvml.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    assert gpu_uuids() == UUIDS[1:]


def test_without_a_driver_the_error_says_that_one_is_needed(nvml: pytest.MonkeyPatch) -> None:
    nvml.setattr(pynvml, "nvmlInit", lambda: _raise(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    with pytest.raises(NoGpuError, match="LATENTMILL_GPU=auto needs an NVIDIA driver"):
        gpu_uuids()


def test_a_driver_without_a_gpu_is_an_error(nvml: pytest.MonkeyPatch) -> None:
    nvml.setattr(pynvml, "nvmlDeviceGetCount", lambda: 0)
    with pytest.raises(NoGpuError, match="needs a GPU"):
        gpu_uuids()


def test_metrics_show_the_claimed_gpu_alone(watched: pytest.MonkeyPatch) -> None:
    watched.setenv("CUDA_VISIBLE_DEVICES", UUIDS[1])
    stopping = threading.Event()
    watch_gpus(stopping)
    assert _shown(gpu_utilization, 1) == {UUIDS[1]: 0.5}
    assert _shown(gpu_memory, 2) == {f"{UUIDS[1]} used": 2, f"{UUIDS[1]} total": 8}
    stopping.set()


def test_a_mig_instance_shows_its_memory_though_it_has_no_figure_of_its_use(watched: pytest.MonkeyPatch) -> None:
    watched.setenv("CUDA_VISIBLE_DEVICES", UUIDS[0])
    watched.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda _: _raise(pynvml.NVML_ERROR_NOT_SUPPORTED))
    stopping = threading.Event()
    watch_gpus(stopping)
    assert _shown(gpu_memory, 2) == {f"{UUIDS[0]} used": 1, f"{UUIDS[0]} total": 8}
    stopping.set()


def _start_worker(**variables: str) -> "subprocess.CompletedProcess[str]":
    settings = {f"LATENTMILL_{name.upper()}": str(value) for name, value in SETTINGS.items()}
    environment = {**os.environ, **settings, **variables}
    command = [sys.executable, "-m", "worker"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_a_worker_that_can_claim_no_gpu_says_so_and_exits_1() -> None:
    ended = _start_worker(LATENTMILL_GPU="auto", CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 1
    assert "LATENTMILL_GPU=auto" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_another_way_to_a_gpu_is_refused_with_the_legal_ones() -> None:
    ended = _start_worker(LATENTMILL_GPU="first")
    assert (ended.returncode, ended.stderr) == (2, "LATENTMILL_GPU: should be 'any' or 'auto'\n")
