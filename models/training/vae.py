"""Trains the autoencoder: first whole, then its decoder alone."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import nn
from torch.nn import functional

from models import parts
from models.training.clips import ClipShape, draw_batch
from models.training.modules import channels_last, small_vae
from models.training.optimise import learning_rate, optimiser, take_step
from models.training.stages import Recipe

logger = logging.getLogger(__name__)

LOG_EVERY: Final = 50
VAE_RATE: Final = 2e-3
# Just enough to keep the latents in one region; a larger weight blurs the pictures.
KL_WEIGHT: Final = 1e-5

DECODER_STEPS: Final = 410
DECODER_RATE: Final = 1e-3
# A sampler's last step leaves up to this much noise, in standard deviations of a latent channel.
LEFTOVER_NOISE: Final = 0.08
# Pixels near an outline decide the shape and are few: count them five times.
EDGE_GAIN: Final = 4.0
EDGE_REACH: Final = 7
BLOB_CONTRAST: Final = 0.02


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps that take turns over some clip shapes, and their share of the learning rate's curve."""

    steps: int
    share: float
    shapes: tuple[ClipShape, ...]
    loose: bool


# Cheap single frames first, then short crops, and the real size last. The shares are shares of computing time,
# and the steps (1,950 together) fill them on one core: 0.34, 1.09 and 2.41 s a step were measured.
PHASES: Final = (
    Phase(980, 0.2, (ClipShape(16, 1, 32),), loose=True),
    Phase(763, 0.5, (ClipShape(8, 5, 32), ClipShape(8, 9, 32)), loose=True),
    Phase(207, 0.3, (ClipShape(4, 9),), loose=False),
)


def train_vae(recipe: Recipe) -> AutoencoderKLWan:
    """Train an autoencoder from nothing on rendered clips."""
    torch.manual_seed(recipe.seed)
    rng = np.random.default_rng(recipe.seed)
    vae = small_vae()
    keep_variance(vae)
    channels_last(vae)
    adam = optimiser(vae.parameters(), VAE_RATE, weight_decay=0)
    for step, (progress, clips) in enumerate(_scheduled_clips(recipe, rng), start=1):
        loss = _reconstruction_loss(vae, clips)
        take_step(adam, loss, learning_rate(VAE_RATE, progress))
        if step % LOG_EVERY == 0:
            logger.info("vae step %d (%.0f %%) loss %.4f", step, 100 * progress, loss.item())
    return vae


@torch.no_grad()
def keep_variance(vae: AutoencoderKLWan) -> None:
    """Start as an image autoencoder that keeps the variance of its signal.

    torch's own start shrinks the signal at every convolution until only the biases are left, and nothing is learnt
    for minutes.
    """
    for name, layer in vae.named_modules():
        if isinstance(layer, nn.Conv3d) and layer.weight.shape[2] > 1:
            _start_temporal(layer)
        elif isinstance(layer, nn.Conv3d | nn.Conv2d):
            _start_spatial(layer)
        else:
            continue
        if name.endswith("conv2"):  # the end of a residual branch: small, so that branches add up gently
            layer.weight.mul_(0.3)
    # The second half of the encoder's output is the log of the posterior's variance: begin with little noise.
    vae.quant_conv.bias[parts.LATENT_CHANNELS :] = -5.0
    vae.quant_conv.weight[parts.LATENT_CHANNELS :] *= 0.1


