"""What the tests run in a forked process: targets on their seeds, on variations of these, on finds."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

from tests.hostile.fuzz import FOUND, SECONDS
from tests.hostile.room import Room, room
from tests.hostile.targets import BY_TARGET, Target, attempt, mutants


def survived(names: Iterable[str], count: int) -> dict[str, Any]:
    """Return, by target, how many seeds were accepted, how many inputs were tried, and what went wrong."""
    signal.signal(signal.SIGALRM, _late)
    with room() as workroom:
        return {name: _tried(BY_TARGET[name], workroom, count) for name in names}


def _late(*_: object) -> None:
    raise TimeoutError


def _tried(target: Target, workroom: Room, count: int) -> dict[str, Any]:
    seeds = target.seeds()
    outcome: dict[str, Any] = {"accepted": 0, "tried": 0, "wrong": []}
    for number, data in enumerate(_inputs(target, seeds, count)):
        signal.alarm(SECONDS)
        try:
            accepted = attempt(target, workroom, data)
            outcome["accepted"] += accepted and number < len(seeds)
        except BaseException:  # noqa: BLE001  # what is looked for
            outcome["wrong"].append([data.hex()[:2000], traceback.format_exc()[-1500:]])
        signal.alarm(0)
        outcome["tried"] += 1
    return outcome


def _inputs(target: Target, seeds: list[bytes], count: int) -> Iterator[bytes]:
    yield from seeds
    for path in sorted(FOUND.glob(f"{target.name}-*")):
        yield path.read_bytes()
    yield from mutants(seeds, count, target.name)
