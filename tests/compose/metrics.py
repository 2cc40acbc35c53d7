"""What an api says of itself."""

import json

from tests.compose.programs import READ_METRICS
from tests.compose.stack import Container, docker


def metric(api: Container, name: str) -> float:
    """A metric of this api, summed over its labels."""
    metrics: dict[str, float] = json.loads(docker("exec", "--interactive", api.id, "python", "-", stdin=READ_METRICS))
    return sum(value for full_name, value in metrics.items() if full_name.partition("{")[0] == name)
