"""Films: the episode that was scored, drawn without a display, in a file that is whole or not there."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.cli import evaluate
from ckpttool.core import CkpttoolError, MissingExtraError, UnsupportedError, UsageError
from ckpttool.evaluation import environments, episode_videos, gymnasium_engine, playing
from ckpttool.evaluation.gymnasium_engine import GymVector
from ckpttool.evaluation.protocol import Protocol
from ckpttool.evaluation.rollout import Rollout, RolloutSpec, rollouts
from ckpttool.evaluation.video import (
    ENCODINGS,
    Camera,
    Caption,
    CutError,
    StripCamera,
    StripFrame,
    choose_encoding,
    render_strip,
    resize_image,
    write_video,
)
from tests.conftest import ROOT, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden
from tests.test_rollout import PENDULUM, Countdown, Linear, needs_mujoco

pytestmark = [
    pytest.mark.environment,
    pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("pygame") is None, reason="pygame is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("imageio_ffmpeg") is None, reason="no imageio-ffmpeg"),
]

FPS = 20.0


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Drawing settles in the process's environment which libraries draw; leave it to others as it was."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def noise(n: int, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """Pictures that change everywhere but in one half, smooth enough for an encoder that loses detail."""
    rng = np.random.default_rng(0)
    frames = []
    for _ in range(n):
        picture = np.full((height, width, 3), 90, np.uint8)
        picture[:, : width // 2] = rng.integers(0, 255, 3)
        frames.append(picture)
    return frames


def decoded(path: Path) -> tuple[np.ndarray, float]:
    """Return a film's pictures [n, height, width, 3] and its seconds, by readers that are not ours."""
    if path.suffix == ".gif":
        from PIL import Image, ImageSequence

        with Image.open(path) as film:
            shown = [
                (np.asarray(frame.convert("RGB")), frame.info["duration"])
                for frame in ImageSequence.Iterator(film)
            ]
        return np.stack([picture for picture, _ in shown]), sum(ms for _, ms in shown) / 1000
    import imageio_ffmpeg

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    match = re.search(r"Video: h264.* (\d+)x(\d+).* ([\d.]+) fps", done.stderr.decode())
    assert match is not None
    width, height, fps = int(match[1]), int(match[2]), float(match[3])
    frames = np.frombuffer(done.stdout, np.uint8).reshape(-1, height, width, 3)
    return frames, len(frames) / fps


def write(path: Path, pictures: list[np.ndarray], fps: float) -> None:
    with write_video(str(path), choose_encoding(path.suffix), fps) as show:
        for picture in pictures:
            show(picture)


# --- files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
@pytest.mark.parametrize("size", [(48, 64), (33, 51)], ids=["even", "odd"])
def test_what_is_shown_is_in_the_file(suffix: str, size: tuple[int, int], tmp_path: Path) -> None:
    shown = noise(12, *size)
    path = tmp_path / f"film{suffix}"
    write(path, shown, FPS)
    frames, seconds = decoded(path)
    height, width = size
    assert len(frames) == len(shown)
    assert seconds == pytest.approx(12 / FPS)
    # H.264 has no odd sides, and both lose colours.
    assert frames.shape[1:] == (
        (height, width, 3) if suffix == ".gif" else (height + 1 & ~1, width + 1 & ~1, 3)
    )
    errors = abs(frames[:, :height, :width].astype(int) - np.stack(shown)).mean(axis=(1, 2, 3))
    assert errors.max() < 8


def test_a_gif_keeps_pictures_that_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "film.gif"
    write(path, noise(1) * 30, 30.0)
    from PIL import Image

    with Image.open(path) as film:
        assert film.n_frames == 30
        assert film.info["loop"] == 0
    assert decoded(path)[1] == pytest.approx(1.0)
    assert path.stat().st_size < 8000


