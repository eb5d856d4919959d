"""Plugin registry: built-in formats, layouts and backends, and others (also commands) by entry point."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Literal, cast

from ckpttool.core import search_paths
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import MissingExtraError, UsageError, suggest_choice

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


Kind = Literal["formats", "layouts", "backends", "commands"]

# What every module of a kind defines.
_DEFINES: dict[Kind, tuple[str, ...]] = {
    "formats": ("NAME", "TITLE", "WRITES", "FRAMEWORK", "claims", "read"),
    "layouts": ("TABLE", "recognise"),
    "backends": ("NAME", "build", "versions"),
    "commands": ("run",),
}

# Errors that importlib.metadata treats as a package without entry points.
_UNREADABLE = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


ANY = ("",)  # as `folder` or `prefix`: the format inspects every path


class FormatSignature(NamedTuple):
    """Signature of a format's files; the format's module is imported when any field matches.

    A signature may match too much, never too little: `claims` of the module makes the decision.
    """

    magic: tuple[bytes, ...] = ()
    """the bytes at `offset`"""
    offset: int = 0
    end: bytes = b""
    """the last bytes"""
    suffixes: tuple[str, ...] = ()
    """ends of the file's name, in lower case"""
    infix: str = ""
    """a part of the file's name, in lower case"""
    members: tuple[str, ...] = ()
    """ends of the members' names in a zip archive; a damaged archive matches too"""
    pickle: bool = False
    """whether pickles can belong to the format (see formats.pickle_signatures.find_pickle_format)"""
    folder: tuple[str, ...] = ()
    """parts of the names in a folder"""
    nested: bool = False
    """whether the only folder in a folder may hold the files"""
    prefix: tuple[str, ...] = ()
    """parts of the names beside a path without a file, which may be the prefix of several files"""


class Plugin(NamedTuple):
    """A plugin: its name, its module, and the libraries (of the extra) that it needs.

    Built-in formats have a signature; formats without one (from other packages) are tried on every
    path.
    """

    name: str
    module: str
    extra: str | None = None
    requires: tuple[str, ...] = ()
    # Requirements of a library before its module is imported, as regular expressions that match whole: a name
    # in an agent's tree, or the file's name. A row may match too much, never too little; a library without
    # either (from another package) is tried on every tree.
    names: str = ""
    files: str = ""
    owner: str = "ckpttool"
    signature: FormatSignature | None = None
    # Names that the module of another package must define.
    defines: tuple[str, ...] = ()

    def available(self) -> bool:
        """Return whether everything that the plugin needs is installed."""
        return all(importlib.util.find_spec(name) is not None for name in self.requires)

    def load(self) -> ModuleType:
        """Import the module; raise MissingExtraError when a library that it needs is not installed."""
        if not self.available():
            from ckpttool.core.installation import install_extra

            missing = [n for n in self.requires if importlib.util.find_spec(n) is None]
            verb = "is" if len(missing) == 1 else "are"
            raise MissingExtraError(
                f"{self.name} needs {', '.join(missing)}, which {verb} not installed",
                hint=install_extra(self.extra) if self.extra else None,
            )
        try:
            module, _, name = self.module.partition(":")
            target = importlib.import_module(module)
            target = cast(ModuleType, getattr(target, name)) if name else target
        except Exception as error:  # the module of another package may raise anything
            if self.owner == "ckpttool":
                raise
            if isinstance(error, ModuleNotFoundError):
                raise self._load_error(str(error), "install its dependencies") from error
            traceback = f"run python -c 'import {module}' to show the traceback"
            raise self._load_error(f"{type(error).__name__}: {error}", traceback) from error
        undefined = [name for name in self.defines if not hasattr(target, name)]
        if undefined:
            reason = f"{self.module} does not define {', '.join(undefined)}"
            raise self._load_error(reason, f"define {' and '.join(undefined)} there")
        return target

    def _load_error(self, reason: str, repair: str) -> UsageError:
        return UsageError(
            f"cannot load {self.name} from package {self.owner}: {reason}",
            hint=f"{repair}, or run pip uninstall {self.owner}",
        )


