"""Optimizers: the state, settings and defaults of each kind in every framework. One row adds a kind.

Canonical slots: Adam's m, v, vhat; RMSprop's rms (mean of squares) and mg (mean of gradients, if centered);
Adagrad's squares (their sum); Adamax's m and u (the decaying maximum); Adadelta's mean_squares and
mean_deltas (running means of the squares of gradients and of its own steps). Momentum's gradient sum is
`buffer` if it does not include the learning rate (torch, TensorFlow 1's MomentumOptimizer), `velocity` if
each term was multiplied by it (Keras, TensorFlow 1's RMSPropOptimizer); Keras's SGD subtracts its gradients
there.

Sources: torch/optim/{adam,rmsprop,sgd,adagrad,adamax,adadelta}.py;
keras/src/optimizers/{adam,adamw,rmsprop,sgd,adagrad,adamax,adadelta}.py, tf_keras's of the same names and
legacy/*.py; tensorflow/python/training/{adam,rmsprop,momentum,adagrad}.py. Update rules: Adam and Adamax
(Kingma and Ba, 2015), AMSGrad (Reddi et al., 2018), RMSprop (Hinton, 2012; centered: Graves, 2013), momentum
(Sutskever et al., 2013), Adagrad (Duchi et al., 2011), Adadelta (Zeiler, 2012).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import cache, lru_cache
from typing import Any

from ckpttool.core.deferred import NamedTuple, dataclass, field

BUFFER, VELOCITY = "buffer", "velocity"


class DefaultSetting(NamedTuple):
    """Default of a hyperparameter missing from the other framework's checkpoints, and its library."""

    value: float | bool | None
    library: str


class SlotSpec(NamedTuple):
    """One slot: its canonical name, and its names in torch's state and in Keras.

    `keras` is its kind in object graphs and trees, `edge` Keras 3's list, `ending` the end of its variable's
    name there. It exists only with `setting`, if there is one.
    """

    name: str
    torch: str
    keras: str
    edge: str
    ending: str
    setting: str = ""


# Settings in the groups of torch's optimizers that have other names there; a slash leads into a tuple.
_TORCH_NAMES = {
    "lr": "learning_rate",
    "betas/0": "beta_1",
    "betas/1": "beta_2",
    "eps": "epsilon",
    "alpha": "rho",
}
# torch/optim/optimizer.py: options that change how the step is computed, not its result.
HOW = ("foreach", "capturable", "differentiable", "fused")
# Settings that the first versions of torch's classes lack.
_NEWER = {*HOW, "maximize", "decoupled_weight_decay"}
# What schedulers store in torch's groups (torch/optim/lr_scheduler.py and swa_utils.py).
SCHEDULED = frozenset(("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"))
# Settings that are not numbers, for all optimizers.
FLAGS = frozenset((*HOW, "amsgrad", "maximize", "centered", "nesterov", "decoupled_weight_decay"))
# Defaults of all classes that have the setting, in torch if Keras has none.
_TORCH_DEFAULTS: Mapping[str, float | bool | None] = {
    **dict.fromkeys(FLAGS, False),
    "foreach": None,
    "fused": None,
    "weight_decay": 0,
    "dampening": 0,
    "lr_decay": 0,
}
_KERAS_DEFAULTS: Mapping[str, float | bool | None] = {
    "learning_rate": 0.001,
    "beta_1": 0.9,
    "beta_2": 0.999,
    "epsilon": 1e-7,
    "rho": 0.9,
    "momentum": 0.0,
    "initial_accumulator_value": 0.1,
}
# Settings that Keras 2 up to 2.10 stores as variables; `decay` divides the learning rate.
_LEGACY_VARIABLES = ("beta_1", "beta_2", "rho", "momentum")


def _own_defaults(owner: str, values: Mapping[str, float | bool | None]) -> dict[str, DefaultSetting]:
    return {name: DefaultSetting(value, owner) for name, value in values.items()}


# Returns what an update subtracts, without weight decay, and changes the slots: called with numpy or torch,
# settings, the update's number from 1, gradient, slots. Adam's root is corrected; others add epsilon as Keras
UpdateRule = Callable[[Any, Mapping[str, Any], int, Any, dict[str, Any]], Any]


