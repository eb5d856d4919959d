"""What is to be written: a file's name, who fills it, and its place among those that are written with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import IO, NamedTuple


class Output(NamedTuple):
    """One file to write, `target` and `suffix` together; `write` fills it.

    Large buffers are written behind `write`, which must not change them once it has written them.
    Files of one target are written under one temporary stem with their own suffixes, so that `check`, called
    with that stem when this file and those before it are filled, may open them as what they will be; it
    raises if they are wrong. A suffix that begins with a slash is a file in the folder `target`, which gets
    its name as a whole.

    `nbytes` is the least that the file takes. `replaces` says that it may be there already (a state file that
    is brought up to date), `follows` that it is about the others and known by their digest (a receipt), so
    that it may wait beside until they stand. What `indexes` says which files its set has. Where the names of
    a set's parts are taken by the set before, `meanwhile` is the suffix under which a part stands first; an
    output that is `extra` stands then alone (an index that knows the parts by these names).
    """

    target: str
    write: Callable[[IO[bytes]], None]
    check: Callable[[str], None] | None = None
    suffix: str = ""
    replaces: bool = False
    nbytes: int = 0
    follows: bool = False
    indexes: bool = False
    meanwhile: str = ""
    extra: bool = False

    @property
    def file(self) -> str:
        """The name that the file will have."""
        return self.target + self.suffix

    @property
    def inside(self) -> bool:
        """Whether the target is a folder that the file lies in."""
        return self.suffix.startswith(os.sep)
