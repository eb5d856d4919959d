"""Train in TensorFlow: gradients by a tape, steps by Keras 3's optimizers, starting from a given state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ckpttool.core.errors import UnsupportedError
from ckpttool.core.optimizers import BUFFER, VELOCITY
from ckpttool.networks.model_training import build_keras_optimizer
from ckpttool.networks.network import Layer, Network, dtype_of, look_up
from ckpttool.networks.policy_training import (
    GradientEngine,
    Learner,
    OptimizerSetup,
    layer_arrays,
    without_values,
)
from ckpttool.networks.tensorflow_backend import LAYERS, Tensor


def require_keras(what: str) -> None:
    """Raise UnsupportedError without Keras 3 with the TensorFlow backend."""
    if not keras.__version__.startswith("3.") or keras.backend.backend() != "tensorflow":
        raise UnsupportedError(
            f"{what} in TensorFlow require Keras 3 with the TensorFlow backend",
            found=f"Keras {keras.__version__}",
        )


class NetworkModel(keras.Model):  # type: ignore[misc]  # Keras is not annotated
    """A network as a Keras model; its maps and statistics are variables that are not trained.

    A call takes the network's inputs in order (see `network_inputs`), or one mapping by name, and returns the
    output; of a policy with memory a tuple with the next states. Variable `layer_N_kernel` [in, out] is that
    of node N. With `drawn` the network's output is that of NetworkSettings "distribution", which
    `distribution` returns.
    """

    def __init__(self, network: Network, *, drawn: bool = False) -> None:
        super().__init__(dtype=dtype_of(network))
        self.network_inputs = tuple(name for name, _ in network.inputs)
        self._drawn = drawn
        self._results = (network.output, *(slot.value for slot in network.states))
        self._steps: list[tuple[Layer, tuple[int, ...], list[Tensor]]] = []
        for number, (node, empty) in enumerate(
            zip(network.nodes, without_values(network).nodes, strict=True)
        ):
            variables = self._add_variables(f"layer_{number}", node.layer)
            self._steps.append((empty.layer, node.inputs, variables))

    def call(self, *inputs: Any) -> Any:
        """Return the output [batch, n], and the next states if there are any."""
        output, *states = self._run(inputs)
        output = tf.split(output, 3, -1)[0] if self._drawn else output
        return (output, *states) if states else output

    def distribution(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Return a Gaussian policy's mean, to which the noise is added, and its standard deviation."""
        if not self._drawn:
            raise UnsupportedError("the network is not a policy with a standard deviation")
        _, mean, deviation = tf.split(self._run(inputs)[0], 3, -1)
        return mean, deviation

    def _run(self, inputs: Sequence[Any]) -> list[Tensor]:
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            inputs = [inputs[0][name] for name in self.network_inputs]
        values = [tf.cast(input_, self.compute_dtype) for input_ in inputs]
        for layer, sources, variables in self._steps:
            run = LAYERS[type(layer)](layer, _take_each(variables))
            values.append(run(*[values[number] for number in sources]))
        return [values[number] for number in self._results]

    def _add_variables(self, prefix: str, layer: Layer) -> list[Tensor]:
        """Add the variables of a layer, in the order in which its row in the table takes them."""
        arrays = layer_arrays(layer)
        left = iter(arrays.items())
        variables: list[Tensor] = []

        def add(array: np.ndarray) -> Tensor:
            name, (_, trained) = next(left)
            variable = self.add_weight(
                shape=array.shape,
                initializer=lambda *_args, **_kwargs: tf.constant(np.ascontiguousarray(array)),
                trainable=trained,
                name=f"{prefix}_{name}",
            )
            variables.append(variable)
            return variable

        look_up(LAYERS, type(layer), "tensorflow backend")(layer, add)
        return variables


def _take_each(variables: Sequence[Tensor]) -> Callable[[np.ndarray], Tensor]:
    """Return a function that gives the variables in turn, in place of a layer's arrays."""
    left = iter(variables)
    return lambda _: next(left)


def _run_on_cpu(net: NetworkModel, *inputs: Tensor) -> Tensor:
    """Return the output [batch, n] of a network without memory."""
    with tf.device("cpu:0"):
        return net.call(*inputs)


def _move(slow: NetworkModel, fast: NetworkModel, tau: float) -> None:
    """Move every weight of the target network by the fraction `tau` towards the online one."""
    for target, online in zip(slow.trainable_variables, fast.trainable_variables, strict=True):
        target.value.assign_add(tau * (online.value - target.value))


