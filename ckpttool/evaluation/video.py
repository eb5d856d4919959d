"""Write videos and film strips of episodes: captioned images; ffmpeg encodes through imageio-ffmpeg."""

from __future__ import annotations

import io
import re
import signal
import subprocess
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.core import search_paths
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import CkpttoolError, MissingExtraError
from ckpttool.core.installation import require_package
from ckpttool.core.text import format_count
from ckpttool.evaluation.gymnasium_engine import VectorEnv

if TYPE_CHECKING:
    from PIL import ImageDraw, ImageFont

Show = Callable[[np.ndarray], None]
"""Callback for the next image of a video, uint8 [height, width, 3]; all have the same size."""

_TEXT_COLOUR, _BOX_COLOUR = (255, 255, 255), (20, 20, 20)


class CutError(Exception):
    """The filmed episode has ended: the rest of the rollout is not needed."""


class Camera:
    """Callback (see rollout.Watch) that films one episode, then stops the rollout with CutError.

    All rows keep playing, because the policy computes with one batch shape: the filmed episode is
    bit for bit the one that was scored. One step in `every` is drawn, the first and the last.
    """

    def __init__(
        self, envs: VectorEnv, episode: int, title: str, show: Show, width: int | None = None, every: int = 1
    ) -> None:
        self.envs, self.episode, self.title, self.show, self.width = envs, episode, title, show, width
        self.every = every
        self.caption = Caption()
        self.frames = 0
        self.reward = 0.0

    def __call__(self, row: int, number: int, reward: float, ended: bool) -> None:
        """Film the row if it plays the episode."""
        if number != self.episode:
            return
        if ended or self.frames % self.every == 0:
            self.film(row, reward, ended)
        self.frames += 1
        self.reward = reward
        if ended:
            raise CutError

    def film(self, row: int, reward: float, ended: bool) -> None:  # noqa: ARG002
        """Show the row's image with a caption."""
        lines = (self.title, f"step {self.frames}   return {reward:.1f}")
        self.show(self.caption.put(resize_image(self.envs.frame(row), self.width), lines))


class StripFrame(NamedTuple):
    """One image of a film strip: steps and return until then, uint8 [height, width, 3]."""

    step: int
    reward: float
    picture: np.ndarray


class StripCamera(Camera):
    """Camera of some steps of one episode and its last one, without captions."""

    def __init__(self, envs: VectorEnv, episode: int, steps: Iterable[int], width: int) -> None:
        super().__init__(envs, episode, "", lambda _: None, width)
        self.steps = frozenset(steps)
        self.captured: list[StripFrame] = []

    def film(self, row: int, reward: float, ended: bool) -> None:
        """Keep the row's image if the step is in the strip."""
        if ended or self.frames in self.steps:
            picture = resize_image(self.envs.frame(row), self.width)
            self.captured.append(StripFrame(self.frames, reward, picture))


def resize_image(picture: np.ndarray, width: int | None) -> np.ndarray:
    """Return an image uint8 [height, width, 3] in another width, with equal proportions; None keeps it."""
    from PIL import Image

    height, present, _ = picture.shape
    if width is None or width == present:
        return picture
    size = (width, max(1, round(height * width / present)))
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS))


# Paper, letters and dim letters of a film strip.
STRIP_COLOURS = {"light": ("#ffffff", "#222222", "#59636e"), "dark": ("#0d1117", "#e6edf3", "#9198a1")}
_GAP, _MARGIN, _FONT, _LINE = 8, 16, 26, 38


