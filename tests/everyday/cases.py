"""The ordinary checkpoints of the matrix, and which commands apply to each; imports no framework."""

from __future__ import annotations

from dataclasses import dataclass

TARGETS = ("torch", "tf", "keras", "safetensors", "npz")
COLUMNS = ("inspect", *TARGETS, "onnx", "eval")
# Facts that no file of a lone policy holds; the environment's bounds scale its tanh.
ENVIRONMENT = ("--env", "Pendulum-v1")
LONE = ("--activation", "relu", "--head", "tanh")
# The program of a model that ends in tanh scales its outputs.
SCALED = ("--head", "affine")

# The input of each network: shape without the batch, as PyTorch takes it; number of classes of an index.
INPUTS: dict[str, tuple[tuple[int, ...], int]] = {
    "mlp": ((3,), 0),
    "gaussian": ((3,), 0),
    "layernorm": ((5,), 0),
    "cnn": ((3, 6, 10), 0),
    "lstm": ((4, 5), 0),
    "gru": ((4, 5), 0),
    "block": ((4, 8), 0),
    "encoder": ((4, 8), 0),
    "embedding": ((4,), 11),
    "tied": ((4,), 11),
}
# The layers of each network, in the order in which a program makes them.
NAMES: dict[str, tuple[str, ...]] = {
    "mlp": ("fc1", "fc2", "fc3"),
    "gaussian": ("fc1", "fc2", "fc3"),
    "layernorm": ("fc1", "norm", "fc2"),
    "cnn": ("conv1", "bn1", "conv2", "fc1", "fc2"),
    "lstm": ("lstm", "fc"),
    "gru": ("gru", "fc"),
    "block": ("norm1", "query", "key", "value", "proj", "norm2", "linear1", "linear2", "head"),
    "encoder": ("self_attn", "linear1", "linear2", "norm1", "norm2"),
    "embedding": ("embed", "fc"),
    "tied": ("embed", "fc1", "decoder"),
}


# What a network needs that no tensor tells, by the option that gives it.
# The convolutions leave 5 channels of 2 by 6, which a dense layer takes flattened.
def _flatten(layer: str) -> tuple[str, str]:
    return "--flatten", f"{layer}=2,6,5"


@dataclass(frozen=True)
class Case:
    """One file of the matrix.

    Args:
        name: The function of `torch_files`, `tensorflow_files` or `keras_2_files` that makes it.
        title: What the page calls it.
        side: The module of makers: torch, tensorflow or keras_2.
        net: A key of INPUTS and NAMES.
        path: What the command is given, below the case's folder.
        optimizer: The kind of its optimizer, or None.
        policy: Whether it can be played on Pendulum.
        facts: Options that complete a policy which is no agent of a known layout.
        options: Options for conversions to another framework, if the first try names them.
        names: The names of the network's layers.
        dtype: The element type of its weights.
        several: Whether the file holds several networks, which a user's model has as attributes.
        differs: What a note must say if updates cannot be equal in the two frameworks.
        rate_elsewhere: Whether the learning rate stands in the program alone, which sets it again.
    """

    name: str
    title: str
    side: str
    net: str
    path: str
    optimizer: str | None = None
    policy: bool = False
    facts: tuple[str, ...] = LONE
    options: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    dtype: str = "float32"
    several: bool = False
    differs: str = ""
    rate_elsewhere: bool = False

    def applies(self, column: str) -> bool:
        """Return whether a command makes sense for this file."""
        return self.policy or column not in {"onnx", "eval"}

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of the network's layers."""
        return self.names or NAMES[self.net]


def _torch(name: str, title: str, net: str = "mlp", path: str = "model.pt", **rest: object) -> Case:
    rest.setdefault("policy", net == "mlp")
    return Case(name, title, "torch", net, path, **rest)  # type: ignore[arg-type]


def _tensorflow(name: str, title: str, net: str = "mlp", path: str = "ckpt-1", **rest: object) -> Case:
    rest.setdefault("policy", net == "mlp")
    return Case(name, title, "tensorflow", net, path, **rest)  # type: ignore[arg-type]


def _keras_2(name: str, title: str, net: str = "mlp", path: str = "model.h5", **rest: object) -> Case:
    rest.setdefault("policy", net == "mlp")
    return Case(name, title, "keras_2", net, path, **rest)  # type: ignore[arg-type]


