"""Scores a checkpoint: how often the pixel test sees what the prompt said."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image

from models.pixel_test import Seen, read_clip
from models.world import LENGTHS, SIZE, WORLD, Clip, Scene, centred_placement, motion_words, prompt_of, render

PARTS: Final = ("colour", "shape", "motion", "background")
FRAMES: Final = LENGTHS[0]
STEPS: Final = 10
# Prompts in one call of the text-to-video pipeline.
TOGETHER: Final = 10
T2V_SEED: Final = 9
I2V_SEED: Final = 4
MOTION_ONLY_SEED: Final = 5


@dataclass(frozen=True, slots=True)
class Score:
    """Percentage of clips in which each part is right, and in which all are."""

    clips: int
    colour: float
    shape: float
    motion: float
    background: float
    every_part: float


def evaluate_t2v(checkpoint: Path, clips: int = 100) -> Score:
    """Score a text-to-video checkpoint over scenes that are drawn without repeats."""
    pipeline = WanPipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    rng = np.random.default_rng(T2V_SEED + 1000)
    scenes = [WORLD[number] for number in rng.choice(len(WORLD), clips)]
    return _score((scene, read_clip(clip)) for scene, clip in _t2v_clips(pipeline, scenes))


def evaluate_i2v(checkpoint: Path, clips: int = 40, *, motion_only: bool = False) -> Score:
    """Score an image-to-video checkpoint, with whole prompts or with the motion's words alone."""
    pipeline = WanImageToVideoPipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    rng = np.random.default_rng(MOTION_ONLY_SEED if motion_only else I2V_SEED)
    seen = []
    for number in range(clips):
        scene = WORLD[rng.integers(len(WORLD))]
        image = first_frame(render(scene, FRAMES, centred_placement(rng)))
        prompt = motion_words(scene.motion) if motion_only else prompt_of(scene)
        seen.append((scene, read_clip(_i2v_clip(pipeline, image, prompt, number))))
    return _score(seen)


def first_frame(clip: Clip) -> Image.Image:
    """Turn the first frame of a clip into the image that a user would send."""
    return Image.fromarray((clip[0] * 255).round().astype(np.uint8))


def _t2v_clips(pipeline: WanPipeline, scenes: list[Scene]) -> Iterator[tuple[Scene, Clip]]:
    for start in range(0, len(scenes), TOGETHER):
        part = scenes[start : start + TOGETHER]
        # Any seeds would do; these are far apart for every start.
        seeds = [T2V_SEED * 100_003 + start + offset for offset in range(len(part))]
        made = pipeline(
            [prompt_of(scene) for scene in part],
            height=SIZE,
            width=SIZE,
            num_frames=FRAMES,
            num_inference_steps=STEPS,
            guidance_scale=4.0,
            guidance_scale_2=3.0,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            output_type="np",
        )
        yield from zip(part, made.frames, strict=True)


def _i2v_clip(pipeline: WanImageToVideoPipeline, image: Image.Image, prompt: str, seed: int) -> Clip:
    made = pipeline(
        image,
        prompt,
        height=SIZE,
        width=SIZE,
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        guidance_scale=3.5,
        guidance_scale_2=3.5,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    )
    clip: Clip = made.frames[0]
    return clip


def _score(pairs: Iterable[tuple[Scene, Seen]]) -> Score:
    right = np.array([[getattr(scene, part) == getattr(seen, part) for part in PARTS] for scene, seen in pairs])
    shares = np.append(right.mean(axis=0), right.all(axis=1).mean())
    return Score(len(right), *(round(100 * float(share), 1) for share in shares))
