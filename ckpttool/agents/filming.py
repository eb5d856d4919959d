"""Filming an episode while it is played: its pictures, with the return so far and the step on each."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from ckpttool.agents.envs import VectorEnv
from ckpttool.errors import MissingExtraError

Show = Callable[[np.ndarray], None]
"""Takes the next picture of a film, uint8 [height, width, 3]; all of one film have one size."""

HINT = "pip install 'ckpttool[eval]'"
_INK, _PAPER = (255, 255, 255), (20, 20, 20)
_DARKENED = 0.75


class CutError(Exception):
    """The filmed episode is over: nothing else of the play is needed."""


class Camera:
    """A watcher of a play (see rollout.Watch) that films one episode, then ends the play with CutError.

    All rows play on beside it, because the policy computes with one batch shape: so the filmed episode is
    the one that was scored, bit for bit.
    """

    def __init__(self, envs: VectorEnv, episode: int, title: str, show: Show) -> None:
        self.envs, self.episode, self.title, self.show = envs, episode, title, show
        self.caption = Caption()
        self.frames = 0
        self.paid = 0.0

    def __call__(self, row: int, number: int, paid: float, ended: bool) -> None:
        """Show the row if it plays the episode that is filmed."""
        if number != self.episode:
            return
        lines = (self.title, f"step {self.frames}   return {paid:.1f}")
        self.show(self.caption.put(self.envs.frame(row), lines))
        self.frames += 1
        self.paid = paid
        if ended:
            raise CutError


class Caption:
    """Writes lines into the upper left corner of pictures, on a darkened box that only grows."""

    def __init__(self) -> None:
        self._image, self._draw = pillow("Image"), pillow("ImageDraw")
        # A typeface that Pillow carries, in the size that suits the first picture.
        self._font: Any = None
        self._room = [0, 0]

    def put(self, picture: np.ndarray, lines: tuple[str, ...]) -> np.ndarray:
        """Return a copy of the picture, uint8 [height, width, 3], with the lines on it."""
        image = self._image.fromarray(picture)
        text = "\n".join(lines)
        if self._font is None:
            self._font = pillow("ImageFont").load_default(max(10, round(image.height / 30)))
        margin = max(3, image.height // 80)
        _, _, right, bottom = self._draw.Draw(image).multiline_textbbox((margin, margin), text, self._font)
        self._room = [max(self._room[0], round(right)), max(self._room[1], round(bottom))]
        box = (0, 0, min(self._room[0] + margin, image.width), min(self._room[1] + margin, image.height))
        corner = image.crop(box)
        paper = self._image.new("RGB", corner.size, _PAPER)
        image.paste(self._image.blend(corner, paper, _DARKENED), box)
        self._draw.Draw(image).multiline_text((margin, margin), text, _INK, self._font)
        return np.asarray(image)


def pillow(module: str) -> Any:
    """Return a module of Pillow, which matplotlib and imageio bring; raise MissingExtraError without it."""
    if importlib.util.find_spec("PIL") is None:
        raise MissingExtraError("a film needs Pillow, which is not installed", hint=HINT)
    return importlib.import_module(f"PIL.{module}")
