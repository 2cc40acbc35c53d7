"""latentmill's own parts: migrations and bucket (tasks), two apis, the dispatcher and the workers."""

import re
import subprocess
import sys
from collections.abc import Mapping
from functools import partial

from infra.local import probes
from infra.local.options import REPOSITORY
from infra.local.part import Launch, Part, StackError
from infra.local.plan import Plan, caller_environment

APIS = ("api-1", "api-2")
MODEL = "tiny-wan2.2-t2v"
WORKER = re.compile(r"worker-[1-9]\d*")
# The first one has no number.
DISPATCHER = re.compile(r"dispatcher(-[2-9])?")


def tasks(plan: Plan) -> tuple[Part, ...]:
    """Return what runs once before the services: the schema, and the bucket with its policy."""
    return (
        Part("migrations", partial(_launch, plan, ("migrations", "upgrade"), {}), None, needs=("postgres",)),
        Part("bucket", partial(_launch, plan, ("common.storage",), {}), None, needs=("s3",)),
    )


def api(plan: Plan, name: str, overrides: Mapping[str, str]) -> Part:
    """Return one api process."""
    port = plan.ports[name]
    environment = {
        "LATENTMILL_API_HOST": "127.0.0.1",
        "LATENTMILL_API_PORT": str(port),
        "LATENTMILL_METRICS_PORT": str(plan.ports[f"{name}.metrics"]),
    }
    environment = environment | dict(plan.options.api_env) | dict(overrides)
    return Part(
        name,
        partial(_launch, plan, ("api",), environment),
        partial(probes.answers_http, port, "/readyz"),
        needs=("migrations", "bucket", "redis", "rabbitmq"),
    )


def dispatcher(plan: Plan, name: str, overrides: Mapping[str, str]) -> Part:
    """Return one dispatcher; of several, one leads."""
    port = plan.ports[f"{name}.metrics"]
    environment = {"LATENTMILL_METRICS_PORT": str(port)} | dict(plan.options.dispatcher_env) | dict(overrides)
    return Part(
        name,
        partial(_launch, plan, ("dispatcher",), environment),
        partial(probes.answers_http, port, "/metrics"),
        needs=("migrations", "redis", "rabbitmq"),
    )


def worker(plan: Plan, name: str, overrides: Mapping[str, str]) -> Part:
    """Return one worker. It opens its metrics port once its model is loaded."""
    port = plan.ports[f"{name}.metrics"]
    environment = _worker_environment(plan, name, port) | dict(plan.options.worker_env) | dict(overrides)
    return Part(
        name,
        partial(_launch, plan, ("worker",), environment),
        partial(probes.answers_http, port, "/metrics"),
        # It loads its model for longer than the servers take to start, and connects, again and again, only after that.
        uses=("postgres", "redis", "s3", "rabbitmq"),
        # Importing torch and loading the tiny model takes 10 s, and minutes when several do it on two busy cores.
        timeout_s=300,
        # LATENTMILL_DRAIN_GRACE_S lets the running batch take 100 s; 10 s more for its upload.
        grace_s=110,
    )


def _worker_environment(plan: Plan, name: str, port: int) -> dict[str, str]:
    environment = {
        "LATENTMILL_ENGINE": "wan",
        "LATENTMILL_MODEL": MODEL,
        "LATENTMILL_MODEL_PATH": str(REPOSITORY / "models" / "trained" / MODEL),
        # So that batches are made here: the default of 1 is for models that keep a GPU busy with one job.
        "LATENTMILL_MAX_BATCH": "4",
        # Each worker takes the folder of its name in it.
        "LATENTMILL_SPOOL_DIR": str(plan.layout.spool),
        "LATENTMILL_WORKER_ID": name,
        "LATENTMILL_METRICS_PORT": str(port),
    }
    # The tiny model gains nothing from more threads, and a thread per core beside the servers of the stack made a clip
    # take ten times as long as one thread alone.
    return environment | {"LATENTMILL_THREADS": "1", "OMP_NUM_THREADS": "1"}


def _launch(plan: Plan, module: tuple[str, ...], environment: Mapping[str, str]) -> Launch:
    shared = caller_environment() | plan.environment() | {"PYTHONUNBUFFERED": "1"}
    return Launch((sys.executable, "-m", *module), REPOSITORY, shared | dict(environment))


def make_api_key(plan: Plan) -> str:
    """Have the api make a key for the tenant `demo`; return it. Raises StackError when that fails."""
    launch = _launch(plan, ("api.keys", "create", "--tenant", "demo", "--name", "local", "--quiet"), {})
    done = subprocess.run(  # noqa: S603 - the stack's own command
        launch.argv, cwd=launch.cwd, env=dict(launch.environment), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        message = f"no API key could be made: {done.stderr.strip()}"
        raise StackError(message)
    return done.stdout.strip()
