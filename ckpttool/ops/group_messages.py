"""Groups on their way to another process and outcomes on their way back: JSON and arrays, no pickles."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool import documents, ledger, search_paths
from ckpttool.agents import serial
from ckpttool.agents.messages import Message, error_of, facts_of
from ckpttool.errors import CkpttoolError
from ckpttool.ops import results
from ckpttool.ops.evaluate import Entrant, Place
from ckpttool.ops.evaluation import Protocol
from ckpttool.ops.groups import Group, Outcome

ARRAYS = "group.npz"


def write(group: Group, folder: Path) -> Message:
    """Write a group's arrays into the folder; return the rest."""
    arrays: dict[str, np.ndarray] = {}
    entrants = [
        {
            "checkpoint": entrant.checkpoint,
            "place": dataclasses.asdict(entrant.place),
            "network": serial.taken_apart(entrant.network, arrays, f"{number}/"),
            "ledger": ledger.documents(entrant.ledger),
            "notes": entrant.notes,
        }
        for number, entrant in enumerate(group.entrants)
    ]
    np.savez(folder / ARRAYS, allow_pickle=False, **arrays)
    # The environment may be a module of the caller's own.
    return {
        "number": group.number,
        "entrants": entrants,
        "how": dataclasses.asdict(group.how),
        "sys_path": sys.path,
        "user_modules": search_paths.user_modules(),
    }


def read(document: Message, folder: Path) -> Group:
    """Return the group that was written."""
    with np.load(folder / ARRAYS, allow_pickle=False) as arrays:
        entrants = tuple(
            Entrant(
                each["checkpoint"],
                Place(**each["place"]),
                serial.put_together(each["network"], arrays),
                ledger.read(each["ledger"]),
                tuple(each["notes"]),
            )
            for each in document["entrants"]
        )
    return Group(document["number"], entrants, Protocol(**document["how"]))


def write_outcome(outcome: Outcome) -> Message:
    """Return an outcome as a document for JSON."""
    return {checkpoint: _result(result) for checkpoint, result in outcome.items()}


def read_outcome(document: Message, group: Group) -> Outcome:
    """Return what came of a group."""
    return {
        checkpoint: error_of(found["error"])
        if "error" in found
        else results.read(found["evaluation"], group.how)
        for checkpoint, found in document.items()
    }


def _result(result: Any) -> Message:
    if isinstance(result, CkpttoolError):
        return {"error": facts_of(result)}
    return {"evaluation": documents.plain(result.document())}
