"""The `latentmill` command: arguments in, exit code out. What it shows is in output."""

import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import click

from latentmill.client import DEFAULT_URL, Client
from latentmill.errors import ApiError, LatentmillError, NoVideoError
from latentmill.models import SUCCEEDED, TERMINAL_STATUSES, Job, JobOptions
from latentmill.output import emit, print_job, print_jobs, print_models, report, say, show, watcher

STDOUT = Path("/dev/stdout")  # what `-` stands for
OK, NOT_SUCCEEDED, USAGE, REFUSED, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130

_EPILOG = """\b
Exit codes:
  0    ok
  1    the job failed, was cancelled or expired, or has no video yet
  2    wrong use of the command, or a file that cannot be written
  3    the API refused the request (4xx)
  4    the server or the network failed, or a download was damaged
  130  Ctrl-C; the job goes on

\b
Environment:
  LATENTMILL_URL           address of the server
  LATENTMILL_API_KEY       the API key; never an argument, where others could read it
  LATENTMILL_API_KEY_FILE  a file with the key, instead

Results go to stdout, everything meant for people to stderr. With `-` as the
file of a video stdout is the video and nothing else."""


@dataclass(frozen=True, slots=True)
class Session:
    """What every command needs: a server, and whether a program reads the output."""

    client: Client
    as_json: bool


Command = Callable[..., int | None]


def connected(command: Command) -> Callable[..., None]:
    """Give a command the options of the connection and, as its first argument, the Session made of them."""

    @click.option(
        "--url", envvar="LATENTMILL_URL", default=DEFAULT_URL, show_default=True, help="Address of the server."
    )
    @click.option(
        "--api-key-file",
        envvar="LATENTMILL_API_KEY_FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with the API key. Without it the key is LATENTMILL_API_KEY.",
    )
    @click.option("--json", "as_json", is_flag=True, help="One JSON document a line on stdout.")
    @functools.wraps(command)
    def run(url: str, api_key_file: Path | None, *, as_json: bool, **arguments: object) -> None:
        try:
            client = Client(url, _api_key(api_key_file))
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        with client:
            code = _guarded(command, Session(client, as_json), arguments)
        raise click.exceptions.Exit(code)

    return run


def _guarded(command: Command, session: Session, arguments: Mapping[str, object]) -> int:
    try:
        return command(session, **arguments) or OK
    except LatentmillError as error:
        report(error, as_json=session.as_json)
        return _exit_code(error)
    except BrokenPipeError:  # whoever read our output has left
        raise
    except OSError as error:  # a folder that is not there, a full disk
        say(f"error: {error}")
        return USAGE


def _exit_code(error: LatentmillError) -> int:
    if isinstance(error, NoVideoError):
        return NOT_SUCCEEDED
    return REFUSED if isinstance(error, ApiError) and not error.is_server_fault else UNREACHABLE


def _api_key(file: Path | None) -> str | None:
    key = (file.read_text("utf-8", errors="replace") if file else os.environ.get("LATENTMILL_API_KEY", "")).strip()
    if not all("!" <= char <= "~" for char in key):
        message = f"the API key from {file or 'LATENTMILL_API_KEY'} has characters that no key has"
        raise click.UsageError(message)
    return key or None


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="latentmill")
def cli() -> None:
    """Make videos on a latentmill render farm.

    Start with: latentmill submit "a red circle moving right" --watch
    """


def _metadata(_context: click.Context, _option: click.Parameter, pairs: Sequence[str]) -> dict[str, str] | None:
    if wrong := next((pair for pair in pairs if "=" not in pair or pair.startswith("=")), None):
        message = f"{wrong!r} is not of the form KEY=VALUE"
        raise click.BadParameter(message)
    return dict(pair.split("=", 1) for pair in pairs) or None


def _target(_context: click.Context, _option: click.Parameter, path: str | None) -> Path | None:
    if path is None:
        return None
    return STDOUT if path == "-" else Path(path)


def _refuse_mixture(session: Session, target: Path | None) -> None:
    """Raise UsageError, before anything is done, when a video would meet something else on stdout."""
    if target != STDOUT:
        return
    if session.as_json:
        message = "--json and - both need stdout; save to a file instead"
        raise click.UsageError(message)
    if sys.stdout.isatty():
        message = "a video is nothing for a terminal; send it to a file or a program: - > video.mp4"
        raise click.UsageError(message)


@cli.command(epilog=_EPILOG)
@click.argument("prompt")
@click.option("--model", envvar="LATENTMILL_MODEL", help="What makes the video; `latentmill models` lists them.")
@click.option("--size", metavar="WxH", help="Pixels, for example 832x480.")
@click.option("--num-frames", type=int, help="Length in frames, 4k+1.")
@click.option("--seconds", type=float, help="Length in seconds, instead of --num-frames.")
@click.option("--fps", type=int, help="Frames a second.")
@click.option("--steps", "num_inference_steps", type=int, help="Denoising steps.")
@click.option("--seed", type=int, help="Same seed, same video. Drawn by the server when absent.")
@click.option("--guidance-scale", type=float, help="How closely to follow the prompt.")
@click.option("--guidance-scale-2", type=float, help="The same for the low-noise expert.")
@click.option("--flow-shift", type=float, help="Shift of the noise schedule.")
@click.option("--negative-prompt", help="What the video must not show.")
@click.option("--priority", type=int, help="0 to 9, higher goes first.")
@click.option("--deterministic", is_flag=True, default=None, help="Never share a batch: a rerun gives the same bytes.")
@click.option("--queue-deadline-s", type=float, help="Give up when no worker has started it after so many seconds.")
@click.option("--metadata", multiple=True, metavar="KEY=VALUE", callback=_metadata, help="Kept with it; repeatable.")
@click.option("--watch/--no-watch", default=False, show_default=True, help="Stay until the job is finished.")
@click.option("--download", callback=_target, metavar="PATH", help="Save the video here (-: stdout); implies --watch.")
@connected
def submit(
    session: Session, prompt: str, *, watch: bool, download: Path | None, **options: Unpack[JobOptions]
) -> int | None:
    """Ask for a video of PROMPT.

    Prints the job's id, or with --watch the address of the finished video.
    """
    _refuse_mixture(session, download)
    job = session.client.submit(prompt, **options)
    if session.as_json:
        emit(job.raw)
    if watch or download:
        say(f"submitted {job.id}")
        return _follow(session, [job.id], download)
    if not session.as_json:
        show(job.id)
        say(f"follow it with: latentmill watch {job.id}")
    return OK


