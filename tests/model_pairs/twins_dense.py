"""Twins of dense layers, norms, embeddings and own classes, with square shapes on purpose."""

# ruff: noqa: E731, N802, B007

from __future__ import annotations

import keras
import numpy as np
import torch
from keras import layers
from torch import nn
from torch.nn import functional

from tests.model_pairs.twins import pair


@pair("mlp_seq_square", ("v", 8))
def mlp_seq_square():
    return (
        lambda: keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(8, activation="tanh"),
                layers.Dense(8, activation="tanh"),
                layers.Dense(8),
            ]
        ),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
    )


@pair("mlp_ctor_reversed", ("v", 8))
def mlp_ctor_reversed():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = layers.Dense(8)
            self.h2 = layers.Dense(8, activation="relu")
            self.h1 = layers.Dense(8, activation="relu")

        def call(self, x):
            return self.head(self.h2(self.h1(x)))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(8, 8)
            self.fc2 = nn.Linear(8, 8)
            self.fc3 = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc3(functional.relu(self.fc2(functional.relu(self.fc1(x)))))

    return K, T


@pair("mlp_torch_ctor_reversed", ("v", 8))
def mlp_torch_ctor_reversed():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(8, 8)
            self.mid = nn.Linear(8, 8)
            self.inp = nn.Linear(8, 8)

        def forward(self, x):
            return self.out(functional.relu(self.mid(functional.relu(self.inp(x)))))

    return (
        lambda: keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(8, activation="relu"),
                layers.Dense(8, activation="relu"),
                layers.Dense(8),
            ]
        ),
        T,
    )


@pair("unet_like_mlp", ("v", 8))
def unet_like_mlp():
    def K():
        i = keras.Input((8,))
        a = layers.Dense(8, activation="relu", name="down1")(i)
        b = layers.Dense(8, activation="relu", name="down2")(a)
        c = layers.Dense(8, activation="relu", name="mid")(b)
        d = layers.Dense(8, activation="relu", name="up2")(c + b)
        e = layers.Dense(8, activation="relu", name="up1")(d + a)
        return keras.Model(i, layers.Dense(8, name="final")(e))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.downs = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.ups = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.bottleneck = nn.Linear(8, 8)
            self.final = nn.Linear(8, 8)

        def forward(self, x):
            h = []
            for d in self.downs:
                x = functional.relu(d(x))
                h.append(x)
            x = functional.relu(self.bottleneck(x))
            for u in self.ups:
                x = functional.relu(u(x + h.pop()))
            return self.final(x)

    return K, T


@pair("twin_critics_ctor_swapped", ("v", 6), ("v", 2), out="v")
def twin_critics_ctor_swapped():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            mk = lambda: keras.Sequential(
                [layers.Dense(16, activation="relu"), layers.Dense(16, activation="relu"), layers.Dense(1)]
            )
            self.q2 = mk()
            self.q1 = mk()

        def call(self, x):
            z = keras.ops.concatenate(x, -1)
            return [self.q1(z), self.q2(z)]

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            mk = lambda: nn.Sequential(
                nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)
            )
            self.q1 = mk()
            self.q2 = mk()

        def forward(self, a, b):
            z = torch.cat([a, b], -1)
            return self.q1(z), self.q2(z)

    return K, T


@pair("twin_critics_words", ("v", 6), ("v", 2))
def twin_critics_words():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.second = [layers.Dense(16, activation="relu"), layers.Dense(1)]
            self.first = [layers.Dense(16, activation="relu"), layers.Dense(1)]

        def call(self, x):
            z = keras.ops.concatenate(x, -1)
            return [self.first[1](self.first[0](z)), self.second[1](self.second[0](z))]

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.qf1 = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
            self.qf2 = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, a, b):
            z = torch.cat([a, b], -1)
            return self.qf1(z), self.qf2(z)

    return K, T


