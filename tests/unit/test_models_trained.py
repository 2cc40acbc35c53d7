"""The committed checkpoints are the published ones, and show what a prompt says."""

import re
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline

from models.pixel_test import Seen, expected_from_prompt, read_clip, verdict
from models.training.evaluate import first_frame
from models.world import Placement, Scene, render

TRAINED = Path(__file__).parents[2] / "models" / "trained"
PROMPTS = (
    "a red circle moving right on a blue background",
    "a yellow square moving left on a black background",
    "a green triangle moving up on a white background",
    "an orange circle moving down on a gray background",
    "a purple square standing still on a white background",
    "A blue box rising over a black backdrop",
)


@pytest.fixture(scope="module")
def seen_by_prompt() -> dict[str, Seen]:
    torch.set_num_threads(1)
    pipeline = WanPipeline.from_pretrained(TRAINED / "tiny-wan2.2-t2v", dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(
        list(PROMPTS),
        height=64,
        width=64,
        num_frames=9,
        num_inference_steps=8,
        guidance_scale=4.0,
        guidance_scale_2=3.0,
        generator=[torch.Generator().manual_seed(seed) for seed in range(len(PROMPTS))],
        output_type="np",
    )
    return dict(zip(PROMPTS, map(read_clip, made.frames), strict=True))


def test_files_have_the_checksums_of_their_provenance() -> None:
    stated = re.findall(r"^([0-9a-f]{64})  (\S+)$", (TRAINED / "PROVENANCE.md").read_text(), re.MULTILINE)
    files = [path for path in TRAINED.rglob("*") if path.is_file() and path.name != "PROVENANCE.md"]

    found = {str(path.relative_to(TRAINED)): sha256(path.read_bytes()).hexdigest() for path in files}

    assert found == {name: digest for digest, name in stated}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_video_has_the_colour_motion_and_background_of_its_prompt(
    prompt: str, seen_by_prompt: dict[str, Seen]
) -> None:
    expected = expected_from_prompt(prompt)

    assert expected is not None
    assert verdict(expected, seen_by_prompt[prompt]).wrong == ()


def test_most_videos_have_the_shape_of_their_prompt(seen_by_prompt: dict[str, Seen]) -> None:
    expected = {prompt: expected_from_prompt(prompt) for prompt in PROMPTS}
    right = [prompt for prompt, one in expected.items() if one and one.shape == seen_by_prompt[prompt].shape]

    assert len(right) > len(PROMPTS) / 2


def test_an_image_moves_as_the_prompt_says() -> None:
    torch.set_num_threads(1)
    pipeline = WanImageToVideoPipeline.from_pretrained(TRAINED / "tiny-wan2.2-i2v", dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    drawn = render(Scene("red", "circle", "left", "white"), 9, Placement(11, 32, 32))

    made = pipeline(
        first_frame(drawn),
        "moving left",
        height=64,
        width=64,
        num_frames=9,
        num_inference_steps=8,
        guidance_scale=3.5,
        guidance_scale_2=3.5,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).frames[0]

    assert verdict(Seen("red", None, "left", "white"), read_clip(made)).ok
    # Twice the mean error at the measured 29.7 dB.
    assert np.sqrt(np.square(made[0] - drawn[0]).mean()) < 2 * 10 ** (-29.7 / 20)
