"""`python -m infra.local`: the stack from a terminal."""

import os
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from infra.local.layout import Layout
from infra.local.options import DEFAULT_DIRECTORY, StackOptions, remembered
from infra.local.part import StackError
from infra.local.plan import caller_environment
from infra.local.stack import LocalStack

WATCH_S = 0.5
# What `systemctl status` answers for a unit that does not run.
NOT_RUNNING = 3

directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_DIRECTORY,
    show_default=".stack in the checkout",
    help="Where data, logs, ports and passwords of the stack lie.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Run latentmill on this machine without a Docker engine.

    Postgres, Redis (Valkey), S3 (SeaweedFS), RabbitMQ and nginx run as real servers on loopback, with two apis, a
    dispatcher and workers. Everything lies in one directory.

    It is for a machine whose users trust each other: SeaweedFS' gRPC ports want no password.
    """


@main.command()
@directory_option
@click.option("--workers", type=click.IntRange(0), default=1, show_default=True, help="How many workers to run.")
@click.option("--no-apps", is_flag=True, help="Start only the servers: no api, dispatcher or worker.")
@click.option("--foreground", is_flag=True, help="Stay, and stop everything on Ctrl-C or when a part dies.")
def up(directory: Path, workers: int, *, no_apps: bool, foreground: bool) -> None:
    """Start the stack, or what of it does not run, and print its address and an API key."""
    signal.signal(signal.SIGTERM, _interrupt)
    stack = LocalStack(StackOptions(directory, workers=workers, apps=not no_apps))
    if None in stack.status().values():
        stack.start(lambda part, seconds: click.echo(f"  {part:<12} ready after {seconds:5.1f} s"))
        click.echo(f"The stack runs in {stack.layout.root}")
    else:
        click.echo(f"The stack runs already in {stack.layout.root}")
    if not no_apps:
        click.echo(f"  address  {stack.public_url}\n  API key  {stack.api_key()}")
    if foreground:
        _watch(stack)


@main.command()
@directory_option
@click.option("--destroy", is_flag=True, help="Remove all data of the stack as well.")
def down(directory: Path, *, destroy: bool) -> None:
    """Stop every part of the stack. Data stays unless --destroy is given."""
    stack = _existing(directory)
    if destroy:
        stack.destroy()
        kept = ", but for what is no part of it" if directory.exists() else ""
        click.echo(f"stopped, and removed the stack in {directory}{kept}")
    else:
        stack.stop()
        click.echo(f"stopped; data is kept in {directory}")


@main.command()
@directory_option
def status(directory: Path) -> None:
    """Show each part with its process. Exits with 3 when one does not run."""
    stack = _existing(directory)
    pids = stack.status()
    for name, pid in pids.items():
        click.echo(f"  {name:<12} {'not running' if pid is None else f'process {pid}'}")
    click.echo(f"  address      {stack.public_url}")
    sys.exit(NOT_RUNNING if None in pids.values() else 0)


@main.command()
@directory_option
def env(directory: Path) -> None:
    """Print the LATENTMILL_* variables, passwords included, for a shell: eval "$(python -m infra.local env)"."""
    for name, value in _existing(directory).environment.items():
        click.echo(f"export {name}={shlex.quote(value)}")


@main.command(context_settings={"ignore_unknown_options": True})
@directory_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(directory: Path, command: tuple[str, ...]) -> None:
    """Run a command with the stack's LATENTMILL_* variables: run -- python -m api.keys list."""
    environment = caller_environment() | dict(_existing(directory).environment)
    os.execvpe(command[0], command, environment)  # noqa: S606 - the caller's own command


def _existing(directory: Path) -> LocalStack:
    layout = Layout.at(directory)
    if not layout.exists():
        message = f"there is no stack in {directory}"
        raise click.ClickException(message)
    return LocalStack(remembered(layout.options, directory))


def _watch(stack: LocalStack) -> None:
    """Wait for Ctrl-C or the end of a part, then stop everything."""
    click.echo("Ctrl-C stops it.")
    try:
        while not (dead := [name for name, pid in stack.status().items() if pid is None]):
            time.sleep(WATCH_S)
        message = f"{dead[0]} ended; the end of {stack.layout.log(dead[0])}:\n{stack.log_tail(dead[0])}"
        raise StackError(message)
    except KeyboardInterrupt:
        pass
    finally:
        click.echo("stopping")
        stack.stop()


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        main()
    except StackError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