@pair("dueling", ("v", 6))
def dueling():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.advantage = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(4)])
            self.value = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(1)])
            self.body = layers.Dense(16, activation="relu")

        def call(self, x):
            h = self.body(x)
            a = self.advantage(h)
            return self.value(h) + a - keras.ops.mean(a, -1, keepdims=True)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.feature = nn.Linear(6, 16)
            self.value_stream = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
            self.advantage_stream = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, x):
            h = functional.relu(self.feature(x))
            a = self.advantage_stream(h)
            return self.value_stream(h) + a - a.mean(-1, keepdim=True)

    return K, T


@pair("dueling_functional_unnamed", ("v", 6))
def dueling_functional_unnamed():
    def K():
        i = keras.Input((6,))
        h = layers.Dense(16, activation="relu")(i)
        a1 = layers.Dense(16, activation="relu")
        v1 = layers.Dense(16, activation="relu")
        v = layers.Dense(1)(v1(h))
        a = layers.Dense(4)(a1(h))
        return keras.Model(i, [v, a])

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Linear(6, 16)
            self.v1 = nn.Linear(16, 16)
            self.v2 = nn.Linear(16, 1)
            self.a1 = nn.Linear(16, 16)
            self.a2 = nn.Linear(16, 4)

        def forward(self, x):
            h = functional.relu(self.trunk(x))
            return self.v2(functional.relu(self.v1(h))), self.a2(functional.relu(self.a1(h)))

    return K, T


@pair("actor_mean_logstd", ("v", 6))
def actor_mean_logstd():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.l1 = layers.Dense(16, activation="relu")
            self.log_std = layers.Dense(3)
            self.mu = layers.Dense(3)

        def call(self, x):
            h = self.l1(x)
            return [self.mu(h), self.log_std(h)]

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
            self.mean_layer = nn.Linear(16, 3)
            self.log_std_layer = nn.Linear(16, 3)

        def forward(self, x):
            h = self.net(x)
            return self.mean_layer(h), self.log_std_layer(h)

    return K, T


@pair("actor_logstd_param", ("v", 6))
def actor_logstd_param():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = layers.Dense(16, activation="tanh", name="pi_fc0")
            self.b = layers.Dense(16, activation="tanh", name="pi_fc1")
            self.c = layers.Dense(16, name="pi_out")

        def build(self, sh):
            self.a.build(sh)
            self.b.build((None, 16))
            self.c.build((None, 16))
            self.log_std = self.add_weight(shape=(16,), name="log_std")
            self.built = True

        def call(self, x):
            m = self.c(self.b(self.a(x)))
            return [m, keras.ops.broadcast_to(keras.ops.exp(self.log_std), keras.ops.shape(m))]

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.logstd = nn.Parameter(torch.zeros(16))
            self.actor = nn.Sequential(
                nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)
            )

        def forward(self, x):
            m = self.actor(x)
            return m, self.logstd.exp().expand_as(m)

    return K, T


@pair("iqn", ("v", 16), ("v", 1))
def iqn():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.psi = layers.Dense(16, activation="relu")
            self.phi = layers.Dense(16, activation="relu")
            self.out = layers.Dense(16)

        def call(self, x):
            o, t = x
            c = keras.ops.cos(np.pi * t * np.arange(16, dtype="float32"))
            return self.out(self.psi(o) * self.phi(c))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.phi = nn.Linear(16, 16)
            self.psi = nn.Linear(16, 16)
            self.head = nn.Linear(16, 16)

        def forward(self, o, t):
            c = torch.cos(np.pi * t * torch.arange(16.0))
            return self.head(functional.relu(self.psi(o)) * functional.relu(self.phi(c)))

    return K, T


@pair("moe", ("v", 8))
def moe():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.gate = layers.Dense(8)
            self.experts = [
                keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(8)]) for _ in range(8)
            ]

        def call(self, x):
            g = keras.ops.softmax(self.gate(x))
            e = keras.ops.stack([f(x) for f in self.experts], 1)
            return keras.ops.sum(e * g[..., None], 1)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(8)
            )
            self.router = nn.Linear(8, 8)

        def forward(self, x):
            g = self.router(x).softmax(-1)
            return (torch.stack([f(x) for f in self.experts], 1) * g[..., None]).sum(1)

    return K, T


