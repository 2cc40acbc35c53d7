"""One pipeline call from noise to latents: seeds, steps, and ways out in its middle."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from common.domain.jobs import ErrorClass
from common.domain.parameters import JobParameters
from worker.engine.base import StepDone
from worker.engine.control import Part
from worker.engine.wan_pipelines import Pipeline, fresh_scheduler


def denoise(pipe: Pipeline, part: Part, embeds: dict[str, torch.Tensor], image: torch.Tensor | None) -> torch.Tensor:
    """Latents (N, C, T, h, w), one row per member that waited at the start.

    Settles members that are cancelled or not finite on the way; raises StopBatch when none is left.
    """
    members = tuple(part.waiting.values())
    shared = members[0].parameters
    pipe.scheduler = fresh_scheduler(pipe, shared.flow_shift)
    more = {} if image is None else {"image": image}
    result = pipe(
        # One generator object each, on the CPU: the noise is the same on every kind of GPU and in every batch.
        generator=[torch.Generator("cpu").manual_seed(member.parameters.seed) for member in members],
        output_type="latent",
        callback_on_step_end=Steps(part, shared.num_inference_steps).on_step,
        callback_on_step_end_tensor_inputs=["latents"],
        **call_arguments(shared),
        **embeds,
        **more,
    )
    latents: torch.Tensor = result.frames
    return latents


def call_arguments(shared: JobParameters) -> dict[str, Any]:
    """The arguments that all members share. guidance_scale_2 is refused by models with one expert."""
    arguments: dict[str, Any] = {
        "width": shared.width,
        "height": shared.height,
        "num_frames": shared.num_frames,
        "num_inference_steps": shared.num_inference_steps,
        "guidance_scale": shared.guidance_scale,
    }
    if shared.guidance_scale_2 is not None:
        arguments["guidance_scale_2"] = shared.guidance_scale_2
    return arguments


class Steps:
    """Called by the pipeline after every step: reports it, and settles members for whom it makes no sense to go on."""

    def __init__(self, part: Part, steps: int) -> None:
        self._part = part
        self._rows = part.job_ids
        self._steps = steps
        self._began = time.monotonic()

    def on_step(self, _pipe: object, index: int, _timestep: object, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Implement callback_on_step_end; changes no tensor."""
        self._settle_not_finite(tensors["latents"])
        self._part.drop_cancelled()
        now = time.monotonic()
        seconds, self._began = now - self._began, now
        if self._part.waiting:
            self._part.emit(StepDone(self._part.job_ids, index + 1, self._steps, seconds))
        self._part.check()
        return {}

    def _settle_not_finite(self, latents: torch.Tensor) -> None:
        finite = torch.isfinite(latents).flatten(1).all(dim=1).tolist()
        for job_id, good in zip(self._rows, finite, strict=True):
            if not good and job_id in self._part.waiting:
                self._part.fail(job_id, ErrorClass.NAN_OUTPUT, "the latents are not finite")


class BlockGate:
    """Calls `watch` before every block, so that a cancel need not wait for a step (26 s at 720p on an H100).

    Kernels are queued far ahead of the GPU: waiting for the block `_AHEAD` before this one keeps the queue filled
    and still makes the gate's place the GPU's place.
    """

    _AHEAD = 4

    def __init__(self, blocks: Iterable[torch.nn.Module]) -> None:
        self.watch: Callable[[], None] | None = None
        self._queued: deque[torch.cuda.Event] = deque()
        for block in blocks:
            block.register_forward_pre_hook(self._before)

    def _before(self, _module: torch.nn.Module, _arguments: object) -> None:
        if self.watch is None:
            return
        if torch.cuda.is_available():
            self._keep_pace()
        self.watch()

    def _keep_pace(self) -> None:
        event = torch.cuda.Event()
        event.record()
        self._queued.append(event)
        if len(self._queued) > self._AHEAD:
            self._queued.popleft().synchronize()


def blocks_of(pipe: Pipeline) -> list[torch.nn.Module]:
    """The blocks of the text encoder and of every expert."""
    experts = [expert for expert in (pipe.transformer, pipe.transformer_2) if expert is not None]
    return [*pipe.text_encoder.encoder.block, *(block for expert in experts for block in expert.blocks)]
