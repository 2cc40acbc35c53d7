"""Use and memory of the GPUs as metrics. Without a driver there is nothing to show, and nothing is."""

import threading

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
    except pynvml.NVMLError as error:
        log.info("gpu_metrics_off", reason=str(error))
        return
    threading.Thread(target=_sample, args=(stopping,), name="gpu", daemon=True).start()


def _sample(stopping: threading.Event) -> None:
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    while not stopping.wait(_EVERY_S):
        for index, handle in enumerate(handles):
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            gpu_utilization.labels(str(index)).set(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
            gpu_memory.labels(str(index), "used").set(memory.used)
            gpu_memory.labels(str(index), "total").set(memory.total)