@pair("moe_same_names", ("v", 8))
def moe_same_names():
    class E(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.w1 = layers.Dense(8, activation="relu", name="w1")
            self.w2 = layers.Dense(8, name="w2")

        def call(self, x):
            return self.w2(self.w1(x))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.experts = [E(name=f"expert_{i}") for i in range(4)]
            self.gate = layers.Dense(4, name="gate")

        def call(self, x):
            g = keras.ops.softmax(self.gate(x))
            e = keras.ops.stack([f(x) for f in self.experts], 1)
            return keras.ops.sum(e * g[..., None], 1)

    class TE(nn.Module):
        def __init__(self):
            super().__init__()
            self.w2 = nn.Linear(8, 8)
            self.w1 = nn.Linear(8, 8)

        def forward(self, x):
            return self.w2(functional.relu(self.w1(x)))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList(TE() for _ in range(4))

        def forward(self, x):
            g = self.gate(x).softmax(-1)
            return (torch.stack([f(x) for f in self.experts], 1) * g[..., None]).sum(1)

    return K, T


@pair("gcn_square", ("v", 5, 8), ("v", 5, 5))
def gcn_square():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.self_lin = layers.Dense(8, use_bias=False)
            self.nbr_lin = layers.Dense(8, use_bias=False)
            self.upd = layers.Dense(8)

        def call(self, x):
            h, a = x
            return self.upd(keras.ops.relu(self.self_lin(h) + a @ self.nbr_lin(h)))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin_nbr = nn.Linear(8, 8, bias=False)
            self.lin_self = nn.Linear(8, 8, bias=False)
            self.lin_upd = nn.Linear(8, 8)

        def forward(self, h, a):
            return self.lin_upd(functional.relu(self.lin_self(h) + a @ self.lin_nbr(h)))

    return K, T


@pair("own_xw_torch", ("v", 8))
def own_xw_torch():
    class XW(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 8))
            self.bias = nn.Parameter(torch.zeros(8))

        def forward(self, x):
            return x @ self.weight + self.bias

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = XW()
            self.b = nn.Linear(8, 8)

        def forward(self, x):
            return self.b(functional.relu(self.a(x)))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = layers.Dense(8, activation="relu")
            self.b = layers.Dense(8)

        def call(self, x):
            return self.b(self.a(x))

    return K, T


@pair("own_out_in_keras", ("v", 8))
def own_out_in_keras():
    class OI(layers.Layer):
        def build(self, sh):
            self.kernel = self.add_weight(shape=(8, 8), name="kernel")
            self.bias = self.add_weight(shape=(8,), name="bias")

        def call(self, x):
            return x @ keras.ops.transpose(self.kernel) + self.bias

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = OI(name="a")
            self.b = layers.Dense(8, name="b")

        def call(self, x):
            return self.b(keras.ops.relu(self.a(x)))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = nn.Linear(8, 8)

        def forward(self, x):
            return self.b(functional.relu(self.a(x)))

    return K, T


@pair("linear_subclass_xw", ("v", 8))
def linear_subclass_xw():
    class XLin(nn.Linear):
        def forward(self, x):
            return x @ self.weight + self.bias

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = XLin(8, 8)
            self.b = nn.Linear(8, 8)

        def forward(self, x):
            return self.b(functional.relu(self.a(x)))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = layers.Dense(8, activation="relu")
            self.b = layers.Dense(8)

        def call(self, x):
            return self.b(self.a(x))

    return K, T


@pair("dense_subclass_oi", ("v", 8))
def dense_subclass_oi():
    class KD(layers.Dense):
        def call(self, x, **k):
            return keras.ops.matmul(x, keras.ops.transpose(self.kernel)) + self.bias

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = KD(8)
            self.b = layers.Dense(8)

        def call(self, x):
            return self.b(keras.ops.relu(self.a(x)))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = nn.Linear(8, 8)

        def forward(self, x):
            return self.b(functional.relu(self.a(x)))

    return K, T


