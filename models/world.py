"""The closed world of the trained checkpoints: what may be said, what it is called and how it is drawn.

numpy only, so that a test or the demo can use it without loading torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Rgb: TypeAlias = tuple[float, float, float]
Clip: TypeAlias = NDArray[np.float32]

COLOURS: Final[Mapping[str, Rgb]] = {
    "red": (0.90, 0.10, 0.10),
    "green": (0.10, 0.70, 0.20),
    "blue": (0.10, 0.20, 0.90),
    "yellow": (0.95, 0.85, 0.10),
    "purple": (0.60, 0.15, 0.75),
    "orange": (0.95, 0.50, 0.05),
}
BACKGROUNDS: Final[Mapping[str, Rgb]] = {
    "black": (0.02, 0.02, 0.02),
    "white": (0.98, 0.98, 0.98),
    "gray": (0.50, 0.50, 0.50),
    "blue": COLOURS["blue"],
}
SHAPES: Final = ("circle", "square", "triangle")
# Unit step per frame, x to the right and y downwards.
MOTIONS: Final[Mapping[str, tuple[int, int]]] = {
    "right": (1, 0),
    "left": (-1, 0),
    "up": (0, -1),
    "down": (0, 1),
    "still": (0, 0),
}
SYNONYMS: Final[Mapping[str, tuple[str, ...]]] = {
    "circle": ("ball", "disc", "disk", "dot", "circles"),
    "square": ("box", "cube", "squares"),
    "triangle": ("pyramid", "triangles"),
    "up": ("upward", "upwards", "rising"),
    "down": ("downward", "downwards", "falling"),
    "left": ("leftward", "leftwards"),
    "right": ("rightward", "rightwards"),
    "still": ("static", "stationary", "motionless"),
    "gray": ("grey",),
    "purple": ("violet",),
    "on": ("over", "against"),
    "background": ("backdrop",),
}

# The checkpoints know one size and three lengths; other sizes give noise.
SIZE: Final = 64
LENGTHS: Final = (9, 13, 17)
# Pixels per frame: 16 pixels over the shortest clip, so motion is plain to see and 17 frames stay inside the picture.
SPEED: Final = 2.0


@dataclass(frozen=True, slots=True)
class Scene:
    """One sentence of the closed world."""

    colour: str
    shape: str
    motion: str
    background: str


# A blue shape on blue would be invisible, hence 345 scenes and not 360.
WORLD: Final = tuple(
    Scene(colour, shape, motion, background)
    for colour, shape, motion, background in product(COLOURS, SHAPES, MOTIONS, BACKGROUNDS)
    if colour != background
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a shape is at the middle of its path, in pixels, and how large it is."""

    radius: float
    x: float
    y: float


def centred_placement(rng: np.random.Generator, size: int = SIZE) -> Placement:
    """Keep the path near the centre: Wan's positions are relative, and free places would cost far more training."""
    radius = rng.uniform(10, 12)
    x, y = size / 2 + rng.uniform(-3, 3, 2)
    return Placement(float(radius), float(x), float(y))


def loose_placement(rng: np.random.Generator, size: int) -> Placement:
    """Let the shape leave the picture: an autoencoder that learns from small crops must know cut shapes."""
    radius = rng.uniform(9, 13)
    x, y = rng.uniform(0, size, 2)
    return Placement(float(radius), float(x), float(y))


def render(scene: Scene, frames: int, placement: Placement, size: int = SIZE) -> Clip:
    """Draw a scene; the result has the shape (frames, size, size, 3) and values in 0..1."""
    step_x, step_y = (SPEED * step for step in MOTIONS[scene.motion])
    since_middle = (np.arange(frames, dtype=np.float32) - (frames - 1) / 2).reshape(-1, 1, 1)
    pixel = np.arange(size, dtype=np.float32) + 0.5
    right = pixel.reshape(1, 1, -1) - (placement.x + step_x * since_middle)
    below = pixel.reshape(1, -1, 1) - (placement.y + step_y * since_middle)
    # Half a pixel on either side of the outline is blended, which makes the edge smooth.
    cover = np.clip(_depth_inside(scene.shape, right, below, placement.radius) + 0.5, 0, 1)[..., None]
    colour, background = np.array(COLOURS[scene.colour]), np.array(BACKGROUNDS[scene.background])
    clip: Clip = (cover * colour + (1 - cover) * background).astype(np.float32)
    return clip


def _depth_inside(shape: str, right: Clip, below: Clip, radius: float) -> NDArray[np.floating]:
    """Distance to the outline in pixels, positive inside; areas of the three shapes are alike."""
    depth: NDArray[np.floating]
    match shape:
        case "circle":
            depth = radius - np.hypot(right, below)
        case "square":
            depth = 0.88 * radius - np.maximum(np.abs(right), np.abs(below))
        case "triangle":  # pointing up
            floor = 0.9 * radius - below
            sides = (below + 1.1 * radius - 2 * np.abs(right)) / math.sqrt(5)
            depth = np.minimum(floor, sides)
        case _:
            message = f"unknown shape {shape!r}, expected one of {SHAPES}"
            raise ValueError(message)
    return depth


def motion_words(motion: str) -> str:
    """Name a motion as a prompt does."""
    return "standing still" if motion == "still" else f"moving {motion}"


def with_article(noun: str) -> str:
    """Put "a" or "an" before a noun of this world."""
    return f"an {noun}" if noun.startswith("orange") else f"a {noun}"


def prompt_of(scene: Scene) -> str:
    """Describe a scene with the usual sentence."""
    subject = with_article(f"{scene.colour} {scene.shape}")
    return f"{subject} {motion_words(scene.motion)} on a {scene.background} background"


def varied_prompt(scene: Scene, rng: np.random.Generator) -> str:
    """Describe a scene, in one case of four with another word order, so that order carries no meaning."""
    subject = f"{scene.colour} {scene.shape}"
    match rng.integers(8):
        case 6:
            return f"{subject} {motion_words(scene.motion)}, {scene.background} background"
        case 7:
            return f"a {scene.background} background with {with_article(subject)} {motion_words(scene.motion)}"
        case _:
            return prompt_of(scene)
