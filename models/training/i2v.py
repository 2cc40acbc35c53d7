"""The stages of the image-to-video checkpoint, which grows out of the joint text-to-video one."""

from pathlib import Path
from typing import Final

import numpy as np
import torch
from diffusers import WanImageToVideoPipeline

from models import parts
from models.training.flow import BATCH, Examples, FlowPlan, Prompts, train_flow
from models.training.latents import encode_conditions
from models.training.modules import i2v_transformer
from models.training.stages import Recipe, Tensors, stage, state_of, under
from models.training.t2v import EMPTY_PROMPTS, SHIFT, Autoencoder, joint_prompts, make_autoencoder, make_joint
from models.world import WORLD, motion_words, varied_prompt

# Five minutes of one core, at the pace of the joint stage.
STEPS: Final = 1500
RATE: Final = 1e-3
AVERAGE: Final = 0.998
# The image already shows colour and shape, so users often give the motion alone.
MOTION_ONLY_PROMPTS: Final = 0.3
BOUNDARY: Final = 0.9


def make_i2v(out: Path, work: Path, recipe: Recipe) -> None:
    """Train what is missing in `work`, the text-to-video stages included, and write the checkpoint to `out`."""
    autoencoder = make_autoencoder(work, recipe)
    joint = make_joint(work, recipe, autoencoder)
    prompts = joint_prompts(joint)
    state = stage(work, "i2v", recipe, lambda: _train(work, autoencoder, joint, recipe))
    # One set of weights serves both sides of the boundary: good enough here, and the layout keeps its two folders.
    model = i2v_transformer(under(joint, "model."))
    model.load_state_dict(state)
    model.half()  # half the download; the pipelines load it as float32
    pipeline = WanImageToVideoPipeline(
        tokenizer=prompts.tokenizer,
        text_encoder=prompts.encoder,
        vae=autoencoder.vae,
        scheduler=parts.flow_scheduler(SHIFT),
        transformer=model,
        transformer_2=model,
        boundary_ratio=BOUNDARY,
        image_encoder=None,
        image_processor=None,
    )
    pipeline.save_pretrained(out, safe_serialization=True)


def _train(work: Path, autoencoder: Autoencoder, joint: Tensors, recipe: Recipe) -> Tensors:
    conditions = stage(
        work, "conditions", recipe, lambda: encode_conditions(autoencoder.vae, autoencoder.statistics, recipe)
    )
    model = i2v_transformer(under(joint, "model."))
    prompts: Prompts = joint_prompts(joint)
    plan = FlowPlan("i2v", recipe.steps(STEPS), RATE, AVERAGE, recipe.seed + 7)
    train_flow(model, prompts, plan, lambda rng: _draw(conditions, rng))
    return state_of(model)


def _draw(conditions: Tensors, rng: np.random.Generator) -> Examples:
    chosen = rng.integers(len(conditions["scenes"]), size=BATCH)
    texts = [_text(int(conditions["scenes"][number]), rng) for number in chosen]
    rows = torch.from_numpy(chosen)
    return Examples(conditions["latents"][rows], texts, conditions["conditions"][rows])


def _text(scene_number: int, rng: np.random.Generator) -> str:
    scene, draw = WORLD[scene_number], rng.random()
    if draw < EMPTY_PROMPTS:
        return ""
    if draw < EMPTY_PROMPTS + MOTION_ONLY_PROMPTS:
        return motion_words(scene.motion)
    return varied_prompt(scene, rng)
