"""Films of scored episodes: the same play once more, drawn, into a file that is whole or not there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from ckpttool import urls
from ckpttool.agents import film_files
from ckpttool.agents.envs import VectorEnv
from ckpttool.agents.envs.simulators import is_factory
from ckpttool.agents.envs.tensors import ENGINE as DEVICE
from ckpttool.agents.filming import Camera, CutError, Show
from ckpttool.agents.rollout import Rollout
from ckpttool.errors import CkpttoolError, UsageError
from ckpttool.ops.agent_facts import NO_FACTS, AgentFacts
from ckpttool.ops.entries import entries
from ckpttool.ops.evaluate import Entrant, enter, place_of, play
from ckpttool.ops.evaluation import Evaluation, Protocol
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.restore import restore
from ckpttool.writing import Output, require_new, write_atomically

WORDS = ("best", "worst", "median")
_FPS = 30.0  # where the environment does not say


@dataclass(frozen=True, slots=True)
class Take:
    """One filmed episode: the words that chose it, its return and steps, and the return that was scored.

    `equal` says that return and steps are those that were scored, bit for bit.
    """

    episode: int
    wanted: tuple[str, ...]
    paid: float
    steps: int
    scored: float
    equal: bool


@dataclass(frozen=True, slots=True)
class Film:
    """A file with episodes one after the other, a picture before the first step and one after each."""

    file: str
    checkpoint: str
    fps: float
    width: int
    height: int
    takes: tuple[Take, ...]

    @property
    def frames(self) -> int:
        """The number of pictures that were drawn."""
        return sum(take.steps + 1 for take in self.takes)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "file": self.file,
            "checkpoint": urls.spelled(self.checkpoint),
            "fps": self.fps,
            "width": self.width,
            "height": self.height,
            "frames": self.frames,
            "episodes": [
                {
                    "episode": take.episode,
                    "wanted": list(take.wanted),
                    "return": take.paid,
                    "length": take.steps,
                    "scored": take.scored,
                    "equal": take.equal,
                }
                for take in self.takes
            ],
        }


def require(
    paths: Sequence[str],
    env: str | None,
    how: Protocol,
    target: str,
    wanted: Sequence[str] = ("0",),
    *,
    layout: str | None = None,
    facts: AgentFacts = NO_FACTS,
) -> None:
    """Raise unless a film can be made of one of these checkpoints: for asking before hours of playing.

    `wanted` are episodes by number, or best, worst and median. Raise UsageError for what is none of them and
    for a file that does not say how to write it, TargetExistsError for one that is there, MissingExtraError
    and UnsupportedError where no picture can be drawn or written: one is drawn to know. Checkpoints that
    cannot be played are not this function's to report.
    """
    if _suffix(target) not in film_files.WRITERS:
        raise UsageError(
            "the film's name does not say what to write",
            file=target,
            hint=f"a film ends in {' or '.join(film_files.WRITERS)}",
        )
    require_new(target, hint="take another name")
    for word in wanted:
        _require_episode(word, how.episodes)
    film_files.require(_suffix(target))
    _require_gymnasium(env, how)
    for entry in entries(paths):
        with suppress(CkpttoolError):
            place = place_of(restore(entry.path, layout, facts, how.network), env, how)
            break
    else:
        return
    with place.make(1, "gymnasium", pictures=True) as trial:
        trial.reset(np.arange(1), np.array([how.seed]))
        trial.frame(0)


def film(
    scored: Evaluation,
    target: str,
    wanted: Sequence[str] = ("0",),
    *,
    env: str | None = None,
    layout: str | None = None,
    facts: AgentFacts = NO_FACTS,
    progress: Progress = silent,
) -> Film:
    """Play what was scored once more and write the episodes that are wanted, in their order, to a new file.

    `env`, `layout` and `facts` are what the evaluation was asked for with. The policy sees the same
    batches, so that every step is repeated bit for bit; Take.equal says so. Where the score was computed
    otherwise (several checkpoints stacked) it may not be. Raise as `require` does, and KeyboardInterrupt
    on Ctrl-C: then no file is written.
    """
    require_new(target, hint="take another name")
    how = scored.protocol
    _require_gymnasium(env, how)
    agent = restore(scored.checkpoint, layout, facts, how.network)
    place = place_of(agent, env, how)
    chosen = _chosen(wanted, scored.rollout)
    counted = _Counted(progress, sum(int(scored.rollout.lengths[number]) + 1 for number in chosen))
    takes: list[Take] = []
    with place.make(how.at_once, "gymnasium", pictures=True) as vector:
        studio = _Studio(enter(agent, place, how, vector.spec), vector, scored)
        fps = vector.spec.render_fps or _FPS

        def write(stream: IO[bytes]) -> None:
            with film_files.WRITERS[_suffix(target)](stream, fps) as show:
                for number, words in chosen.items():
                    takes.append(studio.take(number, words, counted.to(show)))

        write_atomically((Output(target, write),))
    return Film(target, scored.checkpoint, fps, *counted.size, tuple(takes))


def _require_gymnasium(env: str | None, how: Protocol) -> None:
    if how.engine == DEVICE and env is not None and is_factory(env):
        raise UsageError(
            f"the simulator {env} cannot be filmed", hint="--video films environments of Gymnasium"
        )


def _require_episode(word: str, episodes: int) -> None:
    if word in WORDS:
        return
    if not word.isascii() or not word.isdigit():
        raise UsageError(f"there is no episode {word!r}", hint=f"numbers from 0, or {', '.join(WORDS)}")
    if int(word) >= episodes:
        raise UsageError(f"there is no episode {word}", hint=f"{episodes} are played, 0 to {episodes - 1}")


def _suffix(target: str) -> str:
    return os.path.splitext(target)[1].lower()


def _chosen(wanted: Sequence[str], played: Rollout) -> dict[int, tuple[str, ...]]:
    """Return the episodes' numbers in the order they were asked for, each once, with the words for it."""
    ranked = np.argsort(played.returns, kind="stable")
    named = {
        "best": int(np.argmax(played.returns)),
        "worst": int(ranked[0]),
        "median": int(ranked[(len(ranked) - 1) // 2]),
    }
    chosen: dict[int, tuple[str, ...]] = {}
    for word in wanted:
        number = named[word] if word in named else int(word)
        words = (word,) if word in named else ()
        chosen[number] = (*chosen.get(number, ()), *words)
    return chosen


@dataclass(frozen=True, slots=True, eq=False)
class _Studio:
    """An agent and environments that draw, where the play that was scored can be played again."""

    entrant: Entrant
    vector: VectorEnv
    scored: Evaluation

    def take(self, number: int, words: tuple[str, ...], show: Show) -> Take:
        """Film one episode; a play for each, because those that are played at once would come interleaved."""
        how, played = self.scored.protocol, self.scored.rollout
        title = ", ".join((f"episode {number}", *words))
        camera = Camera(self.vector, number, title, show)
        try:
            play((self.entrant,), how, self.vector, watch=camera)
        except CutError:
            steps, score = camera.frames - 1, float(played.returns[number])
            equal = camera.paid == score and steps == played.lengths[number]
            return Take(number, words, camera.paid, steps, score, bool(equal))
        # Only Ctrl-C ends a play before its last episode does.
        raise KeyboardInterrupt


class _Counted:
    """Counts pictures on their way into a film, and remembers their size."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total = progress, total
        self.done = 0
        self.size = (0, 0)

    def to(self, show: Show) -> Show:
        def counted(picture: np.ndarray) -> None:
            show(picture)
            self.done += 1
            self.size = (picture.shape[1], picture.shape[0])
            self.progress(self.done, self.total)

        return counted
