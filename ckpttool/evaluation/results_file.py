"""Finished evaluations in a JSON Lines file, written as they finish and reused by a rerun.

Each line contains the SHA-256 of its own content. A line modified afterwards is rejected; one without a
digest, from an earlier version, is not reused: its checkpoint is played again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any

import numpy as np

from ckpttool.core import filesystem, sidecar
from ckpttool.core import text as documents
from ckpttool.core.atomic_write import require_regular
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import ChecksumError, FormatError, UsageError, WorkerError
from ckpttool.evaluation.gymnasium_engine import Agreement
from ckpttool.evaluation.protocol import Evaluation, PlayableAgent, Protocol
from ckpttool.evaluation.rollout import Rollout
from ckpttool.evaluation.statistics import summarize
from ckpttool.networks import network as serial
from ckpttool.networks.network import Network, stack_structure
from ckpttool.version import __version__

SUFFIX = ".jsonl"
NAME = f"evaluations{SUFFIX}"
SCHEMA = 1
# A line is a few kilobytes for a hundred episodes; this exceeds any real evaluation.
LIMIT = 1 << 30


def results_path(out: str) -> str | None:
    """Return the JSON Lines results file for `--out`, or None if it is one document."""
    if os.path.isdir(out):
        return os.path.join(out, NAME)
    return out if out.endswith(SUFFIX) else None


def hash_policy(network: Network) -> str:
    """Return the SHA-256 of a finished policy: its graph, weights, statistics and action bounds."""
    arrays: dict[str, np.ndarray] = {}
    hasher = hashlib.sha256(json.dumps(serial.network_to_document(network, arrays), sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        hasher.update(f"{name} {array.dtype.str} {array.shape}".encode())
        hasher.update(array.tobytes())
    return hasher.hexdigest()


def evaluation_key(policy: str, env: str, how: Protocol, versions: Mapping[str, str]) -> str:
    """Return a result's key: SHA-256 of policy, environment, protocol and all versions."""
    protocol = {**asdict(how), "num_envs": how.at_once}
    facts = {"policy": policy, "env": env, "protocol": protocol, "versions": dict(versions)}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def parse_evaluation(document: Mapping[str, Any], how: Protocol) -> Evaluation:
    """Return the evaluation stored in a document by `Evaluation.document` under that protocol."""
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
        statistics=summarize(returns),
        ledger=sidecar.parse_entries(document["ledger"]),
        notes=tuple(document["notes"]),
        stacked=int(played["stacked"]),
        surroundings=dict(document["environment"]),
    )


class ResultsFile:
    """Lines of one file by key; a line cut off by a crash is dropped.

    Raise FormatError if the file contains anything but our lines, UsageError if another evaluation has
    it open. Closed by `with`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        require_regular(path)
        try:
            self._file: IO[bytes] = open(path, "a+b")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise UsageError(f"cannot write the results: {error.strerror}", file=path) from None
        try:
            self._lock()
            self._known = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def find(self, key: str, how: Protocol) -> Evaluation | None:
        """Return the evaluation with that key; raise FormatError if its line is incomplete."""
        document = self._known.get(key)
        if document is None:
            return None
        try:
            return parse_evaluation(document, how)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"incomplete evaluation: {error!r}", file=self.path) from None

    def add(self, finished: Sequence[tuple[str, Mapping[str, int], Evaluation]]) -> None:
        """Append results with new keys and flush them to disk before returning.

        Each comes with its key and with the training step in its counters and its name.
        """
        lines = []
        for key, steps, evaluation in finished:
            if key not in self._known:
                self._known[key] = {**_line_head(key, steps), **evaluation.document()}
                lines.append(_encode_line(self._known[key]))
        if lines:
            self._file.write(b"".join(lines))
            self._file.flush()
            os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            filesystem.lock_file(self._file.fileno())
        except OSError:
            raise UsageError("another evaluation is writing to this results file", file=self.path) from None

    def _read(self) -> dict[str, dict[str, Any]]:
        if (size := os.fstat(self._file.fileno()).st_size) > LIMIT:
            raise UsageError(
                f"the results file is too large: {size:,} bytes", file=self.path, hint="choose another name"
            )
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data) and not _is_torn_line(data[whole:]):
            raise FormatError("not a file of evaluation results", file=self.path, hint="choose another name")
        rows = dict(self._lines(data[:whole]))
        self._file.truncate(whole)
        return rows

    def _lines(self, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, text in enumerate(data.splitlines(), 1):
            document: dict[str, Any] = {}
            with suppress(FormatError):
                document = dict(documents.parse_json(text, "a result"))
            if document.get("schema") != SCHEMA or not isinstance(document.get("key"), str):
                raise FormatError(
                    f"line {number} is not an evaluation",
                    file=self.path,
                    hint="use a separate file for --out",
                )
            # A line without a digest is unverified: its checkpoint is played again.
            if document.get("sha256") is not None:
                self._require_unchanged(document, number)
                yield document["key"], document

    def _require_unchanged(self, document: Mapping[str, Any], number: int) -> None:
        digest = _hash_line(document)
        if document["sha256"] != digest:
            raise ChecksumError(
                f"line {number} was modified after it was written",
                file=self.path,
                expected=f"content with sha256 {str(document['sha256'])[:12]}",
                found=digest[:12],
                hint="remove the line; the checkpoint is then played again",
            )


def _hash_line(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a line's content without its own digest."""
    content = {name: value for name, value in document.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _line_head(key: str, steps: Mapping[str, int]) -> dict[str, Any]:
    return {"schema": SCHEMA, "tool": f"ckpttool {__version__}", "key": key, "steps_told": dict(steps)}


def _encode_line(document: Mapping[str, Any]) -> bytes:
    plain = documents.replace_nonfinite(dict(document))
    return json.dumps({**plain, "sha256": _hash_line(plain)}, allow_nan=False).encode() + b"\n"


def _is_torn_line(torn: bytes) -> bool:
    begins = b'{"schema":'
    return torn.startswith(begins) or begins.startswith(torn)


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationJob:
    """An agent ready to play, its number in the checkpoint order, and its result's key.

    `steps` are the training counters and the name's step, `versions` the required library versions.
    """

    number: int
    agent: PlayableAgent
    key: str
    steps: Mapping[str, int]
    versions: Mapping[str, str]

    @property
    def alike(self) -> Hashable:
        """What agents played together share; a network that cannot be stacked is played alone."""
        shape = stack_structure(self.agent.network)
        return self.agent.environment, self.number if shape is None else shape

    def version_error(self, result: Evaluation) -> WorkerError:
        """Return the error that a cluster machine computes with different versions than this one."""
        differ = [name for name, version in self.versions.items() if result.versions.get(name) != version]
        return WorkerError(
            "played with different library versions than on this machine",
            file=self.agent.checkpoint,
            expected=", ".join(f"{name} {self.versions[name]}" for name in differ),
            found=", ".join(f"{name} {result.versions.get(name)}" for name in differ),
        )
