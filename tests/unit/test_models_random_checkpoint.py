"""Random checkpoints of the three layouts load and run as the real ones, and are the same on every build."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image

from models.random_checkpoint import Layout, build


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("random")
    return {layout: build(layout, folder / layout) for layout in Layout}


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


def run(pipeline: Any, **inputs: Any) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(
        prompt="Ein roter Kreis, 赤い円",
        height=64,
        width=64,
        num_frames=9,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **inputs,
    )
    clip: np.ndarray = made.frames[0]
    return clip


@pytest.mark.parametrize("layout", Layout)
def test_a_second_build_has_the_same_bytes(layout: Layout, checkpoints: dict[Layout, Path], tmp_path: Path) -> None:
    torch.rand(7)  # the state of the global generator must not matter

    assert digests(build(layout, tmp_path)) == digests(checkpoints[layout])


@pytest.mark.parametrize("layout", [Layout.T2V_A14B, Layout.TI2V_5B])
def test_text_becomes_a_video(layout: Layout, checkpoints: dict[Layout, Path]) -> None:
    pipeline = WanPipeline.from_pretrained(checkpoints[layout], dtype=torch.float32)

    assert run(pipeline).shape == (9, 64, 64, 3)


@pytest.mark.parametrize("layout", [Layout.I2V_A14B, Layout.TI2V_5B])
def test_an_image_becomes_a_video(layout: Layout, checkpoints: dict[Layout, Path]) -> None:
    pipeline = WanImageToVideoPipeline.from_pretrained(checkpoints[layout], dtype=torch.float32)

    assert run(pipeline, image=Image.new("RGB", (64, 64), "red")).shape == (9, 64, 64, 3)


@pytest.mark.parametrize(
    ("layout", "boundary", "shift"),
    [(Layout.T2V_A14B, 0.875, 12.0), (Layout.I2V_A14B, 0.9, 5.0), (Layout.TI2V_5B, None, 5.0)],
)
def test_a_layout_has_the_settings_of_the_real_model(
    layout: Layout, boundary: float | None, shift: float, checkpoints: dict[Layout, Path]
) -> None:
    pipeline = WanPipeline.from_pretrained(checkpoints[layout], dtype=torch.float32)

    assert pipeline.config.boundary_ratio == boundary
    assert pipeline.config.expand_timesteps is (layout is Layout.TI2V_5B)
    assert (pipeline.transformer_2 is None) is (layout is Layout.TI2V_5B)
    assert pipeline.scheduler.config.flow_shift == shift
