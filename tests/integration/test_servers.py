"""The servers that these tests run on, in whichever way they were started."""

import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

import psutil
import pytest
from sqlalchemy import Engine, text

from common.settings import StorageSettings
from common.storage import client
from tests.integration.servers import CHOICE, Servers, chosen_servers

URLS = ("LATENTMILL_DATABASE_URL", "LATENTMILL_AMQP_URL", "LATENTMILL_REDIS_URL", "LATENTMILL_S3_ENDPOINT")


def test_an_unknown_kind_of_servers_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=f"{CHOICE} is 'remote', which is none of: local, containers"):
        chosen_servers({CHOICE: "remote"})


@pytest.mark.parametrize("name", URLS)
def test_no_server_listens_to_other_machines(environment: Mapping[str, str], name: str) -> None:
    port = urlsplit(environment[name]).port
    addresses = [a.address for each in psutil.net_if_addrs().values() for a in each if a.family == socket.AF_INET]
    answering = []
    for address in addresses:
        with socket.socket() as probe:
            probe.settimeout(2)
            if probe.connect_ex((address, port)) == 0:
                answering.append(address)
    assert answering == ["127.0.0.1"]


def test_a_row_outlives_a_stop_of_postgres(stack: Servers, database: Engine) -> None:
    with database.begin() as connection:
        connection.execute(text("CREATE TABLE kept AS SELECT 7 AS figure"))
    database.dispose()
    stack.stop_part("postgres")
    stack.start_part("postgres")
    with database.begin() as connection:
        assert connection.execute(text("SELECT figure FROM kept")).scalar_one() == 7
        connection.execute(text("DROP TABLE kept"))


def test_an_object_outlives_a_stop_of_the_bucket(stack: Servers, storage_settings: StorageSettings) -> None:
    bucket = client(storage_settings)
    bucket.put_object(Bucket=storage_settings.s3_bucket, Key="videos/kept", Body=b"frames")
    stack.stop_part("s3")
    stack.start_part("s3")
    assert bucket.get_object(Bucket=storage_settings.s3_bucket, Key="videos/kept")["Body"].read() == b"frames"
