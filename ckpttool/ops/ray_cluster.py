"""Groups are played by a Ray cluster: one that is started on this machine for them, or one at an address."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ckpttool import search_paths
from ckpttool.errors import MissingExtraError, UsageError, WorkerError
from ckpttool.ops.groups import Group, Outcome, Room, Spread, played
from ckpttool.ops.progress import Progress, silent

LOCAL = "local"
HINT = "pip install 'ckpttool[ray]'"
# How often a group is given to another worker after the one that had it was lost.
RETRIES = 3
# More groups than can be played at once are held ready, so that no worker waits for a restore.
READY = 2
ANSWER_S = 5.0


def on(address: str = LOCAL, workers: int | None = None) -> Spread:
    """Return what plays groups on a cluster, one core a group.

    `address` is that of a running cluster (`host:6379`, `ray://host:10001`), whose machines have ckpttool and
    its libraries in the same versions, or "local": a cluster of `workers` (None: all cores) is started here
    and ended after. What a lost worker had is played again by another; each group is counted once, when its
    result is here.
    """
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("a cluster needs ray, which is not installed", hint=HINT)

    def spread(groups: Iterable[Group], _: Progress) -> Iterator[tuple[Group, Outcome]]:
        with _cluster(address, workers) as ray:
            yield from _spread(ray, groups)

    return spread


def _spread(ray: Any, groups: Iterable[Group]) -> Iterator[tuple[Group, Outcome]]:
    remote = ray.remote(num_cpus=1, max_retries=RETRIES)(_play)
    most = READY + int(ray.cluster_resources().get("CPU", 1))
    waiting: dict[Any, Group] = {}
    for group in groups:
        waiting[remote.remote(group, search_paths.user_modules())] = group
        while len(waiting) >= most:
            yield _finished(ray, waiting)
    while waiting:
        yield _finished(ray, waiting)


def _finished(ray: Any, waiting: dict[Any, Group]) -> tuple[Group, Outcome]:
    (reference, *_), _ = ray.wait(list(waiting), num_returns=1)
    group = waiting.pop(reference)
    try:
        return group, ray.get(reference)
    except ray.exceptions.RayError as error:
        said = str(error).strip().splitlines()
        lost = WorkerError(f"ray lost the group: {said[-1] if said else type(error).__name__}")
        return group, {entrant.checkpoint: lost for entrant in group.entrants}


def _play(group: Group, user_modules: Sequence[tuple[str, str]]) -> Outcome:
    """Play a group in a worker of the cluster."""
    for name, folder in user_modules:
        search_paths.add_user_module(name, folder)
    with Room() as room:
        return played(group, room, silent)


@contextlib.contextmanager
def _cluster(address: str, workers: int | None) -> Iterator[Any]:
    """Connect to the cluster, or start one; a cluster that the program is connected to already is used."""
    if address not in (LOCAL, "auto"):
        _require_answer(address)
    # Ray reports its use to its makers unless it is told otherwise.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray: Any = importlib.import_module("ray")
    logging.getLogger("ray").setLevel(logging.ERROR)  # what is wrong with the work is said by our errors
    if ray.is_initialized():
        yield ray
        return
    # A local cluster's logs and sockets go with it; unix sockets bear only short paths.
    # What Ray tells of workers that died it prints on stdout, where a document is to be.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        contextlib.redirect_stdout(sys.stderr),
    ):
        own = {
            "num_cpus": workers or len(os.sched_getaffinity(0)),
            "include_dashboard": False,
            "_temp_dir": folder,
        }
        try:
            # Ray puts the working directory first on the search path of its workers.
            with search_paths.elsewhere(folder):
                ray.init(
                    address=address,
                    log_to_driver=False,
                    configure_logging=False,
                    **(own if address == LOCAL else {}),
                )
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            first = str(error).strip().partition("\n")[0]
            raise UsageError(f"no cluster answers at {address}: {first}") from None
        try:
            yield ray
        finally:
            ray.shutdown()


def _require_answer(address: str) -> None:
    """Raise UsageError if nothing listens there: Ray would wait for minutes, and then end the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(
            f"{address!r} is no cluster's address", hint="local, auto, HOST:PORT or ray://HOST:PORT"
        )
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"no cluster answers at {address}: {error}") from None
