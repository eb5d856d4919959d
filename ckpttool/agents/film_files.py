"""Films as files, picture by picture: MP4 by ffmpeg's H.264, GIF by Pillow."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Any

import numpy as np

from ckpttool import search_paths
from ckpttool.agents.filming import HINT, Show, pillow
from ckpttool.errors import CkpttoolError, MissingExtraError

# A GIF counts hundredths of a second, and browsers play what is shorter than two of them slowly.
GIF_FPS = 50.0
_LOOP_FOR_EVER = 0
_KEEP = 1  # what a GIF's picture does not cover stays as it was
_END = b";"


@contextmanager
def mp4(stream: IO[bytes], fps: float) -> Iterator[Show]:
    """Fill a file that is open for writing (ffmpeg opens its name) with the pictures shown in the block.

    H.264 with 4:2:0 colours, which every player takes; a side of odd length gets a black line. On an error
    the encoder is ended.
    """
    encoder = _Ffmpeg(stream.name, fps)
    try:
        yield encoder.show
        encoder.finish()
    finally:
        encoder.stop()


@contextmanager
def gif(stream: IO[bytes], fps: float) -> Iterator[Show]:
    """Write a GIF, each picture with the 256 colours that suit it, of which only what changed is stored.

    Of more than GIF_FPS pictures per second some are left out, never the last one.
    """
    writer = _Gif(stream, fps)
    yield writer.show
    writer.finish()


WRITERS: dict[str, Callable[[IO[bytes], float], AbstractContextManager[Show]]] = {".mp4": mp4, ".gif": gif}


def require(suffix: str) -> None:
    """Raise MissingExtraError unless what writes this kind of film is installed."""
    pillow("Image")
    if suffix == ".mp4":
        _ffmpeg()


def _ffmpeg() -> str:
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        raise MissingExtraError("an MP4 needs imageio-ffmpeg, which is not installed", hint=HINT)
    try:
        return str(importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe())
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise MissingExtraError(f"an MP4 needs ffmpeg: {said}", hint="IMAGEIO_FFMPEG_EXE=FILE") from None


class _Ffmpeg:
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
        command = [_ffmpeg(), "-v", "error", "-y"]
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
            env=search_paths.environment(),
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


class _Gif:
    """A GIF that is written as its pictures come, one held back until it is known how long it stays.

    Source of the layout: the GIF89a specification; Pillow's own writer would hold the whole film.
    """

    def __init__(self, stream: IO[bytes], fps: float) -> None:
        self.stream, self.fps = stream, fps
        self.every = max(1, int(np.ceil(fps / GIF_FPS)))
        self._image, self._chops = pillow("Image"), pillow("ImageChops")
        self._format = pillow("GifImagePlugin")
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
