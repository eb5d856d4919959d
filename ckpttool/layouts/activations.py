"""The canonical names of activations: by the classes of torch, by the settings of RLlib.

Sources: torch/nn/modules/activation.py; rllib/models/utils.py, `get_activation_fn`.
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

RLLIB = {"swish": "silu", "None": "linear"}
