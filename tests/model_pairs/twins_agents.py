"""Twins of agents' networks: value functions, policies, world models, and networks of sets and graphs."""

# ruff: noqa: E731, N802

from __future__ import annotations

from itertools import pairwise

import keras
import torch
from keras import layers, ops
from torch import nn
from torch.nn import functional

from tests.model_pairs.twins import pair


def _mlp(*widths):
    steps = []
    for inputs, outputs in pairwise(widths[:-1]):
        steps += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*steps, nn.Linear(widths[-2], widths[-1]))


def _keras_mlp(*widths, name=None):
    hidden = [layers.Dense(width, activation="relu") for width in widths[:-1]]
    return keras.Sequential([*hidden, layers.Dense(widths[-1])], name=name)


@pair("ddpg_critic_action_first", ("v", 11), ("v", 3))
def ddpg_critic_action_first():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(11, 24)
            self.joint = nn.Linear(27, 20)
            self.q = nn.Linear(20, 1)

        def forward(self, s, a):
            h = functional.relu(self.embed(s))
            return self.q(functional.relu(self.joint(torch.cat([a, h], 1))))

    def K():
        s, a = keras.Input((11,), name="state"), keras.Input((3,), name="action")
        h = layers.Dense(24, activation="relu", name="state_fc")(s)
        h = layers.Dense(20, activation="relu", name="merge_fc")(layers.Concatenate()([h, a]))
        return keras.Model([s, a], layers.Dense(1, name="value")(h))

    return K, T


@pair("td3_twin_q", ("v", 17), ("v", 6))
def td3_twin_q():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1, self.l2, self.l3 = nn.Linear(23, 32), nn.Linear(32, 32), nn.Linear(32, 1)
            self.l4, self.l5, self.l6 = nn.Linear(23, 32), nn.Linear(32, 32), nn.Linear(32, 1)

        def forward(self, s, a):
            x = torch.cat([s, a], 1)
            q1 = self.l3(functional.relu(self.l2(functional.relu(self.l1(x)))))
            q2 = self.l6(functional.relu(self.l5(functional.relu(self.l4(x)))))
            return q1, q2

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.critic_1 = _keras_mlp(32, 32, 1)
            self.critic_2 = _keras_mlp(32, 32, 1)

        def call(self, x):
            z = ops.concatenate(x, -1)
            return [self.critic_1(z), self.critic_2(z)]

    return K, T


@pair("sac_gaussian_actor", ("v", 17))
def sac_gaussian_actor():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(17, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU())
            self.mean = nn.Linear(24, 6)
            self.log_std = nn.Linear(24, 6)

        def forward(self, x):
            h = self.backbone(x)
            return torch.tanh(self.mean(h)), self.log_std(h).clamp(-5, 2)

    def K():
        i = keras.Input((17,))
        h = layers.Dense(32, activation="relu", name="hidden_a")(i)
        h = layers.Dense(24, activation="relu", name="hidden_b")(h)
        mu = layers.Dense(6, activation="tanh", name="mu")(h)
        sigma = layers.Dense(6, name="log_sigma")(h)
        return keras.Model(i, [mu, ops.clip(sigma, -5, 2)])

    return K, T


