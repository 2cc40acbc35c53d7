"""Use and memory of this worker's GPUs as metrics. Without a driver there is nothing to show, and nothing is."""

import os
import threading
from contextlib import suppress
from typing import Any

import pynvml
import structlog

from common.telemetry import gpu_memory, gpu_utilization

# NVML averages over up to a second; more often would show the same figures.
_EVERY_S = 5.0

log = structlog.get_logger()


class NoGpuError(RuntimeError):
    """There is no driver, or no GPU behind it."""


def gpu_uuids() -> list[str]:
    """Every GPU that this machine or container has, in the order of its PCI bus. Raises NoGpuError.

    A container sees those that it was given: NVIDIA_VISIBLE_DEVICES has been obeyed already, in numbers of the host.
    """
    try:
        pynvml.nvmlInit()
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in _all_devices()]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        msg = f"LATENTMILL_GPU=auto needs an NVIDIA driver: {error}"
        raise NoGpuError(msg) from error
    if not uuids:
        msg = "LATENTMILL_GPU=auto needs a GPU, and the NVIDIA driver shows none"
        raise NoGpuError(msg)
    return uuids


def watch_gpus(stopping: threading.Event) -> None:
    """Sample until `stopping`, in the background."""
    try:
        pynvml.nvmlInit()
        handles = {pynvml.nvmlDeviceGetUUID(handle): handle for handle in _own_devices()}
    except pynvml.NVMLError as error:
        log.info("gpu_metrics_off", reason=str(error))
        return
    threading.Thread(target=_sample, args=(handles, stopping), name="gpu", daemon=True).start()


def _own_devices() -> list[Any]:
    """The devices that CUDA gives this process. NVML itself sees all of the host's, whatever the variable says."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _all_devices()
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [
        pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]


def _all_devices() -> list[Any]:
    devices = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        with suppress(pynvml.NVMLError_NoPermission):  # counted, but given to another container
            devices.append(pynvml.nvmlDeviceGetHandleByIndex(index))
    return devices


def _sample(handles: dict[str, Any], stopping: threading.Event) -> None:
    while not stopping.wait(_EVERY_S):
        for gpu, handle in handles.items():
            try:
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                gpu_memory.labels(gpu, "used").set(memory.used)
                gpu_memory.labels(gpu, "total").set(memory.total)
                with suppress(pynvml.NVMLError_NotSupported):  # MIG instances have no such figure
                    gpu_utilization.labels(gpu).set(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
            except pynvml.NVMLError as error:  # a GPU that is gone shows no figures rather than its last ones
                log.warning("gpu_not_readable", gpu=gpu, reason=str(error))
                gpu_utilization.clear()
                gpu_memory.clear()
