"""Videos of scored episodes: the same episodes replayed and rendered, into an atomically written file."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any

import numpy as np

from ckpttool.core import urls
from ckpttool.core.atomic_write import (
    Output,
    Progress,
    ignore_progress,
    require_new,
    write_atomically,
    write_file,
)
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import CkpttoolError, UsageError
from ckpttool.core.text import clean, describe_record, format_count, shorten
from ckpttool.core.tree_views import render_file
from ckpttool.evaluation import video
from ckpttool.evaluation.playing import EvaluationOptions, play_stacked, prepare_agent
from ckpttool.evaluation.protocol import Evaluation
from ckpttool.evaluation.rollout import Rollout
from ckpttool.evaluation.simulators import DEVICE_ENGINE, is_factory
from ckpttool.evaluation.video import Camera, CutError, StripCamera, StripFrame

WORDS = ("best", "worst", "median")
_FPS = 30.0  # if the environment specifies no frame rate


@dataclass(frozen=True, slots=True)
class VideoEpisode:
    """One recorded episode: the words that selected it, its return and steps, and the scored return.

    `equal` is true if return and steps equal the scored ones, bit for bit.
    """

    episode: int
    wanted: tuple[str, ...]
    paid: float
    steps: int
    scored: float
    equal: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "episode": self.episode,
            "wanted": list(self.wanted),
            "return": self.paid,
            "length": self.steps,
            "scored": self.scored,
            "equal": self.equal,
        }


@dataclass(frozen=True, slots=True)
class EpisodeVideo:
    """A video of consecutive episodes, from before the first step to after the last one."""

    __repr__ = describe_record
    _repr_html_ = render_file

    file: str
    checkpoint: str
    fps: float
    width: int
    height: int
    frames: int
    takes: tuple[VideoEpisode, ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "file": self.file,
            "checkpoint": urls.display_url(self.checkpoint),
            "fps": self.fps,
            "width": self.width,
            "height": self.height,
            "frames": self.frames,
            "episodes": [take.document() for take in self.takes],
        }


@dataclass(frozen=True, slots=True)
class EpisodeStrip:
    """A film strip: a row of images per episode, evenly spread over it; `steps` are those of its images."""

    __repr__ = describe_record
    _repr_html_ = render_file

    file: str
    checkpoint: str
    takes: tuple[VideoEpisode, ...]
    steps: tuple[tuple[int, ...], ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "file": self.file,
            "checkpoint": urls.display_url(self.checkpoint),
            "episodes": [
                {**take.document(), "steps": list(steps)}
                for take, steps in zip(self.takes, self.steps, strict=True)
            ],
        }


def require_video_support(
    paths: Sequence[str],
    options: EvaluationOptions,
    target: str,
    episodes: Sequence[str] = ("0",),
    *,
    force: bool = False,
) -> None:
    """Raise an error unless one of these checkpoints can be recorded; call it before hours of playing.

    Raise UsageError for any other word and for a file name without a video format, TargetExistsError for an
    existing file, MissingExtraError and UnsupportedError if frames cannot be rendered or encoded; one frame
    is rendered as a test. Checkpoints that cannot be played are not reported here.

    Args:
        paths: the checkpoints.
        options: those of the evaluation.
        target: the video's file, whose suffix is its format.
        episodes: episode numbers, or best, worst and median.
        force: the file may exist.
    """
    if _suffix(target) not in video.ENCODINGS:
        raise UsageError(
            "cannot infer the video format from the file name",
            file=target,
            hint=f"use a file name that ends in {' or '.join(video.ENCODINGS)}",
        )
    require_new(target, force=force)
    _require_recording(paths, options, episodes, video.require_encoder)


def require_strip_support(
    paths: Sequence[str],
    options: EvaluationOptions,
    target: str,
    episodes: Sequence[str],
    *,
    force: bool = False,
) -> None:
    """Raise an error unless one of these checkpoints can be drawn as a film strip.

    See `require_video_support`.

    Args:
        paths: the checkpoints.
        options: those of the evaluation.
        target: the PNG file.
        episodes: episode numbers, or best, worst and median.
        force: the file may exist.
    """
    if _suffix(target) != ".png":
        raise UsageError("a film strip is a PNG image", file=target, hint="use a file name that ends in .png")
    require_new(target, force=force)
    _require_recording(paths, options, episodes, video.require_pillow)


def _require_recording(
    paths: Sequence[str],
    options: EvaluationOptions,
    words: Sequence[str],
    require_library: Callable[[], None],
) -> None:
    """Raise an error for unknown episodes, or if frames cannot be rendered."""
    require_library()
    for word in words:
        _require_episode(word, options.protocol.episodes)
    _require_gymnasium(options)
    for path in paths:
        with suppress(CkpttoolError):
            environment = options.environment(options.restore(path))
            break
    else:
        return
    with environment.make(1, "gymnasium", pictures=True) as trial:
        trial.reset(np.arange(1), np.array([options.protocol.seed]))
        trial.frame(0)


def record_video(
    scored: Evaluation,
    target: str,
    episodes: Sequence[str] = ("0",),
    *,
    options: EvaluationOptions,
    width: int | None = None,
    force: bool = False,
    progress: Progress = ignore_progress,
) -> EpisodeVideo:
    """Replay a scored evaluation and write episodes, in their order, to a file.

    The policy receives the same batches, so that every step is repeated bit for bit, which VideoEpisode.equal
    records. A score that was computed differently (several checkpoints stacked) may not be repeated exactly.
    Raise as `require_video_support` does, and KeyboardInterrupt on Ctrl-C; in that case no file is written.

    Args:
        scored: the evaluation.
        target: the video's file.
        episodes: episode numbers, or best, worst and median.
        options: those of the evaluation.
        width: width of the images in pixels, by default the environment's.
        force: replace the file.
        progress: called with the frames rendered so far, and all.
    """
    require_new(target, force=force)
    chosen = _choose_episodes(episodes, scored.rollout)
    encoding = video.choose_encoding(_suffix(target), small=width is not None)
    takes: list[VideoEpisode] = []
    with _Replay(scored, options) as replay:
        fps, done, size = replay.vector.spec.render_fps or _FPS, 0, (0, 0)
        # Simulators take most of the time to draw: no image is drawn that the format drops.
        interval = math.ceil(fps / encoding.most_fps)
        fps /= interval
        total = sum(-(-int(scored.rollout.lengths[number]) // interval) + 1 for number in chosen)

        def write(stream: IO[bytes]) -> None:
            with video.write_video(stream.name, encoding, fps) as show:

                def counted(picture: np.ndarray) -> None:
                    nonlocal size, done
                    show(picture)
                    size, done = (picture.shape[1], picture.shape[0]), done + 1
                    progress(done, total)

                for number, words in chosen.items():
                    title = ", ".join((f"episode {number}", *words))
                    camera = Camera(replay.vector, number, title, counted, width, interval)
                    takes.append(replay.take(camera, number, words))

        write_atomically((Output(target, write),), force=force)
    return EpisodeVideo(target, scored.checkpoint, fps, *size, done, tuple(takes))


STRIP_WIDTH = 240


def record_strip(
    scored: Evaluation,
    target: str,
    episodes: Sequence[str] = ("best", "worst"),
    *,
    options: EvaluationOptions,
    frames: int = 8,
    theme: str = "light",
    force: bool = False,
    progress: Progress = ignore_progress,
) -> EpisodeStrip:
    """Replay a scored evaluation and write a film strip to a PNG file.

    Each row is an episode, from the first to the last step. See `record_video` for the replay.

    Args:
        scored: the evaluation.
        target: the PNG file.
        episodes: episode numbers, or best, worst and median: a row each.
        options: those of the evaluation.
        frames: images in a row.
        theme: "light" or "dark".
        force: replace the file.
        progress: called with the episodes drawn so far, and all.
    """
    require_new(target, force=force)
    chosen = _choose_episodes(episodes, scored.rollout)
    takes: list[VideoEpisode] = []
    rows: list[tuple[str, list[StripFrame]]] = []
    with _Replay(scored, options) as replay:
        for number, words in chosen.items():
            steps = np.linspace(0, int(scored.rollout.lengths[number]), frames).round().astype(int)
            camera = StripCamera(replay.vector, number, steps.tolist(), STRIP_WIDTH)
            takes.append(replay.take(camera, number, words))
            rows.append((_strip_heading(takes[-1]), camera.captured))
            progress(len(rows), len(chosen))
        fps = replay.vector.spec.render_fps
    title = f"{shorten(clean(os.path.basename(scored.checkpoint)), 60)} in {clean(scored.env)}"
    write_file(target, video.render_strip(title, rows, fps, theme), force=force)
    pictured = tuple(tuple(frame.step for frame in frames) for _, frames in rows)
    return EpisodeStrip(target, scored.checkpoint, tuple(takes), pictured)


def _strip_heading(take: VideoEpisode) -> str:
    words = f"{' and '.join(take.wanted)}: " if take.wanted else ""
    return f"{words}episode {take.episode}, return {take.paid:,.1f} in {format_count(take.steps, 'step')}"


def _require_gymnasium(options: EvaluationOptions) -> None:
    if options.protocol.engine == DEVICE_ENGINE and options.env is not None and is_factory(options.env):
        raise UsageError(
            f"the simulator {options.env} cannot be recorded on video",
            hint="--video supports only Gymnasium environments",
        )


def _require_episode(word: str, episodes: int) -> None:
    if word in WORDS:
        return
    if not word.isascii() or not word.isdigit():
        raise UsageError(f"unknown episode {word!r}", hint=f"use a number from 0, or {', '.join(WORDS)}")
    if int(word) >= episodes:
        raise UsageError(
            f"episode {word} does not exist", hint=f"{episodes} episodes are played: 0 to {episodes - 1}"
        )


def _suffix(target: str) -> str:
    return os.path.splitext(target)[1].lower()


def _choose_episodes(requested: Sequence[str], played: Rollout) -> dict[int, tuple[str, ...]]:
    """Return the episode numbers in the requested order, each once, with the words that selected it."""
    ranked = np.argsort(played.returns, kind="stable")
    named = {
        "best": int(np.argmax(played.returns)),
        "worst": int(ranked[0]),
        "median": int(ranked[(len(ranked) - 1) // 2]),
    }
    chosen: dict[int, tuple[str, ...]] = {}
    for word in requested:
        number = named[word] if word in named else int(word)
        words = (word,) if word in named else ()
        chosen[number] = (*chosen.get(number, ()), *words)
    return chosen


class _Replay:
    """Rendering environments in which a scored evaluation is replayed; closed by `with`."""

    def __init__(self, scored: Evaluation, options: EvaluationOptions) -> None:
        options = dataclasses.replace(options, protocol=scored.protocol)
        _require_gymnasium(options)
        agent = options.restore(scored.checkpoint)
        environment = options.environment(agent)
        self._scored = scored
        self.vector = environment.make(scored.protocol.at_once, "gymnasium", pictures=True)
        try:
            self._player = prepare_agent(agent, environment, scored.protocol, self.vector.spec)
        except BaseException:
            self.vector.close()
            raise

    def __enter__(self) -> _Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self.vector.close()

    def take(self, camera: Camera | StripCamera, number: int, words: tuple[str, ...]) -> VideoEpisode:
        """Replay one episode; each needs its own replay, because parallel episodes would be interleaved."""
        how, played = self._scored.protocol, self._scored.rollout
        try:
            play_stacked((self._player,), how, self.vector, watch=camera)
        except CutError:
            steps, score = camera.frames - 1, float(played.returns[number])
            equal = camera.reward == score and steps == played.lengths[number]
            return VideoEpisode(number, words, camera.reward, steps, score, bool(equal))
        # Only Ctrl-C ends a replay before its last episode ends.
        raise KeyboardInterrupt
