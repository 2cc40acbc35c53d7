"""Says what a clip shows, by measuring its pixels; numpy only.

Colour, motion and background are safe to assert, also after H.264; the shape is a soft check.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from models.world import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, SYNONYMS, Clip, Rgb, motion_words, with_article

Mask: TypeAlias = NDArray[np.bool_]

# Euclidean distance in RGB (each 0..1) from which a pixel is not background: H.264 at crf 23 stays below a third of it,
# and the closest pair of the world (gray and purple) is 0.44 apart.
VISIBLE: Final = 0.22
# Pixels a shape must cover in every frame; the smallest rendered one covers about 180.
SMALLEST_AREA: Final = 40
# Pixels per frame below which a shape stands still: a quarter of the speed of a moving one.
SLOWEST: Final = 0.5
# A row or column of fewer pixels is an outlier, and a box of fewer rows has no readable shape.
STRAY_PIXELS: Final = 1
SMALLEST_BOX: Final = 4

HARD_PARTS: Final = ("colour", "motion", "background")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a clip shows, or what a prompt asks for; None where nothing can be said."""

    colour: str | None
    shape: str | None
    motion: str | None
    background: str | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Names of the parts that differ from the prompt: `wrong` counts, `doubtful` (the shape) is a hint."""

    wrong: tuple[str, ...]
    doubtful: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether colour, motion and background are what the prompt asked for."""
        return not self.wrong


def read_clip(frames: NDArray[Any]) -> Seen:
    """Read a clip of the shape (frames, height, width, 3), either uint8 or float in 0..1.

    Needs at least two frames; raises ValueError for any other array.
    """
    clip = _in_unit_range(frames)
    background = _edge_colour(clip)
    distance = np.linalg.norm(clip - background, axis=-1)
    blob: Mask = distance > VISIBLE
    background_name = _nearest(background, BACKGROUNDS)
    if _least_area(blob) < SMALLEST_AREA:
        return Seen(None, None, None, background_name)
    colour = np.median(clip[blob], axis=0)
    # The true outline lies at half contrast, whatever the two colours are.
    outline: Mask = distance > 0.5 * np.linalg.norm(colour - background)
    blob = outline if _least_area(outline) >= SMALLEST_AREA else blob
    return Seen(_nearest(colour, COLOURS), _shape_of(blob), _motion_of(blob), background_name)


def expected_from_prompt(prompt: str) -> Seen | None:
    """Read what a prompt of the closed world asks for, synonyms included.

    A part that the prompt does not name, or names twice in different ways, is None and is not judged. The result
    is None when no part is left, and when shape and background would have the same colour.
    """
    words = _canonical_words(prompt)
    background, rest = _split_background(words)
    seen = Seen(_only(rest, COLOURS), _only(words, SHAPES), _only(words, MOTIONS), background)
    nothing_named = seen == Seen(None, None, None, None)
    invisible = seen.colour is not None and seen.colour == seen.background
    return None if nothing_named or invisible else seen


def verdict(expected: Seen, seen: Seen) -> Verdict:
    """Compare a clip with its prompt, part by part; parts that the prompt leaves open are right."""
    wrong = tuple(part for part in HARD_PARTS if getattr(expected, part) not in (None, getattr(seen, part)))
    doubtful = () if expected.shape in (None, seen.shape) else ("shape",)
    return Verdict(wrong, doubtful)


def sentence(seen: Seen) -> str:
    """Put into words what was seen, as "a red circle moving right on a blue background"."""
    background = f"on a {seen.background} background" if seen.background else "on an unnamed background"
    if seen.colour is None and seen.shape is None and seen.motion is None:
        return f"nothing {background}"
    subject = with_article(" ".join(word for word in (seen.colour, seen.shape or "shape") if word))
    action = motion_words(seen.motion) if seen.motion else "with no clear motion"
    return f"{subject} {action} {background}"


