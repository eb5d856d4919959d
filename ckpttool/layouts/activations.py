"""The canonical names of torch's activations, by the last part of their classes' names.

Source: torch/nn/modules/activation.py.
"""

from __future__ import annotations

TORCH = {
    "ReLU": "relu",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
    "ELU": "elu",
    "LeakyReLU": "leaky_relu",
    "GELU": "gelu",
    "Softplus": "softplus",
}
