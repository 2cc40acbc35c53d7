"""Frames to an H.264 MP4 that starts playing before it is complete. Runs in the parent, beside the next batch."""

import contextlib
import hashlib
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Self

import av
from av.video.frame import VideoFrame
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from av.video.stream import VideoStream

from worker.engine.base import Frames

# 81 frames at 1280x720 take 0.8 s with these on two threads; the slower "medium" takes twice as long for some per cent
# of size. crf 19 is visually lossless for generated video.
_PRESET = "veryfast"
_CRF = "19"
# The machine's cores belong to the engine; with more threads x264 also gives other bytes.
_THREADS = 2
# Chroma is stored for blocks of 2 x 2 pixels.
_SIDE_MULTIPLE = 2


@dataclass(frozen=True, slots=True)
class EncodedVideo:
    """A finished file: its size in bytes, SHA-256 in hex, and length in frames and seconds."""

    path: Path
    bytes: int
    sha256: str
    num_frames: int
    duration_s: float


class Mp4Writer:
    """Writes one video to `path`; leaving the context before finish() removes the partial file.

    The same frames give the same bytes. Not for use from two threads at once.
    """

    def __init__(self, path: Path, *, width: int, height: int, fps: int) -> None:
        if width % _SIDE_MULTIPLE or height % _SIDE_MULTIPLE:
            msg = f"H.264 in yuv420p needs even sides, not {width}x{height}"
            raise ValueError(msg)
        self._path = path
        self._shape = (height, width, 3)
        self._tick = Fraction(1, fps)
        self._written = 0
        self._video: EncodedVideo | None = None
        # faststart rewrites the file at its end, so it needs a real path.
        self._container = av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"})
        self._stream = self._add_stream(fps)

    def _add_stream(self, fps: int) -> VideoStream:
        options = {"preset": _PRESET, "crf": _CRF, "threads": str(_THREADS)}
        stream = self._container.add_stream("libx264", rate=fps, options=options)
        stream.height, stream.width = self._shape[:2]
        stream.pix_fmt = "yuv420p"
        # Players guess untagged colours from the size, and guess differently.
        context = stream.codec_context
        context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
        context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
        return stream

    def __enter__(self) -> Self:
        """Write until finish()."""
        return self

    def write(self, frames: Frames) -> None:
        """Append frames (f, height, width, 3); they are copied. Raises ValueError for another shape."""
        if frames.shape[1:] != self._shape:
            msg = f"frames of shape {frames.shape[1:]} in a video of {self._shape}"
            raise ValueError(msg)
        for pixels in frames:
            frame = VideoFrame.from_ndarray(pixels, format="rgb24").reformat(
                format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
            )
            frame.pts, frame.time_base = self._written, self._tick
            self._container.mux(self._stream.encode(frame))
            self._written += 1

    def finish(self) -> EncodedVideo:
        """Complete the file and measure it. Raises ValueError when no frame was written."""
        if not self._written:
            msg = "a video needs at least one frame"
            raise ValueError(msg)
        self._container.mux(self._stream.encode(None))
        self._container.close()
        with self._path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        duration = float(self._written * self._tick)
        self._video = EncodedVideo(self._path, self._path.stat().st_size, digest, self._written, duration)
        return self._video

    def discard(self) -> None:
        """Give up: close and remove the file. Raises nothing, so that it may follow any error."""
        with contextlib.suppress(av.FFmpegError, OSError):
            self._container.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Discard what was not finished."""
        if self._video is None:
            self.discard()
