"""Loading the pipelines of a Wan2.2 checkpoint from a folder, and deciding where their weights are kept."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline

from common.domain.profiles import ImageInput, ModelProfile

# Activations beyond the weights, per token of the latent video: the published peaks of A14B minus one expert are
# 12.7 GB for 32,760 tokens (480p) and 31 GB for 75,600 (720p). TI2V-5B: 22.9 GB minus 12.8 GB of weights, for 27,280.
_BYTES_PER_TOKEN = 420_000

# Diffusers has no types.
Pipeline: TypeAlias = Any
Vae: TypeAlias = Any


class BatchedImageToVideo(WanImageToVideoPipeline):  # type: ignore[misc]  # diffusers has no types
    """WanImageToVideoPipeline for one image per prompt, as a tensor (N, 3, H, W) with values in [0, 1].

    The stock pipeline encodes all images once per generator and so makes N x N conditions. Values in [0, 1] matter:
    it takes a tensor without a negative value for unnormalised and would scale a bright [-1, 1] batch twice.
    """

    def prepare_latents(  # noqa: PLR0913, PLR0917 - the signature of the overridden method
        self,
        image: torch.Tensor,
        batch_size: int,
        num_channels_latents: int = 16,
        height: int = 480,
        width: int = 832,
        num_frames: int = 81,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        last_image: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Latents and condition of every sample, each made as if it were alone."""
        shape = (num_channels_latents, height, width, num_frames, dtype, device)
        each = [
            super(BatchedImageToVideo, self).prepare_latents(
                _row(image, i), 1, *shape, _generator(generator, i), _row(latents, i), _row(last_image, i)
            )
            for i in range(batch_size)
        ]
        per_token: bool = self.config.expand_timesteps
        joined = tuple(torch.cat([made[k] for made in each]) for k in (0, 1))
        # The model with per-token timesteps also gets a mask of the first frame, which is the same for every sample.
        return (*joined, each[0][2]) if per_token else joined


def _row(tensor: torch.Tensor | None, index: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[index : index + 1]


def _generator(
    generator: torch.Generator | list[torch.Generator] | None, index: int
) -> torch.Generator | list[torch.Generator] | None:
    return generator[index] if isinstance(generator, list) else generator


@dataclass(frozen=True, slots=True)
class Pipelines:
    """The pipelines of one checkpoint; they share every module. `plan` says where the weights are, and why."""

    text: Pipeline | None
    image: Pipeline | None
    device: torch.device
    offloads: bool
    plan: str

    @property
    def present(self) -> tuple[Pipeline, ...]:
        """The pipelines that this checkpoint has."""
        return tuple(pipe for pipe in (self.text, self.image) if pipe is not None)

    def activate(self, pipe: Pipeline) -> None:
        """Prepare a pipeline for a call. With offload, the hooks on the shared modules belong to one pipeline only."""
        if self.offloads and len(self.present) > 1:
            pipe.enable_model_cpu_offload(device=self.device)

    def settle(self) -> None:
        """Take an offloaded VAE off the GPU after a decode: the next denoise needs its room."""
        if self.offloads:
            for pipe in self.present:
                pipe.maybe_free_model_hooks()


def load(folder: Path, profile: ModelProfile) -> Pipelines:
    """Read safetensors from a folder, never the network. Raises OSError or ValueError when the folder is not one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source: dict[str, Any] = {"use_safetensors": True, "local_files_only": True}
    # The VAE stays in float32: in bfloat16 its error becomes visible.
    vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae", dtype=torch.float32, **source)
    image_only = _class_name(folder) == WanImageToVideoPipeline.__name__
    stock: Pipeline = BatchedImageToVideo if image_only else WanPipeline
    first = stock.from_pretrained(folder, vae=vae, dtype=dtype, **source)
    first.register_to_config(boundary_ratio=profile.boundary_ratio)
    text, image = (None, first) if image_only else (first, None)
    if text is not None and profile.image is not ImageInput.REFUSED:
        with_image: Pipeline = BatchedImageToVideo
        image = with_image(
            **text.components, boundary_ratio=profile.boundary_ratio, expand_timesteps=text.config.expand_timesteps
        )
    offloads, plan = _place(first, profile, device)
    for pipe in filter(None, (text, image)):
        pipe.set_progress_bar_config(disable=True)
    return Pipelines(text, image, device, offloads, plan)


def _class_name(folder: Path) -> str:
    return str(json.loads((folder / "model_index.json").read_text(encoding="utf-8")).get("_class_name"))


def _place(pipe: Pipeline, profile: ModelProfile, device: torch.device) -> tuple[bool, str]:
    """Move the weights to where they belong; returns whether they are offloaded, and the reason in words."""
    weights = weight_bytes(pipe)
    if device.type == "cpu":
        return False, f"no GPU: {weights / 1e9:.2f} GB of weights in float32 on the CPU"
    free, _ = torch.cuda.mem_get_info()
    needed = weights + activation_bytes(profile)
    if fits := needed <= free:
        pipe.to(device)
    else:
        pipe.enable_model_cpu_offload(device=device)
    kept = "everything resident" if fits else "one model at a time on the GPU"
    reason = f"needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB were free"
    return not fits, f"{kept}: {reason}"


def weight_bytes(pipe: Pipeline) -> int:
    """What the weights of all modules take."""
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    return sum(weight.numel() * weight.element_size() for module in modules for weight in module.parameters())


def activation_bytes(profile: ModelProfile) -> int:
    """What the largest default-length job needs beyond the weights. The size multiple is a token's side in pixels."""
    latent_frames = (int(profile.num_frames.default) - 1) // 4 + 1
    return profile.max_area // profile.size_multiple**2 * latent_frames * _BYTES_PER_TOKEN


def fresh_scheduler(pipe: Pipeline, flow_shift: float) -> UniPCMultistepScheduler:
    """A scheduler of its own for one call: it keeps tensors of the call, and checkpoints ship with another shift."""
    fresh: UniPCMultistepScheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=flow_shift)
    return fresh
