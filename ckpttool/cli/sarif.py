"""`check` results as SARIF, the format in which code hosts accept findings of other programs.

Source: Static Analysis Results Interchange Format (SARIF) Version 2.1.0, OASIS Standard; numbers in comments
are its sections.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal
from urllib.parse import quote

from ckpttool.commands.check import CheckpointVerdict, CheckResult
from ckpttool.core import filesystem, urls
from ckpttool.core.atomic_write import require_new, write_file
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import CkpttoolError, TargetExistsError
from ckpttool.core.text import clean, describe_error
from ckpttool.version import __version__

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_BASE = "%SRCROOT%"  # name used by code hosts for the root of a repository
_SARIF_FINGERPRINT = "ckpttoolFinding/v1"
_BEGINNING = 4096


class _SarifRule(NamedTuple):
    id: str
    name: str
    short: str
    full: str
    help: str
    level: Literal["error", "warning"]
    severity: str | None = None


_UNREADABLE = "ckpttool/unreadable"
# Keyed by the topic of a finding.
_RULES: Mapping[str, _SarifRule] = {
    "loading": _SarifRule(
        "ckpttool/loading",
        "LoadingRunsCode",
        "Loading the checkpoint would run code",
        "Loading the file calls or runs more than the allow lists name, e.g. a pickle that calls a function "
        "or creates an instance of an unknown class, a Keras Lambda layer, or a graph that reads files.",
        "Do not load the file. `ckpttool inspect FILE` lists the names; `ckpttool convert FILE safe.npz` "
        "keeps only the data.",
        "error",
        "9.0",
    ),
    "numbers": _SarifRule(
        "ckpttool/numbers",
        "NumbersNotFinite",
        "Tensors contain NaN or infinite values",
        "A tensor of the checkpoint contains NaN or infinite values.",
        "Go back to an earlier checkpoint of the run. `ckpttool stats FILE` shows the tensors.",
        "warning",
    ),
    "layout": _SarifRule(
        "ckpttool/layout",
        "LayoutDiffers",
        "Layout, names, types or shapes differ from the record",
        "The checkpoint does not have the requested layout, or its tensor names, types or shapes differ "
        "from those recorded by `ckpttool inspect --json`.",
        "If the change is intended, record the shapes again: `ckpttool inspect FILE --json > shapes.json`.",
        "error",
    ),
    "unreadable": _SarifRule(
        _UNREADABLE,
        "CheckpointUnreadable",
        "The checkpoint cannot be read",
        "The file is damaged, incomplete, empty, a Git LFS pointer, or in an unsupported format. Its "
        "contents are unknown.",
        "Fetch the file itself (`git lfs pull`), restore it, or remove it.",
        "error",
    ),
}
_ORDER = {topic: number for number, topic in enumerate(_RULES)}
_NOTIFICATIONS = {
    "error": "A file could not be checked",
    "not-checked": "A model of another program was not checked",
}


def write_sarif(
    result: CheckResult | None, status: int, target: str, problem: CkpttoolError | None = None
) -> None:
    """Write the results, or the error that stopped the check, to a target that `require_sarif` accepted."""
    content = json.dumps(build_sarif(result, status, problem), indent=1, ensure_ascii=True).encode() + b"\n"
    write_file(target, content, force=True)


def require_sarif(target: str, *, force: bool) -> None:
    """Raise TargetExistsError if the target exists, unless `force` and it is a SARIF file or empty."""
    require_new(target, force=force)
    start = filesystem.read_bytes(target, 0, _BEGINNING) if os.path.isfile(target) else b""
    if start and not (start.lstrip().startswith(b"{") and b'"runs"' in start and b"sarif" in start.lower()):
        raise TargetExistsError("the target already exists and is not a SARIF file", file=target)


def build_sarif(
    result: CheckResult | None, status: int, problem: CkpttoolError | None = None
) -> dict[str, Any]:
    """Return the SARIF log: one run, with a result for each finding and each unreadable file."""
    checked = () if result is None else result.checkpoints
    notes = [_notification(row.error, _location(row.file)) for row in checked if row.error is not None]
    if result is not None:
        notes += [_notification(file.error, _location(file.path), "not-checked") for file in result.unchecked]
    if problem is not None:
        notes.append(_notification(problem, None))
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": _driver()},
                "originalUriBaseIds": {_BASE: {"uri": _directory()}},
                "invocations": [
                    {
                        "executionSuccessful": not notes,
                        "exitCode": status,
                        "toolExecutionNotifications": notes,
                    }
                ],
                "results": list(_results(checked)),
                "properties": {
                    "skippedFiles": 0 if result is None else len(result.skipped),
                    "uncheckedFiles": 0 if result is None else len(result.unchecked),
                },
            }
        ],
    }


def _driver() -> dict[str, Any]:
    return {
        "name": "ckpttool",
        "version": __version__,
        "rules": [_descriptor(rule) for rule in _RULES.values()],
        "notifications": [
            {"id": f"ckpttool/{name}", "shortDescription": {"text": text}}
            for name, text in _NOTIFICATIONS.items()
        ],
    }


def _descriptor(rule: _SarifRule) -> dict[str, Any]:
    # 3.49; hosts show security-severity beside security findings.
    properties: dict[str, Any] = {"tags": ["checkpoint"]}
    if rule.severity is not None:
        properties = {"tags": ["checkpoint", "security"], "security-severity": rule.severity}
    return {
        "id": rule.id,
        "name": rule.name,
        "shortDescription": {"text": rule.short},
        "fullDescription": {"text": rule.full},
        "help": {"text": rule.help, "markdown": rule.help},
        "defaultConfiguration": {"level": rule.level},
        "properties": properties,
    }


def _results(checked: Iterable[CheckpointVerdict]) -> Iterator[dict[str, Any]]:
    for row in checked:
        for finding in row.findings:
            fix = f". Fix: {finding.fix}" if finding.fix else ""
            yield _result(finding.topic, f"{finding.sentence}{fix}", finding.sentence, row)
        if row.error is not None:
            hint = f". Hint: {row.error.hint}" if row.error.hint else ""
            yield _result("unreadable", f"{describe_error(row.error)}{hint}", row.error.message, row)


def _result(topic: str, text: str, identity: str, checked: CheckpointVerdict) -> dict[str, Any]:
    rule = _RULES.get(topic, _RULES["layout"])
    location = _location(checked.file)
    uri = location["physicalLocation"]["artifactLocation"]["uri"]
    inner = urls.split_chain(urls.normalize_chain(checked.path) or checked.path)[1:]  # member of an archive
    text = f"{inner[-1]}: {text}" if inner else text
    digest = hashlib.sha256("\0".join((rule.id, uri, *inner, identity)).encode("utf-8", "surrogatepass"))
    return {
        "ruleId": rule.id,
        "ruleIndex": _ORDER.get(topic, _ORDER["layout"]),
        "level": rule.level,
        "message": {"text": clean(text)},
        "locations": [location],
        "partialFingerprints": {_SARIF_FINGERPRINT: digest.hexdigest()},
    }


def _notification(
    error: CkpttoolError, location: dict[str, Any] | None, name: str = "error"
) -> dict[str, Any]:
    notification: dict[str, Any] = {
        "descriptor": {"id": f"ckpttool/{name}", "index": list(_NOTIFICATIONS).index(name)},
        "level": "error",
        "message": {"text": describe_error(error)},
        "properties": {"kind": error.kind},
    }
    return notification if location is None else {**notification, "locations": [location]}


def _location(file: str) -> dict[str, Any]:
    # Hosts show findings beside lines; these files have no lines, so use line 1.
    return {"physicalLocation": {"artifactLocation": _artifact(file), "region": {"startLine": 1}}}


def _artifact(path: str) -> dict[str, Any]:
    """Return the path of a file relative to the working directory, or its full URI if it is elsewhere."""
    links = urls.split_chain(urls.normalize_chain(path) or path)
    if urls.is_url(links[0]):
        return {"uri": quote(urls.display_url(links[0]), safe=":/@+,;=!$&'()*~")}
    absolute = os.path.abspath(links[0])
    relative = os.path.relpath(absolute, os.getcwd())
    if relative == os.pardir or relative.startswith(os.pardir + os.sep):
        return {"uri": f"file://{_quote_path(absolute)}"}
    return {"uri": _quote_path(relative), "uriBaseId": _BASE}


def _quote_path(path: str) -> str:
    return quote(pathlib.PurePath(path).as_posix().encode("utf-8", "surrogateescape"), safe="/")


def _directory() -> str:
    # 3.14.14: a base ends with a slash.
    return f"file://{_quote_path(os.getcwd()).rstrip('/')}/"
