"""Use and memory of this worker's GPUs as metrics. Without a driver there is nothing to show, and nothing is."""

import os
import threading
from typing import Any

import pynvml
import structlog

from common.telemetry import gpu_memory, gpu_utilization

# NVML averages over up to a second; more often would show the same figures.
_EVERY_S = 5.0

log = structlog.get_logger()


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
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [
        pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]


def _sample(handles: dict[str, Any], stopping: threading.Event) -> None:
    while not stopping.wait(_EVERY_S):
        for gpu, handle in handles.items():
            try:
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                gpu_utilization.labels(gpu).set(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
                gpu_memory.labels(gpu, "used").set(memory.used)
                gpu_memory.labels(gpu, "total").set(memory.total)
            except pynvml.NVMLError as error:  # a GPU that is gone shows no figures rather than its last ones
                log.warning("gpu_not_readable", gpu=gpu, reason=str(error))
                gpu_utilization.clear()
                gpu_memory.clear()