def render_strip(
    title: str, rows: Sequence[tuple[str, Sequence[StripFrame]]], fps: float | None, theme: str = "light"
) -> bytes:
    """Return a film strip as PNG: a row of images per episode with its heading, each with time and return.

    `fps` are the steps per second of the environment; without it the steps are printed.
    """
    from PIL import Image, ImageDraw

    paper, ink, dim = STRIP_COLOURS[theme]
    height, width, _ = rows[0][1][0].picture.shape
    most = max(len(frames) for _, frames in rows)
    wide = most * (width + _GAP) - _GAP
    row_height = 2 * _LINE + height + _GAP
    image = Image.new("RGB", (2 * _MARGIN + wide, 2 * _MARGIN + _LINE + len(rows) * row_height), paper)
    draw = ImageDraw.Draw(image)
    labels = [[_strip_label(frame, fps) for frame in frames] for _, frames in rows]
    small = _fit_font(draw, [label for row in labels for label in row], width, _FONT - 4)
    draw.text((_MARGIN, _MARGIN), title, ink, _fit_font(draw, [title], wide, _FONT))
    top = _MARGIN + _LINE
    heading = _fit_font(draw, [words for words, _ in rows], wide, _FONT - 2)
    for (words, frames), names in zip(rows, labels, strict=True):
        draw.text((_MARGIN, top + 4), words, ink, heading)
        for number, (frame, label) in enumerate(zip(frames, names, strict=True)):
            left, above = _MARGIN + number * (width + _GAP), top + _LINE
            image.paste(Image.fromarray(frame.picture), (left, above))
            # Many environments are drawn on white.
            draw.rectangle((left, above, left + width - 1, above + height - 1), outline=dim)
            draw.text((left, above + height + 4), label, dim, small)
        top += row_height
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return stream.getvalue()


def _strip_label(frame: StripFrame, fps: float | None) -> str:
    time = f"step {frame.step}" if fps is None else f"{frame.step / fps:.1f} s"
    return f"{time}, return {frame.reward:,.1f}"


