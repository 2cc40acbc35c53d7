"""From decoded frames to a finished job: H.264, upload, and the completion in Postgres. Beside the next batch."""

import contextlib
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from common import telemetry
from common.domain.jobs import ErrorClass, Phase
from common.storage import StorageError, delete_object, upload_video, video_key
from worker.attempts import Attempt
from worker.conclude import GivenUpError, complete, fail, release, until_done
from worker.connections import Connections, show_progress
from worker.encode import EncodedVideo, Mp4Writer
from worker.engine.base import FramesReady

# Uploads wait for the network, so a few may overlap; each job has at most one.
_UPLOADS = 4

log = structlog.get_logger()


class SpoolLostError(RuntimeError):
    """Somebody removed a finished video before it was uploaded."""


class DeliveryLane:
    """One encoding thread, so that a job's frames stay in order, and a few uploading ones behind it."""

    def __init__(self, connections: Connections, engine: Mapping[str, Any]) -> None:
        self._connections = connections
        self._engine = engine  # what made the videos, as shown in every result
        self._writers: dict[str, Mp4Writer] = {}  # by the job's wire id; touched by the encoding thread alone
        self._failures: dict[str, str] = {}
        self._encoder = ThreadPoolExecutor(1, "encode")
        self._uploader = ThreadPoolExecutor(_UPLOADS, "upload")

    def write(self, attempt: Attempt, chunk: FramesReady) -> None:
        """Encode a chunk of frames, in the order of the calls."""
        self._encoder.submit(self._write, attempt, chunk)

    def finish(self, attempt: Attempt) -> None:
        """All frames were written: close the file, upload it, complete the job."""
        self._encoder.submit(self._finish, attempt)

    def discard(self, attempt: Attempt) -> None:
        """The job has no result: throw away what was encoded of it."""
        self._encoder.submit(self._discard, attempt)

    def close(self) -> None:
        """Wait for everything under way: the GPU work behind it is paid for."""
        self._encoder.shutdown(wait=True)
        self._uploader.shutdown(wait=True)

    # Everything below runs on the encoding thread, until the upload.

    def _write(self, attempt: Attempt, chunk: FramesReady) -> None:
        try:
            if attempt.wire_id not in self._failures:
                self._writer(attempt).write(chunk.frames)
        except Exception as error:  # the edge of the thread: a full disk or a codec's fault fails this job alone
            log.exception("encoding_failed", job_id=attempt.wire_id)
            self._failures[attempt.wire_id] = f"the video could not be encoded: {type(error).__name__}"
        finally:
            chunk.release()

    def _writer(self, attempt: Attempt) -> Mp4Writer:
        if attempt.wire_id not in self._writers:
            path = self._connections.spool / f"{attempt.job_id}.{attempt.attempt}.mp4"
            size = attempt.parameters
            self._writers[attempt.wire_id] = Mp4Writer(path, width=size.width, height=size.height, fps=size.fps)
        return self._writers[attempt.wire_id]

    def _finish(self, attempt: Attempt) -> None:
        started = time.monotonic()
        failure = self._failures.pop(attempt.wire_id, None)
        writer = self._writers.pop(attempt.wire_id, None)
        if failure is not None or writer is None:
            if writer is not None:
                writer.discard()
            fail(self._connections, attempt, ErrorClass.INFRASTRUCTURE, failure or "no frames were decoded")
            return
        try:
            video = writer.finish()
        except Exception as error:  # the edge of the thread, as in _write
            log.exception("encoding_failed", job_id=attempt.wire_id)
            writer.discard()
            detail = f"the video could not be finished: {type(error).__name__}"
            fail(self._connections, attempt, ErrorClass.INFRASTRUCTURE, detail)
            return
        attempt.timings_ms["encode"] = int(1000 * (time.monotonic() - started))
        attempt.phase = Phase.UPLOAD
        show_progress(self._connections, attempt)
        self._uploader.submit(self._upload, attempt, video)

    def _discard(self, attempt: Attempt) -> None:
        self._failures.pop(attempt.wire_id, None)
        writer = self._writers.pop(attempt.wire_id, None)
        if writer is not None:
            writer.discard()

    def _upload(self, attempt: Attempt, video: EncodedVideo) -> None:
        try:
            self._upload_and_complete(attempt, video)
        except GivenUpError:
            # The job runs again elsewhere, without charge; one that was cancelled becomes cancelled.
            release(self._connections, attempt, "preempted")
        except SpoolLostError as error:
            fail(self._connections, attempt, ErrorClass.INFRASTRUCTURE, str(error))
        except Exception:  # the edge of the thread
            log.exception("delivery_failed", job_id=attempt.wire_id)
            fail(self._connections, attempt, ErrorClass.INTERNAL, "the result could not be delivered")
        finally:
            self._connections.active.remove(attempt)
            with contextlib.suppress(OSError):
                video.path.unlink()

    def _upload_and_complete(self, attempt: Attempt, video: EncodedVideo) -> None:
        settings, s3 = self._connections.settings, self._connections.s3
        key = video_key(attempt.job_id, attempt.attempt, video.sha256)
        started = time.monotonic()

        def upload() -> None:
            if not video.path.exists():
                msg = "the finished video is gone from the spool"
                raise SpoolLostError(msg)
            upload_video(s3, settings, video.path, key, video.sha256)

        until_done(self._connections, attempt, upload, StorageError)
        attempt.timings_ms["upload"] = int(1000 * (time.monotonic() - started))
        for name, milliseconds in attempt.timings_ms.items():
            if name != "queue":
                telemetry.stage.labels(attempt.parameters.model, name).observe(milliseconds / 1000)
        stored = {"object_key": key, "object_sha256": video.sha256, "object_bytes": video.bytes}
        if not complete(self._connections, attempt, stored, self._result(attempt, video)):
            release(self._connections, attempt, "cancelled")
            with contextlib.suppress(*StorageError):
                delete_object(s3, settings, key)

    def _result(self, attempt: Attempt, video: EncodedVideo) -> dict[str, Any]:
        asked = attempt.parameters
        return {
            "attempt": attempt.attempt,
            "width": asked.width,
            "height": asked.height,
            "fps": asked.fps,
            "num_frames": video.num_frames,
            "duration_s": video.duration_s,
            "worker": self._connections.worker_id,
            **self._engine,
        }
