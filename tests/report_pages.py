"""What the tests of `report` share: a page read as data, and checkpoints with names that mean harm."""

from __future__ import annotations

import base64
import html.parser
import json
import math
import pickle
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# Names as a hostile file has them, and what of each a page shows.
HOSTILE = {
    "</script><script>document.title='owned'</script>": "</script><script>document",
    "<img src=x onerror=\"document.title='owned'\">": '<img src=x onerror="document',
    "--><!--<svg onload=alert(1)>": "--><!--<svg onload=alert(1)>",
    "\u202eexe_cod\u202c": "\\u202eexe_cod\\u202c",
    "\x1b[31mred\x07": "\\x1b[31mred\\x07",
    "line\u2028sep": "line\\u2028sep",
    "{{ 7*7 }}{% raw %}": "{{ 7*7 }}{% raw %}",
    "&lt;b&gt;": "&lt;b&gt;",
    "__proto__": "__proto__",
    "a" * 100_000: "a" * 40,
}


def write_hostile(file: Path) -> Path:
    """Write a checkpoint with these names, numbers that are none, and values that would like to be markup."""
    numbers = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    whole: dict[str, Any] = {name: {"weight": numbers.copy()} for name in HOSTILE}
    nan = numbers.copy()
    nan[0, 0] = np.nan
    file.write_bytes(pickle.dumps({**whole, "nan": nan, "text": "</script><b>bold"}))
    return file


def write_results(folder: Path, means: dict[int, float], *, run: Path, **more: Any) -> Path:
    """Write what `eval --json` prints about torch files of a run, shortened to what the page reads."""
    entries = [
        {
            "checkpoint": str(run / f"ckpt-{step}.pt"), "env": "Pendulum-v1", "updates": step,
            "returns": [mean - 1, mean + 1], "mean": mean, "ci95": [mean - 1, mean + 1],
            "std": 1.0, "median": mean, "iqm": mean,
            "judgement": {
                "sentence": f"between random and solved: {step} %", "random": {"mean": -1200.0},
                "goal": {"value": -140.0, "source": "authors"}, "verdict": "between",
            },
        }
        for step, mean in means.items()
    ]  # fmt: skip
    file = folder / "results.json"
    file.write_text(json.dumps({"evaluations": entries, "curve": [], "notes": [], **more}))
    return file


def write_gif(file: Path, size: int = 40) -> Path:
    """Write a GIF of one black pixel, with a comment of any size."""
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    comment = b"!\xfe" + b"".join(b"\xff" + bytes(255) for _ in range(size // 256)) + b"\0"
    file.write_bytes(head + comment + b",\0\0\0\0\1\0\1\0\0\2\2D\1\0;")
    return file


@dataclass
class Page(html.parser.HTMLParser):
    """A page as a browser takes it apart: elements with their attributes, scripts, all text."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._within = ""
        self._continued = False

    @classmethod
    def of(cls, file: Path) -> Page:
        page = cls()
        page.feed(file.read_text(encoding="utf-8"))
        page.close()
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._continued = tag == "wbr"  # a place for a line break within a word
        if not self._continued:
            self._within = tag

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        texts = {"script": self.scripts, "style": self.styles}.get(self._within, self.text)
        if self._continued:
            data = texts.pop() + data
        texts.append(data)
        self._continued = False

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script makes of its data."""
        whole = json.loads(self.scripts[0])
        rows = _unpacked(whole["rows"])
        above: list[str] = []
        for row in rows:
            del above[row["level"] :]
            row.setdefault("path", "/".join([*above[-1:], row["name"]]))
            above.append(row["path"])
            if "shape" in row:
                row["size"] = math.prod(row["shape"])
        changes = _unpacked(whole["changes"])
        for row in rows:
            if row.get("change", -1) >= 0:
                changes[row["change"]].setdefault("path", row["path"])
        return {"rows": rows, "changes": changes}

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows of tensors and values by path."""
        return {row["path"]: row for row in self.data["rows"] if not row.get("module")}

    @property
    def words(self) -> str:
        """All text of the page, spaces as one."""
        return " ".join(" ".join(self.text).split())

    def cells(self, picture: list[float]) -> np.ndarray:
        """Return a picture's values, NaN where there is none."""
        at, rows, columns, _, _, scale = picture
        data = np.frombuffer(base64.b64decode(self.scripts[1]), np.uint8)
        numbers = data[int(at) : int(at + rows * columns)].reshape(int(rows), int(columns)).astype(np.float64)
        return np.where(numbers == 0, np.nan, (numbers - 128) / 127 * scale)


def _unpacked(packed: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for number, *values in packed["items"]:
        row: dict[str, Any] = {}
        for name, value in zip(packed["keys"][number], values, strict=True):
            outer, _, inner = name.partition(".")
            if inner:
                row.setdefault(outer, {})[inner] = value
            else:
                row[outer] = value
        rows.append(row)
    return rows
