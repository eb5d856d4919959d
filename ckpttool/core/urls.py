"""How places that are no local files are spelled: URLs, and members of archives as fsspec chains them.

A person writes a chain from the inside out, `zip://ckpt-1.index::/runs/old.zip`. Inside the program it goes
from the outside in, `/runs/old.zip::zip://ckpt-1.index`, so that what is beside or below such a place is
found as it is for files: by the last slash.

The syntax is Python 3.7's: errors need these functions, and networks/model_child.py needs errors.
"""

from __future__ import annotations

import os
import re

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ARCHIVES = ("zip://", "tar://")
_LINK = re.compile(r"::(?=(?:zip|tar)://)")
# What stands before the first folder of an archive, so that its files lie in a folder too.
TOP = "."
_SIGNED = ("http://", "https://")


def is_url(text: str) -> bool:
    """Say whether a person means a URL, not a local path."""
    return _SCHEME.match(text) is not None


def is_elsewhere(text: str) -> bool:
    """Say whether a person means a URL or an archive's member, in either order of a chain."""
    return is_url(text) or _LINK.search(text) is not None


def has_query(text: str) -> bool:
    """Say whether a URL has a query or a fragment, which no place has."""
    return "?" in text or "#" in text


def normalize_chain(text: str) -> str | None:
    """Return a chain with the outermost place first; what is none as it is, None if it names no archive."""
    links: list[str] = []
    while text.startswith(_ARCHIVES):
        link, chained, text = text.partition("::")
        if not chained or not text:
            return None
        links.append(link)
    return "::".join([text, *reversed(links)])


def split_chain(place: str) -> list[str]:
    """Return the links of a chain, the outermost place first; a single one for what is no chain."""
    return _LINK.split(place)


def display_url(place: str) -> str:
    """Return the name as a person writes it, without what must not be shown.

    That is a user's name and password, and of http the query and the fragment: signed URLs have their
    signature there.
    """
    if "://" not in place:
        return place
    typed: list[str] = []
    while place.startswith(_ARCHIVES) and "::" in place:
        link, _, place = place.partition("::")
        typed.append(link)
    return "::".join(map(_redact_link, [*typed, *reversed(split_chain(place))]))


def base_name(text: str) -> str:
    """Return the last name in a path or a URL, of an archive's member its own; "" where there is none."""
    shown = display_url(text)
    for link in reversed(split_chain(normalize_chain(shown) or shown)):
        scheme = _SCHEME.match(link)
        found = os.path.basename((link if scheme is None else link[scheme.end() :]).rstrip("/"))
        if found:
            return found
    return ""


def _redact_link(link: str) -> str:
    scheme = _SCHEME.match(link)
    if scheme is None:
        return link
    if link.startswith(_ARCHIVES):
        return scheme[0] + re.sub(rf"\A({re.escape(TOP)})?/?", "", link[scheme.end() :])
    rest = link[scheme.end() :]
    if scheme[0].lower() in _SIGNED:
        rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    authority, slash, path = rest.partition("/")
    return scheme[0] + authority.rpartition("@")[2] + slash + path
