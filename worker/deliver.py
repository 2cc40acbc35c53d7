"""From decoded frames to a finished job: H.264, upload, and the completion in Postgres. Beside the next batch."""

import contextlib
import errno
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from common import telemetry
from common.domain.jobs import ErrorClass, Phase
from common.storage import StorageError, delete_object, upload_video, video_key
from worker.attempts import Attempt
from worker.breaker import Breaker
from worker.conclude import GivenUpError, complete, expire, fail, release, until_done
from worker.connections import Connections, show_progress
from worker.encode import Mp4Writer
from worker.engine.base import FramesReady
from worker.spooled import Spooled, remove, write_note

# Uploads wait for the network, so a few may overlap; each job has at most one.
_UPLOADS = 4
# After a full disk no job is taken for so long, also when a quota hides how full it is.
_FULL_S = 10.0
# An upload that is under way when the worker must go has this long to notice.
_LAST_MOMENT_S = 5.0
_LOOK_S = 0.2

log = structlog.get_logger()


class SpoolLostError(RuntimeError):
    """Somebody removed a finished video before it was uploaded."""


@dataclass(frozen=True, slots=True)
class _Failure:
    detail: str
    disk_full: bool


class DeliveryLane:
    """One encoding thread, so that a job's frames stay in order, and others behind it, one for each job that waits."""

    def __init__(self, connections: Connections, breaker: Breaker, engine: Mapping[str, Any]) -> None:
        self._connections = connections
        self._breaker = breaker
        self._engine = engine  # what made the videos, as shown in every result
        self._writers: dict[str, Mp4Writer] = {}  # by the job's wire id; touched by the encoding thread alone
        self._failures: dict[str, _Failure] = {}
        self._full_at: float | None = None
        self._encoder = ThreadPoolExecutor(1, "encode")
        # While the bucket is away each job waits on a thread of its own, so that a cancel of any is noticed. An adopted
        # spool may hold more of them than this worker makes; these wait for their turn.
        self._deliverer = ThreadPoolExecutor(connections.settings.spool_jobs, "deliver")
        self._uploads = threading.Semaphore(_UPLOADS)
        self._under_way: set[Future[None]] = set()

    @property
    def disk_full(self) -> bool:
        """Whether a video did not fit on the disk just now."""
        return self._full_at is not None and time.monotonic() - self._full_at < _FULL_S

    def write(self, attempt: Attempt, chunk: FramesReady) -> None:
        """Encode a chunk of frames, in the order of the calls."""
        self._encoder.submit(self._write, attempt, chunk)

    def finish(self, attempt: Attempt) -> None:
        """All frames were written: close the file, upload it, complete the job."""
        self._encoder.submit(self._finish, attempt)

    def discard(self, attempt: Attempt) -> None:
        """The job has no result: throw away what was encoded of it."""
        self._encoder.submit(self._discard, attempt)

    def deliver(self, entry: Spooled) -> None:
        """Upload a finished video and complete its job, now or whenever that becomes possible."""
        delivery = self._deliverer.submit(self._deliver, entry)
        self._under_way.add(delivery)
        delivery.add_done_callback(self._under_way.discard)

    def drop(self, entry: Spooled) -> None:
        """Nobody waits for this video: remove the file, and the object that an earlier try may have left."""
        key = video_key(entry.attempt.job_id, entry.attempt.attempt, entry.video.sha256)
        self._deliverer.submit(self._remove_object, key)
        self._forget(entry.attempt, entry.video.path)

    def close(self) -> None:
        """Wait for everything under way, since the GPU work behind it is paid for, until the worker must go."""
        self._encoder.shutdown(wait=True)
        self._deliverer.shutdown(wait=False)
        until = None
        while self._under_way and (until is None or time.monotonic() < until):
            if until is None and self._connections.closing.is_set():
                until = time.monotonic() + _LAST_MOMENT_S
            wait(list(self._under_way), timeout=_LOOK_S)

    # From here on the encoding thread.

    def _write(self, attempt: Attempt, chunk: FramesReady) -> None:
        try:
            if attempt.wire_id not in self._failures:
                self._writer(attempt).write(chunk.frames)
        except Exception as error:  # noqa: BLE001  the edge of the thread: a full disk or a codec fails this job alone
            self._failures[attempt.wire_id] = self._note_failure(attempt, error)
        finally:
            chunk.release()

    def _writer(self, attempt: Attempt) -> Mp4Writer:
        if attempt.wire_id not in self._writers:
            path = self._connections.spool / f"{attempt.job_id}.{attempt.attempt}.mp4"
            size = attempt.parameters
            self._writers[attempt.wire_id] = Mp4Writer(path, width=size.width, height=size.height, fps=size.fps)
        return self._writers[attempt.wire_id]

    def _note_failure(self, attempt: Attempt, error: Exception) -> _Failure:
        detail = f"the video could not be encoded: {type(error).__name__}"
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            self._full_at = time.monotonic()
            log.error("disk_full", job_id=attempt.wire_id, folder=str(self._connections.spool))
            return _Failure("the disk for finished videos is full", disk_full=True)
        log.error("encoding_failed", job_id=attempt.wire_id, exc_info=error)
        return _Failure(detail, disk_full=False)

    def _finish(self, attempt: Attempt) -> None:
        failure = self._failures.pop(attempt.wire_id, None)
        writer = self._writers.pop(attempt.wire_id, None)
        try:
            if failure is None:
                self._keep(attempt, writer)
        except Exception as error:  # noqa: BLE001  the edge of the thread, as in _write
            failure = self._note_failure(attempt, error)
        if failure is not None:
            if writer is not None:
                writer.discard()
            self._fail(attempt, failure)

    def _keep(self, attempt: Attempt, writer: Mp4Writer | None) -> None:
        """Complete the file and hand it on. Raises whatever keeps it from being complete."""
        if writer is None:
            msg = "no frames were decoded"
            raise ValueError(msg)
        started = time.monotonic()
        video = writer.finish()
        attempt.timings_ms["encode"] = int(1000 * (time.monotonic() - started))
        entry = Spooled(attempt, video, self._result(attempt, video.num_frames, video.duration_s))
        try:
            write_note(entry)
        except OSError as error:  # it can be delivered all the same, as long as this process lives
            log.warning("spool_note_not_written", job_id=attempt.wire_id, error=type(error).__name__)
        self._breaker.succeeded()
        attempt.finished = True
        attempt.phase = Phase.UPLOAD
        show_progress(self._connections, attempt)
        self.deliver(entry)

    def _fail(self, attempt: Attempt, failure: _Failure) -> None:
        if not failure.disk_full:
            self._breaker.failed([attempt.wire_id])
        fail(
            self._connections,
            attempt,
            ErrorClass.INFRASTRUCTURE,
            failure.detail,
            spare_if_others=failure.disk_full,
        )

    def _discard(self, attempt: Attempt) -> None:
        self._failures.pop(attempt.wire_id, None)
        writer = self._writers.pop(attempt.wire_id, None)
        if writer is not None:
            writer.discard()

    def _result(self, attempt: Attempt, num_frames: int, duration_s: float) -> dict[str, Any]:
        asked = attempt.parameters
        return {
            "attempt": attempt.attempt,
            "width": asked.width,
            "height": asked.height,
            "fps": asked.fps,
            "num_frames": num_frames,
            "duration_s": duration_s,
            "worker": self._connections.worker_id,
            **self._engine,
        }

    # From here on a delivering thread.

    def _deliver(self, entry: Spooled) -> None:
        attempt, path = entry.attempt, entry.video.path
        try:
            self._upload_and_complete(entry)
        except GivenUpError:
            if self._stop_waiting(attempt):
                return  # the file stays for the next process
        except SpoolLostError as error:
            fail(self._connections, attempt, ErrorClass.INFRASTRUCTURE, str(error))
        except Exception:  # the edge of the thread
            log.exception("delivery_failed", job_id=attempt.wire_id)
            fail(self._connections, attempt, ErrorClass.INTERNAL, "the result could not be delivered")
        self._forget(attempt, path)

    def _stop_waiting(self, attempt: Attempt) -> bool:
        """The delivery was given up. True: only by this process, and the next one on this spool may go on with it.

        The job is left to that for the time of a lease; then it runs again elsewhere, without charge.
        """
        if attempt.unwanted:
            release(self._connections, attempt, "cancelled")
        elif time.monotonic() >= attempt.deadline:
            expire(self._connections, attempt)
        else:
            release(self._connections, attempt, "preempted", delay_s=self._connections.settings.lease_s)
            log.warning("result_left_in_spool", job_id=attempt.wire_id, attempt=attempt.attempt)
            return True
        return False

    def _forget(self, attempt: Attempt, path: Path) -> None:
        self._connections.active.remove(attempt)
        with contextlib.suppress(OSError):
            remove(path)

    def _upload_and_complete(self, entry: Spooled) -> None:
        attempt, video = entry.attempt, entry.video
        key = video_key(attempt.job_id, attempt.attempt, video.sha256)
        started = time.monotonic()
        self._upload(entry, key)
        attempt.timings_ms["upload"] = int(1000 * (time.monotonic() - started))
        stored = {"object_key": key, "object_sha256": video.sha256, "object_bytes": video.bytes}
        try:
            accepted = complete(self._connections, attempt, stored, entry.result)
        except GivenUpError:
            if attempt.unwanted:
                self._remove_object(key)
            raise
        if not accepted:
            release(self._connections, attempt, "cancelled")
            self._remove_object(key)
            return
        for name, milliseconds in attempt.timings_ms.items():
            if name != "queue":
                telemetry.stage.labels(attempt.parameters.model, name).observe(milliseconds / 1000)

    def _upload(self, entry: Spooled, key: str) -> None:
        settings, s3 = self._connections.settings, self._connections.s3

        def upload() -> None:
            if not entry.video.path.exists():
                msg = "the finished video is gone from the spool"
                raise SpoolLostError(msg)
            with self._uploads:
                if entry.attempt.unwanted:
                    raise GivenUpError(upload.__name__)
                upload_video(s3, settings, entry.video.path, key, entry.video.sha256)

        until_done(self._connections, entry.attempt, upload, StorageError)

    def _remove_object(self, key: str) -> None:
        try:
            delete_object(self._connections.s3, self._connections.settings, key)
        except StorageError as error:
            log.warning("object_left_to_the_collector", key=key, error=type(error).__name__)
