"""The Python client against a real server on the loopback: calls and their retries."""

import pytest
from starlette.responses import HTMLResponse, Response

from latentmill import ApiError, BadAnswerError, Client, ConnectionFailedError, FieldError, Job
from tests.unit.client_support import KEY, QUICK, Farm, job, problem, unused_url


def test_submit_sends_what_was_given_and_nothing_else(farm: Farm, client: Client) -> None:
    submitted = client.submit("a red circle", seed=7, model=None, metadata={"shot": "3"})
    assert submitted.status == "queued"
    assert farm.bodies == [{"prompt": "a red circle", "seed": 7, "metadata": {"shot": "3"}}]


def test_get_reads_the_job_and_keeps_the_document(farm: Farm, client: Client) -> None:
    queue = {"position": 2, "ahead": 1, "est_start_s": 8.5}
    job_id = farm.add(job(queue=queue, created_at="2026-12-01T10:00:00Z", something_new=[1]))
    read = client.get(job_id)
    assert (read.id, read.queue and read.queue.position, read.created_at and read.created_at.year) == (job_id, 2, 2026)
    assert read.raw["something_new"] == [1]


def test_list_goes_through_the_pages(farm: Farm, client: Client) -> None:
    ids = [farm.add(job(number)) for number in range(230)]
    assert [listed.id for listed in client.list()] == ids
    assert farm.paths() == ["GET /v1/jobs"] * 3


def test_list_asks_for_no_more_than_the_limit(farm: Farm, client: Client) -> None:
    for number in range(5):
        farm.add(job(number))
    assert len(list(client.list(limit=2))) == 2
    assert farm.requests[0].query_params["limit"] == "2"


def test_cancel_gives_the_job_back(farm: Farm, client: Client) -> None:
    assert client.cancel(farm.add(job(status="running"))).cancel_requested


def test_cancel_of_a_finished_job_is_refused(farm: Farm, client: Client) -> None:
    with pytest.raises(ApiError) as refused:
        client.cancel(farm.add(job(status="succeeded")))
    assert (refused.value.status, refused.value.code) == (409, "job_terminal")


def test_a_refusal_names_every_field_and_the_request(farm: Farm, client: Client) -> None:
    errors = [{"field": "seed", "message": "too large"}, {"field": "size", "message": "not served"}]
    farm.refusals.append(problem(400, "invalid_parameter", "2 fields are wrong", errors))
    with pytest.raises(ApiError) as refused:
        client.submit("x")
    assert refused.value.fields == (FieldError("seed", "too large"), FieldError("size", "not served"))
    assert refused.value.request_id == "req-7"


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_read_is_repeated_while_the_server_restarts(farm: Farm, client: Client, status: int) -> None:
    job_id = farm.add(job())
    farm.refusals.extend([Response("bad gateway", status)] * 2)
    assert client.get(job_id).id == job_id
    assert len(farm.requests) == 3


def test_a_read_gives_up_after_the_last_attempt(farm: Farm, client: Client) -> None:
    farm.refusals.extend([Response("bad gateway", 502)] * 9)
    with pytest.raises(ApiError) as refused:
        client.get("job_1")
    assert (refused.value.status, refused.value.code, len(farm.requests)) == (502, "http_502", QUICK.attempts)


@pytest.mark.parametrize("answer", [Response("bad gateway", 502), problem(503, "queue_full", "no")])
def test_a_submit_that_may_have_been_taken_is_not_repeated(farm: Farm, client: Client, answer: Response) -> None:
    farm.refusals.append(answer)
    with pytest.raises(ApiError):
        client.submit("x")
    assert len(farm.requests) == 1


def test_a_submit_is_repeated_when_the_server_says_when(farm: Farm, client: Client) -> None:
    farm.refusals.append(problem(503, "queue_full", "no", retry_after="0"))
    assert client.submit("x").status == "queued"
    assert len(farm.requests) == 2


def test_a_long_retry_after_is_told_and_not_waited_for(farm: Farm, client: Client) -> None:
    farm.refusals.append(problem(503, "queue_full", "no", retry_after="60"))
    with pytest.raises(ApiError) as refused:
        client.submit("x")
    assert refused.value.retry_after_s == 60


def test_no_server_is_told_with_the_address() -> None:
    url = unused_url()
    with Client(url, KEY, QUICK) as client, pytest.raises(ConnectionFailedError, match=url):
        client.submit("x")


def test_an_answer_of_another_server_is_recognised(farm: Farm, client: Client) -> None:
    farm.refusals.append(HTMLResponse("<html>welcome</html>"))
    with pytest.raises(BadAnswerError, match="latentmill server"):
        client.get("job_1")


def test_an_id_cannot_leave_its_place_in_the_path(farm: Farm, client: Client) -> None:
    with pytest.raises(ApiError):
        client.get("../models?x=1")
    assert farm.requests == [] or farm.requests[0].url.query == ""


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://host", "http://host:port"])
def test_a_bad_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        Client(url)


@pytest.mark.parametrize("raw", [[], {}, {"id": "a"}, {"id": "a", "status": "queued", "seq": "x"}])
def test_what_is_no_job_is_refused(raw: object) -> None:
    with pytest.raises(BadAnswerError):
        Job.from_json(raw)


def test_the_key_is_not_in_the_representation(client: Client) -> None:
    assert KEY not in repr(client)