def _fit_font(
    draw: ImageDraw.ImageDraw, texts: Sequence[str], width: int, largest: int
) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return the largest font in which every text fits."""
    from PIL import ImageFont

    for size in range(largest, 8, -1):
        font = ImageFont.load_default(size)
        if max(draw.textlength(text, font) for text in texts) <= width:
            return font
    return ImageFont.load_default(8)


def require_pillow() -> None:
    """Raise MissingExtraError unless Pillow is installed."""
    require_package("PIL", "a film strip needs Pillow", "gif")


class Caption:
    """Draw text on a dark box in the upper left corner of images, scaled to the first image."""

    def __init__(self) -> None:
        self._font: ImageFont.FreeTypeFont | ImageFont.ImageFont | None = None

    def put(self, picture: np.ndarray, lines: tuple[str, ...]) -> np.ndarray:
        """Return a copy of the image, uint8 [height, width, 3], with the text."""
        from PIL import Image, ImageDraw, ImageFont

        image = Image.fromarray(picture)
        # Outlines of letters this small would fill them.
        self._font = self._font or ImageFont.load_default(max(14, round(image.height / 26)))
        margin = max(4, image.height // 80)
        draw, text = ImageDraw.Draw(image), "\n".join(lines)
        _, _, right, bottom = draw.multiline_textbbox((margin, margin), text, self._font)
        draw.rectangle((0, 0, right + margin, bottom + margin), _BOX_COLOUR)
        draw.multiline_text((margin, margin), text, _TEXT_COLOUR, self._font)
        return np.asarray(image)


@dataclass(frozen=True, slots=True)
class VideoEncoding:
    """ffmpeg options of one video format; a film has at most `most_fps` images per second."""

    codec: str
    pixel_format: str
    filters: str
    options: tuple[str, ...]
    most_fps: float = 50.0


ENCODINGS = {
    # 4:2:0 colours, supported by every player, require even sides. The fast preset leaves the cores to
    # rendering.
    ".mp4": VideoEncoding(
        "libx264",
        "yuv420p",
        "pad=ceil(iw/2)*2:ceil(ih/2)*2",
        ("-preset", "veryfast", "-movflags", "+faststart", "-f", "mp4"),
    ),
    # One palette per image: a shared one would make ffmpeg hold the whole video. GIF delays are in hundredths
    # of a second, and browsers slow down images shorter than two.
    ".gif": VideoEncoding(
        "gif",
        "pal8",
        "split[a][b];[a]palettegen=stats_mode=single[palette];[b][palette]paletteuse=new=1:dither=none",
        ("-f", "gif"),
    ),
}


# For pages: fewer images and colours, a third of the bytes.
SMALL_GIF = VideoEncoding(
    "gif",
    "pal8",
    "split[a][b];[a]palettegen=stats_mode=single:max_colors=64[palette];"
    "[b][palette]paletteuse=new=1:dither=none",
    ("-f", "gif"),
    most_fps=15.0,
)


def require_encoder() -> None:
    """Raise MissingExtraError unless Pillow, imageio-ffmpeg and an ffmpeg are installed."""
    require_package("PIL", "a video needs Pillow", "gif")
    require_package("imageio_ffmpeg", "a video needs imageio-ffmpeg", "gif")
    import imageio_ffmpeg

    try:
        imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise MissingExtraError(f"a video needs ffmpeg: {reason}", hint="IMAGEIO_FFMPEG_EXE=FILE") from None


def choose_encoding(suffix: str, *, small: bool = False) -> VideoEncoding:
    """Return the encoding of a video file; a `small` GIF has 15 images per second, of 64 colours."""
    return SMALL_GIF if small and suffix == ".gif" else ENCODINGS[suffix]


@contextmanager
def write_video(path: str, encoding: VideoEncoding, fps: float) -> Iterator[Show]:
    """Write a video to an absolute path from the images passed in the block.

    The video is read back before the block ends. ffmpeg writes its own messages to stderr. Raise
    CkpttoolError if there is no image or ffmpeg fails.
    """
    with closing(_FrameWriter(path, encoding, fps)) as writer:
        yield writer.show
    writer.require_complete()


class _FrameWriter:
    """Pipe of images to ffmpeg, which starts with the first one; its size is the video's."""

    def __init__(self, path: str, encoding: VideoEncoding, fps: float) -> None:
        self.path, self.encoding, self.fps = path, encoding, fps
        self.count = 0
        self._pictures: Generator[None, np.ndarray | None, None] | None = None

    def show(self, picture: np.ndarray) -> None:
        """Encode the next image; raise CkpttoolError if ffmpeg has stopped reading."""
        if self._pictures is None:
            height, width, _ = picture.shape
            self._pictures = self._start((width, height))
            self._pictures.send(None)
        try:
            with _delay_interrupt():
                self._pictures.send(np.ascontiguousarray(picture))
        except OSError:
            raise CkpttoolError("ffmpeg cannot write the video") from None
        self.count += 1

    def _start(self, size: tuple[int, int]) -> Generator[None, np.ndarray | None, None]:
        import imageio_ffmpeg

        encoding = self.encoding
        pictures: Generator[None, np.ndarray | None, None] = imageio_ffmpeg.write_frames(
            self.path,
            size,
            pix_fmt_out=encoding.pixel_format,
            fps=self.fps,
            quality=None,
            codec=encoding.codec,
            macro_block_size=1,
            ffmpeg_log_level="error",
            output_params=["-vf", encoding.filters, *encoding.options],
        )
        return pictures

    def close(self) -> None:
        """Finish the video and wait for ffmpeg."""
        if self._pictures is not None:
            self._pictures.close()

    def require_complete(self) -> None:
        """Raise CkpttoolError unless the file contains every image: ffmpeg may fail at the end."""
        if not self.count:
            raise CkpttoolError("the video has no frames")
        expected, count = format_count(self.count, "picture"), _count_frames(self.path)
        if count != self.count:
            raise CkpttoolError("ffmpeg wrote an incomplete video", expected=expected, found=str(count))


@contextmanager
def _delay_interrupt() -> Iterator[None]:
    """Delay Ctrl-C until the block ends: ffmpeg reports an error for a partial image."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _count_frames(path: str) -> int:
    """Return the number of images that ffmpeg decodes from a video; 0 for a damaged one."""
    import imageio_ffmpeg

    # imageio-ffmpeg's own functions for this let ffmpeg read from the terminal, or leave pipes open.
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
