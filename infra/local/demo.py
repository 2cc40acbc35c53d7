"""`make demo`: from a prompt to a video that is looked at, through nginx and with the public client alone."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click

from infra.local.options import REPOSITORY, StackOptions
from infra.local.part import StackError
from infra.local.plan import caller_environment
from infra.local.stack import LocalStack
from models.pixel_test import expected_from_prompt, read_clip, sentence, verdict
from models.video_file import contact_sheet, read_mp4

OUT = REPOSITORY / "out"
VIDEO, SHEET = OUT / "demo.mp4", OUT / "demo.png"
# The longest clip of the tiny model, long enough to see the motion.
MODEL, NUM_FRAMES = "tiny-wan2.2-t2v", "17"
# One part of the file, as a player asks for it.
RANGE = "bytes=0-1023"

_started = time.monotonic()


class DemoError(RuntimeError):
    """The demo did not show what it should."""


@click.command()
@click.argument("prompt")
@click.option("--keep", is_flag=True, help="Leave the stack running afterwards.")
def main(prompt: str, *, keep: bool) -> None:
    """Start the stack, make a video of PROMPT, fetch it from the edge, and say what is seen in it."""
    try:
        stack = LocalStack(StackOptions())
    except StackError as error:
        click.echo(f"demo: FAILED {error}", err=True)
        sys.exit(1)
    keep = keep or None not in stack.status().values()
    try:
        say(f"starting the stack in {stack.layout.root.relative_to(REPOSITORY)}/")
        stack.start(lambda part, seconds: click.echo(f"    {part:<12} ready after {seconds:4.1f} s"))
        show(stack, prompt)
    except (DemoError, StackError, OSError) as error:
        click.echo(f"demo: FAILED {error}", err=True)
        sys.exit(1)
    finally:
        if keep:
            say(f"the stack runs on at {stack.public_url}; `make down` stops it")
        else:
            stack.stop()
    click.echo(f"demo: OK {VIDEO.relative_to(REPOSITORY)} {VIDEO.stat().st_size} {time.monotonic() - _started:.1f}")


def show(stack: LocalStack, prompt: str) -> None:
    """Make the video and look at it."""
    say(f'asking {stack.public_url} for "{prompt}"')
    job = make_video(stack, prompt)
    result = job["result"]
    say(f"{result['num_frames']} frames of {result['width']}x{result['height']}, {result['bytes']} bytes, sha256 ok")
    say("stages in ms: " + ", ".join(f"{name} {ms}" for name, ms in job["timings_ms"].items()))
    say("from the edge: " + look_at_edge(result["url"]))
    frames, _ = read_mp4(VIDEO)
    contact_sheet(frames, SHEET)
    say(f"contact sheet in {SHEET.relative_to(REPOSITORY)}")
    judge(prompt, frames)


def make_video(stack: LocalStack, prompt: str) -> dict[str, Any]:
    """Submit, follow and download with the `latentmill` command; the finished job."""
    OUT.mkdir(exist_ok=True)
    command = str(Path(sys.executable).with_name("latentmill"))
    options = ["--json", "--model", MODEL, "--num-frames", NUM_FRAMES, "--download", str(VIDEO)]
    environment = {**caller_environment(), "LATENTMILL_URL": stack.public_url, "LATENTMILL_API_KEY": stack.api_key()}
    done = subprocess.run(  # noqa: S603  our own client; the prompt is one argument, after --
        [command, "submit", *options, "--", prompt], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        msg = f"the job did not succeed (exit code {done.returncode}); logs are in {stack.layout.root}/logs"
        raise DemoError(msg)
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    return finished_job(documents)


def finished_job(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The last job with a result among what the client printed."""
    jobs = [document.get("job", document) for document in documents]
    return next(job for job in reversed(jobs) if job.get("result"))


def look_at_edge(url: str) -> str:
    """Ask for a part of the file twice, and once with a changed signature; what the edge answered."""
    first, again = fetch(url), fetch(url)
    signed, signature = url.split("&s=")
    # The first character: of the last one, some bits mean nothing.
    changed = fetch(f"{signed}&s={'A' if signature[0] != 'A' else 'B'}{signature[1:]}")
    answer = f"range {first}, again {again}, changed signature {changed}"
    if (first[:3], again, changed[:3]) != ("206", "206 HIT", "403"):
        msg = f"the media edge answered: {answer}"
        raise DemoError(msg)
    return answer


def fetch(url: str) -> str:
    """GET one range; the status and what the cache did."""
    request = urllib.request.Request(url, headers={"Range": RANGE})  # noqa: S310  the stack's own address
    # A proxy that the environment names cannot reach it.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=30) as response:
            response.read()
            return f"{response.status} {response.headers.get('X-Cache', '-')}"
    except urllib.error.HTTPError as error:
        return str(error.code)


def judge(prompt: str, frames: Any) -> None:  # noqa: ANN401  a numpy array; numpy is not needed here otherwise
    """Say what the pixel test sees. Raises DemoError when it contradicts the prompt."""
    seen = read_clip(frames)
    say(f"the pixel test sees {sentence(seen)}")
    expected = expected_from_prompt(prompt)
    if expected is None:
        say("the tiny model does not know all of this prompt, so the video is not judged")
        return
    judged = verdict(expected, seen)
    if not judged.ok:
        msg = f"the video does not show the prompt: {', '.join(judged.wrong)} differ; see {SHEET}"
        raise DemoError(msg)


def say(text: str) -> None:
    """Print a line with the seconds since the start."""
    click.echo(f"[{time.monotonic() - _started:5.1f} s] {text}")


if __name__ == "__main__":
    main()
