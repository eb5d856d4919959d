"""Pairs of architectures of reinforcement learning, and of others that use their parts.

They were written, and not changed, before ckpttool first converted them.
"""

# ruff: noqa: B905, N802, N812, RUF007

from __future__ import annotations

import keras
import numpy as np
import torch
from keras import layers, ops
from torch import nn
from torch.nn import functional as F

from tests.model_pairs.twins import pair


# 1. R2D2: convolutions, LSTM with previous action and reward, dueling heads
@pair("r2d2", ("img", 16, 16, 3), ("v", 4), ("v", 1))
def r2d2():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.feature = nn.Sequential(
                nn.Conv2d(3, 8, 4, 2),
                nn.ReLU(),
                nn.Conv2d(8, 16, 3, 2),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(144, 32),
                nn.ReLU(),
            )
            self.recurrent = nn.LSTM(32 + 4 + 1, 32, batch_first=True)
            self.advantage = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
            self.value = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, x, last_action, last_reward):
            h = torch.cat((self.feature(x), last_action, last_reward), 1)
            h = self.recurrent(h.unsqueeze(1))[0][:, 0]
            a = self.advantage(h)
            return self.value(h) + a - a.mean(1, keepdim=True)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.conv_a = layers.Conv2D(8, 4, 2, activation="relu")
            self.conv_b = layers.Conv2D(16, 3, 2, activation="relu")
            self.flat = layers.Flatten()
            self.torso = layers.Dense(32, activation="relu")
            self.memory = layers.LSTM(32)
            self.v_hidden = layers.Dense(32, activation="relu")
            self.v_out = layers.Dense(1)
            self.adv_hidden = layers.Dense(32, activation="relu")
            self.adv_out = layers.Dense(4)

        def call(self, inputs):
            x, a, r = inputs
            h = self.torso(self.flat(self.conv_b(self.conv_a(x))))
            h = self.memory(ops.expand_dims(ops.concatenate([h, a, r], -1), 1))
            adv = self.adv_out(self.adv_hidden(h))
            return self.v_out(self.v_hidden(h)) + adv - ops.mean(adv, axis=-1, keepdims=True)

    return K, T


# 2. QMIX mixing network with hypernetworks
@pair("qmix", ("v", 3), ("v", 12))
def qmix():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.hyper_w_1 = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3 * 16))
            self.hyper_w_final = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16))
            self.hyper_b_1 = nn.Linear(12, 16)
            self.V = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, q, s):
            w1 = self.hyper_w_1(s).abs().view(-1, 3, 16)
            b1 = self.hyper_b_1(s).view(-1, 1, 16)
            h = F.elu(torch.bmm(q.view(-1, 1, 3), w1) + b1)
            wf = self.hyper_w_final(s).abs().view(-1, 16, 1)
            return (torch.bmm(h, wf) + self.V(s).view(-1, 1, 1)).view(-1, 1)

    class Hyper(layers.Layer):
        def __init__(self, units, **kw):
            super().__init__(**kw)
            self.hidden = layers.Dense(16, activation="relu")
            self.out = layers.Dense(units)

        def call(self, s):
            return self.out(self.hidden(s))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.bias_first = layers.Dense(16)
            self.weights_first = Hyper(48)
            self.state_value = Hyper(1)
            self.weights_second = Hyper(16)

        def call(self, inputs):
            q, s = inputs
            w = ops.reshape(ops.abs(self.weights_first(s)), (-1, 3, 16))
            h = ops.elu(ops.matmul(q[:, None, :], w) + self.bias_first(s)[:, None, :])
            w = ops.reshape(ops.abs(self.weights_second(s)), (-1, 16, 1))
            return ops.reshape(ops.matmul(h, w), (-1, 1)) + self.state_value(s)

    return K, T


# 3. DreamerV3's RSSM step: own GRU with layer norm, prior and posterior
@pair("rssm", ("v", 24), ("v", 16), ("v", 3), ("v", 20))
def rssm():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self._img_in_layers = nn.Sequential(
                nn.Linear(16 + 3, 24, bias=False), nn.LayerNorm(24, eps=1e-3), nn.SiLU()
            )
            self._cell_layers = nn.Sequential(nn.Linear(48, 72, bias=False), nn.LayerNorm(72, eps=1e-3))
            self._img_out_layers = nn.Sequential(
                nn.Linear(24, 24, bias=False), nn.LayerNorm(24, eps=1e-3), nn.SiLU()
            )
            self._obs_out_layers = nn.Sequential(
                nn.Linear(24 + 20, 24, bias=False), nn.LayerNorm(24, eps=1e-3), nn.SiLU()
            )
            self._imgs_stat_layer = nn.Linear(24, 16)
            self._obs_stat_layer = nn.Linear(24, 16)

        def forward(self, deter, stoch, action, embed):
            x = self._img_in_layers(torch.cat([stoch, action], -1))
            reset, cand, update = self._cell_layers(torch.cat([x, deter], -1)).chunk(3, -1)
            update = torch.sigmoid(update - 1)
            deter = update * torch.tanh(torch.sigmoid(reset) * cand) + (1 - update) * deter
            prior = self._imgs_stat_layer(self._img_out_layers(deter))
            post = self._obs_stat_layer(self._obs_out_layers(torch.cat([deter, embed], -1)))
            return deter, prior, post

    class NormedDense(layers.Layer):
        def __init__(self, units, act=None, **kw):
            super().__init__(**kw)
            self.linear = layers.Dense(units, use_bias=False)
            self.ln = layers.LayerNormalization()
            self.act = layers.Activation(act)

        def call(self, x):
            return self.act(self.ln(self.linear(x)))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.gru = NormedDense(72, "linear")
            self.inp = NormedDense(24, "silu")
            self.posterior_hidden = NormedDense(24, "silu")
            self.posterior = layers.Dense(16)
            self.prior_hidden = NormedDense(24, "silu")
            self.prior = layers.Dense(16)

        def call(self, inputs):
            deter, stoch, action, embed = inputs
            x = self.inp(ops.concatenate([stoch, action], -1))
            r, c, u = ops.split(self.gru(ops.concatenate([x, deter], -1)), 3, axis=-1)
            u = ops.sigmoid(u - 1)
            deter = u * ops.tanh(ops.sigmoid(r) * c) + (1 - u) * deter
            return [
                deter,
                self.prior(self.prior_hidden(deter)),
                self.posterior(self.posterior_hidden(ops.concatenate([deter, embed], -1))),
            ]

    return K, T


