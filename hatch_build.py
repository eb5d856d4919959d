"""Build hook that makes the links of README.md absolute, because package indexes show it on their sites."""

from __future__ import annotations

import os
import re
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"""(\]\(|\b(?:href|src|srcset)=")(?!https?:)([^)"\s]+)""")
_PICTURES = (".gif", ".png", ".svg")


class ReadmeHook(MetadataHookInterface):
    """Sets the field `readme` (pyproject.toml, `dynamic`)."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Store the text with absolute links."""
        with open(os.path.join(self.root, "README.md"), encoding="utf-8") as file:
            text = absolute_links(file.read(), metadata["urls"]["Homepage"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute_links(text: str, home: str) -> str:
    """Return Markdown whose links to files and headings lead to the repository at the URL `home`."""

    def lengthen(link: re.Match[str]) -> str:
        begin, target = link.groups()
        if target.startswith("#"):
            return f"{begin}{home}{target}"
        folder = "raw" if target.endswith(_PICTURES) else "blob"
        return f"{begin}{home}/{folder}/main/{target}"

    return _LINK.sub(lengthen, text)
