"""A learner, its batches and what became of it on their way between processes: JSON and npz, no pickles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.agents import serial
from ckpttool.agents.training.learner import Adam, Batch, Learner
from ckpttool.agents.training.td3 import Trained, Weights

_LEARNER, _BATCHES, _TRAINED = "learner.npz", "batches.npz", "trained.npz"
_MOMENTS = ("m", "v", "vhat")


def write(learner: Learner, batches: Sequence[Batch], folder: Path) -> dict[str, Any]:
    """Write the arrays into the folder; return the rest as a document for JSON."""
    arrays: dict[str, np.ndarray] = {"low": learner.low, "high": learner.high}
    document = {
        "networks": {
            title: serial.taken_apart(network, arrays, f"{number}/")
            for number, (title, network) in enumerate(learner.networks.items())
        },
        "critics": list(learner.critics),
        "slow": dict(learner.slow),
        "updates": learner.updates,
        "actor_adam": _adam("actor", learner.actor_adam, arrays),
        "critic_adam": _adam("critic", learner.critic_adam, arrays),
    }
    np.savez(folder / _LEARNER, allow_pickle=False, **arrays)
    stacked = {name: np.stack([getattr(b, name) for b in batches]) for name in Batch._fields}
    np.savez(folder / _BATCHES, allow_pickle=False, **stacked)
    return document


def read(document: dict[str, Any], folder: Path) -> tuple[Learner, list[Batch]]:
    """Return what `write` was given."""
    with np.load(folder / _LEARNER, allow_pickle=False) as arrays:
        learner = Learner(
            networks={t: serial.put_together(each, arrays) for t, each in document["networks"].items()},
            critics=tuple(document["critics"]),
            slow=document["slow"],
            actor_adam=_read_adam("actor", document["actor_adam"], arrays),
            critic_adam=_read_adam("critic", document["critic_adam"], arrays),
            low=arrays["low"],
            high=arrays["high"],
            updates=document["updates"],
        )
    with np.load(folder / _BATCHES, allow_pickle=False) as stacked:
        rows = zip(*(stacked[name] for name in Batch._fields), strict=True)
        return learner, [Batch(*row) for row in rows]


def write_trained(trained: Trained, folder: Path) -> dict[str, Any]:
    """Write the weights into the folder; return the rest as a document for JSON."""
    held = {"first": trained.first, "last": trained.last}
    named = {
        f"{when}/{t}/{n}": a for when, by in held.items() for t, w in by.items() for n, a in enumerate(w)
    }
    np.savez(folder / _TRAINED, allow_pickle=False, **named)
    return {"steps": trained.steps, "moved": trained.moved}


def read_trained(document: dict[str, Any], folder: Path) -> Trained:
    """Return what `write_trained` was given."""
    first: Weights = {title: [] for title in document["moved"]}
    last: Weights = {title: [] for title in document["moved"]}
    with np.load(folder / _TRAINED, allow_pickle=False) as arrays:
        for name in arrays.files:  # in the order in which they were written
            when, _, rest = name.partition("/")
            (first if when == "first" else last)[rest.rpartition("/")[0]].append(arrays[name])
    return Trained(document["steps"], document["moved"], first, last)


def _adam(name: str, adam: Adam, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    held = {moment: getattr(adam, moment) for moment in _MOMENTS}
    arrays |= {f"{name}/{moment}/{n}": a for moment, each in held.items() for n, a in enumerate(each)}
    plain = {field.name: getattr(adam, field.name) for field in fields(adam) if field.name not in held}
    return {**plain, **{moment: len(each) for moment, each in held.items()}}


def _read_adam(name: str, document: dict[str, Any], arrays: Any) -> Adam:
    held = {m: tuple(arrays[f"{name}/{m}/{n}"] for n in range(document[m])) for m in _MOMENTS}
    return Adam(**{**document, **held, "l2": tuple(document["l2"])})
