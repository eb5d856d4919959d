"""The optimizers that are mapped, one table each: slots, settings and defaults in every framework.

Canonical slots: Adam's m, v, vhat; RMSprop's rms (mean of squares) and mg (mean of gradients, if centered);
Adagrad's squares (their sum); Adamax's m and u (the decaying maximum); Adadelta's mean_squares and
mean_deltas (running means of the squares of gradients and of its own steps).
The sum of gradients of momentum is `buffer` where no learning rate is in it (torch, TensorFlow 1's
MomentumOptimizer), `velocity` where each term was multiplied by it (Keras, TensorFlow 1's RMSPropOptimizer);
Keras's SGD subtracts its gradients there.

Sources: torch/optim/{adam,rmsprop,sgd,adagrad,adamax,adadelta}.py;
keras/src/optimizers/{adam,adamw,rmsprop,sgd,adagrad,adamax,adadelta}.py,
tf_keras's of the same names and legacy/*.py; tensorflow/python/training/{adam,rmsprop,momentum,adagrad}.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from ckpttool.layouts.canonical import Default

BUFFER, VELOCITY = "buffer", "velocity"


class KerasSlot(NamedTuple):
    """A slot in Keras: the kind that a tree says, Keras 3's list, and how its variable's name ends."""

    kind: str
    edge: str
    ending: str


@dataclass(frozen=True, slots=True)
class Family:
    """One way to update weights, and what each framework calls its parts.

    `torch_slots` and `torch_settings` lead from torch's names (a slash leads into a tuple), in the order in
    which torch writes them, to canonical ones. `keras` has the slots in the rounds in which Keras makes
    them; `constructed` are arguments of Keras's class that no variable holds, `legacy` those that were
    variables up to Keras 2.10. `always` are slots that every
    state has. `folded` is the sign of the gradients in Keras's `velocity`. `tf1` names the class of
    TensorFlow 1, whose slots are `VARIABLE/NAME`, `VARIABLE/NAME_1`, ..., "" for an optimizer whose slots are
    not read there. `zeros` says that slots begin with zeros.
    """

    name: str
    torch_slots: Mapping[str, str]
    torch_settings: Mapping[str, str]
    torch_defaults: Mapping[str, Default]
    keras: tuple[tuple[str, ...], ...]
    keras_slots: Mapping[str, KerasSlot]
    keras_defaults: Mapping[str, Default]
    constructed: tuple[str, ...]
    legacy: tuple[str, ...]
    keras_name: str
    tf1: str
    always: tuple[str, ...] = ()
    folded: int = 1
    tf1_defaults: Mapping[str, Default] = field(default_factory=dict)
    counts: bool = True
    zeros: bool = True

    @property
    def uses_count(self) -> bool:
        """Whether updates depend on their count, by which the moments are corrected for their start."""
        return "betas/0" in self.torch_settings

    @property
    def slots(self) -> tuple[str, ...]:
        """Every canonical slot."""
        return tuple(dict.fromkeys((*self.torch_slots.values(), *self.keras_slots)))

    def torch_slot(self, slot: str) -> str:
        """Return torch's name of a canonical slot."""
        wanted = BUFFER if slot == VELOCITY else slot
        return next(theirs for theirs, ours in self.torch_slots.items() if ours == wanted)


def _all(whose: str, **values: float | bool | None) -> Mapping[str, Default]:
    return MappingProxyType({name: Default(value, whose) for name, value in values.items()})


# torch/optim/optimizer.py: how the step is computed, not which.
HOW = ("foreach", "capturable", "differentiable", "fused")
# Settings that are no numbers, whichever optimizer has them.
FLAGS = frozenset((*HOW, "amsgrad", "maximize", "centered", "nesterov", "decoupled_weight_decay"))
_COMMON = {"weight_decay": 0, "maximize": False}
_UNSET = {"foreach": None, "differentiable": False}

