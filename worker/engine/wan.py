"""The real engine: Wan2.2 pipelines of diffusers, for T2V-A14B, I2V-A14B and TI2V-5B checkpoints in a local folder."""

import gc
import logging
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import diffusers
import torch
import transformers

from common.domain.jobs import ErrorClass, Phase
from common.domain.profiles import PROFILES
from worker.engine.base import (
    Batch,
    Capabilities,
    Control,
    Emit,
    EngineConfig,
    Event,
    FramesReady,
    Member,
    MemberDecoded,
    MemberFailed,
    PhaseStarted,
)
from worker.engine.control import Part, StopBatch, StopReason, stopped
from worker.engine.wan_decode import HostCopies, stream_decode, to_uint8
from worker.engine.wan_denoise import BlockGate, blocks_of, denoise
from worker.engine.wan_errors import Failure, failure_of
from worker.engine.wan_images import BadImageError, to_tensor
from worker.engine.wan_pipelines import Pipeline, Pipelines, fresh_scheduler, load
from worker.engine.wan_text import PromptEmbeddings
from worker.engine.warmup import Unlimited, smallest_member

log = logging.getLogger(__name__)
Result = TypeVar("Result")

# One job that does not fit may be too large; two in a row mean that something else holds the memory.
_LONE_OOM_LIMIT = 2


@dataclass(frozen=True, slots=True)
class Rendered:
    """Latents of a part, one row per job id, and the milliseconds they took."""

    rows: tuple[str, ...]
    latents: torch.Tensor
    timings_ms: dict[str, int]