def _mean(slots: dict[str, Any], name: str, factor: float, value: Any) -> Any:
    """Return a slot that is a running mean, with one more value."""
    slots[name] = value = factor * slots[name] + (1 - factor) * value
    return value


def _update_adam(xp: Any, known: Mapping[str, Any], count: int, g: Any, slots: dict[str, Any]) -> Any:
    beta_1, beta_2 = known["beta_1"], known["beta_2"]
    m, v = _mean(slots, "m", beta_1, g), _mean(slots, "v", beta_2, g * g)
    if "vhat" in slots:
        v = slots["vhat"] = xp.maximum(slots["vhat"], v)
    root = xp.sqrt(v / (1 - beta_2**count)) + known["epsilon"]
    return known["learning_rate"] * m / (1 - beta_1**count) / root


def _update_rmsprop(xp: Any, known: Mapping[str, Any], count: int, g: Any, slots: dict[str, Any]) -> Any:
    v = _mean(slots, "rms", known["rho"], g * g)
    v = v - _mean(slots, "mg", known["rho"], g) ** 2 if "mg" in slots else v
    return _update_sgd(xp, known, count, g / xp.sqrt(v + known["epsilon"]), slots)


def _update_sgd(_xp: Any, known: Mapping[str, Any], _count: int, g: Any, slots: dict[str, Any]) -> Any:
    if BUFFER in slots:
        slots[BUFFER] = known["momentum"] * slots[BUFFER] + g
        g = g + known["momentum"] * slots[BUFFER] if known.get("nesterov") else slots[BUFFER]
    return known["learning_rate"] * g


def _update_adagrad(xp: Any, known: Mapping[str, Any], _count: int, g: Any, slots: dict[str, Any]) -> Any:
    slots["squares"] = slots["squares"] + g * g
    return known["learning_rate"] * g / xp.sqrt(slots["squares"] + known["epsilon"])


def _update_adamax(xp: Any, known: Mapping[str, Any], count: int, g: Any, slots: dict[str, Any]) -> Any:
    m = _mean(slots, "m", known["beta_1"], g)
    slots["u"] = xp.maximum(known["beta_2"] * slots["u"], abs(g))
    return known["learning_rate"] * m / (1 - known["beta_1"] ** count) / (slots["u"] + known["epsilon"])


def _update_adadelta(xp: Any, known: Mapping[str, Any], _count: int, g: Any, slots: dict[str, Any]) -> Any:
    squares = _mean(slots, "mean_squares", known["rho"], g * g)
    delta = g * xp.sqrt(slots["mean_deltas"] + known["epsilon"]) / xp.sqrt(squares + known["epsilon"])
    _mean(slots, "mean_deltas", known["rho"], delta * delta)
    return known["learning_rate"] * delta


