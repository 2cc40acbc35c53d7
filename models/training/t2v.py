"""The stages of the text-to-video checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from torch import nn

from models import parts
from models.training.flow import BATCH, Examples, FlowPlan, Prompts, train_flow
from models.training.latents import T2V_CLIPS, Statistics, encode_clips
from models.training.modules import channels_last, small_vae, t2v_transformer, word_encoder, word_tokenizer
from models.training.stages import Recipe, Tensors, stage, state_of, under
from models.training.vae import train_vae, tune_decoder
from models.world import WORLD, varied_prompt

Module = TypeVar("Module", bound=nn.Module)

# Motion is right after about half of the joint steps; the shape keeps improving to the end.
JOINT_STEPS: Final = 3984
JOINT_RATE: Final = 1.5e-3
HIGH_STEPS: Final = 645
LOW_STEPS: Final = 2740
BOUNDARY: Final = 0.875
# Each expert also learns a little of the other's side, since the boundary falls between two steps of the sampler.
HIGH_FROM: Final = 0.86
LOW_TO: Final = 0.89
# How often a batch has 9, 13 or 17 frames.
LENGTH_SHARES: Final = (0.6, 0.15, 0.25)
# Guidance needs a model that also knows what to do without a prompt.
EMPTY_PROMPTS: Final = 0.1
# Any shift from 3 to 12 works; 3 leaves the most steps to the low-noise expert, which draws the outline.
SHIFT: Final = 3.0


def make_t2v(out: Path, work: Path, recipe: Recipe) -> None:
    """Train what is missing in `work` and write the checkpoint to `out`."""
    autoencoder = make_autoencoder(work, recipe)
    joint = make_joint(work, recipe, autoencoder)
    prompts = joint_prompts(joint)
    experts = stage(work, "experts", recipe, lambda: _train_experts(autoencoder, joint, prompts, recipe))
    high, low = (_load(t2v_transformer(), under(experts, prefix)) for prefix in ("high.", "low."))
    pipeline = WanPipeline(
        tokenizer=prompts.tokenizer,
        text_encoder=prompts.encoder,
        vae=autoencoder.vae,
        scheduler=parts.flow_scheduler(SHIFT),
        transformer=high.half(),  # half the download; the pipelines load them as float32
        transformer_2=low.half(),
        boundary_ratio=BOUNDARY,
    )
    pipeline.save_pretrained(out, safe_serialization=True)


@dataclass(frozen=True, slots=True)
class Autoencoder:
    """The trained autoencoder, and the latents that it made of the training clips."""

    vae: AutoencoderKLWan
    statistics: Statistics
    encoded: Tensors


def make_autoencoder(work: Path, recipe: Recipe) -> Autoencoder:
    """Train the autoencoder, encode the clips, then sharpen its decoder."""
    first = stage(work, "vae", recipe, lambda: state_of(train_vae(recipe)))
    encoded = stage(work, "latents", recipe, lambda: encode_clips(_vae_with(first), recipe))
    statistics = Statistics(encoded["mean"], encoded["std"])
    sharp = stage(work, "decoder", recipe, lambda: _sharpened(_vae_with(first), statistics, recipe))
    return Autoencoder(_vae_with(sharp, statistics), statistics, encoded)


def make_joint(work: Path, recipe: Recipe, autoencoder: Autoencoder) -> Tensors:
    """Train one transformer over all noise levels, with the text encoder; names begin `model.` and `text.`."""
    return stage(work, "joint", recipe, lambda: _train_joint(autoencoder, recipe))


def joint_prompts(joint: Tensors) -> Prompts:
    """Load the text encoder of the joint stage."""
    tokenizer = word_tokenizer()
    return Prompts(tokenizer, _load(word_encoder(tokenizer), under(joint, "text.")))


def _train_joint(autoencoder: Autoencoder, recipe: Recipe) -> Tensors:
    torch.manual_seed(recipe.seed + 2)
    tokenizer = word_tokenizer()
    prompts, model = Prompts(tokenizer, word_encoder(tokenizer)), t2v_transformer()
    plan = FlowPlan("joint", recipe.steps(JOINT_STEPS), JOINT_RATE, 0.999, recipe.seed + 3, train_text=True)
    train_flow(model, prompts, plan, lambda rng: _draw(autoencoder.encoded, rng))
    return state_of(model, "model.") | state_of(prompts.encoder, "text.")


def _train_experts(autoencoder: Autoencoder, joint: Tensors, prompts: Prompts, recipe: Recipe) -> Tensors:
    """Tune two copies of the joint transformer, each on its side of the boundary."""
    seed, high_steps, low_steps = recipe.seed, recipe.steps(HIGH_STEPS), recipe.steps(LOW_STEPS)
    # The short run averages over fewer steps; the rates are a half and two thirds of the joint one.
    plans = (
        FlowPlan("high", high_steps, JOINT_RATE / 2, 0.997, seed + 4, lowest=HIGH_FROM),
        FlowPlan("low", low_steps, JOINT_RATE * 2 / 3, 0.999, seed + 5, highest=LOW_TO),
    )
    tensors: Tensors = {}
    for plan in plans:
        expert = _load(t2v_transformer(), under(joint, "model."))
        train_flow(expert, prompts, plan, lambda rng: _draw(autoencoder.encoded, rng))
        tensors |= state_of(expert, f"{plan.name}.")
    return tensors


def _draw(encoded: Tensors, rng: np.random.Generator) -> Examples:
    frames = rng.choice(list(T2V_CLIPS), p=LENGTH_SHARES)
    scenes, latents = encoded[f"scenes.{frames}"], encoded[f"latents.{frames}"]
    chosen = rng.integers(len(scenes), size=BATCH)
    texts = [
        "" if rng.random() < EMPTY_PROMPTS else varied_prompt(WORLD[int(scenes[number])], rng) for number in chosen
    ]
    return Examples(latents[torch.from_numpy(chosen)], texts)


def _vae_with(state: Tensors, statistics: Statistics | None = None) -> AutoencoderKLWan:
    vae = small_vae(statistics.as_lists() if statistics else None)
    vae.load_state_dict(state)
    channels_last(vae)
    return vae


def _sharpened(vae: AutoencoderKLWan, statistics: Statistics, recipe: Recipe) -> Tensors:
    tune_decoder(vae, statistics.std, recipe)
    return state_of(vae)


def _load(module: Module, state: Tensors) -> Module:
    module.load_state_dict(state)
    return module