class WanEngine:
    """Implements Engine."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._profile = PROFILES[config.model]
        self._prompts = PromptEmbeddings()
        self._copies = HostCopies()
        self._lone_ooms = 0

    def load(self) -> None:
        """Read the checkpoint. Raises OSError or ValueError when the folder is none."""
        if self._config.threads:
            torch.set_num_threads(self._config.threads)
        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
        self.pipelines: Pipelines = load(self._folder, self._profile)
        self._gate = BlockGate(blocks_of(self.pipelines.present[0]))

    def warmup(self) -> None:
        """Render one step of the smallest job. Raises RuntimeError when that fails."""
        events: list[Event] = []
        self.run(Batch("warm-up", (smallest_member(self._profile),)), events.append, Unlimited())
        if failed := [event.detail for event in events if isinstance(event, MemberFailed)]:
            msg = f"the first, smallest job failed: {failed[0]}"
            raise RuntimeError(msg)

    def capabilities(self) -> Capabilities:
        """Describe the engine."""
        on_gpu = self.pipelines.device.type == "cuda"
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "transformers": transformers.__version__,
        }
        return Capabilities(
            engine="wan",
            model=self._config.model,
            device=torch.cuda.get_device_name() if on_gpu else "cpu",
            max_batch=self._config.max_batch,
            plan=self.pipelines.plan,
            versions=versions,
        )

    def run(self, batch: Batch, emit: Emit, control: Control) -> bool:
        """Render a batch; halves what does not fit into memory."""
        if self.pipelines.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        todo = [[m for m in batch.members if (m.image is None) is textual] for textual in (True, False)]
        while todo:
            if members := todo.pop(0):
                todo[:0] = self._render(Part(members, emit, control))
        return self._lone_ooms < _LONE_OOM_LIMIT

    def reset(self) -> None:
        """Drop what a broken call left behind: hooks, feature caches, the scheduler's tensors, activations."""
        for pipe in self.pipelines.present:
            pipe.maybe_free_model_hooks()
            pipe.scheduler = fresh_scheduler(pipe, pipe.scheduler.config.flow_shift)
        self.pipelines.present[0].vae.clear_cache()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free the model."""
        del self.pipelines, self._gate
        gc.collect()

    def _render(self, part: Part) -> list[list[Member]]:
        """Settle every member, or return those to try again, in smaller parts."""
        members = tuple(part.waiting.values())
        rendered = self._guarded(lambda: self._denoise(part), part)
        if isinstance(rendered, Failure):
            return self._after(rendered, part)
        if isinstance(rendered, StopReason):
            part.settle_all(rendered)
            return []
        for member in members:
            if member.job_id in part.waiting:
                self._deliver(member, rendered, part)
        self.pipelines.settle()
        return []

    def _guarded(self, action: Callable[[], Result], part: Part) -> Result | Failure | StopReason:
        """Run a step of the work. After any exception the engine is as fresh, and the exception itself is gone."""
        shared = next(iter(part.waiting.values())).parameters
        ended: Failure | StopReason
        self._gate.watch = part.check
        try:
            return action()
        except StopBatch as stop:
            ended = stop.reason
        except Exception as error:
            log.exception("a pipeline call failed")
            ended = failure_of(error, shared, len(part.waiting))
        finally:
            self._gate.watch = None
        self.reset()  # here, where no exception holds the frames of the call
        return ended

    def _after(self, failure: Failure, part: Part) -> list[list[Member]]:
        """Out of memory with company: try in halves. Everything else fails those who wait."""
        waiting = list(part.waiting.values())
        if failure.error is ErrorClass.OOM and len(waiting) > 1:
            middle = len(waiting) // 2
            return [waiting[:middle], waiting[middle:]]
        self._lone_ooms += failure.error is ErrorClass.OOM
        for member in waiting:
            part.fail(member.job_id, failure.error, failure.detail)
        return []

    def _denoise(self, part: Part) -> Rendered:
        began = time.monotonic()
        pipe, images = self._inputs(part)
        part.check()
        self.pipelines.activate(pipe)
        part.emit(PhaseStarted(part.job_ids, Phase.TEXT))
        embeds = self._embeds(pipe, tuple(part.waiting.values()))
        encoded, rows = time.monotonic(), part.job_ids
        part.emit(PhaseStarted(rows, Phase.DENOISE))
        latents = denoise(pipe, part, embeds, images)
        timings = {"text": encoded - began, "denoise": time.monotonic() - encoded}
        return Rendered(rows, latents, {name: round(seconds * 1000) for name, seconds in timings.items()})

    def _inputs(self, part: Part) -> tuple[Pipeline, torch.Tensor | None]:
        """The pipeline for this part and the pictures it takes. Members whose picture is wrong for it fail."""
        by_text = all(member.image is None for member in part.waiting.values())
        if by_text and self.pipelines.text is not None:
            return self.pipelines.text, None
        if self.pipelines.image is None:
            for job_id in part.job_ids:
                part.fail(job_id, ErrorClass.INVALID_INPUT, "the model takes no input image")
        return self.pipelines.image, _images(part)

    def _embeds(self, pipe: Pipeline, members: tuple[Member, ...]) -> dict[str, torch.Tensor]:
        asked = [member.parameters for member in members]
        device = self.pipelines.device
        embeds = {"prompt_embeds": self._prompts.get(pipe, [one.prompt for one in asked], device)}
        if asked[0].guidance_scale > 1:
            negative = [one.negative_prompt for one in asked]
            embeds["negative_prompt_embeds"] = self._prompts.get(pipe, negative, device)
        return embeds

    def _deliver(self, member: Member, rendered: Rendered, part: Part) -> None:
        """Decode one member and settle it."""
        job_id = member.job_id
        decoded = self._guarded(lambda: self._decode(member, rendered, part), part)
        match decoded:
            case Failure():
                self._lone_ooms += decoded.error is ErrorClass.OOM
                part.fail(job_id, decoded.error, decoded.detail)
            case StopReason():
                part.settle(stopped(decoded, job_id))
            case _:
                self._lone_ooms = 0
                part.settle(decoded)

    def _decode(self, member: Member, rendered: Rendered, part: Part) -> MemberDecoded:
        began, sent, job_id = time.monotonic(), 0, member.job_id
        part.emit(PhaseStarted((job_id,), Phase.DECODE))
        row = rendered.rows.index(job_id)
        chunks = stream_decode(self.pipelines.present[0].vae, rendered.latents[row : row + 1])
        for frames in self._copies.stream(to_uint8(chunk) for chunk in chunks):
            part.check(job_id)
            part.emit(FramesReady(job_id, sent, frames))
            sent += len(frames)
        timings = rendered.timings_ms | {"decode": round((time.monotonic() - began) * 1000)}
        return MemberDecoded(job_id, sent, timings, self._peak_memory())

    def _peak_memory(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self.pipelines.device.type == "cuda" else None


def _images(part: Part) -> torch.Tensor:
    """The pictures (N, 3, H, W) of the members that wait; those without a readable one fail."""
    tensors = []
    for job_id, member in tuple(part.waiting.items()):
        try:
            tensors.append(to_tensor(member))
        except BadImageError as error:
            part.fail(job_id, ErrorClass.INVALID_INPUT, str(error))
    return torch.stack(tensors) if tensors else torch.empty(0)
