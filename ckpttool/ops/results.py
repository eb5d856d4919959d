"""Finished evaluations in a file, a line of JSON each, written as they come and taken up by a rerun.

Each line carries the sha256 of its own content. A line that was changed afterwards is refused; one without a
digest, from an earlier version, is not taken up: its checkpoint is played again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np

from ckpttool import documents, ledger
from ckpttool.agents import serial
from ckpttool.agents.envs.spec import Agreement
from ckpttool.agents.network import Network
from ckpttool.agents.rollout import Rollout
from ckpttool.agents.statistics import summarise
from ckpttool.errors import ChecksumError, FormatError, UsageError
from ckpttool.ops.evaluation import Evaluation, Protocol
from ckpttool.version import __version__
from ckpttool.writing.names import require_regular

SUFFIX = ".jsonl"
NAME = f"evaluations{SUFFIX}"
SCHEMA = 1
# A line is a few kilobytes for a hundred episodes; nobody's evaluations fill this.
LIMIT = 1 << 30


def place(out: str) -> str | None:
    """Return the file of lines that an `--out` means, or None if it means one document."""
    if os.path.isdir(out):
        return os.path.join(out, NAME)
    return out if out.endswith(SUFFIX) else None


def digest_of_policy(network: Network) -> str:
    """Return the sha256 of a finished policy: its graph, weights, statistics and action bounds."""
    arrays: dict[str, np.ndarray] = {}
    found = hashlib.sha256(json.dumps(serial.taken_apart(network, arrays), sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype.str} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def key(policy: str, env: str, how: Protocol, versions: Mapping[str, str]) -> str:
    """Return what a result is known by: sha256 of policy, environment, protocol and all versions."""
    protocol = {**dataclasses.asdict(how), "num_envs": how.at_once}
    facts = {"policy": policy, "env": env, "protocol": protocol, "versions": dict(versions)}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read(document: Mapping[str, Any], how: Protocol) -> Evaluation:
    """Return the evaluation of a document that `Evaluation.document` made of one under that protocol."""
    played = document["protocol"]
    returns = np.array([float(value) for value in document["returns"]])
    rollout = Rollout(
        returns=returns,
        lengths=np.array(document["lengths"], np.int64),
        terminated=np.array(document["terminated"], np.bool_),
        truncated=np.array(document["truncated"], np.bool_),
        seeds=np.array(played["seeds"], np.int64),
        episodes=int(played["episodes"]),
        num_envs=int(played["num_envs"]),
        steps=int(document["steps"]),
        seconds=float(document["seconds"]),
        clipped=int(document["clipped_actions"]),
        engine=str(played["engine"]),
        agreement=Agreement.read(document.get("agreement")),
        interrupted=bool(document["interrupted"]),
    )
    return Evaluation(
        checkpoint=str(document["checkpoint"]),
        env=str(document["env"]),
        protocol=how,
        device=str(played["device"]),
        versions=dict(document["versions"]),
        rollout=rollout,
        statistics=summarise(returns),
        ledger=ledger.read(document["ledger"]),
        notes=tuple(document["notes"]),
        stacked=int(played["stacked"]),
        surroundings=dict(document["environment"]),
    )


class Results:
    """The lines of one file by their keys; a line that a crash cut short is dropped.

    Raise FormatError if the file holds anything else than our lines, UsageError if another evaluation has
    it open. It is left by `with`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        require_regular(path)
        try:
            self._file: IO[bytes] = open(path, "a+b")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise UsageError(f"the results cannot be written: {error.strerror}", file=path) from None
        try:
            self._lock()
            self._known = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def find(self, key: str, how: Protocol) -> Evaluation | None:
        """Return the evaluation of that key; raise FormatError if its line is incomplete."""
        document = self._known.get(key)
        if document is None:
            return None
        try:
            return read(document, how)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"an evaluation is incomplete: {error!r}", file=self.path) from None

    def add(self, finished: Sequence[tuple[str, Mapping[str, int], Evaluation]]) -> None:
        """Append what has a new key, and have it on the disk when this returns.

        Each comes with its key and with what its counters and its name say of its training's step.
        """
        lines = []
        for key, steps, evaluation in finished:
            if key not in self._known:
                self._known[key] = {**_head(key, steps), **evaluation.document()}
                lines.append(_line(self._known[key]))
        if lines:
            self._file.write(b"".join(lines))
            self._file.flush()
            os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError("another evaluation is writing these results", file=self.path) from None

    def _read(self) -> dict[str, dict[str, Any]]:
        if (size := os.fstat(self._file.fileno()).st_size) > LIMIT:
            raise UsageError(
                f"the file of results has {size:,} bytes", file=self.path, hint="take another name"
            )
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data) and not _ours(data[whole:]):
            raise FormatError("this is no file of evaluations", file=self.path, hint="take another name")
        found = dict(self._lines(data[:whole]))
        self._file.truncate(whole)
        return found

    def _lines(self, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, text in enumerate(data.splitlines(), 1):
            document: dict[str, Any] = {}
            with contextlib.suppress(FormatError):
                document = dict(documents.parse(text, "a result"))
            if document.get("schema") != SCHEMA or not isinstance(document.get("key"), str):
                raise FormatError(
                    f"line {number} is no evaluation", file=self.path, hint="--out takes a file of its own"
                )
            # A line without a digest may hold anything: it is played again.
            if document.get("sha256") is not None:
                self._require_unchanged(document, number)
                yield document["key"], document

    def _require_unchanged(self, document: Mapping[str, Any], number: int) -> None:
        found = _digest(document)
        if document["sha256"] != found:
            raise ChecksumError(
                f"line {number} was changed after it was written",
                file=self.path,
                expected=f"content of sha256 {str(document['sha256'])[:12]}",
                found=found[:12],
                hint="remove the line: the checkpoint is played again",
            )


def _digest(document: Mapping[str, Any]) -> str:
    """Return the sha256 of a line's content, its own digest apart."""
    content = {name: value for name, value in document.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _head(key: str, steps: Mapping[str, int]) -> dict[str, Any]:
    return {"schema": SCHEMA, "tool": f"ckpttool {__version__}", "key": key, "steps_told": dict(steps)}


def _line(document: Mapping[str, Any]) -> bytes:
    plain = documents.plain(dict(document))
    return json.dumps({**plain, "sha256": _digest(plain)}, allow_nan=False).encode() + b"\n"


def _ours(torn: bytes) -> bool:
    begins = b'{"schema":'
    return torn.startswith(begins) or begins.startswith(torn)
