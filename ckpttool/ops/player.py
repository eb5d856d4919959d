"""The program of a process that plays groups: told what over a pipe, on the cores that it is given."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ckpttool import search_paths
from ckpttool.agents.messages import Message, pipes, serve
from ckpttool.ops import group_messages
from ckpttool.ops.groups import Room, played
from ckpttool.ops.progress import silent


@dataclass(slots=True)
class Session:
    """The folder that is shared with the parent, and the environments that are kept."""

    folder: Path
    room: Room = field(default_factory=Room)


def _play(session: Session, message: Message) -> Message:
    document = message["group"]
    sys.path[:] = dict.fromkeys([*sys.path, *document["sys_path"]])
    for name, folder in document["user_modules"]:
        search_paths.add_user_module(name, folder)
    group = group_messages.read(document, session.folder)
    return group_messages.write_outcome(played(group, session.room, silent))


def main(folder: str, cores: str) -> None:
    """Play what is asked until the parent is gone."""
    # Environments and backends take as many threads as there are cores.
    os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    with pipes() as (requests, answers):
        serve(Session(Path(folder)), {"play": _play}, requests, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
