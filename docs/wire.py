"""The HTTP API as Markdown, from the OpenAPI document and the models behind it."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, SecretStr

from api import render
from api.app import create_app
from api.schemas import JobRequest
from common.settings import ApiSettings
from docs.tables import code, table

_NESTED = (render.Progress, render.Queue, render.Batch, render.Result, render.JobError, render.Links)
# Nothing is connected to while the document is made.
_NOWHERE = {
    "database_url": "postgresql://nobody@127.0.0.1/none",
    "amqp_url": "amqp://127.0.0.1",
    "redis_url": "redis://127.0.0.1",
    "s3_access_key": "none",
    "s3_secret_key": SecretStr("none"),
    "edge_secret": "none",
}


def operations() -> str:
    """Every route with its answers."""
    document = create_app(ApiSettings.model_validate(_NOWHERE)).openapi()
    rows = [
        (code(f"{method.upper()} {path}"), operation["summary"], _answers(operation), _note(operation))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return table(("call", "what it does", "answers", "note"), rows)


def _answers(operation: dict[str, Any]) -> str:
    return ", ".join(status for status in operation["responses"] if status != "4XX")


def _note(operation: dict[str, Any]) -> str:
    return " ".join(operation.get("description", "").split())


def job_request() -> str:
    """The body of a submit."""
    return _fields(JobRequest)


def job() -> str:
    """A job, and the objects inside it."""
    parts = [_fields(render.Job)]
    for model in _NESTED:
        title = model.__name__.removeprefix("Job").lower()
        parts.append(f"### {code(title)}\n\n{(model.__doc__ or '').strip()}\n\n{_fields(model)}")
    return "\n\n".join(parts)


def _fields(model: type[BaseModel]) -> str:
    schema = model.model_json_schema()
    required = set(schema.get("required", ())) if model is JobRequest else set()
    rows = [
        (code(name), _type(field, schema), ("required. " if name in required else "") + field.get("description", ""))
        for name, field in schema["properties"].items()
    ]
    return table(("field", "type", "meaning"), rows)


def _type(field: dict[str, Any], schema: dict[str, Any]) -> str:
    return " or ".join(dict.fromkeys(_types(field, schema)))


def _types(field: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[-1]
        choices = schema["$defs"][name].get("enum")
        yield ", ".join(map(code, choices)) if choices else name.removeprefix("Job").lower()
    elif "const" in field:
        yield code(field["const"])
    elif "anyOf" in field:
        for choice in field["anyOf"]:
            yield from _types(choice, schema)
    elif field.get("type") == "array":
        yield f"list of {_type(field['items'], schema)}"
    else:
        yield str(field.get("type", "any"))
