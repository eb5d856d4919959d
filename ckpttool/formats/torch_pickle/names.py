"""What the names of an archive's members tell: which folder is torch's, and what no pickle refers to.

Source: caffe2/serialize/inline_container.cc (PyTorchStreamReader): the first member's folder is the
archive's, and a member is found whatever the case of its letters (miniz, mz_zip_reader_locate_file).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from ckpttool.errors import FormatError, some
from ckpttool.wire.zip_records import UTF8, Member

_PICKLE = re.compile(r"[^/]+/data\.pkl")
# What torch writes beside the storages; code and extra files are listed by themselves (script.py).
_BESIDE = re.compile(
    r"(?:data|constants|bytecode|attributes)\.pkl|version|byteorder|mobile_debug_handles\.pkl"
    r"|\.(?:data/.*|format_version|storage_alignment)|(?:code|extra)/.*",
    re.DOTALL,
)
_SOURCE = ("code/", "extra/")
_SHOWN, _LONG = 3, 60


def top(members: Mapping[str, object], file: str) -> str:
    """Return the folder that holds data.pkl; raise FormatError unless that is the one that torch opens."""
    found = [name for name in members if _PICKLE.fullmatch(name)]
    if len(found) != 1:
        raise FormatError(
            "the archive does not hold one data.pkl",
            file=file,
            found=", ".join(map(_shown, found[:_SHOWN])) or "none",
        )
    folder = found[0].removesuffix("/data.pkl")
    first = next(iter(members)).partition("/")[0]
    if first != folder:
        raise FormatError(
            "the archive does not begin with the folder that holds data.pkl",
            file=file,
            expected=_shown(folder),
            found=_shown(first),
        )
    for name, member in members.items():
        if isinstance(member, Member) and not name.isascii() and not member.flags & UTF8:
            # miniz and torch take the name's bytes for UTF-8 whatever the flag says.
            raise FormatError("a member's name is not marked as UTF-8", file=file, found=_shown(name))
    _require_one_case(members, folder, file)
    return folder


# What torch looks for by name, whatever the case of its letters.
_WANTED = "data.pkl constants.pkl byteorder version .data/version .format_version .storage_alignment"


def _require_one_case(members: Collection[str], folder: str, file: str) -> None:
    wanted = {f"{folder}/{name}".lower(): f"{folder}/{name}" for name in _WANTED.split()}
    for name in members:
        exact = wanted.get(name.lower(), name)
        if exact != name:
            raise FormatError(
                "a member has a name that torch looks for, but for the case of its letters",
                file=file,
                expected=_shown(exact),
                found=_shown(name),
            )
    source = tuple(f"{folder}/{name}" for name in _SOURCE)
    seen: dict[str, str] = {}
    for name in members:
        other = seen.setdefault(name.lower(), name)
        if other is not name and not name.startswith(source):
            raise FormatError(
                "two members differ only in the case of their letters, which torch does not tell apart",
                file=file,
                found=f"{_shown(other)} and {_shown(name)}",
            )


def beside(members: Iterable[str], folder: str) -> list[str]:
    """Return what torch writes to say how it wrote: small members that no pickle refers to."""
    marks = (f"{folder}/version", f"{folder}/byteorder", f"{folder}/.")
    return [name for name in members if name.startswith(marks)]


def notes(members: Iterable[str], folder: str, used: Collection[str]) -> tuple[str, ...]:
    """Return a line on members that nothing refers to, none when there are none."""
    start = f"{folder}/"
    unread = [
        name
        for name in members
        if name not in used
        and not name.endswith("/")
        and not (name.startswith(start) and _BESIDE.fullmatch(name, len(start)))
    ]
    if not unread:
        return ()
    shown = some([*map(_shown, unread[:_SHOWN]), *unread[_SHOWN:]], _SHOWN)
    return (f"members that nothing in the checkpoint refers to, not read: {shown}",)


def _shown(name: str) -> str:
    return repr(name) if len(name) <= _LONG else f"{name[:_LONG]!r}..."
