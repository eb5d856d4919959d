"""The part of SARIF 2.1.0 that `check --sarif` writes, as a JSON schema.

Written from the text of the standard (Static Analysis Results Interchange Format Version 2.1.0, OASIS), whose
section stands beside each object. Objects are closed: a misspelt property is an error.
"""

from __future__ import annotations

from typing import Any


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT = {"type": "string"}
_INDEX = {"type": "integer", "minimum": -1}
_LEVEL = {"enum": ["none", "note", "warning", "error"]}
_BAG = {"type": "object"}  # 3.8
# 3.10.1: a valid URI reference; no character that RFC 3986 wants escaped.
_URI = {"type": "string", "pattern": r"^(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})+$"}
_MESSAGE = _object("text", text=_TEXT, markdown=_TEXT)  # 3.11, 3.12
_ARTIFACT = _object("uri", uri=_URI, uriBaseId=_TEXT)  # 3.4
_REGION = _object("startLine", startLine={"type": "integer", "minimum": 1})  # 3.30
_PHYSICAL = _object("artifactLocation", artifactLocation=_ARTIFACT, region=_REGION)  # 3.29
_LOCATION = _object("physicalLocation", physicalLocation=_PHYSICAL)  # 3.28
_RULE = _object(  # 3.49
    "id",
    id=_TEXT,
    name=_TEXT,
    shortDescription=_MESSAGE,
    fullDescription=_MESSAGE,
    help=_MESSAGE,
    defaultConfiguration=_object("level", level=_LEVEL),  # 3.50
    properties=_BAG,
)
_NOTIFICATION = _object(  # 3.58
    "message",
    descriptor=_object("id", id=_TEXT, index=_INDEX),  # 3.52
    level=_LEVEL,
    message=_MESSAGE,
    locations=_list(_LOCATION),
    properties=_BAG,
)
_INVOCATION = _object(  # 3.20
    "executionSuccessful",
    executionSuccessful={"type": "boolean"},
    exitCode={"type": "integer"},
    toolExecutionNotifications=_list(_NOTIFICATION),
)
_RESULT = _object(  # 3.27
    "message ruleId",
    ruleId=_TEXT,
    ruleIndex=_INDEX,
    level=_LEVEL,
    message=_MESSAGE,
    locations=_list(_LOCATION),
    partialFingerprints={"type": "object", "additionalProperties": _TEXT},
)
_DRIVER = _object(  # 3.19
    "name", name=_TEXT, version=_TEXT, rules=_list(_RULE), notifications=_list(_RULE)
)
_RUN = _object(  # 3.14
    "tool",
    tool=_object("driver", driver=_DRIVER),  # 3.18
    invocations=_list(_INVOCATION),
    originalUriBaseIds={"type": "object", "additionalProperties": _object("uri", uri=_URI)},
    results=_list(_RESULT),
    properties=_BAG,
)
SCHEMA: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    **_object("version runs", version={"const": "2.1.0"}, runs=_list(_RUN), **{"$schema": _URI}),  # 3.13
}