@pair("noisy_c51", ("v", 12))
def noisy_c51():
    class Noisy(nn.Module):
        def __init__(self, used, output):
            super().__init__()
            self.weight_mu = nn.Parameter(torch.zeros(output, used))
            self.weight_sigma = nn.Parameter(torch.zeros(output, used))
            self.bias_mu = nn.Parameter(torch.zeros(output))
            self.bias_sigma = nn.Parameter(torch.zeros(output))

        def forward(self, x):
            return functional.linear(x, self.weight_mu, self.bias_mu)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.feature = nn.Linear(12, 20)
            self.hidden = Noisy(20, 16)
            self.atoms = Noisy(16, 4 * 11)

        def forward(self, x):
            h = functional.relu(self.hidden(functional.relu(self.feature(x))))
            return self.atoms(h).view(-1, 4, 11).softmax(-1)

    class KNoisy(layers.Layer):
        def __init__(self, output, **k):
            super().__init__(**k)
            self.created = output

        def build(self, shape):
            for name in ("mu", "sigma"):
                setattr(
                    self, f"kernel_{name}", self.add_weight((shape[-1], self.created), name=f"kernel_{name}")
                )
                setattr(self, f"bias_{name}", self.add_weight((self.created,), name=f"bias_{name}"))

        def call(self, x):
            return x @ self.kernel_mu + self.bias_mu

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.torso = layers.Dense(20, activation="relu")
            self.noisy_1 = KNoisy(16)
            self.noisy_2 = KNoisy(44)

        def call(self, x):
            h = self.noisy_2(ops.relu(self.noisy_1(self.torso(x))))
            return ops.softmax(ops.reshape(h, (-1, 4, 11)), -1)

    return K, T


@pair("r2d2_dueling_lstm", ("v", 7, 10))
def r2d2_dueling_lstm():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.advantage = _mlp(20, 16, 5)
            self.value = _mlp(20, 16, 1)
            self.lstm = nn.LSTM(14, 20, batch_first=True)
            self.encoder = nn.Linear(10, 14)

        def forward(self, x):
            h, _ = self.lstm(functional.relu(self.encoder(x)))
            a = self.advantage(h)
            return self.value(h) + a - a.mean(-1, keepdim=True)

    def K():
        i = keras.Input((7, 10))
        h = layers.Dense(14, activation="relu", name="embed")(i)
        h = layers.LSTM(20, return_sequences=True, name="memory")(h)
        v = layers.Dense(1, name="v_out")(layers.Dense(16, activation="relu", name="v_hidden")(h))
        a = layers.Dense(5, name="a_out")(layers.Dense(16, activation="relu", name="a_hidden")(h))
        return keras.Model(i, v + a - ops.mean(a, -1, keepdims=True))

    return K, T