# 4. TD-MPC2: NormedLinear with Mish, SimNorm, two Q functions
@pair("tdmpc2", ("v", 11), ("v", 3))
def tdmpc2():
    class NormedLinear(nn.Linear):
        def __init__(self, i, o, act=None):
            super().__init__(i, o)
            self.ln = nn.LayerNorm(o)
            self.act = act or nn.Mish()

        def forward(self, x):
            return self.act(self.ln(super().forward(x)))

    class SimNorm(nn.Module):
        def forward(self, x):
            return F.softmax(x.view(*x.shape[:-1], -1, 8), -1).view(*x.shape)

    def mlp(i, hidden, o, act=None):
        dims = [i, *hidden, o]
        parts = [NormedLinear(dims[n], dims[n + 1]) for n in range(len(dims) - 2)]
        parts.append(NormedLinear(dims[-2], dims[-1], act) if act else nn.Linear(dims[-2], dims[-1]))
        return nn.Sequential(*parts)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self._encoder = nn.ModuleDict({"state": mlp(11, [32], 32, SimNorm())})
            self._dynamics = mlp(35, [32, 32], 32, SimNorm())
            self._reward = mlp(35, [32, 32], 9)
            self._pi = mlp(32, [32, 32], 6)
            self._Qs = nn.ModuleList([mlp(35, [32, 32], 9) for _ in range(2)])

        def forward(self, obs, a):
            z = self._encoder["state"](obs)
            za = torch.cat([z, a], -1)
            return self._dynamics(za), self._reward(za), self._pi(z), self._Qs[0](za), self._Qs[1](za)

    def dense(x, units, name, act="mish"):
        x = layers.Dense(units, name=name)(x)
        x = layers.LayerNormalization(epsilon=1e-5, name=name + "_ln")(x)
        if act == "simnorm":
            return layers.Reshape((units,))(layers.Softmax(-1)(layers.Reshape((units // 8, 8))(x)))
        return layers.Activation("mish")(x)

    def head(x, units, name):
        x = dense(dense(x, 32, name + "_fc1"), 32, name + "_fc2")
        return layers.Dense(units, name=name + "_out")(x)

    def K():
        obs, act = keras.Input((11,)), keras.Input((3,))
        z = dense(dense(obs, 32, "enc_fc1"), 32, "enc_fc2", "simnorm")
        za = layers.Concatenate()([z, act])
        d = dense(dense(za, 32, "dyn_fc1"), 32, "dyn_fc2")
        d = dense(d, 32, "dyn_fc3", "simnorm")
        return keras.Model(
            [obs, act],
            [d, head(za, 9, "rew"), head(z, 6, "policy"), head(za, 9, "critic1"), head(za, 9, "critic2")],
        )

    return K, T


# 5. SimBa: observation statistics, pre-norm residual blocks
@pair("simba_actor", ("v", 17))
def simba_actor():
    class ResidualBlock(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.norm = nn.LayerNorm(dim)
            self.fc1 = nn.Linear(dim, 4 * dim)
            self.fc2 = nn.Linear(4 * dim, dim)

        def forward(self, x):
            return x + self.fc2(F.relu(self.fc1(self.norm(x))))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("obs_running_mean", torch.zeros(17))
            self.register_buffer("obs_running_var", torch.ones(17))
            self.embedder = nn.Linear(17, 24)
            self.encoder = nn.Sequential(ResidualBlock(24), ResidualBlock(24))
            self.post_norm = nn.LayerNorm(24)
            self.mean = nn.Linear(24, 6)
            self.log_std = nn.Linear(24, 6)

        def forward(self, x):
            x = (x - self.obs_running_mean) / torch.sqrt(self.obs_running_var + 1e-8)
            x = self.post_norm(self.encoder(self.embedder(x)))
            return torch.tanh(self.mean(x)), torch.clamp(self.log_std(x), -5, 2)

    class PreNormMLP(layers.Layer):
        def __init__(self, dim, **kw):
            super().__init__(**kw)
            self.expand = layers.Dense(4 * dim, activation="relu")
            self.contract = layers.Dense(dim)
            self.layer_norm = layers.LayerNormalization(epsilon=1e-5)

        def call(self, x):
            return x + self.contract(self.expand(self.layer_norm(x)))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.projection = layers.Dense(24)
            self.blocks = [PreNormMLP(24) for _ in range(2)]
            self.final_norm = layers.LayerNormalization(epsilon=1e-5)
            self.log_sigma = layers.Dense(6)
            self.mu = layers.Dense(6, activation="tanh")

        def build(self, shape):
            self.running_mean = self.add_weight(shape=(17,), name="running_mean", trainable=False)
            self.running_var = self.add_weight(
                shape=(17,), name="running_var", initializer="ones", trainable=False
            )
            super().build(shape)

        def call(self, x):
            x = self.projection((x - self.running_mean) / ops.sqrt(self.running_var + 1e-8))
            for block in self.blocks:
                x = block(x)
            x = self.final_norm(x)
            return [self.mu(x), ops.clip(self.log_sigma(x), -5, 2)]

    return K, T


# 6. BRO critic: BroNet, two of them
@pair("bro_critic", ("v", 9), ("v", 4))
def bro_critic():
    class BroNetBlock(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.dense1, self.ln1 = nn.Linear(d, d), nn.LayerNorm(d, eps=1e-6)
            self.dense2, self.ln2 = nn.Linear(d, d), nn.LayerNorm(d, eps=1e-6)

        def forward(self, x):
            return x + self.ln2(self.dense2(F.relu(self.ln1(self.dense1(x)))))

    class BroNet(nn.Module):
        def __init__(self, i, d, o):
            super().__init__()
            self.projection = nn.Sequential(nn.Linear(i, d), nn.LayerNorm(d, eps=1e-6), nn.ReLU())
            self.blocks = nn.ModuleList([BroNetBlock(d) for _ in range(2)])
            self.final_layer = nn.Linear(d, o)

        def forward(self, x):
            x = self.projection(x)
            for block in self.blocks:
                x = block(x)
            return self.final_layer(x)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic1, self.critic2 = BroNet(13, 20, 5), BroNet(13, 20, 5)

        def forward(self, s, a):
            x = torch.cat([s, a], -1)
            return self.critic1(x), self.critic2(x)

    class ResidualBro(layers.Layer):
        def __init__(self, d, **kw):
            super().__init__(**kw)
            self.a, self.norm_a = layers.Dense(d), layers.LayerNormalization(epsilon=1e-6)
            self.b, self.norm_b = layers.Dense(d), layers.LayerNormalization(epsilon=1e-6)

        def call(self, x):
            return x + self.norm_b(self.b(ops.relu(self.norm_a(self.a(x)))))

    class Q(layers.Layer):
        def __init__(self, **kw):
            super().__init__(**kw)
            self.stem, self.stem_norm = layers.Dense(20), layers.LayerNormalization(epsilon=1e-6)
            self.res1, self.res2 = ResidualBro(20), ResidualBro(20)
            self.quantiles = layers.Dense(5)

        def call(self, x):
            return self.quantiles(self.res2(self.res1(ops.relu(self.stem_norm(self.stem(x))))))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.q1, self.q2 = Q(), Q()

        def call(self, inputs):
            x = ops.concatenate(inputs, -1)
            return [self.q1(x), self.q2(x)]

    return K, T


# 7. MPO: LayerNorm-tanh torso, Gaussian head, critic
@pair("mpo", ("v", 10), ("v", 3))
def mpo():
    class Torso(nn.Module):
        def __init__(self, i, sizes):
            super().__init__()
            self.first = nn.Linear(i, sizes[0])
            self.norm = nn.LayerNorm(sizes[0], eps=1e-3)
            self.rest = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

        def forward(self, x):
            x = torch.tanh(self.norm(self.first(x)))
            for layer in self.rest:
                x = F.elu(layer(x))
            return x

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.policy_torso = Torso(10, (32, 32, 32))
            self.mean, self.stddev = nn.Linear(32, 3), nn.Linear(32, 3)
            self.critic_torso = Torso(13, (32, 32, 16))
            self.q = nn.Linear(16, 1)

        def forward(self, s, a):
            h = self.policy_torso(s)
            return (
                self.mean(h),
                F.softplus(self.stddev(h)) + 1e-4,
                self.q(self.critic_torso(torch.cat([s, a], 1))),
            )

    def torso(i, sizes):
        model = keras.Sequential(
            [
                keras.Input((i,)),
                layers.Dense(sizes[0]),
                layers.LayerNormalization(),
                layers.Activation("tanh"),
            ]
        )
        for n in sizes[1:]:
            model.add(layers.Dense(n, activation="elu"))
        return model

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.critic = torso(13, (32, 32, 16))
            self.critic_head = layers.Dense(1)
            self.policy = torso(10, (32, 32, 32))
            self.scale_layer = layers.Dense(3, activation="softplus")
            self.mean_layer = layers.Dense(3)

        def call(self, inputs):
            s, a = inputs
            h = self.policy(s)
            return [
                self.mean_layer(h),
                self.scale_layer(h) + 1e-4,
                self.critic_head(self.critic(ops.concatenate([s, a], 1))),
            ]

    return K, T


# 8. Soft-MoE actor over convolutional tokens
@pair("soft_moe", ("img", 9, 9, 4))
def soft_moe():
    class Expert(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d))

        def forward(self, x):
            return self.net(x)

    class SoftMoE(nn.Module):
        def __init__(self, d, n, p):
            super().__init__()
            self.phi = nn.Parameter(torch.randn(d, n, p))
            self.experts = nn.ModuleList([Expert(d) for _ in range(n)])

        def forward(self, x):
            logits = torch.einsum("bmd,dnp->bmnp", x, self.phi)
            dispatch = logits.softmax(1)
            b, m, n, p = logits.shape
            combine = logits.reshape(b, m, n * p).softmax(-1).reshape(b, m, n, p)
            slots = torch.einsum("bmd,bmnp->bnpd", x, dispatch)
            y = torch.stack([f(slots[:, i]) for i, f in enumerate(self.experts)], 1)
            return torch.einsum("bnpd,bmnp->bmd", y, combine)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.cnn = nn.Sequential(nn.Conv2d(4, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 12, 3, 1), nn.ReLU())
            self.moe = SoftMoE(12, 3, 2)
            self.actor = nn.Linear(12, 5)
            self.critic = nn.Linear(12, 1)

        def forward(self, x):
            h = self.cnn(x).flatten(2).transpose(1, 2)
            h = self.moe(h).mean(1)
            return self.actor(h), self.critic(h)

    class MixtureOfExperts(layers.Layer):
        def __init__(self, d, n, p, **kw):
            super().__init__(**kw)
            self.n, self.p = n, p
            self.up = [layers.Dense(d, activation="relu") for _ in range(n)]
            self.down = [layers.Dense(d) for _ in range(n)]

        def build(self, shape):
            self.slots = self.add_weight(shape=(shape[-1], self.n * self.p), name="slots")
            super().build(shape)

        def call(self, x):
            logits = ops.matmul(x, self.slots)
            d, c = ops.softmax(logits, 1), ops.softmax(logits, -1)
            s = ops.reshape(ops.matmul(ops.transpose(d, (0, 2, 1)), x), (-1, self.n, self.p, x.shape[-1]))
            y = ops.concatenate(
                [down(up(s[:, i])) for i, (up, down) in enumerate(zip(self.up, self.down))], 1
            )
            return ops.matmul(c, y)

    def K():
        i = keras.Input((9, 9, 4))
        x = layers.Conv2D(8, 3, 2, activation="relu")(i)
        x = layers.Conv2D(12, 3, activation="relu")(x)
        x = MixtureOfExperts(12, 3, 2)(layers.Reshape((4, 12))(x))
        x = layers.GlobalAveragePooling1D()(x)
        return keras.Model(i, [layers.Dense(5, name="logits")(x), layers.Dense(1, name="baseline")(x)])

    return K, T


# 9. Graph network: edge, node and global updates on a full graph of four nodes
@pair("graph_net", ("v", 4, 6), ("v", 16, 3))
def graph_net():
    class MLP(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.lin1, self.lin2, self.norm = nn.Linear(i, 16), nn.Linear(16, o), nn.LayerNorm(o)

        def forward(self, x):
            return self.norm(self.lin2(F.relu(self.lin1(x))))

    class Processor(nn.Module):
        def __init__(self):
            super().__init__()
            self.node_fn, self.edge_fn = MLP(32, 16), MLP(48, 16)

        def forward(self, n, e):
            b = n.shape[0]
            s = n.unsqueeze(2).expand(b, 4, 4, 16).reshape(b, 16, 16)
            r = n.unsqueeze(1).expand(b, 4, 4, 16).reshape(b, 16, 16)
            e2 = self.edge_fn(torch.cat([s, r, e], -1))
            agg = e2.view(b, 4, 4, 16).sum(1)
            return n + self.node_fn(torch.cat([n, agg], -1)), e + e2

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.node_encoder, self.edge_encoder = MLP(6, 16), MLP(3, 16)
            self.processors = nn.ModuleList([Processor(), Processor()])
            self.decoder = nn.Linear(16, 2)

        def forward(self, n, e):
            n, e = self.node_encoder(n), self.edge_encoder(e)
            for p in self.processors:
                n, e = p(n, e)
            return self.decoder(n)

    def mlp(name, i):
        return keras.Sequential(
            [
                keras.Input((None, i)),
                layers.Dense(16, activation="relu"),
                layers.Dense(16),
                layers.LayerNormalization(epsilon=1e-5),
            ],
            name=name,
        )

    class InteractionLayer(layers.Layer):
        def __init__(self, **kw):
            super().__init__(**kw)
            self.edge_model = mlp("edge_model", 48)
            self.node_model = mlp("node_model", 32)

        def call(self, n, e):
            s, r = ops.repeat(n, 4, axis=1), ops.tile(n, (1, 4, 1))
            new = self.edge_model(ops.concatenate([s, r, e], -1))
            agg = ops.sum(ops.reshape(new, (-1, 4, 4, 16)), 1)
            return n + self.node_model(ops.concatenate([n, agg], -1)), e + new

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed_edges, self.embed_nodes = mlp("embed_edges", 3), mlp("embed_nodes", 6)
            self.step_1, self.step_2 = InteractionLayer(), InteractionLayer()
            self.readout = layers.Dense(2)

        def call(self, inputs):
            n, e = inputs
            n, e = self.embed_nodes(n), self.embed_edges(e)
            n, e = self.step_1(n, e)
            n, e = self.step_2(n, e)
            return self.readout(n)

    return K, T


# 10. PointNet with a T-Net
@pair("pointnet_functional", ("seqc", 12, 3))
def pointnet_functional():
    class TNet(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.k = k
            self.conv1, self.conv2 = nn.Conv1d(k, 16, 1), nn.Conv1d(16, 32, 1)
            self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, k * k)
            self.bn1, self.bn2, self.bn3 = (
                nn.BatchNorm1d(16, eps=1e-3),
                nn.BatchNorm1d(32, eps=1e-3),
                nn.BatchNorm1d(16, eps=1e-3),
            )

        def forward(self, x):
            x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
            x = F.relu(self.bn3(self.fc1(x.max(2)[0])))
            return self.fc2(x).view(-1, self.k, self.k) + torch.eye(self.k)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.stn = TNet(3)
            self.conv1, self.conv2, self.conv3 = (
                nn.Conv1d(3, 16, 1),
                nn.Conv1d(16, 16, 1),
                nn.Conv1d(16, 32, 1),
            )
            self.bn1, self.bn2, self.bn3 = (
                nn.BatchNorm1d(16, eps=1e-3),
                nn.BatchNorm1d(16, eps=1e-3),
                nn.BatchNorm1d(32, eps=1e-3),
            )
            self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, 4)
            self.bn4 = nn.BatchNorm1d(16, eps=1e-3)

        def forward(self, x):
            x = torch.bmm(x.transpose(2, 1), self.stn(x)).transpose(2, 1)
            x = F.relu(self.bn1(self.conv1(x)))
            x = F.relu(self.bn2(self.conv2(x)))
            x = self.bn3(self.conv3(x)).max(2)[0]
            return self.fc2(F.relu(self.bn4(self.fc1(x))))

    def conv_bn(x, filters):
        x = layers.Conv1D(filters, kernel_size=1)(x)
        return layers.Activation("relu")(layers.BatchNormalization()(x))

    def dense_bn(x, units):
        return layers.Activation("relu")(layers.BatchNormalization()(layers.Dense(units)(x)))

    class AddEye(layers.Layer):
        def call(self, x):
            return x + ops.eye(3)

    def tnet(inputs):
        x = conv_bn(conv_bn(inputs, 16), 32)
        x = layers.GlobalMaxPooling1D()(x)
        x = layers.Dense(9)(dense_bn(x, 16))
        return layers.Dot(axes=(2, 1))([inputs, AddEye()(layers.Reshape((3, 3))(x))])

    def K():
        i = keras.Input((12, 3))
        x = conv_bn(conv_bn(tnet(i), 16), 16)
        x = layers.BatchNormalization()(layers.Conv1D(32, 1)(x))
        x = dense_bn(layers.GlobalMaxPooling1D()(x), 16)
        return keras.Model(i, layers.Dense(4)(x))

    return K, T


# 11. Diagonal state space layer (real S4D), two blocks
@pair("s4d", ("v", 6, 5))
def s4d():
    class S4DReal(nn.Module):
        def __init__(self, d, n):
            super().__init__()
            self.A_log = nn.Parameter(torch.zeros(d, n))
            self.B = nn.Parameter(torch.ones(d, n))
            self.C = nn.Parameter(torch.randn(d, n))
            self.log_dt = nn.Parameter(torch.zeros(d))
            self.D = nn.Parameter(torch.ones(d))

        def forward(self, u):
            dt = torch.exp(self.log_dt)[:, None]
            a = torch.exp(-torch.exp(self.A_log) * dt)
            h = torch.zeros(u.shape[0], *self.B.shape)
            ys = []
            for t in range(u.shape[1]):
                h = a * h + dt * self.B * u[:, t, :, None]
                ys.append((h * self.C).sum(-1) + self.D * u[:, t])
            return torch.stack(ys, 1)

    class Block(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.s4 = S4DReal(d, 4)
            self.output_linear = nn.Linear(d, 2 * d)
            self.norm = nn.LayerNorm(d)

        def forward(self, x):
            y = F.glu(self.output_linear(F.gelu(self.s4(self.norm(x)))), -1)
            return x + y

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(5, 10)
            self.s4_layers = nn.ModuleList([Block(10), Block(10)])
            self.decoder = nn.Linear(10, 3)

        def forward(self, x):
            x = self.encoder(x)
            for layer in self.s4_layers:
                x = layer(x)
            return self.decoder(x.mean(1))

    class DiagonalSSM(layers.Layer):
        def __init__(self, states, **kw):
            super().__init__(**kw)
            self.states = states

        def build(self, shape):
            d = shape[-1]
            self.skip = self.add_weight(shape=(d,), name="skip")
            self.log_step = self.add_weight(shape=(d,), name="log_step")
            self.log_a = self.add_weight(shape=(d, self.states), name="log_a")
            self.b = self.add_weight(shape=(d, self.states), name="b")
            self.c = self.add_weight(shape=(d, self.states), name="c")

        def call(self, u):
            dt = ops.exp(self.log_step)[:, None]
            a = ops.exp(-ops.exp(self.log_a) * dt)
            h = ops.zeros((ops.shape(u)[0], u.shape[-1], self.states))
            ys = []
            for t in range(u.shape[1]):
                h = a * h + dt * self.b * u[:, t, :, None]
                ys.append(ops.sum(h * self.c, -1) + self.skip * u[:, t])
            return ops.stack(ys, 1)

    class SSMBlock(layers.Layer):
        def __init__(self, d, **kw):
            super().__init__(**kw)
            self.ln = layers.LayerNormalization(epsilon=1e-5)
            self.ssm = DiagonalSSM(4)
            self.mix = layers.Dense(2 * d)

        def call(self, x):
            a, b = ops.split(self.mix(ops.gelu(self.ssm(self.ln(x)), approximate=False)), 2, axis=-1)
            return x + a * ops.sigmoid(b)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.inp = layers.Dense(10)
            self.block1, self.block2 = SSMBlock(10), SSMBlock(10)
            self.head = layers.Dense(3)

        def call(self, x):
            return self.head(ops.mean(self.block2(self.block1(self.inp(x))), 1))

    return K, T


# 12. EfficientNetV2: fused and plain inverted residuals with squeeze and excitation
@pair("efficientnet_v2", ("img", 8, 8, 3))
def efficientnet_v2():
    class SE(nn.Module):
        def __init__(self, c, s):
            super().__init__()
            self.fc1, self.fc2 = nn.Conv2d(c, s, 1), nn.Conv2d(s, c, 1)

        def forward(self, x):
            s = x.mean((2, 3), keepdim=True)
            return x * torch.sigmoid(self.fc2(F.silu(self.fc1(s))))

    def cba(i, o, k, s=1, g=1, act=True):
        parts = [nn.Conv2d(i, o, k, s, k // 2, groups=g, bias=False), nn.BatchNorm2d(o, eps=1e-3)]
        return nn.Sequential(*parts, *([nn.SiLU()] if act else []))

    class Fused(nn.Module):
        def __init__(self, c, e):
            super().__init__()
            self.block = nn.Sequential(cba(c, c * e, 3), cba(c * e, c, 1, act=False))

        def forward(self, x):
            return x + self.block(x)

    class MBConv(nn.Module):
        def __init__(self, c, e):
            super().__init__()
            self.block = nn.Sequential(
                cba(c, c * e, 1), cba(c * e, c * e, 3, g=c * e), SE(c * e, 2), cba(c * e, c, 1, act=False)
            )

        def forward(self, x):
            return x + self.block(x)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                cba(3, 8, 3), Fused(8, 2), Fused(8, 2), MBConv(8, 4), MBConv(8, 4), cba(8, 24, 1)
            )
            self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(24, 5))

        def forward(self, x):
            return self.classifier(self.features(x).mean((2, 3)))

    def conv_bn(x, o, k, name, act=True):
        x = layers.Conv2D(o, k, padding="same", use_bias=False, name=name + "_conv")(x)
        x = layers.BatchNormalization(name=name + "_bn")(x)
        return layers.Activation("swish", name=name + "_activation")(x) if act else x

    def fused(x, name):
        y = conv_bn(x, 16, 3, name + "expand")
        return layers.Add()([conv_bn(y, 8, 1, name + "project", False), x])

    def mbconv(x, name):
        y = conv_bn(x, 32, 1, name + "expand")
        y = layers.DepthwiseConv2D(3, padding="same", use_bias=False, name=name + "dwconv2")(y)
        y = layers.Activation("swish")(layers.BatchNormalization(name=name + "bn")(y))
        se = layers.GlobalAveragePooling2D(name=name + "se_squeeze")(y)
        se = layers.Reshape((1, 1, 32), name=name + "se_reshape")(se)
        se = layers.Conv2D(2, 1, activation="swish", name=name + "se_reduce")(se)
        se = layers.Conv2D(32, 1, activation="sigmoid", name=name + "se_expand")(se)
        y = layers.multiply([y, se], name=name + "se_excite")
        return layers.Add()([conv_bn(y, 8, 1, name + "project", False), x])

    def K():
        i = keras.Input((8, 8, 3))
        x = conv_bn(i, 8, 3, "stem")
        x = fused(fused(x, "block1a_"), "block1b_")
        x = mbconv(mbconv(x, "block2a_"), "block2b_")
        x = layers.GlobalAveragePooling2D()(conv_bn(x, 24, 1, "top"))
        return keras.Model(i, layers.Dense(5, name="predictions")(x))

    return K, T


# 13. VQ-VAE with residual blocks and a soft codebook
@pair("vq_vae", ("img", 8, 8, 3), out="img")
def vq_vae():
    class Residual(nn.Module):
        def __init__(self, c):
            super().__init__()
            self._block = nn.Sequential(
                nn.ReLU(),
                nn.Conv2d(c, c, 3, padding=1, bias=False),
                nn.ReLU(),
                nn.Conv2d(c, c, 1, bias=False),
            )

        def forward(self, x):
            return x + self._block(x)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self._encoder = nn.Sequential(
                nn.Conv2d(3, 12, 4, 2, 1), nn.ReLU(), nn.Conv2d(12, 12, 3, 1, 1), Residual(12), Residual(12)
            )
            self._pre_vq_conv = nn.Conv2d(12, 6, 1)
            self._embedding = nn.Embedding(7, 6)
            self._decoder = nn.Sequential(
                nn.Conv2d(6, 12, 3, 1, 1),
                Residual(12),
                Residual(12),
                nn.ReLU(),
                nn.ConvTranspose2d(12, 3, 4, 2, 1),
            )

        def forward(self, x):
            z = self._pre_vq_conv(self._encoder(x)).permute(0, 2, 3, 1)
            e = self._embedding.weight
            d = (z**2).sum(-1, keepdim=True) + (e**2).sum(1) - 2 * z @ e.t()
            q = torch.softmax(-d, -1) @ e
            return self._decoder(q.permute(0, 3, 1, 2))

    class Quantizer(layers.Layer):
        def build(self, shape):
            self.codebook = self.add_weight(shape=(7, shape[-1]), name="codebook")

        def call(self, z):
            e = self.codebook
            d = ops.sum(z**2, -1, keepdims=True) + ops.sum(e**2, 1) - 2 * ops.matmul(z, ops.transpose(e))
            return ops.matmul(ops.softmax(-d, -1), e)

    def residual(x, name):
        y = layers.Conv2D(12, 3, padding="same", use_bias=False, name=name + "_3x3")(layers.ReLU()(x))
        return x + layers.Conv2D(12, 1, use_bias=False, name=name + "_1x1")(layers.ReLU()(y))

    def K():
        i = keras.Input((8, 8, 3))
        x = layers.ReLU()(layers.Conv2D(12, 4, 2, padding="same", name="enc_down")(i))
        x = layers.Conv2D(12, 3, padding="same", name="enc_conv")(x)
        x = residual(residual(x, "enc_res1"), "enc_res2")
        x = Quantizer(name="vq")(layers.Conv2D(6, 1, name="to_codes")(x))
        x = layers.Conv2D(12, 3, padding="same", name="dec_conv")(x)
        x = layers.ReLU()(residual(residual(x, "dec_res1"), "dec_res2"))
        return keras.Model(i, layers.Conv2DTranspose(3, 4, 2, padding="same", name="dec_up")(x))

    return K, T


# 14. RetNet: parallel retention, gate, group norm over heads, gated feed-forward
@pair("retnet", ("ids", 6, 13))
def retnet():
    decay = np.tril(0.9 ** (np.arange(6)[:, None] - np.arange(6)[None]).clip(0)).astype(np.float32)

    class Retention(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
            self.v_proj, self.g_proj = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False)
            self.out_proj = nn.Linear(2 * d, d, bias=False)
            self.group_norm = nn.LayerNorm(d, eps=1e-6, elementwise_affine=False)
            self.decay = torch.tensor(decay)

        def forward(self, x):
            b, t, d = x.shape
            q, k = (f(x).view(b, t, 2, d // 2).transpose(1, 2) for f in (self.q_proj, self.k_proj))
            v = self.v_proj(x).view(b, t, 2, d).transpose(1, 2)
            y = (q @ k.transpose(2, 3) * (d // 2) ** -0.5 * self.decay) @ v
            y = self.group_norm(y).transpose(1, 2).reshape(b, t, 2 * d)
            return self.out_proj(F.silu(self.g_proj(x)) * y)

    class GLU(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.fc1, self.fc2, self.gate = (
                nn.Linear(d, 20, bias=False),
                nn.Linear(20, d, bias=False),
                nn.Linear(d, 20, bias=False),
            )

        def forward(self, x):
            return self.fc2(F.gelu(self.fc1(x)) * self.gate(x))

    class Layer(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.retention, self.retention_layer_norm = Retention(d), nn.LayerNorm(d)
            self.ffn, self.final_layer_norm = GLU(d), nn.LayerNorm(d)

        def forward(self, x):
            x = x + self.retention(self.retention_layer_norm(x))
            return x + self.ffn(self.final_layer_norm(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(13, 12)
            self.layers = nn.ModuleList([Layer(12), Layer(12)])
            self.output_projection = nn.Linear(12, 13, bias=False)

        def forward(self, x):
            x = self.embed_tokens(x)
            for layer in self.layers:
                x = layer(x)
            return self.output_projection(x)

    class MultiScaleRetention(layers.Layer):
        def __init__(self, d, **kw):
            super().__init__(**kw)
            self.d = d
            self.wq, self.wk = layers.Dense(d, use_bias=False), layers.Dense(d, use_bias=False)
            self.wv, self.wg = layers.Dense(2 * d, use_bias=False), layers.Dense(2 * d, use_bias=False)
            self.wo = layers.Dense(d, use_bias=False)
            self.norm = layers.LayerNormalization(epsilon=1e-6, center=False, scale=False)

        def heads(self, x, n):
            return ops.transpose(ops.reshape(x, (-1, 6, 2, n)), (0, 2, 1, 3))

        def call(self, x):
            q, k, v = (
                self.heads(self.wq(x), self.d // 2),
                self.heads(self.wk(x), self.d // 2),
                self.heads(self.wv(x), self.d),
            )
            s = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * (self.d // 2) ** -0.5 * decay
            y = ops.reshape(ops.transpose(self.norm(ops.matmul(s, v)), (0, 2, 1, 3)), (-1, 6, 2 * self.d))
            return self.wo(ops.silu(self.wg(x)) * y)

    class RetNetBlock(layers.Layer):
        def __init__(self, d, **kw):
            super().__init__(**kw)
            self.ln_1, self.ln_2 = (
                layers.LayerNormalization(epsilon=1e-5),
                layers.LayerNormalization(epsilon=1e-5),
            )
            self.msr = MultiScaleRetention(d)
            self.w_gate, self.w_up = layers.Dense(20, use_bias=False), layers.Dense(20, use_bias=False)
            self.w_down = layers.Dense(d, use_bias=False)

        def call(self, x):
            x = x + self.msr(self.ln_1(x))
            h = self.ln_2(x)
            return x + self.w_down(self.w_gate(h) * ops.gelu(self.w_up(h), approximate=False))

    def K():
        i = keras.Input((6,), dtype="int32")
        x = layers.Embedding(13, 12)(i)
        for _ in range(2):
            x = RetNetBlock(12)(x)
        return keras.Model(i, layers.Dense(13, use_bias=False)(x))

    return K, T


# 15. Temporal Fusion Transformer: gated residual networks and variable selection
@pair("tft_grn", ("v", 5, 4), ("v", 8))
def tft_grn():
    class GLU(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.fc = nn.Linear(d, 2 * d)

        def forward(self, x):
            return F.glu(self.fc(x), -1)

    class GRN(nn.Module):
        def __init__(self, i, d, o, context=None):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(i, d), nn.Linear(d, o)
            self.context = nn.Linear(context, d, bias=False) if context else None
            self.gate, self.norm = GLU(o), nn.LayerNorm(o)
            self.skip = nn.Linear(i, o) if i != o else nn.Identity()

        def forward(self, x, c=None):
            h = self.fc1(x)
            if c is not None:
                h = h + self.context(c)
            return self.norm(self.gate(self.fc2(F.elu(h))) + self.skip(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.static_context = GRN(8, 10, 10)
            self.embeddings = nn.ModuleList([nn.Linear(1, 10) for _ in range(4)])
            self.selection = GRN(40, 10, 4, context=10)
            self.single = nn.ModuleList([GRN(10, 10, 10) for _ in range(4)])
            self.lstm = nn.LSTM(10, 10, batch_first=True)
            self.enrichment = GRN(10, 10, 10, context=10)
            self.quantiles = nn.Linear(10, 3)

        def forward(self, x, s):
            c = self.static_context(s).unsqueeze(1).expand(-1, 5, -1)
            e = [f(x[..., n : n + 1]) for n, f in enumerate(self.embeddings)]
            w = F.softmax(self.selection(torch.cat(e, -1), c), -1)
            v = torch.stack([g(one) for g, one in zip(self.single, e)], -1)
            h = (v * w.unsqueeze(2)).sum(-1)
            y, _ = self.lstm(h)
            return self.quantiles(self.enrichment(y, c))

    class GatedLinearUnit(layers.Layer):
        def __init__(self, units, **kw):
            super().__init__(**kw)
            self.linear, self.sigmoid = layers.Dense(units), layers.Dense(units, activation="sigmoid")

        def call(self, x):
            return self.linear(x) * self.sigmoid(x)

    class GatedLinear(layers.Layer):
        def __init__(self, units, **kw):
            super().__init__(**kw)
            self.dense = layers.Dense(2 * units)

        def call(self, x):
            a, b = ops.split(self.dense(x), 2, axis=-1)
            return a * ops.sigmoid(b)

    class GatedResidualNetwork(layers.Layer):
        def __init__(self, hidden, units, project=False, context=False, **kw):
            super().__init__(**kw)
            self.elu_dense, self.linear_dense = layers.Dense(hidden), layers.Dense(units)
            self.gated, self.layer_norm = GatedLinear(units), layers.LayerNormalization(epsilon=1e-5)
            self.project = layers.Dense(units) if project else None
            self.context_dense = layers.Dense(hidden, use_bias=False) if context else None

        def call(self, x, c=None):
            h = self.elu_dense(x)
            if c is not None:
                h = h + self.context_dense(c)
            h = self.gated(self.linear_dense(ops.elu(h)))
            return self.layer_norm(h + (self.project(x) if self.project is not None else x))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.static = GatedResidualNetwork(10, 10, project=True)
            self.inputs_projection = [layers.Dense(10) for _ in range(4)]
            self.grns = [GatedResidualNetwork(10, 10) for _ in range(4)]
            self.weights_grn = GatedResidualNetwork(10, 4, project=True, context=True)
            self.encoder_lstm = layers.LSTM(10, return_sequences=True)
            self.static_enrichment = GatedResidualNetwork(10, 10, context=True)
            self.head = layers.Dense(3)

        def call(self, inputs):
            x, s = inputs
            c = ops.repeat(ops.expand_dims(self.static(s), 1), 5, axis=1)
            e = [f(x[..., n : n + 1]) for n, f in enumerate(self.inputs_projection)]
            w = ops.softmax(self.weights_grn(ops.concatenate(e, -1), c), -1)
            v = ops.stack([g(one) for g, one in zip(self.grns, e)], -1)
            h = self.encoder_lstm(ops.sum(v * ops.expand_dims(w, 2), -1))
            return self.head(self.static_enrichment(h, c))

    return K, T


# 16. N-BEATS, generic, three blocks
@pair("n_beats_layers", ("v", 12))
def n_beats_layers():
    class Block(nn.Module):
        def __init__(self, units):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(12, units), nn.Linear(units, units)
            self.fc3, self.fc4 = nn.Linear(units, units), nn.Linear(units, units)
            self.theta_b_fc, self.theta_f_fc = (
                nn.Linear(units, 5, bias=False),
                nn.Linear(units, 5, bias=False),
            )
            self.backcast_fc, self.forecast_fc = nn.Linear(5, 12), nn.Linear(5, 4)

        def forward(self, x):
            for f in (self.fc1, self.fc2, self.fc3, self.fc4):
                x = F.relu(f(x))
            return self.backcast_fc(F.relu(self.theta_b_fc(x))), self.forecast_fc(F.relu(self.theta_f_fc(x)))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.stacks = nn.ModuleList([nn.ModuleList([Block(16), Block(16)]), nn.ModuleList([Block(16)])])

        def forward(self, x):
            forecast = 0
            for stack in self.stacks:
                for block in stack:
                    b, f = block(x)
                    x, forecast = x - b, forecast + f
            return forecast

    class NBeatsBlock(layers.Layer):
        def __init__(self, **kw):
            super().__init__(**kw)
            self.hidden = [layers.Dense(16, activation="relu") for _ in range(4)]
            self.theta_forecast = layers.Dense(5, activation="relu", use_bias=False)
            self.theta_backcast = layers.Dense(5, activation="relu", use_bias=False)
            self.forecast = layers.Dense(4)
            self.backcast = layers.Dense(12)

        def call(self, x):
            for layer in self.hidden:
                x = layer(x)
            return self.backcast(self.theta_backcast(x)), self.forecast(self.theta_forecast(x))

    def K():
        residuals = i = keras.Input((12,))
        total = None
        for n in range(3):
            backcast, forecast = NBeatsBlock(name=f"nbeats_{n}")(residuals)
            residuals = layers.subtract([residuals, backcast])
            total = forecast if total is None else layers.add([total, forecast])
        return keras.Model(i, total)

    return K, T
