"""Encodes rendered clips once, since the autoencoder is the slow part of every later step."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from models.parts import MASK_CHANNELS
from models.training.clips import ClipShape, draw_batch
from models.training.stages import Recipe, Tensors

# Clips of each length; nine frames are what most prompts ask for.
T2V_CLIPS: Final = {9: 1500, 13: 500, 17: 750}
I2V_CLIPS: Final = 2000
I2V_FRAMES: Final = 9
ENCODED_AT_ONCE: Final = 10


@dataclass(frozen=True, slots=True)
class Statistics:
    """Mean and standard deviation of each latent channel, which the pipelines use to normalise latents."""

    mean: torch.Tensor
    std: torch.Tensor

    def normalise(self, latents: torch.Tensor) -> torch.Tensor:
        """Bring latents (batch, channels, frames, height, width) to mean zero and deviation one."""
        return (latents - self.mean.view(1, -1, 1, 1, 1)) / self.std.view(1, -1, 1, 1, 1)

    def as_lists(self) -> tuple[list[float], list[float]]:
        """Give both as the autoencoder's configuration wants them."""
        return self.mean.tolist(), self.std.tolist()


@torch.no_grad()
def encode_clips(vae: AutoencoderKLWan, recipe: Recipe) -> Tensors:
    """Encode clips of every length and measure their statistics.

    The names are `scenes.9`, `latents.9` and so on, `mean` and `std`; the latents are normalised.
    """
    rng = np.random.default_rng(recipe.seed + 1)
    scenes, raw = {}, {}
    for frames, clips in T2V_CLIPS.items():
        batches = [draw_batch(rng, ClipShape(ENCODED_AT_ONCE, frames)) for _ in range(_batches(recipe, clips))]
        scenes[frames] = torch.cat([numbers for numbers, _ in batches])
        raw[frames] = torch.cat([vae.encode(pictures).latent_dist.mean for _, pictures in batches])
    every = torch.cat([latents.transpose(0, 1).flatten(1) for latents in raw.values()], dim=1)
    statistics = Statistics(every.mean(dim=1), every.std(dim=1))
    tensors = {f"scenes.{frames}": numbers for frames, numbers in scenes.items()}
    tensors |= {f"latents.{frames}": statistics.normalise(latents) for frames, latents in raw.items()}
    return tensors | {"mean": statistics.mean, "std": statistics.std}


@torch.no_grad()
def encode_conditions(vae: AutoencoderKLWan, statistics: Statistics, recipe: Recipe) -> Tensors:
    """Encode clips, and their first frames as the image-to-video pipeline does: followed by gray, with a mask.

    The names are `scenes`, `latents` and `conditions`.
    """
    rng = np.random.default_rng(recipe.seed + 500)
    scenes, latents, conditions = [], [], []
    for _ in range(_batches(recipe, I2V_CLIPS)):
        numbers, clips = draw_batch(rng, ClipShape(ENCODED_AT_ONCE, I2V_FRAMES))
        scenes.append(numbers)
        latents.append(statistics.normalise(vae.encode(clips).latent_dist.mode()))
        conditions.append(_condition(vae, statistics, clips))
    return {"scenes": torch.cat(scenes), "latents": torch.cat(latents), "conditions": torch.cat(conditions)}


def _condition(vae: AutoencoderKLWan, statistics: Statistics, clips: torch.Tensor) -> torch.Tensor:
    """Join the mask (1 in the given frame) and the latents of a clip of which only the first frame is known."""
    first_only = torch.cat([clips[:, :, :1], torch.zeros_like(clips[:, :, 1:])], dim=2)
    image = statistics.normalise(vae.encode(first_only).latent_dist.mode())
    mask = torch.zeros(len(image), MASK_CHANNELS, *image.shape[2:])
    mask[:, :, 0] = 1
    return torch.cat([mask, image], dim=1)


def _batches(recipe: Recipe, clips: int) -> int:
    return -(-recipe.steps(clips) // ENCODED_AT_ONCE)
