"""Forms of remote locations: URLs, and archive members chained as in fsspec.

People write a chain from the inside out, `zip://ckpt-1.index::/runs/old.zip`. Internally it goes
from the outside in, `/runs/old.zip::zip://ckpt-1.index`, so that everything beside or below such
a location is found by the last slash, as for local files.

The syntax is Python 3.7's: errors need these functions, and networks/model_child.py needs
errors.
"""

from __future__ import annotations

import os
import re
import shlex

from ckpttool.core import deferred

_SCHEME = deferred.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ARCHIVES = ("zip://", "tar://")
_LINK = deferred.compile(r"::(?=(?:zip|tar)://)")
# Prefix of an archive's first folder, so that its files are in a folder too.
TOP = "."
_SIGNED = ("http://", "https://")
# What is shown instead of the paths of temporary copies.
_COPIES: dict[str, str] = {}


def is_url(text: str) -> bool:
    """Return whether a path is a URL."""
    return _SCHEME.match(text) is not None


def is_elsewhere(text: str) -> bool:
    """Return whether a path is a URL or an archive member, in either order of a chain."""
    return is_url(text) or _LINK.search(text) is not None


def has_query(text: str) -> bool:
    """Return whether a URL has a query or a fragment, which locations never have."""
    return "?" in text or "#" in text


def normalize_chain(text: str) -> str | None:
    """Return a chain with the outermost location first; None if it names no archive.

    Other paths are returned unchanged.
    """
    links: list[str] = []
    while text.startswith(_ARCHIVES):
        link, chained, text = text.partition("::")
        if not chained or not text:
            return None
        links.append(link)
    return "::".join([text, *reversed(links)])


def split_chain(location: str) -> list[str]:
    """Return the links of a chain, outermost first; a single one for a plain path."""
    return _LINK.split(location)


def display_url(location: str) -> str:
    """Return the name in the form that people write, without secrets.

    Secrets are a user's name and password and, for http, the query and the fragment, where signed
    URLs have their signature.
    """
    if "://" not in location:
        return _COPIES.get(location, location)
    typed: list[str] = []
    while location.startswith(_ARCHIVES) and "::" in location:
        link, _, location = location.partition("::")
        typed.append(link)
    return "::".join(map(_redact_link, [*typed, *reversed(split_chain(location))]))


def name_copy(path: str, name: str) -> None:
    """Have a temporary copy shown under the name of its origin from now on."""
    _COPIES[path] = name


def is_copy(path: str) -> bool:
    """Return whether the path is that of a temporary copy, which no later command can read."""
    return path in _COPIES


def base_name(text: str) -> str:
    """Return the last name in a path or URL, or the name of an archive's member; "" without a name."""
    shown = display_url(text)
    for link in reversed(split_chain(normalize_chain(shown) or shown)):
        scheme = _SCHEME.match(link)
        name = os.path.basename((link if scheme is None else link[scheme.end() :]).rstrip("/"))
        if name:
            return name
    return ""


def unused_name(name: str) -> str:
    """Return the name of a new file here: with the next number, if a file or TensorFlow prefix has it."""
    stem, suffix = os.path.splitext(name)
    first = re.search(r"-(\d{1,9})$", stem, re.ASCII)
    number = 1 if first is None else int(first[1])
    while os.path.lexists(name) or os.path.lexists(f"{name}.index"):
        number += 1
        name = f"{stem if first is None else stem[: first.start()]}-{number}{suffix}"
    return name


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


def format_command(verb: str, path: str, *words: str) -> str:
    """Return a checkpoint's path as a single shell word, as a user types it."""
    return shlex.join(("ckpttool", verb, display_url(path), *words))