SEQUENTIAL = ("0", "2", "4")

CASES: tuple[Case, ...] = (
    # PyTorch: how people save.
    _torch("state_dict", "`state_dict()` of an MLP"),
    _torch("sequential", "`state_dict()` of `nn.Sequential`", names=SEQUENTIAL),
    _torch(
        "tutorial",
        "PyTorch tutorial: `epoch`, `model_state_dict`, `optimizer_state_dict`, `loss`",
        optimizer="adam",
    ),
    _torch("model_epoch", '`{"model": ..., "epoch": 3}`'),
    _torch("model_optimizer_args", "`model`, `optimizer`, `args` as `argparse.Namespace`", optimizer="adam"),
    _torch(
        "nested_settings", "`model`, `optimizer`, `cfg` as `OmegaConf.to_container` gives", optimizer="adam"
    ),
    _torch("schedulers", "`model`, `optimizer`, two schedulers, `GradScaler`", optimizer="adam"),
    _torch(
        "random_states", "`model`, `optimizer`, random states of torch, NumPy and Python", optimizer="adam"
    ),
    _torch("old_format", "`state_dict()` in the format before torch 1.6"),
    _torch("safetensors", "`safetensors.torch.save_file`", path="model.safetensors"),
    _torch("two_networks", "`pi`, `qf` and an optimizer for each", optimizer="adam", several=True),
    _torch("history", "`net`, `opt`, lists of losses and returns, `best`, a NumPy number", optimizer="adam"),
    _torch("half", "`model.half().state_dict()`", dtype="float16", policy=False),
    _torch("bfloat16", "`model.bfloat16().state_dict()`", dtype="bfloat16", policy=False),
    # Whole modules and TorchScript.
    _torch("whole_sequential", "`torch.save(model)`, `nn.Sequential`", names=SEQUENTIAL, facts=SCALED),
    _torch("whole_module", "`torch.save(model)`, own class"),
    _torch("whole_cnn", "`torch.save(model)`, CNN with batch norm", "cnn", options=_flatten("fc1")),
    _torch("whole_hooked", "`torch.save(model)` with hooks, in `eval()`", names=SEQUENTIAL),
    _torch("script_mlp", "TorchScript of an MLP", facts=SCALED),
    _torch("script_cnn", "TorchScript of a CNN with batch norm", "cnn", options=_flatten("fc1")),
    # Wrappers.
    _torch("data_parallel", "`nn.DataParallel(model).state_dict()`"),
    _torch("distributed", "DDP names, `epoch`, `args`", optimizer="sgd"),
    _torch("compiled", "`torch.compile(model).state_dict()`"),
    _torch("compiled_distributed", "DDP around `torch.compile`, optimizer", optimizer="adamw"),
    _torch(
        "lightning",
        "Lightning `.ckpt` (same dict, made without Lightning)",
        path="last.ckpt",
        optimizer="adam",
    ),
    _torch("accelerate", "Accelerate `save_state` folder (same files)", path="step_100", optimizer="adamw"),
    # model.safetensors sorts its tensors: which of four equal layers the optimizer means is open.
    _torch(
        "trainer",
        "Hugging Face `Trainer` folder (same files)",
        "block",
        "checkpoint-500",
        optimizer="adamw",
        options=("--part", "model"),
    ),
    _torch(
        "timm",
        "timm: `state_dict`, `state_dict_ema`, `arch`, `args`",
        "cnn",
        optimizer="sgd",
        options=_flatten("*/fc1"),
        several=True,
    ),
    _torch("averaged", "`model` beside `AveragedModel` (EMA)", several=True),
    # Optimizers.
    _torch(
        "adamw_groups",
        "AdamW with two groups of parameters and two learning rates",
        optimizer="adamw",
        differs="learning_rate differs",
    ),
    _torch("sgd_momentum", "SGD with momentum", optimizer="sgd"),
    _torch("sgd_plain", "SGD without momentum", optimizer="sgd_plain"),
    _torch("rmsprop", "RMSprop", optimizer="rmsprop"),
    _torch("adagrad", "Adagrad", optimizer="adagrad"),
    _torch("amsgrad", "Adam with AMSGrad", optimizer="amsgrad"),
    # Other networks.
    _torch("cnn", "CNN with batch norm, Adam", "cnn", optimizer="adam", options=_flatten("model/fc1")),
    _torch("lstm", "LSTM, Adam", "lstm", optimizer="adam", differs="half as fast"),
    _torch("gru", "GRU, Adam", "gru", optimizer="adam"),
    _torch("block", "Transformer block of linear layers, AdamW", "block", optimizer="adamw"),
    _torch(
        "encoder",
        "`nn.TransformerEncoderLayer`, Adam",
        "encoder",
        optimizer="adam",
        options=("--kind", "model/self_attn=attention:2"),
    ),
    _torch(
        "embedding",
        "Embedding, Adam",
        "embedding",
        optimizer="adam",
        options=("--kind", "model/embed=embedding"),
    ),
    _torch(
        "tied",
        "Embedding that shares its weight with the output layer",
        "tied",
        options=("--kind", "embed=embedding"),
    ),
    _torch("layernorm", "Layer norm, Adam", "layernorm", optimizer="adam"),
    # RL libraries.
    _torch(
        "cleanrl_td3",
        "CleanRL TD3 `.cleanrl_model`",
        path="td3.cleanrl_model",
        names=("fc1", "fc2", "fc_mu"),
        facts=(),
        several=True,
    ),
    _torch(
        "authors_td3",
        "TD3 authors' four files",
        path="TD3_Pendulum-v1_0",
        names=("l1", "l2", "l3"),
        optimizer="adam",
        facts=(),
        several=True,
    ),
    _torch(
        "authors_actor", "TD3 authors' actor file alone", path="actor.pth", names=("l1", "l2", "l3"), facts=()
    ),
    _torch(
        "sb3_td3",
        "Stable-Baselines3 TD3 zip",
        path="td3.zip",
        facts=(),
        names=("mu.0", "mu.2", "mu.4"),
        several=True,
    ),
    _torch(
        "sb3_ppo",
        "Stable-Baselines3 PPO zip",
        "gaussian",
        "ppo.zip",
        policy=True,
        facts=(),
        names=("mlp_extractor.policy_net.0", "mlp_extractor.policy_net.2", "action_net"),
        several=True,
    ),
    _torch(
        "sb3_sac",
        "Stable-Baselines3 SAC zip",
        path="sac.zip",
        facts=(),
        names=("latent_pi.0", "latent_pi.2", "mu"),
        several=True,
    ),
    # TensorFlow and Keras 3.
    _tensorflow("actor_opt_step", "`Checkpoint(actor=, opt=, step=)`", optimizer="adam"),
    _tensorflow("model_optimizer", "`Checkpoint(model=, optimizer=)`", optimizer="adam"),
    _tensorflow("net_compiled", "`Checkpoint(net=compiled model)`", optimizer="adam"),
    _tensorflow("manager", "`CheckpointManager` folder", path="training", optimizer="adam"),
    _tensorflow("model_alone", "`Checkpoint(model)`"),
    _tensorflow("pi_qf", "`Checkpoint(pi=, qf=, pi_opt=, qf_opt=)`", optimizer="adam", several=True),
    _tensorflow("tf_module", "`Checkpoint(net=tf.Module, optimizer=tf.optimizers.Adam)`", optimizer="adam"),
    _tensorflow(
        "sgd_checkpoint",
        "`Checkpoint`, SGD with momentum",
        optimizer="sgd",
        options=("--optimizer", "optimizer/momentum=0.9"),
    ),
    _tensorflow("rmsprop_checkpoint", "`Checkpoint`, RMSprop", optimizer="rmsprop"),
    _tensorflow("adamw_checkpoint", "`Checkpoint`, AdamW", optimizer="adamw"),
    _tensorflow("adagrad_checkpoint", "`Checkpoint`, Adagrad", optimizer="adagrad"),
    _tensorflow(
        "schedule", "`Checkpoint`, learning rate by `ExponentialDecay`", optimizer="adam", rate_elsewhere=True
    ),
    _tensorflow("weights_h5", '`save_weights("x.weights.h5")`', path="x.weights.h5"),
    _tensorflow(
        "weights_h5_compiled", "`.weights.h5` of a compiled model", path="x.weights.h5", optimizer="adam"
    ),
    _tensorflow(
        "model_checkpoint",
        "`ModelCheckpoint` callback, weights only",
        path="best.weights.h5",
        optimizer="adam",
    ),
    _tensorflow(
        "keras_sequential",
        "`.keras`, compiled `Sequential`",
        path="model.keras",
        optimizer="adam",
        facts=SCALED,
    ),
    _tensorflow(
        "keras_functional",
        "`.keras`, compiled functional model",
        path="model.keras",
        optimizer="adam",
        facts=SCALED,
    ),
    _tensorflow(
        "h5_sequential", "`.h5` by Keras 3, compiled", path="model.h5", optimizer="adam", facts=SCALED
    ),
    _tensorflow(
        "saved_model", "SavedModel of a compiled model", path="saved", optimizer="adam", facts=SCALED
    ),
    _tensorflow("exported", "`model.export()`", path="exported", facts=SCALED),
    _tensorflow(
        "cnn_checkpoint",
        "`Checkpoint`, CNN with batch norm, Adam",
        "cnn",
        optimizer="adam",
        options=_flatten("model/fc1"),
    ),
    _tensorflow(
        "cnn_keras",
        "`.keras`, CNN with batch norm, compiled",
        "cnn",
        "model.keras",
        optimizer="adam",
        options=_flatten("hidden"),
    ),
    _tensorflow("lstm_checkpoint", "`Checkpoint`, LSTM, Adam", "lstm", optimizer="adam", differs="bias"),
    _tensorflow(
        "lstm_weights",
        "`.weights.h5`, LSTM, compiled",
        "lstm",
        "x.weights.h5",
        optimizer="adam",
        differs="bias",
    ),
    _tensorflow("gru_checkpoint", "`Checkpoint`, GRU, Adam", "gru", optimizer="adam"),
    _tensorflow("block_checkpoint", "`Checkpoint`, transformer block, AdamW", "block", optimizer="adamw"),
    _tensorflow(
        "encoder_checkpoint", "`Checkpoint`, `MultiHeadAttention` block", "encoder", optimizer="adam"
    ),
    _tensorflow("embedding_checkpoint", "`Checkpoint`, embedding, Adam", "embedding", optimizer="adam"),
    _tensorflow("layernorm_checkpoint", "`Checkpoint`, layer norm, Adam", "layernorm", optimizer="adam"),
    _tensorflow("half_checkpoint", "`Checkpoint` of a float16 model", dtype="float16", policy=False),
    # TensorFlow 1.
    _tensorflow(
        "saver_adam",
        "`tf.compat.v1` Saver, Adam",
        path="model.ckpt-100",
        optimizer="adam_v1",
        rate_elsewhere=True,
    ),
    _tensorflow(
        "saver_momentum",
        "`tf.compat.v1` Saver, Momentum",
        path="model.ckpt-100",
        optimizer="sgd",
        rate_elsewhere=True,
        options=(
            *("--optimizer", "optimizer/momentum=0.9"),
            *("--optimizer", "optimizer/learning_rate=0.001"),
        ),
    ),
    _tensorflow(
        "estimator",
        "Estimator-like folder: scopes, `global_step`",
        path="run",
        optimizer="adam_v1",
        rate_elsewhere=True,
    ),
    # Keras 2.
    _keras_2("h5_compiled", "`.h5` by Keras 2, compiled", optimizer="adam", facts=SCALED),
    _keras_2("h5_weights", '`save_weights("x.h5")` by Keras 2', path="x.h5"),
    _keras_2("tf_weights", '`save_weights("x")` by Keras 2, compiled', path="x", optimizer="adam"),
    _keras_2(
        "keras_2_checkpoint", "`Checkpoint(model=, optimizer=)` by Keras 2", path="ckpt-1", optimizer="adam"
    ),
    _keras_2(
        "keras_2_saved_model", "SavedModel by Keras 2, compiled", path="saved", optimizer="adam", facts=SCALED
    ),
    _keras_2("keras_1_h5", "`.h5` with the names of Keras 1", path="old.h5"),
    # ONNX, as torch.onnx.export writes it.
    _torch("onnx_mlp", "`torch.onnx.export` of an MLP", path="model.onnx", facts=SCALED),
    _torch("onnx_layernorm", "`torch.onnx.export`, layer norm, opset 11", "layernorm", path="model.onnx"),
    _torch("onnx_cnn", "`torch.onnx.export` of a CNN, batch norm kept", "cnn", path="model.onnx"),
    _torch("onnx_lstm", "`torch.onnx.export` of an LSTM", "lstm", path="model.onnx"),
)