# The state file of a TensorFlow folder is text that may begin with white space or a comment.
_STATE = (
    b"model_checkpoint_path",
    b"all_model_checkpoint_path",
    *(bytes((byte,)) for byte in b" \t\r\n\f\v#"),
)
# The last bytes of a table (tensorflow/core/lib/io/format.h, kTableMagicNumber).
_TABLE = bytes.fromhex("57fb808b247547db")
# torch's magic number as a pickle of protocols 2 to 5, possibly framed, and of protocols 0 and 1.
_STREAM = (
    *(bytes((0x80, protocol)) + opcode for protocol in (2, 3, 4, 5) for opcode in (b"\x8a\n", b"\x95")),
    b"L119547037146038801333356",
)
# onnx.proto, ModelProto: the fields that may come first: numbers, then those with a length.
_MODEL = (b"\x08", b"\x28", *(bytes((n << 3 | 2,)) for n in (2, 3, 4, 6, 7, 8, 14, 20, 25)))
_HDF5 = (".h5", ".hdf5", ".h5f", ".hdf", ".he5", ".keras", ".weights.json")
_SAVED_MODEL = ("saved_model.pb", "saved_model.pbtxt", "saved_model.cpb")
_RLLIB = ("rllib_checkpoint.json", "class_and_ctor_args.pkl", "_state.", "checkpoint-")
_SB3 = ("_stable_baselines3_version", "policy.pth")
_WEIGHTS = (".index.json", "model.safetensors", "pytorch_model.bin")

# The networks of an agent under the names of layouts td3_torch and td3_tf.
_AGENT = r"((actor|critic|value)(_target)?|discriminator)"

