"""Says which program's model a file is that no format claims: it was made to run, not to be restored."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Archive(NamedTuple):
    """A member's name that tells what a zip archive is."""

    member: re.Pattern[str]
    what: str
    hint: str


class Model(NamedTuple):
    """What a file's first bytes look like, what that is, and what to point at instead."""

    start: re.Pattern[bytes]
    what: str
    hint: str
    graph: bool = False  # of TensorFlow, whose operations are judged
    weights: bool = False  # a checkpoint all the same, in a form that is not read


# A length of a protobuf field: a varint of at most five bytes.
_LENGTH = rb"[\x80-\xff]{0,4}[\0-\x7f]"

# Sources: tensorflow/lite/schema/schema.fbs (file_identifier, byte 4); tensorflow/core/framework/graph.proto
# and node_def.proto (a node: its name, its operation); tensorflow/core/protobuf/meta_graph.proto (in a
# MetaInfoDef, stripped_op_list: operations by name) and saved_model.proto (version 1, then a MetaGraphDef);
# torch/csrc/jit/serialization/mobile_bytecode.fbs and executorch/schema/program.fbs (file_identifier).
# flax/serialization.py (`to_bytes`: a list is a map from "0" on) and the msgpack specification.
MODELS = (
    Model(
        re.compile(rb".{4}PTMF", re.DOTALL),
        "a PyTorch model for mobile devices (a flatbuffer), made to run and not to restore",
        "use the TorchScript file or the checkpoint that it was made from",
    ),
    Model(
        re.compile(rb".{4}ET\d\d", re.DOTALL),
        "an ExecuTorch program, made to run and not to restore",
        "use the checkpoint that it was made from",
    ),
    Model(
        re.compile(rb".{4}TFL3", re.DOTALL),
        "a TensorFlow Lite model, made to run and not to restore",
        "use the checkpoint, SavedModel or Keras file that it was made from",
    ),
    Model(
        re.compile(
            rb"\x0a%b\x0a%b[\w./>\-]+\x12[\x01-\x7f][A-Z_][\w>]*[\x0a\x12\x1a\x22\x2a]" % (_LENGTH, _LENGTH)
        ),
        "a TensorFlow graph alone (a GraphDef, whose weights are constants if any), not a checkpoint",
        "use the checkpoint or SavedModel that it was made from",
        graph=True,
    ),
    Model(
        re.compile(rb"\x0a%b\x12%b\x0a%b\x0a[\x01-\x7f][A-Z_][\w>]*\W" % (_LENGTH, _LENGTH, _LENGTH)),
        "a TensorFlow graph alone (a MetaGraphDef, as a Saver's .meta holds), not its checkpoint",
        "name the prefix of the .index and .data files that belong to it",
        graph=True,
    ),
    Model(
        re.compile(rb"\x08\x01\x12%b\x0a%b[\x0a\x12\x1a\x22]" % (_LENGTH, _LENGTH)),
        "the graph of a SavedModel under another name",
        "call it saved_model.pb, beside its folder variables, and name the folder of both",
        graph=True,
    ),
    Model(
        re.compile(rb"[\x81-\x8f](?:\xa1[0-9][\x80-\x9f\xdc-\xdf]|\xa6params[\x80-\x8f\xde\xdf])"),
        "parameters in msgpack, as Flax writes them (JAX; CleanRL's programs in JAX too), which are not read",
        "load it with flax.serialization and save its arrays with numpy.savez",
        weights=True,
    ),
)


# Sources: torch/export/pt2_archive/constants.py, and torch/export/__init__.py (`save`) before 2.8;
# caffe2/serialize/inline_container.h (the history of versions) for TorchScript before 1.2;
# torch/package/package_exporter.py (`_finalize_zip`).
ARCHIVES = (
    Archive(
        re.compile(r"[^/]+/archive_format|serialized_exported_program\.(json|pt)"),
        "a torch.export program (.pt2), made to run and not to restore",
        "save the state_dict of what torch.export.load returns",
    ),
    Archive(
        re.compile(r"[^/]+/model\.json"),
        "a TorchScript file of PyTorch 1.0 or 1.1",
        "load it there and save its state_dict",
    ),
    Archive(
        re.compile(r"[^/]+/\.data/(extern_modules|python_version)"),
        "a torch.package archive, whose pickles have names of their own",
        "save the state_dict of what it holds",
    ),
)


def archived(members: Iterable[str]) -> Archive | None:
    """Return what the members of a zip archive tell that it is."""
    names = list(members)
    return next((each for each in ARCHIVES if any(map(each.member.fullmatch, names))), None)


def known(head: bytes) -> Model | None:
    """Return the model that the file's first bytes look like."""
    return next((model for model in MODELS if model.start.match(head)), None)
