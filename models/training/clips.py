"""Rendered clips as tensors."""

from dataclasses import dataclass

import numpy as np
import torch

from models.world import SIZE, WORLD, Scene, centred_placement, loose_placement, render


@dataclass(frozen=True, slots=True)
class ClipShape:
    """How many clips a batch holds, their frames, and their width and height in pixels."""

    batch: int
    frames: int
    size: int = SIZE


def draw_batch(rng: np.random.Generator, shape: ClipShape, *, loose: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw random scenes: their indices in WORLD, and clips (batch, 3, frames, size, size) in -1..1.

    `loose` places shapes anywhere, cut by the border; otherwise they stay near the centre.
    """
    numbers = [int(number) for number in rng.integers(len(WORLD), size=shape.batch)]
    clips = [_draw(WORLD[number], shape, rng, loose=loose) for number in numbers]
    stacked = torch.from_numpy(np.stack(clips)).permute(0, 4, 1, 2, 3) * 2 - 1
    return torch.tensor(numbers), stacked.contiguous(memory_format=torch.channels_last_3d)


def _draw(scene: Scene, shape: ClipShape, rng: np.random.Generator, *, loose: bool) -> np.ndarray:
    placement = loose_placement(rng, shape.size) if loose else centred_placement(rng, shape.size)
    return render(scene, shape.frames, placement, shape.size)
