"""TensorFlow's SavedModels: a folder with a graph (saved_model.pb) and a tensor bundle (variables/variables).

The folder's layout is that of tensorflow/python/saved_model/constants.py. The graph is read as data, never
run: it says what the variables are called, which are trained, and which signature uses which.
"""

from __future__ import annotations

import os

from ckpttool import places
from ckpttool.checkpoint import Checkpoint
from ckpttool.formats.probe import Probe

NAME = "saved_model"
TITLE = "TensorFlow SavedModel (folder with saved_model.pb and variables/)"
WRITES = False
FRAMEWORK = "tensorflow"

GRAPH = "saved_model.pb"
TEXT_GRAPH = "saved_model.pbtxt"
CHUNKED_GRAPH = "saved_model.cpb"
METADATA = "keras_metadata.pb"
VARIABLES = os.path.join("variables", "variables")


def claims(probe: Probe) -> str | None:
    """Return the folder of the SavedModel that the path means: the folder itself, or its graph.

    A folder that has variables/variables.index and no graph is one too (TF-Agents writes such), unless it
    holds checkpoints of its own.
    """
    if probe.kind == "file":
        # Keras's description of the layers belongs to the graph beside it.
        described = probe.name == METADATA and not probe.names.isdisjoint((GRAPH, TEXT_GRAPH))
        return probe.folder if described or probe.name in (GRAPH, TEXT_GRAPH) else None
    if probe.kind != "folder":
        return None
    if not probe.names.isdisjoint((GRAPH, TEXT_GRAPH)):
        return probe.path
    if "variables" not in probe.names or _holds_checkpoints(probe):
        return None
    return probe.path if places.isfile(os.path.join(probe.path, f"{VARIABLES}.index")) else None


def _holds_checkpoints(probe: Probe) -> bool:
    if "checkpoint" in probe.names or any(name.endswith(".index") for name in probe.names):
        return True
    # A prefix may have a folder of the same name beside its index.
    return places.isfile(f"{probe.path.rstrip('/')}.index")


def read(location: str) -> Checkpoint:
    """List the variables of the SavedModel in the folder `location`, and what its graph says about them.

    A graph that is damaged, absent or too large costs only what it would have said: a note tells so. Damaged
    variables are a FormatError, like those of any tensor bundle, and so are variables that the graph has and
    the folder has not.
    """
    # Every command asks every format what it claims; only this one's own reader needs the rest.
    from ckpttool.formats.saved_model.listing import read as listed

    return listed(location)