class TensorFlowGradientEngine(GradientEngine):
    """A learner as Keras variables on the CPU."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        require_keras("training steps")
        with tf.device("cpu:0"):
            self._nets = {title: NetworkModel(network) for title, network in learner.networks.items()}
            self._vectors = {
                title: keras.Variable(array, dtype=array.dtype.name)
                for title, array in learner.vectors.items()
            }
            self._rules = {
                name: _KerasRule(setup, [value for title in setup.titles for value in self._variables(title)])
                for name, setup in learner.optimizers.items()
            }
        self._forward = {
            title: tf.function(partial(_run_on_cpu, net), autograph=False)
            for title, net in self._nets.items()
        }
        self._backward = {
            title: tf.function(partial(_differentiate, net), autograph=False)
            for title, net in self._nets.items()
        }

    def _variables(self, title: str) -> list[Tensor]:
        return [self._vectors[title]] if title in self._vectors else self._nets[title].trainable_variables

    def forward(self, title: str, *inputs: np.ndarray) -> np.ndarray:
        """Return a network's output [batch, n]."""
        output: np.ndarray = self._forward[title](*map(tf.constant, inputs)).numpy()
        return output

    def differentiate(
        self, title: str, inputs: Sequence[np.ndarray], gradient: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the gradients of a network's inputs and of its trained arrays."""
        tensors = self._backward[title](tf.constant(gradient), *map(tf.constant, inputs))
        arrays = [tensor.numpy() for tensor in tensors]
        return arrays[: len(inputs)], arrays[len(inputs) :]

    def follow(self, slow: str, fast: str, tau: float) -> None:
        """Move every weight of the target network by the fraction `tau` towards the online one."""
        _move(self._nets[slow], self._nets[fast], tau)

    def weights(self, title: str) -> list[np.ndarray]:
        """Return the trained arrays of a network or vector."""
        return [np.array(variable.numpy()) for variable in self._variables(title)]


def _differentiate(net: NetworkModel, gradient: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Return the gradients of the inputs and of the variables."""
    with tf.GradientTape() as tape:
        for input_ in inputs:
            tape.watch(input_)
        output = _run_on_cpu(net, *inputs)
    weights = [variable.value for variable in net.trainable_variables]
    gradients: list[Tensor] = tape.gradient(
        output,
        [*inputs, *weights],
        output_gradients=gradient,
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    return gradients


class _KerasRule:
    """One optimizer of Keras, starting from a given state."""

    def __init__(self, setup: OptimizerSetup, variables: list[Tensor]) -> None:
        self._setup, self._count, self._variables = setup, setup.step, variables
        dtype = variables[0].dtype
        self._optimizer = build_keras_optimizer(keras, self._make, variables, dtype)
        self._epsilon = tf.Variable(setup.settings.get("epsilon", 0.0), dtype=dtype, trainable=False)
        # Only Adam's changes with each update; some classes take no variable.
        if setup.family == "Adam":
            self._optimizer.epsilon = self._epsilon
        self._optimizer.iterations.assign(setup.step)
        for edge, slot in setup.row.keras_lists.items():
            # Keras's sums of gradients include the learning rate, and in SGD the sign.
            factor = setup.row.folded * setup.settings["learning_rate"] if slot == VELOCITY else 1.0
            arrays = setup.slots.get(BUFFER if slot == VELOCITY else slot, ())
            for array, variable in zip(arrays, getattr(self._optimizer, edge, ()), strict=bool(arrays)):
                variable.assign(array * array.dtype.type(factor))
        self._apply = tf.function(self._update, autograph=False)

    def _make(self) -> Tensor:
        known = self._setup.choices
        names = (*self._setup.row.arguments, "weight_decay")
        arguments = {name: known[name] for name in names if known.get(name)}
        return getattr(keras.optimizers, self._setup.family)(known["learning_rate"], **arguments)

    def step(self, gradients: Sequence[np.ndarray]) -> None:
        """Make one update."""
        self._count += 1
        self._epsilon.assign(self._setup.epsilon_at(self._count, corrected=False))
        self._apply(*map(tf.constant, gradients))

    def _update(self, *gradients: Tensor) -> None:
        with tf.device("cpu:0"):
            self._optimizer.apply(list(gradients), self._variables)