def _in_unit_range(frames: NDArray[Any]) -> Clip:
    if frames.ndim != 4 or frames.shape[0] < 2 or frames.shape[-1] != 3:
        message = f"expected at least two frames as (frames, height, width, 3), got {frames.shape}"
        raise ValueError(message)
    scale = 255 if frames.dtype == np.uint8 else 1
    clip: Clip = frames.astype(np.float32) / np.float32(scale)
    return clip


def _edge_colour(clip: Clip) -> Clip:
    """Median colour of a two pixel frame around the picture, which no shape of this world reaches for long."""
    rows = (clip[:, :2], clip[:, -2:])
    columns = (clip[:, :, :2], clip[:, :, -2:])
    edge = np.concatenate([part.reshape(-1, 3) for part in (*rows, *columns)])
    colour: Clip = np.median(edge, axis=0)
    return colour


def _nearest(colour: Clip, names: Mapping[str, Rgb]) -> str:
    return min(names, key=lambda name: float(np.square(colour - np.array(names[name])).sum()))


def _least_area(blob: Mask) -> int:
    return int(blob.sum(axis=(1, 2)).min())


def _motion_of(blob: Mask) -> str:
    """Compare the centroids of the first and the last frame."""
    first, last = _centroid(blob[0]), _centroid(blob[-1])
    right, down = last[0] - first[0], last[1] - first[1]
    if max(abs(right), abs(down)) / (len(blob) - 1) < SLOWEST:
        return "still"
    if abs(right) > abs(down):
        return "right" if right > 0 else "left"
    return "down" if down > 0 else "up"


def _centroid(blob: Mask) -> tuple[float, float]:
    rows, columns = np.nonzero(blob)
    return float(columns.mean()), float(rows.mean())


def _shape_of(blob: Mask) -> str | None:
    """Let every frame vote for the ideal shape that overlaps its blob best."""
    votes = Counter(vote for vote in map(_shape_in_frame, blob) if vote is not None)
    return votes.most_common(1)[0][0] if votes else None


def _shape_in_frame(blob: Mask) -> str | None:
    columns = np.flatnonzero(blob.sum(axis=0) > STRAY_PIXELS)
    rows = np.flatnonzero(blob.sum(axis=1) > STRAY_PIXELS)
    if min(len(columns), len(rows)) < SMALLEST_BOX:
        return None
    box = blob[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    ideals = _ideal_shapes(*box.shape)
    return max(SHAPES, key=lambda name: float((box & ideals[name]).sum() / (box | ideals[name]).sum()))


@lru_cache(maxsize=256)  # boxes of one clip hardly differ in size
def _ideal_shapes(height: int, width: int) -> dict[str, Mask]:
    """Draw each shape so that it fills a box of this many pixels."""
    down, right = np.mgrid[:height, :width]
    u = (right + 0.5) / width * 2 - 1
    v = (down + 0.5) / height * 2 - 1
    return {
        "circle": u * u + v * v <= 1,
        "square": np.ones((height, width), dtype=np.bool_),
        "triangle": np.abs(u) <= (v + 1) / 2,
    }


def _canonical_words(prompt: str) -> list[str]:
    canonical = {synonym: word for word, synonyms in SYNONYMS.items() for synonym in synonyms}
    return [canonical.get(word, word) for word in re.findall(r"[a-z]+", prompt.lower())]


def _split_background(words: list[str]) -> tuple[str | None, list[str]]:
    """Find "blue background" or "on (a) blue", and the words that are left when it is taken out."""
    text = " ".join(words)
    names = "|".join(BACKGROUNDS)
    for pattern in (rf"\b({names}) background\b", rf"\bon (?:an? |the )?({names})\b(?! (?:{'|'.join(SHAPES)}))"):
        if found := re.search(pattern, text):
            rest = text[: found.start()] + text[found.end() :]
            return found[1], rest.split()
    return None, words


def _only(words: Iterable[str], known: Iterable[str]) -> str | None:
    """Return the single known word; two different ones contradict each other."""
    named = set(words) & set(known)
    return named.pop() if len(named) == 1 else None