@pair("impala_cnn", ("img", 9, 9, 3))
def impala_cnn():
    class Residual(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.conv0 = nn.Conv2d(width, width, 3, padding=1)
            self.conv1 = nn.Conv2d(width, width, 3, padding=1)

        def forward(self, x):
            return x + self.conv1(functional.relu(self.conv0(functional.relu(x))))

    class Section(nn.Module):
        def __init__(self, used, output):
            super().__init__()
            self.conv = nn.Conv2d(used, output, 3, padding=1)
            self.res_block0 = Residual(output)
            self.res_block1 = Residual(output)

        def forward(self, x):
            x = functional.max_pool2d(self.conv(x), 3, 2, 1)
            return self.res_block1(self.res_block0(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList([Section(3, 6), Section(6, 10)])
            self.fc = nn.Linear(90, 24)
            self.policy = nn.Linear(24, 5)
            self.baseline = nn.Linear(24, 1)

        def forward(self, x):
            for layer in self.convs:
                x = layer(x)
            h = functional.relu(self.fc(functional.relu(x).flatten(1)))
            return self.policy(h), self.baseline(h)

    def K():
        x = i = keras.Input((9, 9, 3))
        for width in (6, 10):
            x = layers.Conv2D(width, 3, padding="same")(x)
            x = layers.MaxPooling2D(3, 2, padding="same")(x)
            for _ in range(2):
                y = layers.Conv2D(width, 3, padding="same")(layers.ReLU()(x))
                y = layers.Conv2D(width, 3, padding="same")(layers.ReLU()(y))
                x = layers.Add()([x, y])
        h = layers.Dense(24, activation="relu")(layers.Flatten()(layers.ReLU()(x)))
        return keras.Model(i, [layers.Dense(5, name="logits")(h), layers.Dense(1, name="baseline")(h)])

    return K, T


@pair("nature_dqn", ("img", 36, 36, 4))
def nature_dqn():
    return (
        lambda: keras.Sequential(
            [
                keras.Input((36, 36, 4)),
                layers.Conv2D(8, 8, 4, activation="relu"),
                layers.Conv2D(12, 4, 2, activation="relu"),
                layers.Flatten(),
                layers.Dense(32, activation="relu"),
                layers.Dense(6),
            ]
        ),
        lambda: nn.Sequential(
            *(nn.Conv2d(4, 8, 8, 4), nn.ReLU(), nn.Conv2d(8, 12, 4, 2), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(108, 32), nn.ReLU(), nn.Linear(32, 6)),
        ),
    )


@pair("qmix_mixer", ("v", 3), ("v", 9))
def qmix_mixer():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.hyper_w_1, self.hyper_w_final = nn.Linear(9, 24), nn.Linear(9, 8)
            self.hyper_b_1 = nn.Linear(9, 8)
            self.V = nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, q, s):
            w1 = self.hyper_w_1(s).abs().view(-1, 3, 8)
            hidden = functional.elu((q.unsqueeze(1) @ w1).squeeze(1) + self.hyper_b_1(s))
            return (hidden * self.hyper_w_final(s).abs()).sum(1, keepdim=True) + self.V(s)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.w1 = layers.Dense(24)
            self.b1 = layers.Dense(8)
            self.w2 = layers.Dense(8)
            self.value_hidden = layers.Dense(8, activation="relu")
            self.value_out = layers.Dense(1)

        def call(self, x):
            q, s = x
            w1 = ops.reshape(ops.abs(self.w1(s)), (-1, 3, 8))
            hidden = ops.elu(ops.squeeze(ops.expand_dims(q, 1) @ w1, 1) + self.b1(s))
            mixed = ops.sum(hidden * ops.abs(self.w2(s)), 1, keepdims=True)
            return mixed + self.value_out(self.value_hidden(s))

    return K, T


@pair("dreamer_v3_head", ("v", 14))
def dreamer_v3_head():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            steps = []
            for width in (14, 24, 24):
                steps += [nn.Linear(width, 24, bias=False), nn.LayerNorm(24, eps=1e-3), nn.SiLU()]
            self.layers = nn.Sequential(*steps)
            self.mean_layer = nn.Linear(24, 31)

        def forward(self, x):
            return self.mean_layer(self.layers(x))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.linears = [layers.Dense(24, use_bias=False) for _ in range(3)]
            self.norms = [layers.LayerNormalization(epsilon=1e-3) for _ in range(3)]
            self.out = layers.Dense(31)

        def call(self, x):
            for linear, norm in zip(self.linears, self.norms, strict=True):
                x = ops.silu(norm(linear(x)))
            return self.out(x)

    return K, T


@pair("rssm_norm_gru", ("v", 10), ("v", 16))
def rssm_norm_gru():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.img_in = nn.Linear(10, 12)
            self.cell = nn.ModuleDict(
                {"layer": nn.Linear(28, 48, bias=False), "norm": nn.LayerNorm(48, eps=1e-3)}
            )
            self.img_out = nn.Linear(16, 12)
            self.stats = nn.Linear(12, 20)

        def forward(self, x, h):
            x = functional.elu(self.img_in(x))
            parts = self.cell["norm"](self.cell["layer"](torch.cat([x, h], 1)))
            reset, cand, update = parts.chunk(3, 1)
            cand = torch.tanh(reset.sigmoid() * cand)
            update = (update - 1).sigmoid()
            h = update * cand + (1 - update) * h
            return self.stats(functional.elu(self.img_out(h)))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.inp = layers.Dense(12, activation="elu")
            self.gates = layers.Dense(48, use_bias=False)
            self.gates_norm = layers.LayerNormalization(epsilon=1e-3)
            self.prior_hidden = layers.Dense(12, activation="elu")
            self.prior_stats = layers.Dense(20)

        def call(self, inputs):
            x, h = inputs
            parts = self.gates_norm(self.gates(ops.concatenate([self.inp(x), h], -1)))
            reset, cand, update = ops.split(parts, 3, -1)
            cand = ops.tanh(ops.sigmoid(reset) * cand)
            update = ops.sigmoid(update - 1)
            return self.prior_stats(self.prior_hidden(update * cand + (1 - update) * h))

    return K, T


def _bn(width):
    return nn.BatchNorm2d(width, eps=1e-3)


@pair("alphazero_board", ("img", 5, 5, 7))
def alphazero_board():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(12, 12, 3, padding=1, bias=False), _bn(12)
            self.conv2, self.bn2 = nn.Conv2d(12, 12, 3, padding=1, bias=False), _bn(12)

        def forward(self, x):
            y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
            return functional.relu(x + y)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(7, 12, 3, padding=1, bias=False), _bn(12), nn.ReLU())
            self.tower = nn.Sequential(Block(), Block())
            self.policy_conv, self.policy_bn = nn.Conv2d(12, 2, 1, bias=False), _bn(2)
            self.policy_fc = nn.Linear(50, 26)
            self.value_conv, self.value_bn = nn.Conv2d(12, 1, 1, bias=False), _bn(1)
            self.value_fc1, self.value_fc2 = nn.Linear(25, 16), nn.Linear(16, 1)

        def forward(self, x):
            x = self.tower(self.stem(x))
            p = functional.relu(self.policy_bn(self.policy_conv(x))).flatten(1)
            v = functional.relu(self.value_bn(self.value_conv(x))).flatten(1)
            return self.policy_fc(p), torch.tanh(self.value_fc2(functional.relu(self.value_fc1(v))))

    def K():
        def conv_bn(x, width, size, name):
            x = layers.Conv2D(width, size, padding="same", use_bias=False, name=f"{name}_conv")(x)
            return layers.BatchNormalization(name=f"{name}_norm")(x)

        i = keras.Input((5, 5, 7))
        x = layers.ReLU()(conv_bn(i, 12, 3, "input"))
        for n in range(2):
            y = layers.ReLU()(conv_bn(x, 12, 3, f"res{n}_a"))
            x = layers.ReLU()(layers.Add()([x, conv_bn(y, 12, 3, f"res{n}_b")]))
        p = layers.Flatten()(layers.ReLU()(conv_bn(x, 2, 1, "pi")))
        v = layers.Flatten()(layers.ReLU()(conv_bn(x, 1, 1, "v")))
        v = layers.Dense(16, activation="relu", name="v_hidden")(v)
        return keras.Model(
            i, [layers.Dense(26, name="pi")(p), layers.Dense(1, activation="tanh", name="v")(v)]
        )

    return K, T


@pair("multi_discrete_heads", ("v", 13))
def multi_discrete_heads():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared_net = _mlp(13, 20, 20)
            self.action_nets = nn.ModuleList(nn.Linear(20, n) for n in (3, 5, 2))
            self.critic = nn.Linear(20, 1)

        def forward(self, x):
            h = torch.tanh(self.shared_net(x))
            return *(net(h) for net in self.action_nets), self.critic(h)

    def K():
        i = keras.Input((13,))
        h = layers.Dense(20, activation="relu", name="fc_1")(i)
        h = layers.Dense(20, activation="tanh", name="fc_2")(h)
        heads = [layers.Dense(n, name=f"branch_{n}")(h) for n in (3, 5, 2)]
        return keras.Model(i, [*heads, layers.Dense(1, name="value")(h)])

    return K, T


@pair("bootstrapped_dqn", ("v", 9))
def bootstrapped_dqn():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.core = nn.Linear(9, 18)
            self.net_list = nn.ModuleList(_mlp(18, 12, 4) for _ in range(3))

        def forward(self, x):
            h = functional.relu(self.core(x))
            return tuple(net(h) for net in self.net_list)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.heads = [_keras_mlp(12, 4) for _ in range(3)]
            self.torso = layers.Dense(18, activation="relu")

        def call(self, x):
            h = self.torso(x)
            return [head(h) for head in self.heads]

    return K, T


@pair("pets_ensemble", ("v", 8))
def pets_ensemble():
    class EnsembleLinear(nn.Module):
        def __init__(self, used, output):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, used, output))
            self.bias = nn.Parameter(torch.zeros(4, 1, output))

        def forward(self, x):
            return x @ self.weight + self.bias

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = nn.ModuleList([EnsembleLinear(8, 12), EnsembleLinear(12, 10)])
            self.mean_and_logvar = EnsembleLinear(10, 6)

        def forward(self, x):
            x = x.unsqueeze(0).expand(4, -1, -1)
            for layer in self.hidden:
                x = functional.silu(layer(x))
            return self.mean_and_logvar(x).mean(0)

    class EnsembleDense(layers.Layer):
        def __init__(self, output, **k):
            super().__init__(**k)
            self.created = output

        def build(self, shape):
            self.kernel = self.add_weight((4, shape[-1], self.created), name="kernel")
            self.bias = self.add_weight((4, 1, self.created), name="bias")

        def call(self, x):
            return x @ self.kernel + self.bias

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.d1, self.d2, self.d3 = EnsembleDense(12), EnsembleDense(10), EnsembleDense(6)

        def call(self, x):
            x = ops.repeat(ops.expand_dims(x, 0), 4, 0)
            return ops.mean(self.d3(ops.silu(self.d2(ops.silu(self.d1(x))))), 0)

    return K, T


