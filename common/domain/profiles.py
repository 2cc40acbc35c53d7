"""The models that can be asked for: what they accept and what they use when nothing is said.

Sizes, steps, guidance and shift are those of the configurations in Wan-Video/Wan2.2 (wan/configs), whose
sample_guide_scale is ordered (low, high); ranges beyond them are policy. diffusers' own defaults differ and are
never relied on.
"""

from dataclasses import dataclass
from enum import StrEnum


class ImageInput(StrEnum):
    """Whether a model takes an input image."""

    REFUSED = "refused"
    OPTIONAL = "optional"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Range:
    """Legal values, both ends included, and the default."""

    low: float
    high: float
    default: float


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One model as the API offers it. Sizes in pixels, video lengths in frames."""

    model: str
    title: str
    image: ImageInput
    sizes: tuple[tuple[int, int], ...]  # offered (width, height); the first is the default
    size_multiple: int  # VAE stride x patch size: diffusers would round other sizes down silently
    max_area: int  # width x height
    min_side: int
    num_frames: Range
    frame_choices: tuple[int, ...] | None  # None: every 4k+1 in the range
    fps: int
    steps: Range
    guidance_scale: Range  # of the high-noise expert
    guidance_scale_2: Range | None  # of the low-noise expert; None: the model has one expert
    flow_shift: Range
    boundary_ratio: float | None
    max_prompt_chars: int = 2000


# Wan-Video/Wan2.2 shared_config.sample_neg_prompt is a long Chinese list of defects; this is its meaning.
DEFAULT_NEGATIVE_PROMPT = (
    "oversaturated, overexposed, static, blurry details, subtitles, style, artwork, painting, still picture, "
    "gray cast, worst quality, low quality, JPEG artifacts, ugly, mutilated, extra fingers, badly drawn hands, "
    "badly drawn face, deformed, disfigured, malformed limbs, fused fingers, motionless picture, cluttered "
    "background, three legs, crowded background, walking backwards"
)

_A14B_SIZES = ((832, 480), (480, 832), (1280, 720), (720, 1280))
_TINY_NOTE = "a few MB, trained on coloured shapes; runs on a CPU; for demos and tests"

PROFILES: dict[str, ModelProfile] = {
    profile.model: profile
    for profile in (
        ModelProfile(
            model="wan2.2-t2v-a14b",
            title="Wan2.2 T2V-A14B, text to video",
            image=ImageInput.REFUSED,
            sizes=_A14B_SIZES,
            size_multiple=16,
            max_area=921_600,
            min_side=128,
            num_frames=Range(5, 121, 81),
            frame_choices=None,
            fps=16,
            steps=Range(1, 60, 40),
            guidance_scale=Range(1.0, 15.0, 4.0),
            guidance_scale_2=Range(1.0, 15.0, 3.0),
            flow_shift=Range(1.0, 20.0, 12.0),
            boundary_ratio=0.875,
        ),
        ModelProfile(
            model="wan2.2-i2v-a14b",
            title="Wan2.2 I2V-A14B, image to video",
            image=ImageInput.REQUIRED,
            sizes=_A14B_SIZES,
            size_multiple=16,
            max_area=921_600,
            min_side=128,
            num_frames=Range(5, 121, 81),
            frame_choices=None,
            fps=16,
            steps=Range(1, 60, 40),
            guidance_scale=Range(1.0, 15.0, 3.5),
            guidance_scale_2=Range(1.0, 15.0, 3.5),
            flow_shift=Range(1.0, 20.0, 5.0),
            boundary_ratio=0.9,
        ),
        ModelProfile(
            model="wan2.2-ti2v-5b",
            title="Wan2.2 TI2V-5B, text or image to video",
            image=ImageInput.OPTIONAL,
            sizes=((1280, 704), (704, 1280)),
            size_multiple=32,
            max_area=901_120,
            min_side=128,
            num_frames=Range(5, 121, 121),
            frame_choices=None,
            fps=24,
            steps=Range(1, 60, 50),
            guidance_scale=Range(1.0, 15.0, 5.0),
            guidance_scale_2=None,
            flow_shift=Range(1.0, 20.0, 5.0),
            boundary_ratio=None,
        ),
        ModelProfile(
            model="tiny-wan2.2-t2v",
            title=f"Tiny T2V in the A14B layout: {_TINY_NOTE}",
            image=ImageInput.REFUSED,
            sizes=((64, 64),),
            size_multiple=16,
            max_area=4096,
            min_side=64,
            num_frames=Range(9, 17, 9),
            frame_choices=(9, 13, 17),
            fps=8,
            steps=Range(4, 12, 10),
            guidance_scale=Range(1.0, 15.0, 4.0),
            guidance_scale_2=Range(1.0, 15.0, 3.0),
            flow_shift=Range(3.0, 12.0, 5.0),
            boundary_ratio=0.875,
        ),
        ModelProfile(
            model="tiny-wan2.2-i2v",
            title=f"Tiny I2V in the A14B layout: {_TINY_NOTE}",
            image=ImageInput.REQUIRED,
            sizes=((64, 64),),
            size_multiple=16,
            max_area=4096,
            min_side=64,
            num_frames=Range(9, 9, 9),
            frame_choices=(9,),
            fps=8,
            steps=Range(4, 12, 10),
            guidance_scale=Range(1.0, 15.0, 3.5),
            guidance_scale_2=Range(1.0, 15.0, 3.5),
            flow_shift=Range(3.0, 12.0, 5.0),
            boundary_ratio=0.9,
        ),
    )
}
