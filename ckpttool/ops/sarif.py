"""What `check` found as SARIF, the form in which code hosts take the findings of other programs.

Source: Static Analysis Results Interchange Format (SARIF) Version 2.1.0, OASIS Standard; numbers in comments
are its sections.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, Literal, NamedTuple
from urllib.parse import quote

from ckpttool import places, urls
from ckpttool.errors import CkpttoolError, TargetExistsError
from ckpttool.ops.check import Check, Checked
from ckpttool.shown import clean, sentence
from ckpttool.version import __version__
from ckpttool.writing import Output, write_atomically

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_BASE = "%SRCROOT%"  # the name that code hosts give to the root of a repository
_FINGERPRINT = "ckpttoolFinding/v1"
_BEGINNING = 4096


class _Rule(NamedTuple):
    id: str
    name: str
    short: str
    full: str
    help: str
    level: Literal["error", "warning"]
    severity: str | None = None


_UNREADABLE = "ckpttool/unreadable"
# By the topic of a finding.
_RULES: Mapping[str, _Rule] = {
    "loading": _Rule(
        "ckpttool/loading",
        "LoadingRunsCode",
        "Loading the checkpoint would run code",
        "The file asks its loader to import, call or run more than plain data: a pickle that calls "
        "functions, a Keras Lambda layer, a graph that reads files.",
        "Do not load the file. `ckpttool inspect FILE` lists the names; `ckpttool convert FILE safe.npz` "
        "keeps the data alone.",
        "error",
        "9.0",
    ),
    "numbers": _Rule(
        "ckpttool/numbers",
        "NumbersNotFinite",
        "Tensors hold NaN or infinite numbers",
        "A tensor of the checkpoint holds numbers that are NaN or infinite.",
        "Go back to an earlier checkpoint of the run. `ckpttool stats FILE` shows the tensors.",
        "warning",
    ),
    "layout": _Rule(
        "ckpttool/layout",
        "LayoutDiffers",
        "Layout, names, types or shapes are not those recorded",
        "The checkpoint does not have the layout that was asked for, or not the names, types and shapes that "
        "`ckpttool inspect --json` recorded.",
        "If the change is intended, record the shapes again: `ckpttool inspect FILE --json > shapes.json`.",
        "error",
    ),
    "unreadable": _Rule(
        _UNREADABLE,
        "CheckpointUnreadable",
        "The checkpoint cannot be read",
        "The file is damaged, incomplete, empty, a Git LFS pointer, or in a form that is not read. "
        "What it holds is unknown.",
        "Fetch the file itself (`git lfs pull`), restore it, or remove it.",
        "error",
    ),
}
_ORDER = {topic: number for number, topic in enumerate(_RULES)}


def write(found: Check | None, status: int, target: str, problem: CkpttoolError | None = None) -> None:
    """Write what was found, or the problem that kept the check from running, into the file `target`.

    An earlier file of this kind is replaced; raise TargetExistsError if the target is anything else.
    """
    _require_ours(target)
    content = json.dumps(document(found, status, problem), indent=1, ensure_ascii=True).encode() + b"\n"

    def put(stream: IO[bytes]) -> None:
        stream.write(content)

    write_atomically([Output(target, put)], force=True)


def _require_ours(target: str) -> None:
    if not os.path.lexists(target) or os.path.isdir(target):
        return
    start = places.content(target, 0, _BEGINNING) if os.path.isfile(target) else b""
    if start and not (start.lstrip().startswith(b"{") and b'"runs"' in start and b"sarif" in start.lower()):
        raise TargetExistsError("the target exists already and is no SARIF file", file=target)


def document(found: Check | None, status: int, problem: CkpttoolError | None = None) -> dict[str, Any]:
    """Return the SARIF log: one run, with a result for each finding and each file that cannot be read."""
    checked = () if found is None else found.checkpoints
    notes = [_notification(each.error, _location(each)) for each in checked if each.error is not None]
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
                "properties": {"skippedFiles": 0 if found is None else len(found.skipped)},
            }
        ],
    }


def _driver() -> dict[str, Any]:
    return {
        "name": "ckpttool",
        "version": __version__,
        "rules": [_descriptor(rule) for rule in _RULES.values()],
        "notifications": [
            {"id": "ckpttool/error", "shortDescription": {"text": "Something kept a file from being judged"}}
        ],
    }


def _descriptor(rule: _Rule) -> dict[str, Any]:
    # 3.49; hosts show security-severity beside what they call security findings.
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


def _results(checked: Iterable[Checked]) -> Iterator[dict[str, Any]]:
    for each in checked:
        for finding in each.findings:
            fix = f". Fix: {finding.fix}" if finding.fix else ""
            yield _result(finding.topic, f"{finding.sentence}{fix}", finding.sentence, each)
        if each.error is not None:
            hint = f". Hint: {each.error.hint}" if each.error.hint else ""
            yield _result("unreadable", f"{sentence(each.error)}{hint}", each.error.message, each)


def _result(topic: str, text: str, identity: str, checked: Checked) -> dict[str, Any]:
    rule = _RULES.get(topic, _RULES["layout"])
    location = _location(checked)
    uri = location["physicalLocation"]["artifactLocation"]["uri"]
    inner = urls.links(urls.turned(checked.path) or checked.path)[1:]  # a member of an archive
    text = f"{inner[-1]}: {text}" if inner else text
    digest = hashlib.sha256("\0".join((rule.id, uri, *inner, identity)).encode("utf-8", "surrogatepass"))
    return {
        "ruleId": rule.id,
        "ruleIndex": _ORDER.get(topic, _ORDER["layout"]),
        "level": rule.level,
        "message": {"text": clean(text)},
        "locations": [location],
        "partialFingerprints": {_FINGERPRINT: digest.hexdigest()},
    }


def _notification(error: CkpttoolError, location: dict[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "descriptor": {"id": "ckpttool/error", "index": 0},
        "level": "error",
        "message": {"text": sentence(error)},
        "properties": {"kind": error.kind},
    }
    return found if location is None else {**found, "locations": [location]}


def _location(checked: Checked) -> dict[str, Any]:
    # A line, because hosts show findings beside lines; these files have none.
    return {"physicalLocation": {"artifactLocation": _artifact(checked.file), "region": {"startLine": 1}}}


def _artifact(path: str) -> dict[str, Any]:
    """Return a file's place below the working directory, or its whole URI where it lies elsewhere."""
    links = urls.links(urls.turned(path) or path)
    if urls.is_url(links[0]):
        return {"uri": quote(urls.spelled(links[0]), safe=":/@+,;=!$&'()*~")}
    place = os.path.abspath(links[0])
    relative = os.path.relpath(place, os.getcwd())
    if relative == os.pardir or relative.startswith(os.pardir + os.sep):
        return {"uri": f"file://{_quoted(place)}"}
    return {"uri": _quoted(relative), "uriBaseId": _BASE}


def _quoted(path: str) -> str:
    return quote(pathlib.PurePath(path).as_posix().encode("utf-8", "surrogateescape"), safe="/")


def _directory() -> str:
    # 3.14.14: a base ends with a slash.
    return f"file://{_quoted(os.getcwd()).rstrip('/')}/"
