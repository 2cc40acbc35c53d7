"""The Docker engine, and the images that docker-compose.yml pins. As a program it fetches those that are missing."""

import sys

import yaml
from docker.errors import APIError, DockerException, ImageNotFound
from testcontainers.core.config import testcontainers_config
from testcontainers.core.docker_client import DockerClient

from tests.conftest import REPOSITORY

COMPOSE_FILE = REPOSITORY / "docker-compose.yml"
# The parts of a stack, and what the compose file calls them.
SERVICES = {"postgres": "postgres", "rabbitmq": "rabbitmq", "redis": "redis", "s3": "seaweedfs"}


class EngineError(Exception):
    """Containers cannot be used here. The text says why and what to do."""


def engine() -> DockerClient:
    """The Docker engine that the environment or the docker command's settings name. Raises EngineError without one."""
    try:
        return DockerClient()
    except DockerException as error:
        message = (
            f"no Docker engine answers ({_first_cause(error)}): start Docker and be in its group `docker`, or name "
            "another one of this machine in DOCKER_HOST. `make test` needs none"
        )
        raise EngineError(message) from error


def _first_cause(error: BaseException) -> BaseException:
    """What the operating system said, below what three libraries made of it."""
    below = error.__cause__ or error.__context__
    return error if below is None else _first_cause(below)


def images() -> dict[str, str]:
    """The image of each part."""
    services = yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8"))["services"]
    return {part: str(services[service]["image"]) for part, service in SERVICES.items()}


def fetch_images() -> None:
    """Pull what is missing: here, where it is seen and no test's time limit runs. Raises EngineError."""
    store = engine().client.images
    for image in images().values():
        name = testcontainers_config.hub_image_name_prefix + image
        try:
            store.get(name)
        except ImageNotFound:
            sys.stdout.write(f"pulling {name}\n")
            try:
                store.pull(name)
            except APIError as error:
                message = f"{name} cannot be pulled: {error.explanation or error}"
                raise EngineError(message) from error


if __name__ == "__main__":
    try:
        fetch_images()
    except EngineError as error:
        sys.exit(f"test-docker: {error}")
