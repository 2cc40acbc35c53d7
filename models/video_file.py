"""Reads a finished MP4 and draws its frames side by side."""

import math
from pathlib import Path
from typing import Final, TypeAlias

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Frames: TypeAlias = NDArray[np.uint8]

# A frame of 64 pixels is a stamp on a modern screen; three times that can be judged by eye.
SMALLEST_SIDE: Final = 192
LABEL_HEIGHT: Final = 28
GAP: Final = 8
PAPER: Final = (32, 32, 36)
INK: Final = (235, 235, 235)


def read_mp4(path: Path) -> tuple[Frames, float]:
    """Decode a video file to RGB frames of the shape (frames, height, width, 3) and its frames per second.

    Raises ValueError when the file holds no video frame, and av.error.FFmpegError when it cannot be decoded.
    """
    with av.open(str(path)) as container:
        if not container.streams.video:
            message = f"{path} has no video stream"
            raise ValueError(message)
        stream = container.streams.video[0]
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        rate = stream.average_rate
    if not pictures or rate is None:
        message = f"{path} has no video frames"
        raise ValueError(message)
    return np.stack(pictures).astype(np.uint8, copy=False), float(rate)


def contact_sheet(frames: Frames, path: Path, columns: int = 3, scale: int = 3) -> None:
    """Write a PNG with all frames in reading order, each under its number.

    A frame is enlarged `scale` times without smoothing, and further where it would be smaller than 192 pixels.
    """
    count, height, width, _ = frames.shape
    factor = max(scale, math.ceil(SMALLEST_SIDE / min(height, width)))
    cell_width, cell_height = width * factor + GAP, height * factor + LABEL_HEIGHT + GAP
    rows = math.ceil(count / columns)
    sheet = Image.new("RGB", (columns * cell_width + GAP, rows * cell_height + GAP), PAPER)
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=LABEL_HEIGHT - GAP)
    for index, frame in enumerate(frames):
        left = GAP + index % columns * cell_width
        top = GAP + index // columns * cell_height
        pen.text((left, top), f"{index + 1} / {count}", fill=INK, font=font)
        enlarged = Image.fromarray(frame).resize((width * factor, height * factor), Image.Resampling.NEAREST)
        sheet.paste(enlarged, (left, top + LABEL_HEIGHT))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
