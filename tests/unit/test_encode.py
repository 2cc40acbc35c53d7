"""MP4 files as the worker writes them."""

import hashlib
from pathlib import Path

import av
import numpy as np
import pytest

from tests.unit.engine_support import parameters
from worker.encode import EncodedVideo, Mp4Writer
from worker.engine.base import Frames
from worker.engine.synthetic import draw_chunks

FPS = 8


def drawn() -> Frames:
    return np.concatenate([chunk for _, chunk in draw_chunks(parameters())])


def write(path: Path, frames: Frames) -> EncodedVideo:
    height, width = frames.shape[1:3]
    with Mp4Writer(path, width=width, height=height, fps=FPS) as writer:
        writer.write(frames[:1])
        writer.write(frames[1:])
        return writer.finish()


def test_the_stream_is_h264_with_the_asked_size_frames_and_rate(tmp_path: Path) -> None:
    write(tmp_path / "clip.mp4", drawn())
    with av.open(str(tmp_path / "clip.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height, stream.frames, float(stream.average_rate or 0)) == (64, 64, 9, FPS)


def test_the_index_comes_before_the_data(tmp_path: Path) -> None:
    write(tmp_path / "clip.mp4", drawn())
    content = (tmp_path / "clip.mp4").read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")


def test_the_measures_are_those_of_the_file(tmp_path: Path) -> None:
    video = write(tmp_path / "clip.mp4", drawn())
    content = video.path.read_bytes()
    assert video.sha256 == hashlib.sha256(content).hexdigest()
    assert (video.bytes, video.num_frames, video.duration_s) == (len(content), 9, 9 / FPS)


def test_colours_survive(tmp_path: Path) -> None:
    frames = drawn()
    write(tmp_path / "clip.mp4", frames)
    with av.open(str(tmp_path / "clip.mp4")) as container:
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    background = np.abs(decoded[:, 2, 2].astype(int) - frames[:, 2, 2])
    assert background.max() <= 4


def test_equal_frames_give_equal_bytes(tmp_path: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (9, 480, 832, 3), np.uint8)
    assert write(tmp_path / "one.mp4", noise).sha256 == write(tmp_path / "two.mp4", noise).sha256


def write_then_fail(path: Path) -> None:
    with Mp4Writer(path, width=64, height=64, fps=FPS) as writer:
        writer.write(drawn())
        raise KeyError


def test_an_error_removes_the_partial_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        write_then_fail(tmp_path / "clip.mp4")
    assert not (tmp_path / "clip.mp4").exists()


def test_frames_of_another_size_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="frames of shape"),
        Mp4Writer(tmp_path / "clip.mp4", width=32, height=64, fps=FPS) as writer,
    ):
        writer.write(drawn())


def test_a_video_without_frames_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    with pytest.raises(ValueError, match="at least one frame"), Mp4Writer(path, width=64, height=64, fps=FPS) as writer:
        writer.finish()
    assert not path.exists()