@pytest.mark.parametrize(("width", "shape"), [(None, (48, 64, 3)), (64, (48, 64, 3)), (40, (30, 40, 3))])
def test_pictures_keep_their_proportions(width: int | None, shape: tuple[int, ...]) -> None:
    (picture,) = noise(1)
    resized = resize_image(picture, width)
    assert resized.shape == shape
    assert abs(resized[:, : resized.shape[1] // 3].astype(int) - picture[0, 0]).max() <= 8


FAILING = {
    "at once": "exit 1",
    "at the end": "cat > /dev/null; exit 1",
    "cut short": 'last=; for each; do last=$each; done; cat > /dev/null; head -c 900 {whole} > "$last"',
}


# imageio-ffmpeg leaves the pipe of an encoder open that ends before it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", FAILING)
@pytest.mark.parametrize("suffix", ENCODINGS)
def test_an_encoder_that_fails_leaves_no_film(
    case: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import imageio_ffmpeg

    pictures = noise(200, 96, 96)
    whole = tmp_path / f"whole{suffix}"
    write(whole, pictures, FPS)
    real = imageio_ffmpeg.get_ffmpeg_exe()
    script = tmp_path / "ffmpeg"
    # The encoder overwrites; all else is the check of the file.
    encode = FAILING[case].format(whole=whole)
    script.write_text(f'#!/bin/sh\ncase "$1" in -y) {encode};; *) exec {real} "$@";; esac\n')
    script.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(script))
    path = tmp_path / f"film{suffix}"
    with pytest.raises(CkpttoolError):
        write(path, pictures, FPS)
    gc.collect()


@pytest.mark.parametrize("suffix", ENCODINGS)
def test_a_film_without_pictures_is_refused(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(CkpttoolError):
        write(tmp_path / f"film{suffix}", [], FPS)


@pytest.mark.parametrize("suffix", ENCODINGS)
def test_a_film_needs_the_memory_of_a_few_pictures(suffix: str, tmp_path: Path) -> None:
    def grown(n: int) -> int:
        before = peak()
        write(tmp_path / f"film{suffix}", noise(1, 400, 400) * n, FPS)
        return peak() - before

    def peak() -> int:
        return max(
            resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )

    grown(20)
    # 400 pictures are 187 MiB.
    assert grown(400) < 30 << 10


# --- the caption and the camera ---------------------------------------------------------------------


@pytest.mark.parametrize("ground", [0, 128, 200, 255])
def test_a_caption_writes_letters_on_a_dark_box_on_a_copy(ground: int) -> None:
    picture = np.full((240, 320, 3), ground, np.uint8)
    captioned = Caption().put(picture, ("episode 12, best", "step 1000   return -12345.6"))
    assert (picture == ground).all()
    where = (captioned != ground).any(axis=2)
    rows, columns = np.flatnonzero(where.any(axis=1)), np.flatnonzero(where.any(axis=0))
    assert rows[-1] < 60
    assert 100 < columns[-1] < 310
    # Light letters on a dark box: legible on every ground, and the same on each.
    corner = captioned[: rows[-1] + 1, : columns[-1] + 1]
    assert corner.max() > 240
    assert (corner[0] < 40).all()
    assert (corner[:, 0] < 40).all()
    assert (
        Caption().put(np.zeros_like(picture), ("episode 12, best", "step 1000   return -12345.6"))[
            : rows[-1] + 1, : columns[-1] + 1
        ]
        == corner
    ).all()


def test_a_caption_that_does_not_fit_is_cut() -> None:
    picture = np.zeros((16, 24, 3), np.uint8)
    assert Caption().put(picture, ("episode 0", "step 0   return 0.0")).shape == picture.shape


def test_the_filmed_episode_is_the_scored_one() -> None:
    short = {"max_episode_steps": 40}
    shown: list[np.ndarray] = []
    with (
        environments.make_vector_env("Pendulum-v1", 2, trusted_arguments=True, kwargs=short) as fast,
        environments.make_vector_env(
            "Pendulum-v1", 2, trusted_arguments=True, kwargs=short, pictures=True
        ) as drawn,
    ):
        alone = rollouts(PENDULUM, fast, RolloutSpec(5, seed=3))[0]
        camera = Camera(drawn, 3, "episode 3", shown.append)
        with pytest.raises(CutError):
            rollouts(PENDULUM, drawn, RolloutSpec(5, seed=3, watch=camera))
    assert camera.reward == pytest.approx(alone.returns[3], abs=1e-3)
    assert len(shown) == camera.frames == alone.lengths[3] + 1 == 41
    assert {picture.shape for picture in shown} == {(500, 500, 3)}
    # Below the caption: the pole is there, and it moves.
    below = np.stack([picture[100:] for picture in (shown[0], shown[30])])
    assert below[0].min() < 100 < below[0].max()
    assert (below[0] != below[1]).any()


@pytest.mark.parametrize(
    ("suffix", "width", "fps", "interval"),
    [(".mp4", None, 125, 3), (".gif", None, 125, 3), (".gif", 64, 30, 2), (".mp4", 64, 30, 1)],
)
def test_no_picture_is_drawn_that_the_film_drops(
    suffix: str, width: int | None, fps: int, interval: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gymnasium.envs.classic_control import PendulumEnv

    monkeypatch.setitem(PendulumEnv.metadata, "render_fps", fps)
    drawn: list[int] = []
    monkeypatch.setattr(GymVector, "frame", lambda _, row: drawn.append(row) or noise(1, 60, 80)[0])
    path, options = tmp_path / f"film{suffix}", () if width is None else ("--video-width", width)
    film = in_process(*PLAYED, "--episodes", 1, "--video", path, *options, "--json").json()["video"]
    frames, seconds = decoded(path)
    assert len(drawn) <= film["frames"] + 1  # one to find out whether the environment can be drawn
    assert len(frames) == film["frames"] == -(-200 // interval) + 1
    # It lasts as long as the episode.
    assert seconds == pytest.approx(201 / fps, abs=2 * interval / fps)


def test_an_environment_that_draws_nothing_is_said(golden: Golden) -> None:
    with GymVector(Countdown, 1) as vector:
        vector.reset(np.arange(1), np.zeros(1, np.int64))
        with pytest.raises(UnsupportedError) as caught:
            vector.frame(0)
        golden(caught.value)


# --- film strips ------------------------------------------------------------------------------------


def test_a_strip_has_the_pictures_below_each_other(tmp_path: Path) -> None:
    from PIL import Image

    rows = [
        (f"episode {row}", [StripFrame(step, -1.5 * step, picture) for step, picture in enumerate(noise(3))])
        for row in range(2)
    ]
    path = tmp_path / "strip.png"
    for theme, paper in (("light", 255), ("dark", 13)):
        path.write_bytes(render_strip("an agent", rows, 30.0, theme))
        with Image.open(path) as strip:
            shown = np.asarray(strip.convert("RGB"))
        assert shown[0, 0, 0] == paper
        assert (shown[-4:] == shown[0, 0]).all(), "nothing is cut off"
        # Without the line around it, each picture is in the strip twice, one above the other.
        for picture in noise(3):
            inner = picture[1:-1, 1:-1]
            height, width, _ = inner.shape
            lines = np.lib.stride_tricks.sliding_window_view(shown[:, :, 0], width, axis=1)
            starts = np.argwhere((lines == inner[0, :, 0]).all(axis=2))
            at = [(y, x) for y, x in starts if np.array_equal(shown[y : y + height, x : x + width], inner)]
            assert len(at) == 2
            assert at[0][1] == at[1][1]
    assert render_strip("an agent", rows, 30.0) == render_strip("an agent", rows, 30.0)


def test_a_strip_takes_some_steps_and_the_last() -> None:
    short = {"max_episode_steps": 40}
    with environments.make_vector_env(
        "Pendulum-v1", 2, trusted_arguments=True, kwargs=short, pictures=True
    ) as drawn:
        camera = StripCamera(drawn, 2, [0, 20], 50)
        with pytest.raises(CutError):
            rollouts(PENDULUM, drawn, RolloutSpec(3, seed=3, watch=camera))
    assert [frame.step for frame in camera.captured] == [0, 20, 40]
    assert {frame.picture.shape for frame in camera.captured} == {(50, 50, 3)}
    assert (
        camera.captured[0].reward
        == 0
        > camera.captured[1].reward
        > camera.captured[2].reward
        == camera.reward
    )


def test_the_command_draws_the_best_and_the_worst(tmp_path: Path, golden: Golden) -> None:
    path, common = tmp_path / "strip.png", ("eval", TORCH_SAMPLE, "--episodes", 3)
    ran = in_process(*common, "--strip", path, "--strip-frames", 3, "--json")
    assert ran.status == 0, ran.err
    document = ran.json()
    strip, returns = document["strip"], document["returns"]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [episode["wanted"] for episode in strip["episodes"]] == [["best"], ["worst"]]
    assert [episode["return"] for episode in strip["episodes"]] == [max(returns), min(returns)]
    assert all(episode["equal"] and episode["steps"] == [0, 100, 200] for episode in strip["episodes"])
    golden(refused(in_process(*common, "--strip", path)))
    golden(refused(in_process(*common, "--strip", tmp_path / "strip.gif")))
    golden(refused(in_process(*common, "--video-width", 100)))


# --- OpenGL, whose software renderer and TensorFlow (both with LLVM) crash in one process ------------


@pytest.mark.alone
@needs_mujoco
def test_mujoco_draws_without_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    if all(gymnasium_engine._opengl_failure(name) for name in ("egl", "osmesa")):
        pytest.skip("neither EGL nor OSMesa works here")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    policy = Linear(0.0, 30.0)
    small = {"width": 120, "height": 100}
    for _ in range(2):  # the OpenGL of the first one is gone when the second one begins
        shown: list[np.ndarray] = []
        with environments.make_vector_env(
            "InvertedPendulum-v5", 2, trusted_arguments=True, kwargs=small, engine="gymnasium", pictures=True
        ) as vector:
            camera = Camera(vector, 1, "episode 1", shown.append)
            with pytest.raises(CutError):
                rollouts(policy, vector, RolloutSpec(2, watch=camera))
            assert vector.spec.render_fps == 25
        assert 3 < len(shown) == camera.frames < 50
        assert {picture.shape for picture in shown} == {(100, 120, 3)}
        assert all(picture[30:].std() > 10 for picture in shown)
        assert (shown[0][30:] != shown[-1][30:]).mean() > 0.01
    assert os.environ["MUJOCO_GL"] in ("egl", "osmesa")


@pytest.mark.alone
@needs_mujoco
def test_the_camera_goes_along() -> None:
    if all(gymnasium_engine._opengl_failure(name) for name in ("egl", "osmesa")):
        pytest.skip("neither EGL nor OSMesa works here")
    small = {"width": 120, "height": 100}
    with environments.make_vector_env(
        "HalfCheetah-v5", 1, trusted_arguments=True, kwargs=small, pictures=True
    ) as vector:
        assert isinstance(vector, GymVector)
        vector.reset(np.arange(1), np.zeros(1, np.int64))
        inner = vector._envs[0].unwrapped
        columns = []
        for far in (0.0, 50.0):
            positions = inner.data.qpos.copy()
            positions[0] = far
            inner.set_state(positions, inner.data.qvel.copy())
            red, green, blue = vector.frame(0).astype(int).transpose(2, 0, 1)
            columns.append(int(((red - green > 20) & (green - blue > 20)).sum()))
    assert min(columns) > 100, "its skin is not in the picture"


@needs_mujoco
@pytest.mark.parametrize("env", ["HalfCheetah-v5", "Ant-v4", "Humanoid-v5", "Pusher-v5"])
def test_what_is_set_for_drawing_changes_no_step(env: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium_engine, "_choose_opengl", lambda: "egl")
    rows, runs = np.arange(1), []
    for drawn in (False, True):
        with environments.make_vector_env(env, 1, engine="gymnasium", pictures=drawn) as vector:
            vector.reset(rows, np.array([7]))
            rng = np.random.default_rng(0)
            size = (120, 1, vector.spec.action_dim)
            actions = rng.uniform(vector.spec.action_low, vector.spec.action_high, size)
            run = []
            for action in actions.astype(np.float32):
                rewards, *_ = vector.step(action, rows)
                run.append((np.array(vector.obs), rewards))
            runs.append(run)
    for (obs, reward), (others, other) in zip(*runs, strict=True):
        assert (obs == others).all()
        assert reward == other


def test_the_first_opengl_that_works_is_taken(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gymnasium_engine, "_opengl_candidates", lambda: ("egl", "osmesa"))
    monkeypatch.setattr(
        gymnasium_engine, "_opengl_failure", lambda name: "no driver" if name == "egl" else ""
    )
    assert gymnasium_engine._choose_opengl() == "osmesa"
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(UnsupportedError) as caught:
        gymnasium_engine._choose_opengl()
    golden(caught.value)
    assert "MUJOCO_GL" in str(caught.value.hint)
    monkeypatch.delenv("MUJOCO_GL")
    monkeypatch.setattr(gymnasium_engine, "_opengl_failure", lambda name: f"{name} is not here")
    with pytest.raises(UnsupportedError) as caught:
        gymnasium_engine._choose_opengl()
    golden(caught.value)


@needs_mujoco
def test_a_trial_in_another_process_says_why_it_failed() -> None:
    assert "nonsense" in gymnasium_engine._opengl_failure("nonsense")


# --- the command ------------------------------------------------------------------------------------

PLAYED = ("eval", TORCH_SAMPLE, "--env", "Pendulum-v1", "--num-envs", 2)


def test_the_command_films_what_it_scored(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    out = tmp_path / "results.json"
    ran = in_process(
        *PLAYED, "--episodes", 5, "--video", path, "--video-episodes", "worst", "--json", "--out", out
    )
    assert ran.status == 0, ran.err
    document = ran.json()
    # What reports read names the film, too.
    assert json.loads(out.read_text()) == document
    returns, lengths = document["returns"], document["lengths"]
    worst = int(np.argmin(returns))
    video = document["video"]
    assert video["episodes"] == [
        {
            "episode": worst,
            "wanted": ["worst"],
            "return": pytest.approx(returns[worst], abs=1e-3),
            "length": lengths[worst],
            "scored": returns[worst],
            # Gymnasium's own objects draw: to the bit where the engine that scored agrees to the bit.
            "equal": not any(item["largest"] for item in document["agreement"]["deviations"].values()),
        }
    ]
    frames, seconds = decoded(path)
    assert len(frames) == video["frames"] == lengths[worst] + 1
    assert frames.shape[1:] == (video["height"], video["width"], 3) == (500, 500, 3)
    assert seconds == pytest.approx(len(frames) / video["fps"], abs=0.05)
    assert all(30 < picture.mean() < 255 for picture in frames[::20])
    assert sorted(tmp_path.iterdir()) == [path, out]


def test_episodes_are_chosen_by_number_and_by_word_each_once() -> None:
    values = np.array([3.0, 9.0, -1.0, 9.0, 5.0, -1.0])
    n = len(values)
    played = Rollout(values, np.ones(n, int), values > 0, values <= 0, np.arange(n), n, 2, n, 1.0, 0)
    assert episode_videos._choose_episodes(("median", "1", "best", "worst", "5"), played) == {
        0: ("median",),
        1: ("best",),
        2: ("worst",),
        5: (),
    }


def test_of_several_checkpoints_the_best_is_filmed(tmp_path: Path, golden: Golden) -> None:
    early = TORCH_SAMPLE.with_name("ckpt-2500.pt")
    path = tmp_path / "film.gif"
    ran = in_process("eval", early, TORCH_SAMPLE, "--episodes", 1, "--video", path)
    assert ran.status == 0, ran.err
    golden("\n".join(line.partition("return")[0] for line in ran.out.splitlines()[-2:]))
    assert len(decoded(path)[0]) == 201


REFUSED = {
    "suffix": ("x.avi", "0"),
    "there": ("there.gif", "0"),
    "folder": ("nowhere/x.gif", "0"),
    "word": ("x.gif", "bset"),
    "negative": ("x.gif", "-1"),
    "number": ("x.gif", "0,100000000"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_filmed_is_refused(case: str, tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "there.gif").write_bytes(b"mine")
    name, episodes = REFUSED[case]
    with pytest.raises(CkpttoolError) as caught:
        episode_videos.require_video_support(
            [str(TORCH_SAMPLE)],
            playing.EvaluationOptions(None, Protocol(10**8)),
            str(tmp_path / name),
            episodes.split(","),
        )
    golden(caught.value)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("there.gif", b"mine")]


def test_the_command_refuses_before_it_plays(tmp_path: Path, golden: Golden) -> None:
    there = tmp_path / "there.gif"
    there.write_bytes(b"mine")
    # So many episodes would take longer than a command may in these tests.
    golden(refused(in_process(*PLAYED, "--episodes", 10**8, "--video", there)))
    for video, episodes in (("x.gif", ","), (None, "best")):
        with pytest.raises(UsageError) as caught:
            evaluate.OutputOptions(video=video, video_episodes=episodes)
        golden(caught.value)


@pytest.mark.parametrize("missing", ["PIL", "imageio_ffmpeg"])
def test_without_its_libraries_a_film_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttool.evaluation import video

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else object())
    with pytest.raises(MissingExtraError) as caught:
        video.require_encoder()
    assert "ckpttool[gif]" in str(caught.value.hint)


def test_ctrl_c_reports_the_numbers_and_leaves_no_film(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    arguments = [*map(str, PLAYED), "--episodes", "20", "--video", str(path), "--video-episodes"]
    arguments += [",".join(map(str, range(20)))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "ckpttool", *arguments], env=environment, **pipes) as child:
        try:
            until = time.monotonic() + 60
            while not list(tmp_path.iterdir()) and child.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(0.3)
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 130, err
    assert b" 20 episodes" in out
    assert not err
    assert not list(tmp_path.iterdir())