@cli.command(epilog=_EPILOG)
@click.argument("job_ids", nargs=-1, required=True, metavar="ID...")
@connected
def watch(session: Session, job_ids: tuple[str, ...]) -> int:
    """Follow jobs until all are finished, and print the addresses of their videos.

    With --json every event is printed as it was received.
    """
    return _follow(session, list(dict.fromkeys(job_ids)), None)


def _follow(session: Session, job_ids: list[str], download: Path | None) -> int:
    try:
        jobs = _watch(session, job_ids)
        for job in jobs.values():
            _tell_result(session, job, download)
        if download and all(job.status == SUCCEEDED for job in jobs.values()):
            for job_id in jobs:
                _save(session, job_id, download)
    except KeyboardInterrupt:
        ids = " ".join(job_ids)
        say(f"stopped watching; the job goes on. Watch it again with: latentmill watch {ids}")
        say(f"or stop it with: latentmill cancel {ids}")
        return INTERRUPTED
    return OK if all(job.status == SUCCEEDED for job in jobs.values()) else NOT_SUCCEEDED


def _watch(session: Session, job_ids: list[str]) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    with watcher(as_json=session.as_json) as display:
        for event in session.client.events(*job_ids):
            display.show(event)
            jobs.update({job.id: job for job in event.jobs})
    return jobs


def _tell_result(session: Session, job: Job, download: Path | None) -> None:
    if job.result and download == STDOUT:
        say(job.result.url)
    elif job.result and not session.as_json:
        show(job.result.url)
    elif job.error:
        say(f"{job.id} {job.status}: {job.error.code}: {job.error.message}")


@cli.command(epilog=_EPILOG)
@click.argument("job_id", metavar="ID")
@connected
def get(session: Session, job_id: str) -> None:
    """Show a job as it is now."""
    job = session.client.get(job_id)
    emit(job.raw) if session.as_json else print_job(job)


@cli.command("list", epilog=_EPILOG)
@click.option("--status", type=click.Choice(["queued", "running", *sorted(TERMINAL_STATUSES)]), help="Only these.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="At most so many.")
@connected
def list_jobs(session: Session, status: str | None, limit: int) -> None:
    """List jobs, the newest first."""
    jobs = session.client.list(status=status, limit=limit)
    if not session.as_json:
        print_jobs(jobs)
        return
    for job in jobs:
        emit(job.raw)


@cli.command(epilog=_EPILOG)
@click.argument("job_ids", nargs=-1, required=True, metavar="ID...")
@connected
def cancel(session: Session, job_ids: tuple[str, ...]) -> int:
    """Stop jobs. Each is tried, also when another one is refused."""
    codes = [_guarded(_cancel, session, {"job_id": job_id}) for job_id in job_ids]
    return max(codes)


def _cancel(session: Session, job_id: str) -> None:
    job = session.client.cancel(job_id)
    if session.as_json:
        emit(job.raw)
    else:
        say(f"{job.id} {'cancelled' if job.is_terminal else 'cancel requested'}")


@cli.command(epilog=_EPILOG)
@click.argument("job_id", metavar="ID")
@click.argument("path", required=False, callback=_target)
@connected
def download(session: Session, job_id: str, path: Path | None) -> None:
    """Save the video of a job to PATH, or to ID.mp4 here.

    A broken download is resumed, and the file appears only when its checksum is right. With - the video goes to stdout,
    which gets nothing when the checksum is wrong: it is kept in the folder for temporary files until it is whole.
    """
    _refuse_mixture(session, path)
    _save(session, job_id, path or Path())


def _save(session: Session, job_id: str, target: Path) -> None:
    if target == STDOUT:
        _pass_on(session, job_id)
        return
    path = session.client.download(job_id, target)
    size = path.stat().st_size
    if session.as_json:
        emit({"object": "download", "job_id": job_id, "path": str(path), "bytes": size})
    else:
        say(f"saved {path} ({size} bytes)")


def _pass_on(session: Session, job_id: str) -> None:
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        path = session.client.download(job_id, Path(folder) / "video.mp4")
        with path.open("rb") as video:
            shutil.copyfileobj(video, sys.stdout.buffer)
        sys.stdout.flush()
        say(f"{job_id}: {path.stat().st_size} bytes")


@cli.command(epilog=_EPILOG)
@connected
def models(session: Session) -> None:
    """Show the models: sizes, lengths, and what they are."""
    offered = session.client.models()
    if not session.as_json:
        print_models(offered)
        return
    for model in offered:
        emit(model)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and give its exit code."""
    try:
        code = cli.main(arguments, prog_name="latentmill", standalone_mode=False)
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return code if isinstance(code, int) else OK
