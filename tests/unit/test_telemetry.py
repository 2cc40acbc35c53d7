import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from prometheus_client.metrics import MetricWrapperBase

from common import telemetry
from common.telemetry import METRICS_OF, configure_logging


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    before = logging.root.handlers[:]
    configure_logging("test")
    yield stderr
    logging.root.handlers[:] = before
    structlog.reset_defaults()


def test_a_log_line_is_one_json_object_whatever_is_in_it(lines: io.StringIO) -> None:
    structlog.get_logger().info("happened", text="two\nlines \x1b[31m")
    (line,) = lines.getvalue().splitlines()
    assert json.loads(line)["text"] == "two\nlines \x1b[31m"
    assert "\x1b" not in line


def test_a_row_that_postgres_quotes_does_not_reach_the_log(lines: io.StringIO) -> None:
    refusal = ValueError("violates check constraint\nDETAIL:  Failing row contains (1, a very private prompt).")
    structlog.get_logger().error("failed", exc_info=refusal)
    assert "private" not in lines.getvalue()
    assert "violates check constraint" in json.loads(lines.getvalue())["exception"]


def test_every_metric_is_shown_by_some_service() -> None:
    defined = {value for value in vars(telemetry).values() if isinstance(value, MetricWrapperBase)}
    assert defined == {metric for shown in METRICS_OF.values() for metric in shown}