@dataclass(frozen=True, eq=False)
class OptimizerFamily:
    """One update rule for weights, and the names of its parts in each framework: a row of the table.

    `torch` lists torch's settings in the order in which torch writes them, `arguments` those of Keras's
    class that no variable holds. `changed` are Keras's defaults that differ from those of its other classes.
    `tf1` is the class of TensorFlow 1, whose slots are `VARIABLE/NAME`, `VARIABLE/NAME_1`, ..., or "" for an
    optimizer whose slots are not read there; `tf1_settings` are its defaults. `snake` is Keras's name if it
    is not the class in lower case, `folded` the sign of the gradients in Keras's `velocity`. torch `counts`
    updates; `zeros` means that slots start at zero. `epsilon` is a clause on where the frameworks add it,
    `update` the update rule, None if only PyTorch trains with it.
    """

    name: str
    specs: tuple[SlotSpec, ...]
    torch: tuple[str, ...]
    arguments: tuple[str, ...]
    changed: Mapping[str, float] = field(default_factory=dict)
    tf1: str = ""
    tf1_settings: Mapping[str, float] = field(default_factory=dict)
    snake: str = ""
    folded: int = 1
    counts: bool = True
    zeros: bool = True
    epsilon: str = ""
    update: UpdateRule | None = None

    @property
    def torch_settings(self) -> dict[str, str]:
        """Torch's settings and their canonical names."""
        return {name: _TORCH_NAMES.get(name, name) for name in self.torch}

    @property
    def torch_slots(self) -> dict[str, str]:
        """Torch's slots and their canonical names."""
        return {spec.torch: BUFFER if spec.name == VELOCITY else spec.name for spec in self.specs}

    @property
    def torch_keys(self) -> frozenset[str]:
        """The keys of torch's groups: `betas` of `betas/0` and `betas/1`."""
        return _keys(self.torch)

    @property
    def keras_slots(self) -> dict[str, SlotSpec]:
        """Keras's slots by their canonical names."""
        return {spec.name: spec for spec in self.specs}

    @property
    def keras_lists(self) -> dict[str, str]:
        """Keras 3's lists of slots and their canonical names."""
        return {spec.edge: spec.name for spec in self.specs}

    @property
    def keras_rounds(self) -> tuple[tuple[str, ...], ...]:
        """Keras's slots in the rounds over the variables in which it creates them (`build`)."""
        rounds = (self.always, *((spec.name,) for spec in self.specs if spec.setting))
        return tuple(filter(None, rounds))

    def keras_kinds(self, slots: Collection[str]) -> tuple[tuple[str, ...], ...]:
        """Return the kinds of these slots in Keras's rounds."""
        kinds = {name: slot.keras for name, slot in self.keras_slots.items() if name in slots}
        rounds = (tuple(kinds[slot] for slot in own if slot in kinds) for own in self.keras_rounds)
        return tuple(filter(None, rounds))

    @property
    def always(self) -> tuple[str, ...]:
        """The slots that every state has."""
        return tuple(spec.name for spec in self.specs if not spec.setting)

    @property
    def slots(self) -> tuple[str, ...]:
        """All canonical slots."""
        return tuple(dict.fromkeys((*self.torch_slots.values(), *self.keras_slots)))

    @property
    def defaults(self) -> Mapping[str, DefaultSetting]:
        """The defaults of Keras's class, and torch's of settings that Keras lacks or that are usually off."""
        keras = {name: value for name, value in _KERAS_DEFAULTS.items() if name in self.settings}
        off = {name: value for name, value in _TORCH_DEFAULTS.items() if name in self.torch}
        return {**_own_defaults("Keras", {**keras, **self.changed}), **_own_defaults("torch", off)}

    @property
    def tf1_defaults(self) -> Mapping[str, DefaultSetting]:
        """The defaults of TensorFlow 1's class."""
        return _own_defaults("TensorFlow 1", self.tf1_settings)

    @property
    def settings(self) -> tuple[str, ...]:
        """The canonical settings of Keras's class."""
        return ("learning_rate", *self.arguments)

    @property
    def legacy_variables(self) -> tuple[str, ...]:
        """The settings that are variables in Keras 2 up to 2.10 and its legacy optimizers."""
        return ("learning_rate", *(word for word in self.arguments if word in _LEGACY_VARIABLES), "decay")

    @property
    def keras_name(self) -> str:
        """The name that Keras 3 gives its variables."""
        return self.snake or self.name.lower()

    @property
    def uses_count(self) -> bool:
        """Whether updates depend on their count, which corrects the bias of the moments."""
        return "beta_1" in self.arguments

    def flags(self, slots: Collection[str]) -> dict[str, bool]:
        """Return the settings that these slots show: amsgrad, centered."""
        return {spec.setting: spec.name in slots for spec in self.specs if spec.setting in FLAGS}

    def torch_slot(self, slot: str) -> str:
        """Return torch's name of a canonical slot."""
        torch_name = BUFFER if slot == VELOCITY else slot
        return next(name for name, canonical in self.torch_slots.items() if canonical == torch_name)