BUILT_IN: dict[Kind, tuple[Plugin, ...]] = {
    "formats": (
        Plugin(
            "tensor_bundle",
            "ckpttool.formats.tf_bundle",
            signature=FormatSignature(
                magic=_STATE, suffixes=(".index",), infix=".data-", folder=ANY, prefix=ANY
            ),
        ),
        Plugin(
            "tensorflow_v1",
            "ckpttool.formats.tf_v1",
            signature=FormatSignature(magic=_STATE, end=_TABLE, folder=ANY, prefix=ANY),
        ),
        Plugin(
            "saved_model",
            "ckpttool.formats.tf_saved_model",
            signature=FormatSignature(
                suffixes=(*_SAVED_MODEL, "keras_metadata.pb"), folder=(*_SAVED_MODEL, "variables")
            ),
        ),
        Plugin(
            "keras_h5",
            "ckpttool.formats.keras_h5",
            signature=FormatSignature(magic=(b"\x89HDF\r\n\x1a\n",), suffixes=_HDF5),
        ),
        Plugin(
            "keras_zip",
            "ckpttool.formats.keras_h5:KERAS_ARCHIVE",
            signature=FormatSignature(members=("config.json",)),
        ),
        Plugin(
            "keras_rl",
            "ckpttool.formats.keras_h5:KERAS_RL",
            signature=FormatSignature(prefix=("_actor.h5f",)),
        ),
        Plugin(
            "pytorch",
            "ckpttool.formats.torch_zip",
            signature=FormatSignature(
                members=("/data.pkl",), suffixes=("data.pkl",), folder=("data.pkl",), nested=True
            ),
        ),
        Plugin("pytorch_legacy", "ckpttool.formats.torch_legacy", signature=FormatSignature(magic=_STREAM)),
        Plugin(
            "pytorch_tar",
            "ckpttool.formats.torch_legacy:PYTORCH_TAR",
            signature=FormatSignature(magic=(b"ustar",), offset=257),
        ),
        Plugin(
            "pytorch_set",
            "ckpttool.formats.torch_zip:PYTORCH_SET",
            signature=FormatSignature(folder=("_actor",), prefix=("_actor",)),
        ),
        Plugin(
            "pytorch_dcp",
            "ckpttool.formats.torch_dcp",
            signature=FormatSignature(suffixes=(".distcp",), pickle=True, folder=(".metadata",)),
        ),
        Plugin(
            "stable_baselines2",
            "ckpttool.formats.sb3:STABLE_BASELINES2",
            signature=FormatSignature(members=("parameter_list",), pickle=True),
        ),
        Plugin(
            "stable_baselines3", "ckpttool.formats.sb3", signature=FormatSignature(members=_SB3, folder=_SB3)
        ),
        Plugin(
            "rllib",
            "ckpttool.formats.rllib",
            signature=FormatSignature(suffixes=("rllib_checkpoint.json",), pickle=True, folder=_RLLIB),
        ),
        Plugin("d3rlpy", "ckpttool.formats.d3rlpy", signature=FormatSignature(pickle=True)),
        Plugin(
            "safetensors",
            "ckpttool.formats.safetensors",
            signature=FormatSignature(magic=(b"{",), offset=8, suffixes=(".safetensors",)),
        ),
        Plugin(
            "npz",
            "ckpttool.formats.npz",
            signature=FormatSignature(magic=(b"\x93NUMPY", b"PK\x05\x06"), members=(".npy",)),
        ),
        Plugin("onnx", "ckpttool.formats.onnx", signature=FormatSignature(magic=_MODEL)),
        Plugin(
            "sharded",
            "ckpttool.formats.sharded",
            signature=FormatSignature(suffixes=(".index.json",), folder=_WEIGHTS),
        ),
        Plugin(
            "pickle", "ckpttool.formats.torch_legacy:PYTHON_PICKLE", signature=FormatSignature(pickle=True)
        ),
    ),
    "layouts": (
        Plugin("td3_torch", "ckpttool.libraries.td3:TORCH", names=rf"{_AGENT}/(.*/)?weight"),
        Plugin("td3_tf", "ckpttool.libraries.td3:TF", names=rf"([^/]*/)?{_AGENT}/(.*/)?(kernel|w)"),
        Plugin("tf2rl", "ckpttool.libraries.tf2rl", names=r"(.*/)?actor/out_mean/[^/]*"),
        Plugin(
            "fujimoto", "ckpttool.libraries.fujimoto:FUJIMOTO", names=r"(.*/)?l[1-9][./](weight|bias)(/.*)?"
        ),
        Plugin(
            "stable_baselines2",
            "ckpttool.libraries.sb2",
            # A file that does not name its variables has a list of them.
            names=r"(model|target)/(pi|values_fn|qf)/.*|deepq/model/.*|params/0",
        ),
        Plugin(
            "stable_baselines3",
            "ckpttool.libraries.sb3",
            # An algorithm's file, a policy's own file, its state_dict, the module pickled as a whole.
            names=r"((policy|state_dict)/)?(actor[./](mu|latent_pi)|(q_net|quantile_net)[./](q_net|quantile_net)"
            r"|mlp_extractor[./](policy|value|shared)_net|action_net|value_net)[./].*|policy/features_extractor[./].*"
            r"|state_dict/(mu|latent_pi)/.*"
            r"|_modules/(action_net|(actor/_modules/(mu|latent_pi))|((q_net|quantile_net)/_modules/(q_net|quantile_net)))/.*",
        ),
        Plugin(
            "cleanrl",
            "ckpttool.libraries.cleanrl",
            names=r"actor_logstd|0/(fc_mu|fc_mean)/weight|model_weights/atoms",
            files=r".*\.cleanrl_model",
        ),
        Plugin(
            "tianshou",
            "ckpttool.libraries.tianshou",
            names=r"(.*/)?(actor[./](_modules/)?preprocess|model_old)[./].*",
        ),
        Plugin(
            "spinningup",
            "ckpttool.libraries.spinningup",
            # The variables of TensorFlow 1, a state_dict, a module pickled as a whole.
            names=r"(main/)?pi/dense/.*|pi/(pi|net|mu_net|logits_net)/0/.*|_modules/(pi|q[12]?|v)/.*",
        ),
        Plugin(
            "d3rlpy",
            "ckpttool.libraries.d3rlpy",
            names=r"(torch/)?_?(policy|imitator|q_funcs/0|q_func/_q_funcs/0)/_encoder/(_layers|_fcs|_last_layers|_fc)/.*",
        ),
        Plugin(
            "rsl_rl",
            "ckpttool.libraries.rsl_rl",
            names=r"(model_state_dict/(actor|student)|(actor|student)_state_dict/mlp)/0/weight",
        ),
        Plugin("rl_games", "ckpttool.libraries.rl_games", names=r"model/a2c_network/(mu|logits)/.*"),
        Plugin("fasttd3", "ckpttool.libraries.fasttd3:FASTTD3", names=r"qnet_state_dict(/.*)?"),
        Plugin("elegantrl", "ckpttool.libraries.elegantrl", names=r"((_parameters|_buffers)/)?state_avg"),
        Plugin("agilerl", "ckpttool.libraries.agilerl", names=r"network_info/modules/actor_cls"),
        Plugin(
            "skrl",
            "ckpttool.libraries.skrl",
            names=r"(target_policy|critic_1|target_critic|policy_optimizer|value|q_network"
            r"|(value|observation|state)_preprocessor)(/.*)?",
        ),
        Plugin(
            "tf_agents",
            "ckpttool.libraries.tf_agents",
            # Policies exported by version 0.6 list their attributes without names.
            names=r".*/(_actor_network|_actor_net|_q_network)(/.*)?"
            r"|_all_assets/[^/]*/ref/(_mlp_layers|_sequential_layers|_projection_networks)(/.*)?",
        ),
        Plugin(
            "acme",
            "ckpttool.libraries.acme",
            # A learner's networks, and the variables of a snapshot.
            names=r"([^/]*/)?(target_policy|target_critic)(/.*)?|_variables(/.*)?",
        ),
        Plugin("torchrl", "ckpttool.libraries.torchrl", names=r"(.*/)?module/0/module/(0/)?\d+/weight"),
        Plugin("keras_rl", "ckpttool.libraries.keras_rl", files=r".*\.h5f"),
        Plugin(
            "rlgraph",
            "ckpttool.libraries.rlgraph",
            names=r"policy/action-adapter-0/action-network/[^/]+/dense/kernel",
        ),
        Plugin(
            "rllib",
            "ckpttool.libraries.rllib",
            names=r"learner_group/learner/rl_module/.*|(pi_encoder|encoder)/(.*/)?mlp/[^/]*/[^/]*",
        ),
        Plugin("rllib_policy", "ckpttool.libraries.rllib:POLICY", names=r"(policies/[^/]*/)?weights(/.*)?"),
    ),
    "backends": (
        Plugin("numpy", "ckpttool.networks.numpy_backend"),
        Plugin("torch", "ckpttool.networks.torch_backend", "torch", ("torch",)),
        Plugin("tensorflow", "ckpttool.networks.tensorflow_backend", "tensorflow", ("tensorflow",)),
        Plugin("onnxruntime", "ckpttool.networks.onnx_backend", "onnx", ("onnx", "onnxruntime")),
    ),
    "commands": (),  # those of ckpttool: cli/app.py
}