@pair("gail_discriminator", ("v", 6), ("v", 2), ("v", 6))
def gail_discriminator():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = _mlp(8, 14, 1)
            self.h = _mlp(6, 14, 1)

        def forward(self, s, a, following):
            shaping = 0.99 * self.h(following) - self.h(s)
            return self.g(torch.cat([s, a], 1)) + shaping

    def K():
        s, a, following = (keras.Input((n,), name=name) for n, name in ((6, "s"), (2, "a"), (6, "s_next")))
        reward = _keras_mlp(14, 1, name="reward")
        potential = _keras_mlp(14, 1, name="potential")
        value = reward(layers.Concatenate()([s, a])) + 0.99 * potential(following) - potential(s)
        return keras.Model([s, a, following], value)

    return K, T


@pair("icm_curiosity", ("v", 12), ("v", 12), ("v", 4))
def icm_curiosity():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.forward_net = _mlp(14, 16, 10)
            self.inverse_net = _mlp(20, 16, 4)
            self.feature = _mlp(12, 16, 10)

        def forward(self, s, following, a):
            f, g = self.feature(s), self.feature(following)
            return self.inverse_net(torch.cat([f, g], 1)), self.forward_net(torch.cat([f, a], 1))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.phi = _keras_mlp(16, 10)
            self.inverse_model = _keras_mlp(16, 4)
            self.forward_model = _keras_mlp(16, 10)

        def call(self, x):
            s, following, a = x
            f, g = self.phi(s), self.phi(following)
            one = self.inverse_model(ops.concatenate([f, g], -1))
            return [one, self.forward_model(ops.concatenate([f, a], -1))]

    return K, T


