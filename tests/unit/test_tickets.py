import json
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.domain.ids import format_job_id, new_id, parse_job_id
from common.domain.tickets import MAX_TICKET_BYTES, BadTicketError, Ticket, decode_ticket, encode_ticket

TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@given(st.uuids(), st.integers(1, 2**31 - 1), st.sampled_from(["0123456789abcdef", "alone-" + "a" * 36]))
def test_a_ticket_survives_the_wire_and_is_small(job_id: UUID, seq: int, key: str) -> None:
    ticket = Ticket(job_id, seq, "wan2.2-ti2v-5b", key, TRACE)
    assert len(encode_ticket(ticket)) < MAX_TICKET_BYTES
    assert decode_ticket(encode_ticket(ticket)) == ticket


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\x80\x04\x95",
        b'{"v":2}',
        b'{"v":1,"job":"x","seq":1,"model":"m","key":"k"}',
        json.dumps({"v": 1, "job": str(UUID(int=1)), "seq": "many", "model": "m", "key": "k"}).encode(),
        b"[" * 290,
        b" " * (MAX_TICKET_BYTES + 1),
    ],
)
def test_anything_else_is_a_bad_ticket(body: bytes) -> None:
    with pytest.raises(BadTicketError):
        decode_ticket(body)


def test_job_ids_sort_by_time_of_creation() -> None:
    ids = [new_id() for _ in range(3)]
    assert [i.int >> 64 for i in ids] == sorted(i.int >> 64 for i in ids)
    assert {i.version for i in ids} == {7}


def test_a_job_id_survives_the_wire() -> None:
    job_id = new_id()
    assert parse_job_id(format_job_id(job_id)) == job_id


@pytest.mark.parametrize(
    "text", ["", "job_", "job_" + "g" * 32, "job_" + "A" * 32, "a" * 32, "job_" + "a" * 33, "../etc"]
)
def test_other_texts_are_no_job_ids(text: str) -> None:
    assert parse_job_id(text) is None
