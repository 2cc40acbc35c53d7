"""A finished video can be read back and laid out for the eye."""

from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from models.video_file import contact_sheet, read_mp4


def test_frames_and_rate_of_an_mp4_are_read(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=12)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for shade in (0, 100, 200):
            picture = np.full((48, 64, 3), shade, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())

    frames, rate = read_mp4(path)

    assert (frames.shape, frames.dtype.name, rate) == ((3, 48, 64, 3), "uint8", 12.0)
    assert np.abs(frames.mean(axis=(1, 2, 3)) - [0, 100, 200]).max() < 4


def test_a_file_that_is_no_video_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"not a video")

    with pytest.raises(av.error.InvalidDataError):
        read_mp4(path)


def test_a_contact_sheet_enlarges_every_frame_without_smoothing(tmp_path: Path) -> None:
    frames = np.zeros((5, 64, 64, 3), dtype=np.uint8)
    frames[4, :, :32] = (250, 10, 10)

    contact_sheet(frames, tmp_path / "out" / "sheet.png", columns=2, scale=1)

    sheet = np.asarray(Image.open(tmp_path / "out" / "sheet.png"))
    assert sheet.shape[1] >= 2 * 192
    assert sheet.shape[0] >= 3 * 192
    assert (sheet == (250, 10, 10)).all(axis=-1).sum() == 96 * 192