@pair("film_gamma_beta", ("v", 8), ("v", 8))
def film_gamma_beta():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.beta = layers.Dense(8)
            self.gamma = layers.Dense(8)
            self.fc = layers.Dense(8)

        def call(self, x):
            x, c = x
            return self.fc(x) * self.gamma(c) + self.beta(c)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.gamma = nn.Linear(8, 8)
            self.beta = nn.Linear(8, 8)

        def forward(self, x, c):
            return self.fc(x) * self.gamma(c) + self.beta(c)

    return K, T


@pair("affine_gamma_beta_no_norm", ("v", 8))
def affine_gamma_beta_no_norm():
    class A(layers.Layer):
        def build(self, sh):
            self.gamma = self.add_weight(shape=(8,), name="gamma")
            self.beta = self.add_weight(shape=(8,), name="beta")

        def call(self, x):
            return x * self.gamma + self.beta

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.d = layers.Dense(8)
            self.norm = A()

        def call(self, x):
            return self.norm(self.d(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.d = nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8, eps=1e-3)

        def forward(self, x):
            return self.norm(self.d(x))

    return K, T


@pair("layernorm_mlp", ("v", 8))
def layernorm_mlp():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.ln2 = layers.LayerNormalization(epsilon=1e-5)
            self.ln1 = layers.LayerNormalization(epsilon=1e-5)
            self.fc1 = layers.Dense(8)
            self.fc2 = layers.Dense(8)

        def call(self, x):
            return self.ln2(self.fc2(keras.ops.relu(self.ln1(self.fc1(x)))))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8)
            )

        def forward(self, x):
            return self.net(x)

    return K, T


@pair("layernorm_noaffine", ("v", 8))
def layernorm_noaffine():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.n = layers.LayerNormalization(center=False, scale=False, epsilon=1e-5)
            self.fc1 = layers.Dense(8)
            self.fc2 = layers.Dense(8)

        def call(self, x):
            return self.fc2(self.n(self.fc1(x)))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8, elementwise_affine=False)
            self.fc2 = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc2(self.norm(self.fc1(x)))

    return K, T


@pair("layernorm_eps_mismatch", ("v", 8), expect="named")
def layernorm_eps_mismatch():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.n = layers.LayerNormalization()
            self.fc1 = layers.Dense(8)
            self.fc2 = layers.Dense(8)

        def call(self, x):
            return self.fc2(self.n(self.fc1(x)))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(8, 8)
            self.n = nn.LayerNorm(8)
            self.fc2 = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc2(self.n(self.fc1(x)))

    return K, T


@pair("rms_own", ("v", 8))
def rms_own():
    class RMS(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(8, 8)
            self.norm = RMS()
            self.fc2 = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc2(self.norm(self.fc1(x)))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = layers.RMSNormalization(epsilon=1e-6)
            self.fc1 = layers.Dense(8)
            self.fc2 = layers.Dense(8)

        def call(self, x):
            return self.fc2(self.norm(self.fc1(x)))

    return K, T


@pair("rms_gemma_plus1", ("v", 8))
def rms_gemma_plus1():
    class GemmaRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(8, 8)
            self.norm = GemmaRMSNorm()
            self.fc2 = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc2(self.norm(self.fc1(x)))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = layers.RMSNormalization(epsilon=1e-6)
            self.fc1 = layers.Dense(8)
            self.fc2 = layers.Dense(8)

        def call(self, x):
            return self.fc2(self.norm(self.fc1(x)))

    return K, T


@pair("batchnorm_mlp", ("v", 8))
def batchnorm_mlp():
    def K():
        i = keras.Input((8,))
        x = i
        for n in range(2):
            x = layers.ReLU()(layers.BatchNormalization(epsilon=1e-5, momentum=0.9)(layers.Dense(8)(x)))
        return keras.Model(i, layers.Dense(8)(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(8, 8)
            self.fc2 = nn.Linear(8, 8)
            self.fc3 = nn.Linear(8, 8)
            self.bn1 = nn.BatchNorm1d(8)
            self.bn2 = nn.BatchNorm1d(8)

        def forward(self, x):
            return self.fc3(functional.relu(self.bn2(self.fc2(functional.relu(self.bn1(self.fc1(x)))))))

    return K, T


@pair("prelu_mlp", ("v", 8))
def prelu_mlp():
    def K():
        i = keras.Input((8,))
        return keras.Model(i, layers.Dense(8)(layers.PReLU()(layers.Dense(8)(i))))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1 = nn.Linear(8, 8)
            self.act = nn.PReLU(8)
            self.l2 = nn.Linear(8, 8)

        def forward(self, x):
            return self.l2(self.act(self.l1(x)))

    return K, T


@pair("weight_norm_new", ("v", 8))
def weight_norm_new():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
            self.b = nn.Linear(8, 8)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = layers.Dense(8, activation="tanh")
            self.b = layers.Dense(8)

        def call(self, x):
            return self.b(self.a(x))

    return K, T


@pair("spectral_norm_new", ("v", 8))
def spectral_norm_new():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
            self.b = nn.Linear(8, 8)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = layers.Dense(8, activation="tanh")
            self.b = layers.Dense(8)

        def call(self, x):
            return self.b(self.a(x))

    return K, T


@pair("ema_copy", ("v", 8))
def ema_copy():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.ema = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
            self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

        def forward(self, x):
            return self.net(x), self.ema(x)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.online = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(8)])
            self.target = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(8)])

        def call(self, x):
            return [self.online(x), self.target(x)]

    return K, T