@pair("rnd_pair", ("img", 10, 10, 1))
def rnd_pair():
    def net(last):
        steps = [
            nn.Conv2d(1, 6, 4, 2),
            nn.LeakyReLU(0.2),
            nn.Conv2d(6, 8, 2),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
        ]
        return nn.Sequential(*steps, nn.Linear(72, 16), *last)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.predictor = net([nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)])
            self.target = net([])

        def forward(self, x):
            return self.predictor(x), self.target(x)

    class K(keras.Model):
        def __init__(self):
            super().__init__()

            def convs():
                leaky = lambda: layers.LeakyReLU(negative_slope=0.2)
                return [
                    *(layers.Conv2D(6, 4, 2), leaky(), layers.Conv2D(8, 2), leaky(), layers.Flatten()),
                ]

            self.target_net = keras.Sequential([*convs(), layers.Dense(16)])
            dense = [layers.Dense(16, activation="relu"), layers.Dense(16, activation="relu")]
            self.predictor_net = keras.Sequential([*convs(), *dense, layers.Dense(16)])

        def call(self, x):
            return [self.predictor_net(x), self.target_net(x)]

    return K, T


@pair("entity_attention_pool", ("v", 6, 9), ("v", 5))
def entity_attention_pool():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_embed, self.entity_embed = nn.Linear(5, 16), nn.Linear(9, 16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.norm = nn.LayerNorm(16, eps=1e-5)
            self.pi, self.vf = nn.Linear(32, 7), nn.Linear(32, 1)

        def forward(self, e, s):
            x = functional.relu(self.entity_embed(e))
            x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
            z = torch.cat([functional.relu(self.self_embed(s)), x.mean(1)], 1)
            return self.pi(z), self.vf(z)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed_entities = layers.Dense(16, activation="relu")
            self.embed_self = layers.Dense(16, activation="relu")
            self.mha = layers.MultiHeadAttention(2, 8)
            self.ln = layers.LayerNormalization(epsilon=1e-5)
            self.logits, self.value = layers.Dense(7), layers.Dense(1)

        def call(self, inputs):
            e, s = inputs
            x = self.embed_entities(e)
            x = self.ln(x + self.mha(x, x))
            z = ops.concatenate([self.embed_self(s), ops.mean(x, 1)], -1)
            return [self.logits(z), self.value(z)]

    return K, T


@pair("deep_sets", ("v", 8, 6))
def deep_sets():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.rho = _mlp(20, 16, 5)
            self.phi = _mlp(6, 16, 20)

        def forward(self, x):
            return self.rho(self.phi(x).sum(1))

    def K():
        i = keras.Input((8, 6))
        x = layers.Dense(20)(layers.Dense(16, activation="relu")(i))
        x = ops.sum(x, 1)
        return keras.Model(i, layers.Dense(5)(layers.Dense(16, activation="relu")(x)))

    return K, T


@pair("pointnet", ("seqc", 20, 3))
def pointnet():
    class TNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv1d(3, 8, 1), nn.Conv1d(8, 16, 1)
            self.bn1, self.bn2 = nn.BatchNorm1d(8, eps=1e-3), nn.BatchNorm1d(16, eps=1e-3)
            self.fc1, self.fc2 = nn.Linear(16, 12), nn.Linear(12, 9)

        def forward(self, x):
            x = functional.relu(self.bn1(self.conv1(x)))
            x = functional.relu(self.bn2(self.conv2(x))).max(2).values
            return self.fc2(functional.relu(self.fc1(x))).view(-1, 3, 3) + torch.eye(3)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.stn = TNet()
            self.conv1, self.bn1 = nn.Conv1d(3, 10, 1), nn.BatchNorm1d(10, eps=1e-3)
            self.conv2, self.bn2 = nn.Conv1d(10, 18, 1), nn.BatchNorm1d(18, eps=1e-3)
            self.fc = nn.Linear(18, 4)

        def forward(self, x):
            x = (x.transpose(1, 2) @ self.stn(x)).transpose(1, 2)
            x = functional.relu(self.bn1(self.conv1(x)))
            return self.fc(functional.relu(self.bn2(self.conv2(x))).max(2).values)

    def K():
        def shared(x, width, name):
            x = layers.Conv1D(width, 1, name=f"{name}_mlp")(x)
            return layers.ReLU()(layers.BatchNormalization(name=f"{name}_bn")(x))

        i = keras.Input((20, 3))
        t = layers.GlobalMaxPooling1D()(shared(shared(i, 8, "tnet_a"), 16, "tnet_b"))
        t = layers.Dense(9, name="tnet_out")(layers.Dense(12, activation="relu", name="tnet_fc")(t))
        x = ops.matmul(i, layers.Reshape((3, 3))(t) + ops.eye(3))
        x = layers.GlobalMaxPooling1D()(shared(shared(x, 10, "point_a"), 18, "point_b"))
        return keras.Model(i, layers.Dense(4, name="class")(x))

    return K, T


@pair("value_iteration_network", ("img", 6, 6, 2), out="img")
def value_iteration_network():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = nn.Conv2d(2, 10, 3, padding=1)
            self.r = nn.Conv2d(10, 1, 1, bias=False)
            self.q = nn.Conv2d(2, 5, 3, padding=1, bias=False)
            self.out = nn.Conv2d(5, 4, 1)

        def forward(self, x):
            r = self.r(self.h(x))
            v = torch.zeros_like(r)
            for _ in range(3):
                q = self.q(torch.cat([r, v], 1))
                v = q.max(1, keepdim=True).values
            return self.out(q)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.logits = layers.Conv2D(4, 1)
            self.transition = layers.Conv2D(5, 3, padding="same", use_bias=False)
            self.reward = layers.Conv2D(1, 1, use_bias=False)
            self.hidden = layers.Conv2D(10, 3, padding="same")

        def call(self, x):
            r = self.reward(self.hidden(x))
            v = ops.zeros_like(r)
            for _ in range(3):
                q = self.transition(ops.concatenate([r, v], -1))
                v = ops.max(q, -1, keepdims=True)
            return self.logits(q)

    return K, T


@pair("comm_net", ("v", 4, 7))
def comm_net():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(7, 12)
            self.f_modules = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
            self.c_modules = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(2))
            self.heads = nn.Linear(12, 5)

        def forward(self, x):
            h = torch.tanh(self.encoder(x))
            for f, c in zip(self.f_modules, self.c_modules, strict=True):
                h = torch.tanh(f(h) + c((h.sum(1, keepdim=True) - h) / 3))
            return self.heads(h)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.enc = layers.Dense(12, activation="tanh")
            self.own0, self.own1 = layers.Dense(12), layers.Dense(12)
            self.msg0, self.msg1 = layers.Dense(12, use_bias=False), layers.Dense(12, use_bias=False)
            self.act = layers.Dense(5)

        def call(self, x):
            h = self.enc(x)
            for own, msg in ((self.own0, self.msg0), (self.own1, self.msg1)):
                h = ops.tanh(own(h) + msg((ops.sum(h, 1, keepdims=True) - h) / 3))
            return self.act(h)

    return K, T


