"""Makes the page: templates, a style and a script become one file that fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ckpttool import urls
from ckpttool.ops import asking
from ckpttool.ops.signatures import signatures
from ckpttool.report import curves, numbers
from ckpttool.report.contents import Contents
from ckpttool.shown import clean, count, shortened, size
from ckpttool.version import __version__

_STYLES = ("page.css", "tree.css", "print.css")
# In the order in which they need each other.
_SCRIPTS = ("pictures.js", "drawing.js", "panel.js", "rows.js", "tree.js", "search.js", "page.js")
# Characters of a path in a heading and of a sentence, rows of a table that stands in the page as it is.
_TITLE, _SENTENCE, _SHOWN = 200, 600, 100
# Characters of a line of signatures, facts of a format that are shown.
_COLUMNS, _TOLD = 100, 24


def page(found: Contents) -> bytes:
    """Return the page in UTF-8; the same contents give the same bytes."""
    style, script = (_joined(names) for names in (_STYLES, _SCRIPTS))
    strips, ends = curves.strips(found.results.results)
    text = _environment().get_template("page.html").render(
        found=found,
        checkpoint=found.summary.checkpoint,
        asks=asking.document(found.summary.checkpoint.asks),
        signatures=signatures(found.summary.checkpoint.details, _COLUMNS),
        told=_told(found.summary.checkpoint.details),
        chart=curves.chart(found.results.curves),
        chart_width=curves.WIDTH,
        chart_height=curves.HEIGHT,
        strips=strips,
        strip_ends=ends,
        most=_SHOWN,
        style=Markup(style),  # noqa: S704  # our own file
        script=Markup(script),  # noqa: S704  # our own file
        policy=_policy(style, script),
        data=_embedded(_data(found)),
        version=__version__,
    )  # fmt: skip
    return text.encode("utf-8", "backslashreplace")


def _told(details: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a format says of its file in single words: Keras's version, safetensors' metadata."""
    flat = {**details, **(details["metadata"] if isinstance(details.get("metadata"), Mapping) else {})}
    plain = [(name, str(value)) for name, value in flat.items() if isinstance(value, str | int | float)]
    return plain[:_TOLD]


def _joined(names: tuple[str, ...]) -> str:
    folder = files("ckpttool.report") / "templates"
    return "".join(f"\n{(folder / name).read_text('utf-8')}" for name in names)


def _policy(style: str, script: str) -> str:
    """Return the rules for the browser: nothing is fetched or sent, and nothing runs but our own script."""
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _data(found: Contents) -> dict[str, Any]:
    told = found.comparison
    return {"rows": found.rows, "changes": [] if told is None else told.changes}


def _embedded(value: object) -> Markup:
    """Return JSON that no parser of HTML takes for the end of its element, or for the start of another."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704  # nothing of it is markup any more


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("ckpttool.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        size=size,
        count=count,
        number=lambda value: f"{value:,}",
        clean=clean,
        path=lambda text: shortened(clean(urls.spelled(text)), _TITLE),
        sentence=lambda text: shortened(clean(text), _SENTENCE),
        base=lambda text: shortened(clean(urls.name(text)), _TITLE),
        decimal=numbers.shown,
        when=lambda ns: f"{datetime.fromtimestamp(ns // 10**9, UTC):%Y-%m-%d %H:%M}",
    )
    return made
