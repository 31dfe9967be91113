"""Decides how the gateway describes its own HTTP, in the form of OpenAPI 3.1. The bodies are those that are read."""

from typing import Any

from flexmarl.gateway.dialects import DIALECTS
from flexmarl.gateway.dialects.base import Body
from flexmarl.gateway.driving import BeginBody, RewardBody

SEATS = "/e/{key}/{seat}/v1"
_PARTS = "#/components/schemas/"


def description() -> dict[str, Any]:
    """The document: nothing in it depends on the run, and no key is in it."""
    parts: dict[str, Any] = {}

    def post(summary: str, body: type[Body] | None, *, fails: str = "") -> dict[str, Any]:
        operation: dict[str, Any] = {"summary": summary, "responses": _responses(fails)}
        if body is not None:
            schema = body.model_json_schema(ref_template=f"{_PARTS}{{model}}")
            parts.update(schema.pop("$defs", {}))
            parts[body.__name__] = schema
            content = {"application/json": {"schema": {"$ref": f"{_PARTS}{body.__name__}"}}}
            operation["requestBody"] = {"required": True, "content": content}
        return {"post": operation}

    paths: dict[str, Any] = {}
    for endpoint, dialect in DIALECTS.items():
        said = f"A reply of the seat, in the dialect '{dialect.name}'; `stream: true` sends it as events."
        paths[f"{SEATS}/{endpoint}"] = {**post(said, dialect.body, fails="503"), **_named("key", "seat")}
    counted = post("The tokens of the prompt that a message would have.", DIALECTS["messages"].body)
    paths[f"{SEATS}/messages/count_tokens"] = {**counted, **_named("key", "seat")}
    paths[f"{SEATS}/models"] = {**_get("The seats, as models."), **_named("key", "seat")}
    kept = {**_get("A stored response."), "delete": {"summary": "Forgets it.", "responses": _responses()}}
    paths[f"{SEATS}/responses/{{id}}"] = {**kept, **_named("key", "seat", "id")}
    paths["/episodes"] = post("Begins an episode; with the admin key of `flexmarl serve`.", BeginBody)
    paths["/episodes/{id}"] = {**_get("The account of an episode; with its reward key."), **_named("id")}
    paths["/episodes/{id}/rewards"] = {**post("Adds a reward; with the reward key.", RewardBody), **_named("id")}
    paths["/episodes/{id}/end"] = {**post("Ends an episode; with its reward key.", None), **_named("id")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "flexmarl's gateway", "version": "1"},
        "paths": paths,
        "components": {"schemas": parts, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }


def _get(summary: str) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": _responses()}}


def _responses(fails: str = "") -> dict[str, Any]:
    """`fails`: a status with which it answers that is no mistake of the client."""
    made = {"2XX": {"description": "done"}, "4XX": {"description": "refused, with the reason"}}
    return made | ({fails: {"description": "no engine could serve it, with the reason"}} if fails else {})


def _named(*names: str) -> dict[str, Any]:
    return {
        "parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    }