_MOMENTUM = SlotSpec(VELOCITY, "momentum_buffer", "momentum", "_momentums", "momentum", "momentum")
_BETAS = ("lr", "betas/0", "betas/1", "eps", "weight_decay")
ADAM = OptimizerFamily(
    "Adam",
    (
        SlotSpec("m", "exp_avg", "m", "_momentums", "momentum"),
        SlotSpec("v", "exp_avg_sq", "v", "_velocities", "velocity"),
        SlotSpec("vhat", "max_exp_avg_sq", "vhat", "_velocity_hats", "velocity_hat", "amsgrad"),
    ),
    torch=(*_BETAS, "amsgrad", "maximize", *HOW, "decoupled_weight_decay"),
    arguments=("beta_1", "beta_2", "epsilon", "amsgrad"),
    tf1="Adam",
    tf1_settings={"epsilon": 1e-8},
    epsilon="TensorFlow adds it before the bias correction, PyTorch after it",
    update=_update_adam,
)
RMSPROP = OptimizerFamily(
    "RMSprop",
    (
        SlotSpec("rms", "square_avg", "rms", "_velocities", "velocity"),
        _MOMENTUM,
        SlotSpec("mg", "grad_avg", "mg", "_average_gradients", "average_gradient", "centered"),
    ),
    torch=(
        *("lr", "momentum", "alpha", "eps", "centered", "weight_decay", "capturable", "foreach", "maximize"),
        "differentiable",
    ),
    arguments=("rho", "momentum", "epsilon", "centered"),
    tf1="RMSProp",
    tf1_settings={"rho": 0.9, "momentum": 0.0, "epsilon": 1e-10},
    snake="rm_sprop",
    epsilon="TensorFlow adds it inside the square root, PyTorch outside",
    update=_update_rmsprop,
)
SGD = OptimizerFamily(
    "SGD",
    (_MOMENTUM._replace(edge="momentums"),),
    torch=(
        *("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach"),
        *("differentiable", "fused"),
    ),
    arguments=("momentum", "nesterov"),
    changed={"learning_rate": 0.01},
    tf1="Momentum",
    folded=-1,
    counts=False,
    update=_update_sgd,
)
ADAGRAD = OptimizerFamily(
    "Adagrad",
    (SlotSpec("squares", "sum", "accumulator", "_accumulators", "accumulator"),),
    torch=(
        *("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "foreach", "maximize"),
        *("differentiable", "fused"),
    ),
    arguments=("initial_accumulator_value", "epsilon"),
    tf1="Adagrad",
    tf1_settings={"epsilon": 0.0},
    zeros=False,
    epsilon="TensorFlow adds it inside the square root, PyTorch outside",
    update=_update_adagrad,
)
ADAMAX = OptimizerFamily(
    "Adamax",
    (
        SlotSpec("m", "exp_avg", "m", "_m", "momentum"),
        SlotSpec("u", "exp_inf", "u", "_u", "norm"),
    ),
    torch=(*_BETAS, "foreach", "maximize", "differentiable", "capturable"),
    arguments=("beta_1", "beta_2", "epsilon"),
    epsilon="Keras adds it to the maximum, PyTorch to the gradient inside it",
    update=_update_adamax,
)
ADADELTA = OptimizerFamily(
    "Adadelta",
    (
        SlotSpec("mean_squares", "square_avg", "accumulated_grad", "_accumulated_grads", "accumulated_grad"),
        SlotSpec(
            *("mean_deltas", "acc_delta", "accumulated_delta", "_accumulated_delta_vars"),
            "accumulated_delta_var",
        ),
    ),
    torch=("lr", "rho", "eps", "weight_decay", "maximize", "capturable", "foreach", "differentiable"),
    arguments=("rho", "epsilon"),
    changed={"rho": 0.95},
    update=_update_adadelta,
)
FAMILIES = (ADAM, RMSPROP, SGD, ADAGRAD, ADAMAX, ADADELTA)
# Optimizers of PyTorch that are trained (`verify --train-step`), but not converted.
_MOMENTS = ADAM.specs[:2]
_NADAM = OptimizerFamily(
    "NAdam",
    _MOMENTS,
    torch=(*_BETAS, "momentum_decay", "decoupled_weight_decay", "maximize", *HOW[:3]),
    arguments=(),
)
_RADAM = OptimizerFamily(
    "RAdam", _MOMENTS, torch=(*_BETAS, "maximize", *HOW[:3], "decoupled_weight_decay"), arguments=()
)
TORCH_ONLY = (_NADAM, _RADAM)
# Kinds of the slots in Keras's lists. RMSprop has the same lists as Adam, with other meanings.
RMSPROP_LISTS = {spec.edge: spec.keras for spec in RMSPROP.specs}
_OTHER_SPECS = (spec for family in FAMILIES for spec in family.specs if family is not RMSPROP)
KERAS_LISTS = {**RMSPROP_LISTS, **{spec.edge: spec.keras for spec in _OTHER_SPECS}}

# AdamW is Adam with decoupled weight decay (keras/src/optimizers/adamw.py).
ADAMW = "adamw"
ADAMW_DEFAULTS = _own_defaults("Keras's AdamW", {"weight_decay": 0.004, "decoupled_weight_decay": True})
# Classes with the same slots, which a file may contain without naming its class.
SAME_SLOTS = {"Adam": "AdamW, Lamb and old versions of Adamax have", "SGD": "Lion has"}
# Classes in lower case, in both frameworks, whose state may look like one of the above but is not converted.
UNCONVERTED = {
    "adafactor": "Keras and PyTorch factor its second moment and clip its updates differently",
    "asgd": "Keras has no averaged SGD",
    "ftrl": "PyTorch has no FTRL",
    "lamb": "PyTorch has no LAMB",
    "lbfgs": "Keras has no L-BFGS",
    "lion": "PyTorch has no Lion",
    "muon": "Keras's Muon updates some variables with Adam, PyTorch's accepts only matrices",
    "nadam": "its momentum schedule differs (0.96^t in Keras, 0.96^(0.004 t) by default in PyTorch)",
    "radam": "Keras has no RAdam",
    "rprop": "Keras has no Rprop",
}
# Variables that only one class of Keras has: keras/src/optimizers/nadam.py, tf_keras's, and its
# legacy/nadam.py.
OWN_VARIABLES = {"_u_product": "nadam", "u_product": "nadam", "_m_cache": "nadam", "momentum_cache": "nadam"}
# Settings of torch's groups that only one unconverted class has: torch/optim/*.py.
_OWN_SETTINGS = {
    "momentum_decay": "NAdam",
    "lambd": "ASGD",
    "etas": "Rprop",
    "max_iter": "LBFGS",
    "ns_steps": "Muon",
    "beta2_decay": "Adafactor",
}
# Additional slots that training needs, and their PyTorch counterparts.
MORE_SLOTS = {
    "average": "moving averages of the weights (use_ema): PyTorch keeps these in a separate model "
    "(torch.optim.swa_utils.AveragedModel)",
    "gradient": "gradients of an incomplete update (gradient_accumulation_steps): PyTorch keeps these in "
    "the parameters (grad), not in checkpoints",
}


def find_class(cls: str | None) -> OptimizerFamily | None:
    """Return the optimizer with this class of Keras in lower case, None if there is none."""
    return ADAM if cls == ADAMW else next((family for family in FAMILIES if family.name.lower() == cls), None)


def find_family(slots: Collection[str]) -> OptimizerFamily | None:
    """Return the only optimizer with these canonical slots, None if none or several match."""
    if {*slots} <= {BUFFER, VELOCITY}:
        return SGD if slots else None
    return next((family for family in FAMILIES if {*slots} <= {*family.slots, BUFFER}), None)


def find_by_settings(names: Collection[str]) -> OptimizerFamily:
    """Return the optimizer with these canonical settings; Adam if they do not distinguish any."""
    # Among torch's optimizers with a rho only RMSprop has these; Keras's are distinguished by class.
    if {"rho", "weight_decay"} <= {*names} and not {"centered", "momentum"} & {*names}:
        return ADADELTA
    marks = {
        "rho": RMSPROP,
        "centered": RMSPROP,
        "lr_decay": ADAGRAD,
        "initial_accumulator_value": ADAGRAD,
        "nesterov": SGD,
        "dampening": SGD,
    }
    return next((family for name, family in marks.items() if name in names), ADAM)


@lru_cache(maxsize=64)
def find_torch_family(keys: frozenset[str], slots: frozenset[str]) -> OptimizerFamily:
    """Return the optimizer whose groups have these keys, and whose parameters these slots.

    Old versions lack some keys of the class, and files of every version may have keys of the program's own.
    """
    own = {*keys} & frozenset().union(*(family.torch_keys for family in FAMILIES))
    fits = [family for family in FAMILIES if own <= family.torch_keys]
    like = [family for family in fits or FAMILIES if {*slots} & family.torch_slots.keys()]
    exact = [family for family in like if {*slots} <= {*family.torch_slots, "step"}]
    return next(iter((*exact, *like, *fits)), ADAM)


def find_torch_row(cls: str) -> OptimizerFamily | None:
    """Return the optimizer with this class of torch.optim, None if there is none."""
    return find_class(cls.lower()) or next((row for row in TORCH_ONLY if row.name == cls), None)


@lru_cache(maxsize=64)
def find_torch_class(keys: frozenset[str], slots: frozenset[str]) -> OptimizerFamily | None:
    """Return the optimizer that torch.optim has with exactly this state, None if none has.

    Keys are those of its groups; old versions lack the newer settings, and programs add other keys.
    Before PyTorch 0.4 Adam had no `amsgrad`. Classes of other libraries have the same settings and state,
    but with further settings.
    """
    keys = keys - SCHEDULED
    oldest = keys == _keys(_BETAS)
    newer = {*_NEWER, "amsgrad"} if oldest else _NEWER
    classes = [(row, row.torch_keys) for row in (*FAMILIES, *TORCH_ONLY)]
    listed = {name for _, own in classes for name in own}
    numbers = {_NADAM: {"step", "mu_product"}}
    fits = [
        (row, len(listed & keys - own), 0 if oldest else len(own - keys))
        for row, own in classes
        if own - keys <= newer and {*slots} <= {*row.torch_slots} | numbers.get(row, {"step"})
    ]
    row = min(fits, key=lambda fit: fit[1:])[0] if fits else None
    # RAdam has the settings of such classes, too; its own newer ones distinguish it.
    return None if row is _RADAM and not keys & _NEWER else row


def doubt_torch_class(row: OptimizerFamily, keys: frozenset[str], slots: frozenset[str]) -> str:
    """Return why a state_dict may be that of another class than the row's, "" if it cannot."""
    if find_torch_class(keys, slots) is row and (row is not ADAM or "amsgrad" in keys):
        return ""
    return f"is {row.name}, by its state: the file does not name its class, and its settings do not show it"


def find_unconverted(keys: Collection[str], slots: Collection[str]) -> str | None:
    """Return the class of torch's groups if its state is not converted, by the names of their settings."""
    owner = next((owner for name, owner in _OWN_SETTINGS.items() if name in keys), None)
    # Settings of torch/optim/adam.py that RAdam, Adamax and SparseAdam lack while having the newer ones.
    others = "betas" in keys and "amsgrad" not in keys and bool({*keys} & {"foreach", "maximize"})
    return "RAdam, Adamax or SparseAdam" if owner is None and others and "exp_inf" not in slots else owner


def list_torch_settings() -> set[str]:
    """Return the canonical names of all settings in torch's groups."""
    return {setting for family in FAMILIES for setting in family.torch_settings.values()}


def list_slots() -> set[str]:
    """Return the canonical names of all slots."""
    return {slot for family in FAMILIES for slot in family.slots}


def list_torch_slots() -> set[str]:
    """Return torch's names of all slots."""
    return {spec.torch for family in FAMILIES for spec in family.specs}


def list_keras_kinds() -> set[str]:
    """Return the kinds of all slots in Keras."""
    return {spec.keras for family in FAMILIES for spec in family.specs}


def epsilon_factor(beta_2: float, step: int, *, corrected: bool) -> float:
    """Return the factor of Adam's epsilon at update `step`, from 1, that computes the other convention.

    PyTorch adds it to the root of the `corrected` second moment (torch/optim/adam.py), Keras to that of the
    uncorrected one (keras/src/optimizers/adam.py).
    """
    root = math.sqrt(1 - beta_2**step)
    return 1 / root if corrected else root


@cache
def _keys(settings: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name.partition("/")[0] for name in settings)
