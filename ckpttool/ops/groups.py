"""Entrants that are played together: how many, and what comes of each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType

from ckpttool.agents.envs import VectorEnv
from ckpttool.agents.envs.tensors import ENGINE as DEVICE
from ckpttool.errors import CkpttoolError
from ckpttool.ops.evaluate import Entrant, Place, play
from ckpttool.ops.evaluation import Evaluation, Protocol
from ckpttool.ops.progress import Progress

# Most of what stacking can gain is there with this many (docs/design.md has the figures), and smaller groups
# leave work for more processes.
ROWS = 320
MEMBERS = 16
# On a device, where weights stay for the whole play, nothing is gained by smaller groups.
DEVICE_ROWS = 1 << 18
DEVICE_MEMBERS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One piece of work: entrants of one structure and one place, on shared seeds. It can be pickled."""

    number: int
    entrants: tuple[Entrant, ...]
    how: Protocol


Outcome = dict[str, Evaluation | CkpttoolError]
"""What came of each entrant, by its checkpoint; those that Ctrl-C left without an episode are not in it."""

Spread = Callable[[Iterable[Group], Progress], Iterator[tuple[Group, Outcome]]]
"""Plays groups somewhere and yields them in any order, each once; it asks for a group when it has room.

Progress is of the group that is being played, where that can be known."""


def size(how: Protocol) -> int:
    """Return how many policies are played together: a function of the protocol alone.

    The batch's shape decides how products round, so it must not depend on who plays where.
    """
    members, rows = (DEVICE_MEMBERS, DEVICE_ROWS) if how.engine == DEVICE else (MEMBERS, ROWS)
    return max(1, min(members, rows // how.at_once))


def here(groups: Iterable[Group], progress: Progress) -> Iterator[tuple[Group, Outcome]]:
    """Play one group after the other in this process."""
    with Room() as room:
        for group in groups:
            yield group, played(group, room, progress)


class Room:
    """Environments that are kept from group to group; left by `with`."""

    def __init__(self) -> None:
        self._kept: tuple[tuple[Place, int, str, str], VectorEnv] | None = None

    def __enter__(self) -> Room:
        return self

    def __exit__(self, _: type[BaseException] | None, __: object, ___: TracebackType | None) -> None:
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    def of(self, place: Place, rows: int, engine: str, device: str = "cpu") -> VectorEnv:
        """Return that many environments: those of the last time if they are the same.

        What they had to say is said of every group that they play, so those that spoke are not kept.
        """
        wanted = (place, rows, engine, device)
        if self._kept is None or self._kept[0] != wanted or self._kept[1].notes:
            self.__exit__(None, None, None)
            self._kept = (wanted, place.make(rows, engine, device=device))
        return self._kept[1]


def played(group: Group, room: Room, progress: Progress) -> Outcome:
    """Play a group; if that fails, one entrant after the other, so that only those at fault are lost."""
    try:
        return _together(group.entrants, group.how, room, progress)
    except CkpttoolError as error:
        if len(group.entrants) == 1:
            (only,) = group.entrants
            return {only.checkpoint: error.located(file=only.checkpoint)}
    found: Outcome = {}
    for entrant in group.entrants:
        alone = Group(group.number, (entrant,), group.how)
        found |= played(alone, room, progress)
    return found


def _together(entrants: tuple[Entrant, ...], how: Protocol, room: Room, progress: Progress) -> Outcome:
    place = entrants[0].place
    vector = room.of(place, len(entrants) * how.at_once, how.engine, how.device)
    return {each.checkpoint: each for each in play(entrants, how, vector, progress)}
