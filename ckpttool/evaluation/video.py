"""Films of episodes: pictures with a caption, encoded by ffmpeg through imageio-ffmpeg."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.core import search_paths
from ckpttool.core.errors import CkpttoolError, MissingExtraError
from ckpttool.core.text import format_count
from ckpttool.evaluation.gymnasium_engine import VectorEnv

if TYPE_CHECKING:
    from PIL import ImageFont

Show = Callable[[np.ndarray], None]
"""Takes the next picture of a film, uint8 [height, width, 3]; all of one film have one size."""

HINT = "pip install 'ckpttool[eval]'"
_TEXT_COLOUR, _OUTLINE_COLOUR = (255, 255, 255), (20, 20, 20)


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
    """Writes outlined lines into the upper left corner of pictures, in the size that suits the first one."""

    def __init__(self) -> None:
        self._font: ImageFont.FreeTypeFont | ImageFont.ImageFont | None = None

    def put(self, picture: np.ndarray, lines: tuple[str, ...]) -> np.ndarray:
        """Return a copy of the picture, uint8 [height, width, 3], with the lines on it."""
        from PIL import Image, ImageDraw, ImageFont

        image = Image.fromarray(picture)
        size = max(10, round(image.height / 30))
        self._font = self._font or ImageFont.load_default(size)
        margin = max(3, image.height // 80)
        ImageDraw.Draw(image).multiline_text(
            (margin, margin),
            "\n".join(lines),
            _TEXT_COLOUR,
            self._font,
            stroke_width=max(1, size // 12),
            stroke_fill=_OUTLINE_COLOUR,
        )
        return np.asarray(image)


@dataclass(frozen=True, slots=True)
class VideoEncoding:
    """How ffmpeg encodes one kind of film; of more pictures per second than `most_fps` it leaves some out."""

    codec: str
    pixel_format: str
    filters: str
    options: tuple[str, ...]
    most_fps: float = float("inf")


ENCODINGS = {
    # 4:2:0 colours, which every player takes; they need even sides. The fast preset leaves the cores to
    # what draws the pictures.
    ".mp4": VideoEncoding(
        "libx264",
        "yuv420p",
        "pad=ceil(iw/2)*2:ceil(ih/2)*2",
        ("-preset", "veryfast", "-movflags", "+faststart", "-f", "mp4"),
    ),
    # A palette for each picture: one for all would have ffmpeg hold the whole film. A GIF counts hundredths
    # of a second, and browsers slow down pictures that are shorter than two.
    ".gif": VideoEncoding(
        "gif",
        "pal8",
        "split[a][b];[a]palettegen=stats_mode=single[palette];[b][palette]paletteuse=new=1:dither=none",
        ("-f", "gif"),
        most_fps=50.0,
    ),
}


def require_encoder() -> None:
    """Raise MissingExtraError unless Pillow, imageio-ffmpeg and an ffmpeg are installed."""
    for module, name in (("PIL", "Pillow"), ("imageio_ffmpeg", "imageio-ffmpeg")):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"a film needs {name}, which is not installed", hint=HINT)
    import imageio_ffmpeg

    try:
        imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise MissingExtraError(f"a film needs ffmpeg: {reason}", hint="IMAGEIO_FFMPEG_EXE=FILE") from None


@contextmanager
def write_video(path: str, suffix: str, fps: float) -> Iterator[Show]:
    """Fill the file at an absolute path with the pictures shown in the block, in the encoding of `suffix`.

    The film is read back before the block ends. ffmpeg writes its own messages to stderr. Raise
    CkpttoolError if there is no picture or ffmpeg fails.
    """
    with closing(_FrameWriter(path, ENCODINGS[suffix], fps)) as writer:
        yield writer.show
    writer.require_complete()


class _FrameWriter:
    """Pictures on their way to ffmpeg, which starts with the first one, whose size is the film's."""

    def __init__(self, path: str, encoding: VideoEncoding, fps: float) -> None:
        self.path, self.encoding, self.fps = path, encoding, fps
        self.count = 0
        self._pictures: Generator[None, np.ndarray | None, None] | None = None

    def show(self, picture: np.ndarray) -> None:
        """Encode the next picture; raise CkpttoolError if ffmpeg takes no more."""
        if self._pictures is None:
            height, width, _ = picture.shape
            self._pictures = self._start((width, height))
            self._pictures.send(None)
        try:
            with _delay_interrupt():
                self._pictures.send(np.ascontiguousarray(picture))
        except OSError:
            raise CkpttoolError("ffmpeg cannot write the film") from None
        self.count += 1

    def _start(self, size: tuple[int, int]) -> Generator[None, np.ndarray | None, None]:
        import imageio_ffmpeg

        encoding = self.encoding
        rate = f"fps={encoding.most_fps:g}," if self.fps > encoding.most_fps else ""
        pictures: Generator[None, np.ndarray | None, None] = imageio_ffmpeg.write_frames(
            self.path,
            size,
            pix_fmt_out=encoding.pixel_format,
            fps=self.fps,
            quality=None,
            codec=encoding.codec,
            macro_block_size=1,
            ffmpeg_log_level="error",
            output_params=["-vf", rate + encoding.filters, *encoding.options],
        )
        return pictures

    def close(self) -> None:
        """End the film and wait for ffmpeg."""
        if self._pictures is not None:
            self._pictures.close()

    def require_complete(self) -> None:
        """Raise CkpttoolError unless every picture is in the file: ffmpeg may fail at the end."""
        if not self.count:
            raise CkpttoolError("a film has no pictures")
        rate = min(1.0, self.encoding.most_fps / self.fps)
        expected, found = self.count * rate, _count_frames(self.path)
        if not found or abs(found - expected) > (0 if rate == 1 else 1):
            raise CkpttoolError(
                "ffmpeg wrote an incomplete film",
                expected=format_count(round(expected), "picture"),
                found=str(found),
            )


@contextmanager
def _delay_interrupt() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends: ffmpeg complains about a part of a picture."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _count_frames(path: str) -> int:
    """Return how many pictures ffmpeg decodes from a film; 0 for a damaged one."""
    import imageio_ffmpeg

    # imageio-ffmpeg's own functions for this let ffmpeg read the terminal, or leave pipes open.
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-v", "error", "-xerror", "-i", path]
    done = subprocess.run(  # noqa: S603  # the library's own ffmpeg
        [*command, "-map", "0:v:0", "-f", "null", "-progress", "pipe:1", "-"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env=search_paths.child_environment(),
    )
    counts = re.findall(r"^frame=\s*(\d+)", done.stdout, re.MULTILINE)
    return int(counts[-1]) if counts and done.returncode == 0 else 0