@pair("siamese_shared", ("v", 8), ("v", 8))
def siamese_shared():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Linear(8, 8)
            self.cmp = nn.Linear(8, 8)

        def forward(self, a, b):
            return self.cmp(torch.tanh(self.enc(a)) * torch.tanh(self.enc(b)))

    def K():
        a, b = keras.Input((8,)), keras.Input((8,))
        e = layers.Dense(8, activation="tanh")
        return keras.Model([a, b], layers.Dense(8)(e(a) * e(b)))

    return K, T


@pair("recommender", ("ids", 0, 30), ("ids", 0, 30), ("ids", 0, 30))
def recommender():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.embeddings = nn.ModuleDict({k: nn.Embedding(30, 4) for k in ("user", "item", "genre")})
            self.out = nn.Linear(12, 1)

        def forward(self, u, i, g):
            return self.out(
                torch.cat(
                    [self.embeddings["user"](u), self.embeddings["item"](i), self.embeddings["genre"](g)], -1
                )
            )

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.e_genre = layers.Embedding(30, 4, name="genre_emb")
            self.e_item = layers.Embedding(30, 4, name="item_emb")
            self.e_user = layers.Embedding(30, 4, name="user_emb")
            self.o = layers.Dense(1, name="score")

        def call(self, x):
            u, i, g = x
            return self.o(keras.ops.concatenate([self.e_user(u), self.e_item(i), self.e_genre(g)], -1))

    return K, T


@pair("ncf_mlp_gmf", ("ids", 0, 30), ("ids", 0, 30))
def ncf_mlp_gmf():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_user_GMF = nn.Embedding(30, 8)
            self.embed_item_GMF = nn.Embedding(30, 8)
            self.embed_user_MLP = nn.Embedding(30, 8)
            self.embed_item_MLP = nn.Embedding(30, 8)
            self.MLP_layers = nn.Sequential(nn.Linear(16, 8), nn.ReLU())
            self.predict_layer = nn.Linear(16, 1)

        def forward(self, u, i):
            return self.predict_layer(
                torch.cat(
                    [
                        self.embed_user_GMF(u) * self.embed_item_GMF(i),
                        self.MLP_layers(torch.cat([self.embed_user_MLP(u), self.embed_item_MLP(i)], -1)),
                    ],
                    -1,
                )
            )

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.mlp_user_embedding = layers.Embedding(30, 8)
            self.mlp_item_embedding = layers.Embedding(30, 8)
            self.gmf_user_embedding = layers.Embedding(30, 8)
            self.gmf_item_embedding = layers.Embedding(30, 8)
            self.d = layers.Dense(8, activation="relu")
            self.p = layers.Dense(1)

        def call(self, x):
            u, i = x
            c = keras.ops.concatenate
            return self.p(
                c(
                    [
                        self.gmf_user_embedding(u) * self.gmf_item_embedding(i),
                        self.d(c([self.mlp_user_embedding(u), self.mlp_item_embedding(i)], -1)),
                    ],
                    -1,
                )
            )

    return K, T


