"""The server that the tests of the client talk to."""

from collections.abc import Iterator

import pytest

from latentmill import Client
from tests.unit.client_support import KEY, QUICK, Farm, Site, served


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with served() as running:
        yield running


@pytest.fixture
def farm(site: Site) -> Farm:
    return site.fresh()


@pytest.fixture
def client(farm: Farm) -> Iterator[Client]:
    with Client(farm.url, KEY, QUICK) as connected:
        yield connected