@pair("world_model_vae", ("img", 16, 16, 3), out="img")
def world_model_vae():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc_conv1, self.enc_conv2 = nn.Conv2d(3, 8, 4, 2), nn.Conv2d(8, 12, 4, 2)
            self.fc_mu, self.fc_logsigma = nn.Linear(48, 6), nn.Linear(48, 6)
            self.fc1 = nn.Linear(6, 40)
            self.deconv1, self.deconv2 = nn.ConvTranspose2d(40, 10, 5, 2), nn.ConvTranspose2d(10, 3, 8, 2)

        def forward(self, x):
            h = functional.relu(self.enc_conv2(functional.relu(self.enc_conv1(x)))).flatten(1)
            mu = self.fc_mu(h)
            y = functional.relu(self.fc1(mu)).view(-1, 40, 1, 1)
            y = torch.sigmoid(self.deconv2(functional.relu(self.deconv1(y))))
            return y, mu, self.fc_logsigma(h)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.e1 = layers.Conv2D(8, 4, 2, activation="relu")
            self.e2 = layers.Conv2D(12, 4, 2, activation="relu")
            self.z_mean, self.z_log_var = layers.Dense(6), layers.Dense(6)
            self.dense = layers.Dense(40, activation="relu")
            self.d1 = layers.Conv2DTranspose(10, 5, 2, activation="relu")
            self.d2 = layers.Conv2DTranspose(3, 8, 2, activation="sigmoid")
            self.flat = layers.Flatten()

        def call(self, x):
            h = self.flat(self.e2(self.e1(x)))
            mu = self.z_mean(h)
            y = self.d2(self.d1(ops.reshape(self.dense(mu), (-1, 1, 1, 40))))
            return [y, mu, self.z_log_var(h)]

    return K, T