@pair("tied_lm", ("ids", 6, 16))
def tied_lm():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(16, 16)
            self.h = nn.Linear(16, 16)
            self.lm_head = nn.Linear(16, 16, bias=False)
            self.lm_head.weight = self.emb.weight

        def forward(self, x):
            return self.lm_head(torch.tanh(self.h(self.emb(x))))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.emb = layers.Embedding(16, 16)
            self.h = layers.Dense(16, activation="tanh")

        def call(self, x):
            return self.h(self.emb(x)) @ keras.ops.transpose(self.emb.embeddings)

    return K, T


@pair("untied_lm_square", ("ids", 6, 16))
def untied_lm_square():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(16, 16)
            self.h = nn.Linear(16, 16, bias=False)
            self.lm_head = nn.Linear(16, 16, bias=False)

        def forward(self, x):
            return self.lm_head(torch.tanh(self.h(self.wte(x))))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.lm_head = layers.Dense(16, use_bias=False)
            self.wte = layers.Embedding(16, 16)
            self.h = layers.Dense(16, activation="tanh", use_bias=False)

        def call(self, x):
            return self.lm_head(self.h(self.wte(x)))

    return K, T


@pair("einsum_dense_square", ("v", 4, 8))
def einsum_dense_square():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = layers.EinsumDense("btd,ed->bte", output_shape=(None, 8), bias_axes="e")
            self.b = layers.EinsumDense("btd,de->bte", output_shape=(None, 8), bias_axes="e")

        def call(self, x):
            return self.b(keras.ops.tanh(self.a(x)))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = nn.Linear(8, 8)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    return K, T


@pair("mixer_token_channel", ("v", 8, 8))
def mixer_token_channel():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.channel_mix = [layers.Dense(8, activation="gelu"), layers.Dense(8)]
            self.token_mix = [layers.Dense(8, activation="gelu"), layers.Dense(8)]

        def call(self, x):
            t = keras.ops.transpose
            y = self.token_mix[1](self.token_mix[0](t(x, (0, 2, 1))))
            x = x + t(y, (0, 2, 1))
            return x + self.channel_mix[1](self.channel_mix[0](x))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(8, 8)
            self.fc2 = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc2(functional.gelu(self.fc1(x)))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp_tokens = M()
            self.mlp_channels = M()

        def forward(self, x):
            x = x + self.mlp_tokens(x.transpose(1, 2)).transpose(1, 2)
            return x + self.mlp_channels(x)

    return K, T


@pair("swiglu_llama", ("v", 8))
def swiglu_llama():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.down = layers.Dense(8, use_bias=False)
            self.up = layers.Dense(8, use_bias=False)
            self.gate = layers.Dense(8, use_bias=False)

        def call(self, x):
            return self.down(keras.ops.silu(self.gate(x)) * self.up(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj = nn.Linear(8, 8, bias=False)
            self.up_proj = nn.Linear(8, 8, bias=False)
            self.down_proj = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))

    return K, T


@pair("vae_mu_logvar", ("v", 8))
def vae_mu_logvar():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.fc_logvar = layers.Dense(8)
            self.fc_mu = layers.Dense(8)
            self.enc = layers.Dense(8, activation="relu")
            self.dec = layers.Dense(8)

        def call(self, x):
            h = self.enc(x)
            return [self.dec(self.fc_mu(h)), self.fc_logvar(h)]

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(8, 8)
            self.fc21 = nn.Linear(8, 8)
            self.fc22 = nn.Linear(8, 8)
            self.fc3 = nn.Linear(8, 8)

        def forward(self, x):
            h = functional.relu(self.fc1(x))
            return self.fc3(self.fc21(h)), self.fc22(h)

    return K, T