def decode_freely(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Decode as the model does, without its clamp to -1..1, which would stop the gradient.

    The model has no public way to do so; these private names are those of diffusers 0.42.
    """
    vae.clear_cache()
    hidden = vae.post_quant_conv(latents)
    frames = []
    for index in range(latents.shape[2]):
        vae._conv_idx = [0]  # noqa: SLF001
        frames.append(
            vae.decoder(
                hidden[:, :, index : index + 1],
                feat_cache=vae._feat_map,  # noqa: SLF001
                feat_idx=vae._conv_idx,  # noqa: SLF001
                first_chunk=index == 0,
            )
        )
    vae.clear_cache()
    return torch.cat(frames, dim=2)


def tune_decoder(vae: AutoencoderKLWan, latent_std: torch.Tensor, recipe: Recipe) -> None:
    """Sharpen the decoder; the encoder stays as it is, so that cached latents stay valid."""
    torch.manual_seed(recipe.seed + 6)
    rng = np.random.default_rng(recipe.seed + 6)
    vae.requires_grad_(requires_grad=False)
    tuned = [*vae.decoder.parameters(), *vae.post_quant_conv.parameters()]
    for parameter in tuned:
        parameter.requires_grad_(requires_grad=True)
    adam = optimiser(tuned, DECODER_RATE, weight_decay=0)
    steps = recipe.steps(DECODER_STEPS)
    for step in range(steps):
        _, clips = draw_batch(rng, ClipShape(4, 9))
        loss = _edge_loss(vae, clips, latent_std)
        take_step(adam, loss, learning_rate(DECODER_RATE, step / steps))
        if (step + 1) % LOG_EVERY == 0:
            logger.info("decoder step %d of %d loss %.4f", step + 1, steps, loss.item())


def _scheduled_clips(recipe: Recipe, rng: np.random.Generator) -> Iterator[tuple[float, torch.Tensor]]:
    """Yield the progress (0..1) and the clips of every step."""
    done = 0.0
    for phase in PHASES:
        steps = recipe.steps(phase.steps)
        for step in range(steps):
            shape = phase.shapes[step % len(phase.shapes)]
            _, clips = draw_batch(rng, shape, loose=phase.loose)
            yield done + phase.share * step / steps, clips
        done += phase.share


def _reconstruction_loss(vae: AutoencoderKLWan, clips: torch.Tensor) -> torch.Tensor:
    posterior = vae.encode(clips).latent_dist
    difference = decode_freely(vae, posterior.sample()) - clips
    kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
    loss: torch.Tensor = difference.abs().mean() + difference.square().mean() + KL_WEIGHT * kl
    return loss


def _edge_loss(vae: AutoencoderKLWan, clips: torch.Tensor, latent_std: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        latents = vae.encode(clips).latent_dist.mean
        noise = LEFTOVER_NOISE * torch.rand(len(latents), 1, 1, 1, 1) * latent_std.view(1, -1, 1, 1, 1)
        latents = latents + noise * torch.randn_like(latents)
        weight = _edge_weight(clips)
    difference = decode_freely(vae, latents) - clips
    return (weight * (difference.abs() + difference.square())).mean()


def _edge_weight(clips: torch.Tensor) -> torch.Tensor:
    """Weigh the shape and its surroundings; the mean is one, so that the learning rate means the same."""
    corner = clips[..., :1, :1]
    blob = ((clips - corner).abs().amax(dim=1, keepdim=True) > BLOB_CONTRAST).float()
    near = functional.max_pool3d(
        blob, (1, EDGE_REACH, EDGE_REACH), stride=1, padding=(0, EDGE_REACH // 2, EDGE_REACH // 2)
    )
    weight = 1 + EDGE_GAIN * near
    return weight / weight.mean()


def _start_spatial(layer: nn.Conv3d | nn.Conv2d) -> None:
    _start_bias(layer)
    layer.weight.normal_(std=layer.weight[0].numel() ** -0.5)


def _start_temporal(layer: nn.Conv3d) -> None:
    """Let only the newest frame count; the older ones come in during training."""
    _start_bias(layer)
    weight = layer.weight
    outputs, inputs, _, height, width = weight.shape
    if height == 1:  # a change of the frame rate: repeat the frame
        newest = torch.eye(inputs).repeat(outputs // inputs, 1).view(outputs, inputs, 1, 1)
    else:
        newest = torch.randn(outputs, inputs, height, width) * (inputs * height * width) ** -0.5
    weight.normal_(std=0.01 * weight[0].numel() ** -0.5)
    weight[:, :, -1] += newest


def _start_bias(layer: nn.Conv3d | nn.Conv2d) -> None:
    """Never zero: the RMS norm of an exactly gray pixel would have an infinite gradient, and the weights turn NaN."""
    if layer.bias is not None:
        layer.bias.normal_(std=0.1)
