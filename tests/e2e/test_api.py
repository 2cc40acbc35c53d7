"""The API as its callers meet it, through nginx."""

from typing import Any

import httpx
import pytest

from infra.local.stack import LocalStack
from latentmill import Client
from tests.e2e.conftest import SMALL, TINY, make_key

GOOD = {"model": TINY, "prompt": "a red circle"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "no-such-model"),
        ("model", 7),
        ("prompt", ""),
        ("prompt", None),
        ("prompt", ["a"]),
        ("prompt", "x" * 2001),
        ("negative_prompt", 1),
        ("size", "64"),
        ("size", "65x64"),
        ("width", 64),
        ("height", "64"),
        ("num_frames", 10),
        ("num_frames", 9.5),
        ("num_frames", 10**30),
        ("seconds", -1),
        ("fps", 0),
        ("num_inference_steps", 0),
        ("num_inference_steps", True),
        ("guidance_scale", "high"),
        ("guidance_scale_2", 99),
        ("flow_shift", 0),
        ("seed", -1),
        ("deterministic", "yes"),
        ("priority", 10),
        ("queue_deadline_s", 0),
        ("metadata", {"k": 1}),
        ("metadata", "x"),
        ("image", {"url": "http://127.0.0.1/"}),
        ("colour", "red"),
    ],
)
def test_a_bad_value_gets_400_with_the_name_of_its_field(http: httpx.Client, field: str, value: Any) -> None:
    answer = http.post("/v1/jobs", json={**GOOD, field: value})
    assert answer.status_code == 400
    assert answer.headers["Content-Type"] == "application/problem+json"
    named = {error["field"].split(".")[0] for error in answer.json()["errors"]}
    assert field in named or named <= {"width", "height"}
    assert answer.json()["error"]["code"] == "invalid_parameter"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt": NaN}', b"\xff\xfe", b"null"])
def test_what_is_no_json_object_gets_400(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400


def test_a_body_over_the_limit_gets_413(http: httpx.Client) -> None:
    assert http.post("/v1/jobs", json={**GOOD, "prompt": "x" * 1_100_000}).status_code == 413


def test_a_new_job_is_answered_with_everything_that_will_be_used(http: httpx.Client) -> None:
    answer = http.post("/v1/jobs", json={"prompt": "a red circle", **SMALL, "metadata": {"order": "7"}})
    job = answer.json()
    assert answer.status_code == 202
    assert answer.headers["Location"] == f"/v1/jobs/{job['id']}"
    assert job["params"]["guidance_scale"] == 5.0
    assert isinstance(job["params"]["seed"], int)
    assert job["queue"]["position"] >= 1
    assert job["metadata"] == {"order": "7"}


def test_without_a_key_nothing_is_answered(stack: LocalStack) -> None:
    for method, path in (("POST", "/v1/jobs"), ("GET", "/v1/jobs"), ("GET", "/v1/models")):
        answer = httpx.request(method, stack.public_url + path, json=GOOD if method == "POST" else None)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")


def test_another_tenants_job_does_not_exist(client: Client, stack: LocalStack) -> None:
    job = client.submit("a red circle", **SMALL)
    headers = {"Authorization": f"Bearer {make_key(stack, 'stranger')}"}
    paths = [("GET", ""), ("POST", "/cancel"), ("GET", "/events")]
    answers = [
        httpx.request(method, f"{stack.public_url}/v1/jobs/{job.id}{path}", headers=headers) for method, path in paths
    ]
    assert [answer.status_code for answer in answers] == [404] * 3
    assert httpx.get(f"{stack.public_url}/v1/jobs", headers=headers).json()["data"] == []


def test_the_list_has_every_job_once_over_its_pages(stack: LocalStack) -> None:
    api_key = make_key(stack, "lister")
    with Client(stack.public_url, api_key) as lister:
        made = [lister.submit(f"job {n}", **SMALL).id for n in range(5)]
    seen: list[str] = []
    cursor: str | None = None
    while True:
        asked = {"limit": "2"} | ({"cursor": cursor} if cursor else {})
        page = httpx.get(
            f"{stack.public_url}/v1/jobs", params=asked, headers={"Authorization": f"Bearer {api_key}"}
        ).json()
        seen += [job["id"] for job in page["data"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == made[::-1]


def test_a_finished_job_cannot_be_cancelled(client: Client, http: httpx.Client) -> None:
    job = client.submit("quick", **SMALL)
    client.wait(job.id, timeout_s=60)
    answer = http.post(f"/v1/jobs/{job.id}/cancel")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "job_terminal")
    assert answer.headers["x-should-retry"] == "false"


def test_metrics_are_not_for_the_public(stack: LocalStack) -> None:
    assert httpx.get(f"{stack.public_url}/metrics").status_code in {403, 404}


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("api-1", {"latentmill_jobs_submitted_total", "latentmill_progress_streams"}),
        ("dispatcher", {"latentmill_jobs_queued", "latentmill_oldest_queued_seconds", "latentmill_dispatcher_leading"}),
        (
            "worker-3",
            {
                "latentmill_queue_wait_seconds_count",
                "latentmill_batch_jobs_count",
                "latentmill_batch_fill_ratio_count",
                "latentmill_jobs_finished_total",
                "latentmill_stage_seconds_count",
            },
        ),
    ],
)
def test_each_process_shows_its_metrics(client: Client, stack: LocalStack, part: str, names: set[str]) -> None:
    client.wait(client.submit("measured", **SMALL).id, timeout_s=60)
    page = httpx.get(stack.url(f"{part}.metrics") + "/metrics").text
    assert {line.split("{")[0].split(" ")[0] for line in page.splitlines()} >= names


def test_no_prompt_and_no_key_is_in_any_log(client: Client, stack: LocalStack, api_key: str) -> None:
    secret = "a very private prompt"
    client.wait(client.submit(secret, **SMALL).id, timeout_s=60)
    for log in stack.layout.log("api-1").parent.iterdir():
        text = log.read_text(errors="replace")
        assert secret not in text, log
        assert api_key not in text, log