_HTTP = ("ckpttool.core.remote_sites:Web", "remote", ("fsspec", "aiohttp"))
_S3 = ("ckpttool.core.remote_sites:S3", "s3", ("fsspec", "s3fs"))
_GS = ("ckpttool.core.remote_sites:GS", "gs", ("fsspec", "gcsfs"))
# Stores by URL scheme; built in only, because a store must keep the guarantees for servers.
STORES: dict[str, Plugin] = {
    "http": Plugin("http://", *_HTTP),
    "https": Plugin("https://", *_HTTP),
    "s3": Plugin("s3://", *_S3),
    "s3a": Plugin("s3a://", *_S3),
    "gs": Plugin("gs://", *_GS),
    "gcs": Plugin("gcs://", *_GS),
    "hf": Plugin("hf://", "ckpttool.core.remote_sites:HF", "hf", ("fsspec", "aiohttp", "huggingface_hub")),
    "memory": Plugin("memory://", "ckpttool.core.remote_sites:ObjectStore", *_HTTP[1:]),
    "zip": Plugin("zip://", "ckpttool.encodings.archive_store:ArchiveStore"),
    "tar": Plugin("tar://", "ckpttool.encodings.archive_store:ArchiveStore"),
}


def installed(kind: Kind) -> tuple[Plugin, ...]:
    """Return built-in plugins and entry points of `ckpttool.<kind>`; raise for a duplicate name.

    The working directory is not searched: metadata there would name code to run, and may be a stranger's.
    """
    plugins_ = {plugin.name: plugin for plugin in BUILT_IN[kind]}
    folders = search_paths.installed_folders(tuple(map(os.fsdecode, sys.path)))  # some are Path objects
    for point in _entry_points(folders)[kind]:
        owner = point.dist.name if point.dist is not None else point.value
        if point.name in plugins_:
            raise UsageError(
                f"two packages provide {kind[:-1]} {point.name!r}: {plugins_[point.name].owner} and {owner}",
                hint="uninstall one of them",
            )
        plugins_[point.name] = Plugin(point.name, point.value, owner=owner, defines=_DEFINES[kind])
    return tuple(plugins_.values())