@pair("mdn_rnn", ("v", 5, 9))
def mdn_rnn():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.gmm_linear = nn.Linear(18, 32)
            self.rnn = nn.LSTM(9, 18, batch_first=True)

        def forward(self, x):
            y = self.gmm_linear(self.rnn(x)[0])
            return y[..., :12], y[..., 12:24].exp(), y[..., 24:28].log_softmax(-1), y[..., 28:]

    def K():
        i = keras.Input((5, 9))
        y = layers.Dense(32, name="mixture")(layers.LSTM(18, return_sequences=True, name="core")(i))
        parts = [y[..., :12], ops.exp(y[..., 12:24]), ops.log_softmax(y[..., 24:28], -1), y[..., 28:]]
        return keras.Model(i, parts)

    return K, T


@pair("gru_cell_worker", ("v", 10), ("v", 14))
def gru_cell_worker():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(10, 14)
            self.rnn = nn.GRUCell(14, 14)
            self.fc2 = nn.Linear(14, 6)

        def forward(self, x, h):
            h = self.rnn(functional.relu(self.fc1(x)), h)
            return self.fc2(h), h

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.inp = layers.Dense(14, activation="relu")
            self.cell = layers.GRUCell(14)
            self.q = layers.Dense(6)

        def call(self, inputs):
            x, h = inputs
            h, _ = self.cell(self.inp(x), [h])
            return [self.q(h), h]

    return K, T


