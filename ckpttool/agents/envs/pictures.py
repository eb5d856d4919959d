"""Pictures of environments where there is no display: which OpenGL draws them, and what they are."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from typing import Any

import numpy as np

from ckpttool import search_paths
from ckpttool.errors import MissingExtraError, UnsupportedError

HINT = "apt-get install libegl1 libgl1-mesa-dri, or libosmesa6; MUJOCO_GL says which to use"

# Gymnasium takes the name of the OpenGL from this variable (gymnasium/envs/mujoco/mujoco_rendering.py); left
# alone it tries GLFW first, which needs a display.
_CHOICE = "MUJOCO_GL"
_TIMEOUT_S = 60
# A library that is there but has no driver can end the process, so it is tried in another one.
_TRIAL = """
import importlib, sys
import mujoco
context = importlib.import_module("mujoco." + sys.argv[1]).GLContext(64, 64)
context.make_current()
mujoco.MjrContext(mujoco.MjModel.from_xml_string("<mujoco/>"), mujoco.mjtFontScale.mjFONTSCALE_100)
"""
# The name of that camera in Gymnasium's models.
_CAMERA = "track"
_PLANE = 0  # mjtGeom.mjGEOM_PLANE in mujoco/mjmodel.h
# These models ask for shadows of 4096 points, of which a picture of 480 x 480 shows nothing; a processor that
# draws needs half the time with this.
_SHADOW = 2048


def drawable(env: Any) -> Any:
    """Return a Gymnasium environment that was made with `rgb_array`, once it is known that it can draw.

    Raise UnsupportedError where MuJoCo finds no OpenGL. What is set here in the process's environment is
    what a person left open.
    """
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    inner = getattr(env, "unwrapped", env)
    if hasattr(inner, "mujoco_renderer"):
        os.environ[_CHOICE] = _offscreen()
        quality = inner.model.vis.quality
        quality.shadowsize = min(quality.shadowsize, _SHADOW)
        _follow(inner)
    return env


def _follow(inner: Any) -> None:
    """Let the model's own camera look, which goes along with the agent, over a floor without an end.

    Gymnasium 1.4 takes one that stands still (MujocoRenderer in gymnasium/envs/mujoco/mujoco_rendering.py): a
    HalfCheetah is out of its sight after a hundred steps, and beyond the floor after two hundred.
    """
    model = inner.model
    try:
        inner.mujoco_renderer.camera_id = model.camera(_CAMERA).id
    except KeyError:
        return
    for floor in np.flatnonzero(model.geom_type == _PLANE):
        # What collides with a plane finds no end to it: its size is only drawn, and 0 is drawn as infinite
        # (MuJoCo's XML reference, geom, size). Its texture is repeated by the metre then.
        size, material = model.geom_size[floor, :2].copy(), model.geom_matid[floor]
        if size.all() and material >= 0:
            model.geom_size[floor, :2] = 0
            model.mat_texrepeat[material] /= size


def picture(env: Any, name: str) -> np.ndarray:
    """Return what the environment looks like now, uint8 [height, width, 3]; `name` is for sentences."""
    gymnasium = importlib.import_module("gymnasium")
    try:
        drawn = env.render() if hasattr(env, "render") else None
    except NotImplementedError:
        drawn = None
    except gymnasium.error.DependencyNotInstalled as error:
        said = str(error).partition("\n")[0]
        raise MissingExtraError(f"{name} cannot be drawn: {said}", hint="pip install pygame-ce") from None
    found = np.asarray(drawn)
    if found.dtype != np.uint8 or found.ndim != 3 or found.shape[2] != 3:
        raise UnsupportedError(f"{name} draws no picture", expected="uint8[height, width, 3]")
    return found


def _offscreen() -> str:
    """Return the OpenGL that draws without a display: the one that is asked for, or the first that works."""
    asked = os.environ.get(_CHOICE)
    failed = {}
    for name in (asked,) if asked else _candidates():
        failed[name] = _failure(name)
        if not failed[name]:
            return name
    said = "; ".join(f"{name}: {why}" for name, why in failed.items())
    raise UnsupportedError(f"MuJoCo finds no OpenGL to draw with ({said})", hint=HINT)


def _candidates() -> tuple[str, ...]:
    if not sys.platform.startswith("linux"):
        return ("glfw",)
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return ("egl", "osmesa", *(["glfw"] if display else []))


@functools.cache
def _failure(name: str) -> str:
    """Return why this OpenGL does not work, in a line, or nothing if it does."""
    command = [sys.executable, "-P", "-c", _TRIAL, name]
    environment = {**search_paths.environment(), _CHOICE: name}
    try:
        done = subprocess.run(  # noqa: S603  # our own interpreter and our own words
            command, capture_output=True, env=environment, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_TIMEOUT_S} s"
    if done.returncode == 0:
        return ""
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return said[-1][:160] if said else f"ended with status {done.returncode}"
