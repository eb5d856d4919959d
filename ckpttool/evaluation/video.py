"""Films of episodes."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Any

import numpy as np

from ckpttool.core import search_paths
from ckpttool.core.errors import CkpttoolError, MissingExtraError
from ckpttool.evaluation.gymnasium_engine import VectorEnv

# Filming an episode while it is played: its pictures, with the return so far and the step on each.

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
        self._image, self._draw = import_pillow("Image"), import_pillow("ImageDraw")
        # A typeface that Pillow carries, in the size that suits the first picture.
        self._font: Any = None
        self._room = [0, 0]

    def put(self, picture: np.ndarray, lines: tuple[str, ...]) -> np.ndarray:
        """Return a copy of the picture, uint8 [height, width, 3], with the lines on it."""
        image = self._image.fromarray(picture)
        text = "\n".join(lines)
        if self._font is None:
            self._font = import_pillow("ImageFont").load_default(max(10, round(image.height / 30)))
        margin = max(3, image.height // 80)
        _, _, right, bottom = self._draw.Draw(image).multiline_textbbox((margin, margin), text, self._font)
        self._room = [max(self._room[0], round(right)), max(self._room[1], round(bottom))]
        box = (0, 0, min(self._room[0] + margin, image.width), min(self._room[1] + margin, image.height))
        corner = image.crop(box)
        paper = self._image.new("RGB", corner.size, _PAPER)
        image.paste(self._image.blend(corner, paper, _DARKENED), box)
        self._draw.Draw(image).multiline_text((margin, margin), text, _INK, self._font)
        return np.asarray(image)


def import_pillow(module: str) -> Any:
    """Return a module of Pillow, which matplotlib and imageio bring; raise MissingExtraError without it."""
    if importlib.util.find_spec("PIL") is None:
        raise MissingExtraError("a film needs Pillow, which is not installed", hint=HINT)
    return importlib.import_module(f"PIL.{module}")


# Films as files, picture by picture: MP4 by ffmpeg's H.264, GIF by Pillow.

# A GIF counts hundredths of a second, and browsers play what is shorter than two of them slowly.
GIF_FPS = 50.0
_LOOP_FOR_EVER = 0
_KEEP = 1  # what a GIF's picture does not cover stays as it was
_END = b";"


@contextmanager
def write_mp4(stream: IO[bytes], fps: float) -> Iterator[Show]:
    """Fill a file that is open for writing (ffmpeg opens its name) with the pictures shown in the block.

    H.264 with 4:2:0 colours, which every player takes; a side of odd length gets a black line. On an error
    the encoder is ended.
    """
    encoder = _FfmpegEncoder(stream.name, fps)
    try:
        yield encoder.show
        encoder.finish()
    finally:
        encoder.stop()


@contextmanager
def write_gif(stream: IO[bytes], fps: float) -> Iterator[Show]:
    """Write a GIF, each picture with the 256 colours that suit it, of which only what changed is stored.

    Of more than GIF_FPS pictures per second some are left out, never the last one.
    """
    writer = _GifEncoder(stream, fps)
    yield writer.show
    writer.finish()


WRITERS: dict[str, Callable[[IO[bytes], float], AbstractContextManager[Show]]] = {
    ".mp4": write_mp4,
    ".gif": write_gif,
}


def require_encoder(suffix: str) -> None:
    """Raise MissingExtraError unless what writes this kind of film is installed."""
    import_pillow("Image")
    if suffix == ".mp4":
        _find_ffmpeg()


def _find_ffmpeg() -> str:
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        raise MissingExtraError("an MP4 needs imageio-ffmpeg, which is not installed", hint=HINT)
    try:
        return str(importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe())
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise MissingExtraError(f"an MP4 needs ffmpeg: {said}", hint="IMAGEIO_FFMPEG_EXE=FILE") from None


class _FfmpegEncoder:
    """An encoder in a process of its own, started by the first picture, which tells the size."""

    def __init__(self, path: str, fps: float) -> None:
        self.path, self.fps = path, fps
        self.child: subprocess.Popen[bytes] | None = None
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  # stop() closes it

    def show(self, picture: np.ndarray) -> None:
        child = self.child or self._start(picture)
        assert child.stdin is not None  # noqa: S101  # it was made with a pipe
        try:
            child.stdin.write(np.ascontiguousarray(picture).data)
        except BrokenPipeError:
            child.wait()
            raise self._failed() from None

    def _start(self, picture: np.ndarray) -> subprocess.Popen[bytes]:
        height, width, _ = picture.shape
        command = [_find_ffmpeg(), "-v", "error", "-y"]
        command += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{self.fps:g}"]
        # A fast preset: the cores are wanted by what draws.
        command += ["-i", "-", "-an", "-c:v", "libx264", "-preset", "veryfast", "-pix_fmt", "yuv420p"]
        command += ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-movflags", "+faststart"]
        command += ["-f", "mp4", f"file:{self.path}"]
        # In a session of its own: Ctrl-C in the terminal is ours to answer.
        self.child = subprocess.Popen(  # noqa: S603  # the library's own ffmpeg
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.said,
            env=search_paths.child_environment(),
            start_new_session=True,
        )
        return self.child

    def finish(self) -> None:
        """Wait until the file is whole; raise CkpttoolError if it is not."""
        if self.child is None or self.child.stdin is None:
            raise CkpttoolError("a film has no pictures")
        try:
            self.child.stdin.close()
        except BrokenPipeError:
            self.child.wait()
        if self.child.wait() != 0:
            raise self._failed()

    def stop(self) -> None:
        """End the encoder if it still runs."""
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        if self.child is not None and self.child.stdin is not None:
            self._close_pipe(self.child.stdin)
        self.said.close()

    def _close_pipe(self, pipe: IO[bytes]) -> None:
        try:
            pipe.close()
        except BrokenPipeError:
            return

    def _failed(self) -> CkpttoolError:
        self.said.seek(0)
        lines = self.said.read(4000).decode(errors="replace").strip().splitlines()
        return CkpttoolError(f"ffmpeg cannot write the film: {lines[-1] if lines else 'it says nothing'}")


class _GifEncoder:
    """A GIF that is written as its pictures come, one held back until it is known how long it stays.

    Source of the layout: the GIF89a specification; Pillow's own writer would hold the whole film.
    """

    def __init__(self, stream: IO[bytes], fps: float) -> None:
        self.stream, self.fps = stream, fps
        self.every = max(1, int(np.ceil(fps / GIF_FPS)))
        self._image, self._chops = import_pillow("Image"), import_pillow("ImageChops")
        self._format = import_pillow("GifImagePlugin")
        self.seen = 0
        self.before: Any = None
        self.waiting: tuple[Any, tuple[int, int], int] | None = None
        self.skipped: Any = None

    def show(self, picture: np.ndarray) -> None:
        image = self._image.fromarray(np.ascontiguousarray(picture))
        number, self.seen = self.seen, self.seen + 1
        self.skipped = image if number % self.every else None
        if self.skipped is None:
            self._put(image, number)

    def finish(self) -> None:
        if self.skipped is not None:
            self._put(self.skipped, self.seen - 1)
        if self.waiting is None:
            raise CkpttoolError("a film has no pictures")
        self._write(self.seen)
        self.stream.write(_END)

    def _put(self, image: Any, number: int) -> None:
        """Take the next picture, and write the one before it."""
        if self.waiting is not None:
            self._write(number)
            # Every picture is stored, those that show nothing new as one point.
            box = self._chops.difference(image, self.before).getbbox() or (0, 0, 1, 1)
        else:
            box = (0, 0, *image.size)
            for part in self._format.getheader(self._paletted(image), info={"loop": _LOOP_FOR_EVER})[0]:
                self.stream.write(part)
        self.waiting = (image.crop(box), box[:2], number)
        self.before = image

    def _write(self, until: int) -> None:
        """Write the picture that waits, which stays until picture number `until` of all that were shown."""
        assert self.waiting is not None  # noqa: S101  # the callers look
        image, corner, number = self.waiting
        hundredths = round(100 * until / self.fps) - round(100 * number / self.fps)
        parts = self._format.getdata(
            self._paletted(image),
            corner,
            duration=10 * hundredths,
            disposal=_KEEP,
            include_color_table=True,
        )
        for part in parts:
            self.stream.write(part)

    def _paletted(self, image: Any) -> Any:
        colours = min(256, max(2, image.width * image.height))
        return image.quantize(colours, self._image.Quantize.FASTOCTREE, dither=self._image.Dither.NONE)