ADAM = Family(
    name="Adam",
    torch_slots={"exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "vhat"},
    torch_settings={
        "lr": "learning_rate",
        "betas/0": "beta_1",
        "betas/1": "beta_2",
        "eps": "epsilon",
        **{name: name for name in ("weight_decay", "amsgrad", "maximize", *HOW, "decoupled_weight_decay")},
    },
    torch_defaults=_all(
        "torch",
        amsgrad=False,
        capturable=False,
        fused=None,
        decoupled_weight_decay=False,
        **_COMMON,
        **_UNSET,
    ),
    keras=(("m", "v"), ("vhat",)),
    keras_slots={
        "m": KerasSlot("m", "_momentums", "momentum"),
        "v": KerasSlot("v", "_velocities", "velocity"),
        "vhat": KerasSlot("vhat", "_velocity_hats", "velocity_hat"),
    },
    keras_defaults=_all("Keras", learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7),
    constructed=("beta_1", "beta_2", "epsilon", "amsgrad"),
    legacy=("learning_rate", "beta_1", "beta_2", "decay"),
    keras_name="adam",
    tf1="Adam",
    always=("m", "v"),
    tf1_defaults=_all("TensorFlow 1", epsilon=1e-8),
)

RMSPROP = Family(
    name="RMSprop",
    torch_slots={"square_avg": "rms", "momentum_buffer": BUFFER, "grad_avg": "mg"},
    torch_settings={
        "lr": "learning_rate",
        "momentum": "momentum",
        "alpha": "rho",
        "eps": "epsilon",
        **{name: name for name in ("centered", "weight_decay", "capturable", "foreach", "maximize")},
        "differentiable": "differentiable",
    },
    torch_defaults=_all("torch", centered=False, capturable=False, **_COMMON, **_UNSET),
    keras=(("rms",), (VELOCITY,), ("mg",)),
    keras_slots={
        "rms": KerasSlot("rms", "_velocities", "velocity"),
        VELOCITY: KerasSlot("momentum", "_momentums", "momentum"),
        "mg": KerasSlot("mg", "_average_gradients", "average_gradient"),
    },
    keras_defaults=_all("Keras", learning_rate=0.001, rho=0.9, momentum=0.0, epsilon=1e-7),
    constructed=("rho", "momentum", "epsilon", "centered"),
    legacy=("learning_rate", "rho", "momentum", "decay"),
    keras_name="rm_sprop",
    tf1="RMSProp",
    always=("rms",),
    tf1_defaults=_all("TensorFlow 1", rho=0.9, momentum=0.0, epsilon=1e-10),
)

SGD = Family(
    name="SGD",
    torch_slots={"momentum_buffer": BUFFER},
    torch_settings={
        "lr": "learning_rate",
        **{name: name for name in ("momentum", "dampening", "weight_decay", "nesterov", "maximize")},
        **{name: name for name in ("foreach", "differentiable", "fused")},
    },
    torch_defaults=_all("torch", dampening=0, nesterov=False, fused=None, **_COMMON, **_UNSET),
    keras=((VELOCITY,),),
    keras_slots={VELOCITY: KerasSlot("momentum", "momentums", "momentum")},
    keras_defaults=_all("Keras", learning_rate=0.01, momentum=0.0),
    constructed=("momentum", "nesterov"),
    legacy=("learning_rate", "momentum", "decay"),
    keras_name="sgd",
    tf1="Momentum",
    folded=-1,
    counts=False,
)

ADAGRAD = Family(
    name="Adagrad",
    torch_slots={"sum": "squares"},
    torch_settings={
        "lr": "learning_rate",
        "lr_decay": "lr_decay",
        "eps": "epsilon",
        **{name: name for name in ("weight_decay", "initial_accumulator_value", "foreach", "maximize")},
        **{name: name for name in ("differentiable", "fused")},
    },
    torch_defaults=_all("torch", lr_decay=0, fused=None, **_COMMON, **_UNSET),
    keras=(("squares",),),
    keras_slots={"squares": KerasSlot("accumulator", "_accumulators", "accumulator")},
    keras_defaults=_all("Keras", learning_rate=0.001, epsilon=1e-7, initial_accumulator_value=0.1),
    constructed=("initial_accumulator_value", "epsilon"),
    legacy=("learning_rate", "decay"),
    keras_name="adagrad",
    tf1="Adagrad",
    always=("squares",),
    tf1_defaults=_all("TensorFlow 1", epsilon=0.0),
    zeros=False,
)

ADAMAX = Family(
    name="Adamax",
    torch_slots={"exp_avg": "m", "exp_inf": "u"},
    torch_settings={
        "lr": "learning_rate",
        "betas/0": "beta_1",
        "betas/1": "beta_2",
        "eps": "epsilon",
        **{name: name for name in ("weight_decay", "foreach", "maximize", "differentiable", "capturable")},
    },
    torch_defaults=_all("torch", capturable=False, **_COMMON, **_UNSET),
    keras=(("m", "u"),),
    keras_slots={"m": KerasSlot("m", "_m", "momentum"), "u": KerasSlot("u", "_u", "norm")},
    keras_defaults=_all("Keras", learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7),
    constructed=("beta_1", "beta_2", "epsilon"),
    legacy=("learning_rate", "beta_1", "beta_2", "decay"),
    keras_name="adamax",
    tf1="",
    always=("m", "u"),
)

ADADELTA = Family(
    name="Adadelta",
    torch_slots={"square_avg": "mean_squares", "acc_delta": "mean_deltas"},
    torch_settings={
        "lr": "learning_rate",
        "rho": "rho",
        "eps": "epsilon",
        **{name: name for name in ("weight_decay", "maximize", "capturable", "foreach", "differentiable")},
    },
    torch_defaults=_all("torch", capturable=False, **_COMMON, **_UNSET),
    keras=(("mean_squares", "mean_deltas"),),
    keras_slots={
        "mean_squares": KerasSlot("accumulated_grad", "_accumulated_grads", "accumulated_grad"),
        "mean_deltas": KerasSlot("accumulated_delta", "_accumulated_delta_vars", "accumulated_delta_var"),
    },
    keras_defaults=_all("Keras", learning_rate=0.001, rho=0.95, epsilon=1e-7),
    constructed=("rho", "epsilon"),
    legacy=("learning_rate", "rho", "decay"),
    keras_name="adadelta",
    tf1="",
    always=("mean_squares", "mean_deltas"),
)

FAMILIES = (ADAM, RMSPROP, SGD, ADAGRAD, ADAMAX, ADADELTA)
# Keras's classes in lower case. AdamW is Adam whose weights decay beside the gradient.
CLASSES = {
    "adamw": ADAM,
    **{each.name.lower(): each for each in FAMILIES},
}
ADAMW = "adamw"
# keras/src/optimizers/adamw.py
ADAMW_DEFAULTS = _all("Keras's AdamW", weight_decay=0.004, decoupled_weight_decay=True)
# Keras optimizers with a state that may look like one of those and means something else.
OTHERS = frozenset("adafactor ftrl lamb lion muon nadam".split())  # noqa: SIM905
# Why their state is not converted, by the class in lower case; of both frameworks.
_DIFFERENCES = {
    "adafactor": "Keras and PyTorch factor its second moment by other means and clip its updates otherwise",
    "asgd": "Keras has no averaged SGD",
    "ftrl": "PyTorch has no FTRL",
    "lamb": "PyTorch has no LAMB",
    "lbfgs": "Keras has no L-BFGS",
    "lion": "PyTorch has no Lion",
    "muon": "Keras's updates some variables with Adam, PyTorch's takes matrices only",
    "nadam": "its momentum follows another schedule (0.96^t in Keras, 0.96^(0.004 t) by default in PyTorch)",
    "radam": "Keras has no RAdam",
    "rprop": "Keras has no Rprop",
}


# What a note proposes where an optimizer has no equivalent.
WITHOUT = "--optimizer none converts without it"


def not_converted(name: str, cls: str) -> str:
    """Return the sentence for the optimizer `name`, of a class whose state is not converted."""
    why = _DIFFERENCES.get(cls.lower())
    reason = f": {why}" if why else ""
    return f"{name} is {cls}, whose state is not converted{reason}; {WITHOUT}"


# Slots that training needs beside an optimizer's own, and what PyTorch has instead.
MORE_SLOTS = {
    "average": "moving averages of the weights (use_ema): PyTorch keeps these in a model of their own "
    "(torch.optim.swa_utils.AveragedModel)",
    "gradient": "gradients of an update that is not complete (gradient_accumulation_steps): PyTorch keeps "
    "these in the parameters (grad) and in no checkpoint",
}
# Keys of a torch param group that no optimizer above has: torch/optim/*.py.
TORCH_OTHERS = {
    "momentum_decay": "NAdam",
    "lambd": "ASGD",
    "etas": "Rprop",
    "max_iter": "LBFGS",
    "ns_steps": "Muon",
    "beta2_decay": "Adafactor",
}


def of_slots(slots: frozenset[str]) -> Family | None:
    """Return the only optimizer that has these canonical slots, None if there are none or several could."""
    if slots <= {BUFFER, VELOCITY}:
        return SGD if slots else None
    return next((family for family in FAMILIES if slots <= {*family.slots, BUFFER}), None)
