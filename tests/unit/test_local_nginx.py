import json
import re
from pathlib import Path

import pytest

from api.problems import problem_body
from common.domain.errors import CATALOGUE, ErrorKind
from infra.local.credentials import load_or_make
from infra.local.layout import Layout
from infra.local.nginx import RENDERED, TEMPLATES, render, template_values
from infra.local.options import StackOptions
from infra.local.plan import Plan
from infra.local.ports import PortBook


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    layout = Layout(tmp_path)
    layout.create()
    return Plan(layout, PortBook(layout.ports), load_or_make(layout.credentials), StackOptions(tmp_path))


def rendered(plan: Plan, name: str) -> str:
    return render((TEMPLATES / f"{name}.template").read_text(encoding="utf-8"), template_values(plan))


def test_nginx_variables_survive() -> None:
    template = 'set $uri "${uri}"; listen ${LISTEN}; return 200 $arg_e$1;'

    assert render(template, {"LISTEN": "80"}) == 'set $uri "${uri}"; listen 80; return 200 $arg_e$1;'


def test_a_value_is_not_filled_in_a_second_time() -> None:
    assert render("${A}", {"A": "${B}", "B": "wrong"}) == "${B}"


def test_a_variable_without_a_value_is_an_error() -> None:
    with pytest.raises(KeyError, match="MISSING"):
        render("${MISSING}", {})


@pytest.mark.parametrize("name", RENDERED)
def test_every_template_is_filled_in_whole(plan: Plan, name: str) -> None:
    assert not re.search(r"\$\{?[A-Z]", rendered(plan, name))


def test_the_cache_key_leaves_the_signature_out(plan: Plan) -> None:
    assert re.findall(r"proxy_cache_key (.*);", rendered(plan, "edge.conf")) == ["$object"]


def test_the_access_log_never_holds_a_query(plan: Plan) -> None:
    config = rendered(plan, "nginx.conf")
    log_format = config[config.index("log_format") : config.index("access_log")]

    assert not re.search(r"\$(request|args|query_string|request_uri|http_referer)\b", log_format)


def test_nothing_but_a_broken_or_silent_connection_is_tried_elsewhere(plan: Plan) -> None:
    assert re.findall(r"proxy_next_upstream (.*);", rendered(plan, "front.conf")) == ["error timeout"]


def test_bodies_are_small_everywhere(plan: Plan) -> None:
    assert re.findall(r"client_max_body_size (.*);", rendered(plan, "front.conf")) == ["1m"]


def test_errors_of_the_edge_are_not_logged_with_their_signature(plan: Plan) -> None:
    edge = rendered(plan, "edge.conf")

    assert re.match(
        r"[^{}]*^location /v/ \{[^{}]*error_log stderr crit;", edge[edge.index("\nlocation") :], re.MULTILINE
    )
    assert "limit_except" not in edge


def test_nginx_answers_in_the_form_of_the_api(plan: Plan) -> None:
    bodies = re.findall(r"return (\d+) '(\{.*\})';", rendered(plan, "front.conf"))
    catalogue = {kind.code: kind for kind in CATALOGUE}

    assert len(bodies) == 4
    for status, body in bodies:
        told = json.loads(body)
        kind = catalogue.get(told["error"]["code"], ErrorKind(told["error"]["code"], int(status), told["title"]))
        assert told == problem_body(kind, told["detail"], "$instance")
        assert told["status"] == int(status)
