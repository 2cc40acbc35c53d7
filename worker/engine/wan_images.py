"""Input pictures of image-to-video jobs."""

import io

import numpy as np
import torch
from PIL import Image, ImageOps

from worker.engine.base import Member


class BadImageError(ValueError):
    """The picture is missing, or is none."""


def to_tensor(member: Member) -> torch.Tensor:
    """The member's picture (3, H, W) in [0, 1], upright, RGB, cut in its middle to the video's aspect.

    The pipelines would stretch it, and fail on pictures with another number of channels. Raises BadImageError.
    """
    if member.image is None:
        msg = "the model needs an input image"
        raise BadImageError(msg)
    size = (member.parameters.width, member.parameters.height)
    try:
        with Image.open(io.BytesIO(member.image)) as opened:
            upright = ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow's decoders raise
        msg = f"the input image cannot be read: {type(error).__name__}"
        raise BadImageError(msg) from error
    fitted = ImageOps.fit(upright, size, Image.Resampling.LANCZOS)
    return torch.from_numpy(np.asarray(fitted, np.float32) / 255).permute(2, 0, 1)
