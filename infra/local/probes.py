"""Questions that tell whether a server serves, asked over its own protocol."""

import http.client
import socket

import psycopg

# A server on loopback answers within milliseconds; a probe is asked again anyway.
PROBE_TIMEOUT_S = 2


def answers_http(port: int, path: str) -> bool:
    """Tell whether GET `path` on 127.0.0.1 answers 2xx."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status // 100 == 2
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def answers_tcp(port: int) -> bool:
    """Tell whether somebody listens on this port of 127.0.0.1."""
    return _ask(port, b"", 0) is not None


def answers_redis(port: int, password: str) -> bool:
    """Tell whether a Redis server takes this password and answers PING."""
    answer = _ask(port, f"AUTH {password}\r\nPING\r\nQUIT\r\n".encode(), 1024)
    return answer is not None and answer.startswith(b"+OK") and b"+PONG" in answer


def answers_amqp(port: int) -> bool:
    """Tell whether a broker greets an AMQP 0-9-1 client: it opens this port last, after its users and queues."""
    answer = _ask(port, b"AMQP\x00\x00\x09\x01", 7)
    # A method frame (type 1) on channel 0: Connection.Start.
    return answer is not None and answer.startswith(b"\x01\x00\x00")


def answers_postgres(url: str) -> bool:
    """Tell whether Postgres lets this user in and answers a query."""
    try:
        with psycopg.connect(url, connect_timeout=PROBE_TIMEOUT_S) as connection:
            return connection.execute("SELECT 1").fetchone() == (1,)
    except psycopg.OperationalError:
        return False


def _ask(port: int, question: bytes, at_most: int) -> bytes | None:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PROBE_TIMEOUT_S) as connection:
            connection.sendall(question)
            return _read(connection, at_most)
    except OSError:
        return None


def _read(connection: socket.socket, at_most: int) -> bytes:
    answer = b""
    while len(answer) < at_most:
        piece = connection.recv(at_most - len(answer))
        if not piece:
            break
        answer += piece
    return answer
