"""What the local stack leaves behind."""

from pathlib import Path

from infra.local.stack import LocalStack


def test_a_server_that_was_killed_leaves_nothing_outside_the_stack(local_stack: LocalStack) -> None:
    ports = {local_stack.port(name) for name in ("s3", "s3.master", "s3.volume", "s3.filer", "s3.admin")}
    local_stack.kill_part("s3")
    sockets = [path.name for path in Path("/tmp").glob("seaweedfs-*.sock")]  # noqa: S108  SeaweedFS' own choice
    local_stack.start_part("s3")
    assert [name for name in sockets if any(str(port + 10_000) in name for port in ports)] == []