@functools.lru_cache(maxsize=4)
def _entry_points(folders: tuple[str, ...]) -> Mapping[Kind, Iterable[EntryPoint]]:
    if not _may_have_entry_points(folders):
        return dict.fromkeys(BUILT_IN, ())
    from importlib.metadata import distributions

    path = list(folders)
    groups = {kind: f"ckpttool.{kind}" for kind in BUILT_IN}
    owners = {
        package.name
        for package in distributions(path=path)
        if any(package.entry_points.select(group=group) for group in groups.values())
    }
    # Of two packages of one name, Python imports the first.
    packages = [next(iter(distributions(name=name, path=path))) for name in sorted(owners)]
    return {
        kind: [point for package in packages for point in package.entry_points.select(group=group)]
        for kind, group in groups.items()
    }


def _may_have_entry_points(folders: tuple[str, ...]) -> bool:
    """Return whether an installed package may have entry points in our groups.

    Importing importlib.metadata and parsing the metadata of every package takes longer than a small
    conversion. This function reads the same files (importlib/metadata/__init__.py, FastPath.search)
    and returns True for everything it does not read: archives, eggs, finders other than Python's
    own.
    """
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return True
    for folder in folders:
        if folder.lower().endswith(".egg") or os.path.isfile(folder):
            return True
        with contextlib.suppress(*_UNREADABLE), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.lower().endswith((".dist-info", ".egg-info")) and _has_entry_points(entry.path):
                    return True
    return False


def _has_entry_points(metadata: str) -> bool:
    with contextlib.suppress(*_UNREADABLE), open(os.path.join(metadata, "entry_points.txt"), "rb") as file:
        return b"[ckpttool." in file.read()
    return False


def find(kind: Kind, name: str) -> Plugin:
    """Return the plugin with that name; raise UsageError with the known names when there is none."""
    for plugin in BUILT_IN[kind]:
        if plugin.name == name:
            return plugin
    known = installed(kind)
    for plugin in known:
        if plugin.name == name:
            return plugin
    raise UsageError(
        f"unknown {kind[:-1]} {name!r}",
        hint=suggest_choice(name, (plugin.name for plugin in known)),
    )