@pair("graph_attention", ("v", 5, 7), ("v", 5, 5))
def graph_attention():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(7, 12, bias=False)
            self.att_src, self.att_dst = nn.Linear(12, 1, bias=False), nn.Linear(12, 1, bias=False)
            self.out = nn.Linear(12, 3)

        def forward(self, x, a):
            h = self.lin(x)
            e = functional.leaky_relu(self.att_src(h) + self.att_dst(h).transpose(1, 2), 0.2)
            return self.out(functional.elu((e + a).softmax(-1) @ h))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.kernel = layers.Dense(12, use_bias=False)
            self.attn_self = layers.Dense(1, use_bias=False)
            self.attn_neighs = layers.Dense(1, use_bias=False)
            self.readout = layers.Dense(3)

        def call(self, inputs):
            x, a = inputs
            h = self.kernel(x)
            e = ops.leaky_relu(self.attn_self(h) + ops.transpose(self.attn_neighs(h), (0, 2, 1)), 0.2)
            return self.readout(ops.elu(ops.softmax(e + a, -1) @ h))

    return K, T


@pair("spatial_softmax_policy", ("img", 11, 11, 3), ("v", 7))
def spatial_softmax_policy():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(nn.Conv2d(3, 8, 5, 2), nn.ReLU(), nn.Conv2d(8, 6, 3))
            self.head = _mlp(19, 16, 4)

        def forward(self, x, p):
            # One place in each corner of an image of 2 x 2.
            w = self.conv(x).flatten(2).softmax(-1)
            gx = (w * torch.tensor([-1.0, 1.0, -1.0, 1.0])).sum(-1)
            gy = (w * torch.tensor([-1.0, -1.0, 1.0, 1.0])).sum(-1)
            return self.head(torch.cat([gx, gy, p], 1))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.c1 = layers.Conv2D(8, 5, 2, activation="relu")
            self.c2 = layers.Conv2D(6, 3)
            self.hidden = layers.Dense(16, activation="relu")
            self.action = layers.Dense(4)

        def call(self, inputs):
            x, p = inputs
            w = ops.softmax(ops.reshape(self.c2(self.c1(x)), (-1, 4, 6)), 1)
            gx = ops.sum(w * ops.array([-1.0, 1.0, -1.0, 1.0])[:, None], 1)
            gy = ops.sum(w * ops.array([-1.0, -1.0, 1.0, 1.0])[:, None], 1)
            return self.action(self.hidden(ops.concatenate([gx, gy, p], -1)))

    return K, T
