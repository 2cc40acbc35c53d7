"""Trains a transformer by flow matching: it learns the velocity from a clean latent to noise."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from models.training.modules import PIPELINE_TOKENS
from models.training.optimise import RunningAverage, learning_rate, optimiser, take_step

logger = logging.getLogger(__name__)

BATCH: Final = 32
LOG_EVERY: Final = 200
# The longest prompt of the world has seven known words and the end mark; the rest is padding.
TOKENS: Final = 16
TIMESTEPS: Final = 1000
# The sampler's flow_shift in use lies between 1 and this; it moves the noise levels that matter upwards.
LARGEST_SHIFT: Final = 8.0
WEIGHT_DECAY: Final = 0.01


@dataclass(frozen=True, slots=True)
class Prompts:
    """A tokenizer with its text encoder."""

    tokenizer: PreTrainedTokenizerFast
    encoder: UMT5EncoderModel

    def encode(self, texts: list[str]) -> torch.Tensor:
        """Encode prompts to (batch, TOKENS, width), zero after their end as in the pipeline."""
        tokens = self.tokenizer(texts, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt")
        hidden: torch.Tensor = self.encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        cut: torch.Tensor = hidden * tokens.attention_mask.unsqueeze(-1)
        return cut


@dataclass(frozen=True, slots=True)
class Examples:
    """A batch: normalised latents, their prompts, and for image-to-video the channels that follow the latents."""

    latents: torch.Tensor
    texts: list[str]
    condition: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class FlowPlan:
    """One run: the noise levels are drawn between `lowest` and `highest`, of 0 (clean) to 1 (noise)."""

    name: str
    steps: int
    rate: float
    average: float
    seed: int
    lowest: float = 0.0
    highest: float = 1.0
    train_text: bool = False


def train_flow(
    model: WanTransformer3DModel,
    prompts: Prompts,
    plan: FlowPlan,
    draw: Callable[[np.random.Generator], Examples],
) -> None:
    """Train the transformer in place, and with `train_text` the text encoder too; the average weights stay."""
    noise, rng = torch.Generator().manual_seed(plan.seed), np.random.default_rng(plan.seed)
    _set_cross_attention(model, OnePadAttention(TOKENS))
    prompts.encoder.requires_grad_(requires_grad=plan.train_text)
    trained = [model, prompts.encoder] if plan.train_text else [model]
    adam = optimiser((weight for module in trained for weight in module.parameters()), plan.rate, WEIGHT_DECAY)
    average = RunningAverage(trained, plan.average)
    losses: list[float] = []
    for step in range(plan.steps):
        loss = flow_loss(model, prompts, draw(rng), draw_noise_levels(plan, noise), noise)
        take_step(adam, loss, learning_rate(plan.rate, step / plan.steps))
        average.update()
        losses.append(loss.item())
        if (step + 1) % LOG_EVERY == 0:
            logger.info("%s step %d of %d loss %.4f", plan.name, step + 1, plan.steps, np.mean(losses[-LOG_EVERY:]))
    average.write_back()
    _set_cross_attention(model, WanAttnProcessor())


def flow_loss(
    model: WanTransformer3DModel, prompts: Prompts, examples: Examples, levels: torch.Tensor, noise: torch.Generator
) -> torch.Tensor:
    """Mean squared error of the velocity at these noise levels (batch,)."""
    clean = examples.latents
    pure = torch.randn(clean.shape, generator=noise)
    level = levels.view(-1, 1, 1, 1, 1)
    mixed = (1 - level) * clean + level * pure
    if examples.condition is not None:
        mixed = torch.cat([mixed, examples.condition], dim=1)
    velocity = model(
        hidden_states=mixed,
        timestep=levels * TIMESTEPS,
        encoder_hidden_states=prompts.encode(examples.texts),
        return_dict=False,
    )[0]
    return functional.mse_loss(velocity, pure - clean)


def draw_noise_levels(plan: FlowPlan, noise: torch.Generator) -> torch.Tensor:
    """Draw the noise level of each example of a batch.

    Over the whole range half are uniform and half are pushed to high noise as the sampler's shift does; an expert
    draws uniformly from its own side.
    """
    uniform = torch.rand(BATCH, generator=noise)
    if (plan.lowest, plan.highest) != (0.0, 1.0):
        return plan.lowest + (plan.highest - plan.lowest) * uniform
    shift = 1 + (LARGEST_SHIFT - 1) * torch.rand(BATCH, generator=noise)
    shift = torch.where(torch.rand(BATCH, generator=noise) < 0.5, 1.0, shift)  # half of them
    return shift * uniform / (1 + (shift - 1) * uniform)


class OnePadAttention:
    """Cross attention for training over one padding token instead of hundreds.

    The pipeline pads each prompt with zero vectors to 512 tokens and Wan attends to them unmasked. All of them give the
    same key and value, so a single one whose score is raised by the log of their number gives the same softmax.
    """

    def __init__(self, tokens: int) -> None:
        """Take the number of tokens of a training prompt, of which the last is always padding."""
        self._raise_last = torch.zeros(1, 1, 1, tokens)
        self._raise_last[..., -1] = math.log(PIPELINE_TOKENS - tokens + 1)

    def __call__(  # the signature is that of a diffusers attention processor
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,  # noqa: ARG002
        rotary_emb: torch.Tensor | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """Attend from latents (batch, positions, width) to text (batch, tokens, width)."""
        query = attn.norm_q(attn.to_q(hidden_states))
        key = attn.norm_k(attn.to_k(encoder_hidden_states))
        value = attn.to_v(encoder_hidden_states)
        query, key, value = (tensor.unflatten(2, (attn.heads, -1)).transpose(1, 2) for tensor in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=self._raise_last)
        attended: torch.Tensor = attn.to_out[0](mixed.transpose(1, 2).flatten(2))
        return attended


def _set_cross_attention(model: WanTransformer3DModel, processor: OnePadAttention | WanAttnProcessor) -> None:
    for block in model.blocks:
        block.attn2.set_processor(processor)
