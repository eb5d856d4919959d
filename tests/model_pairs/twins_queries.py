"""Twins of networks with learned queries, own attentions, and parameters outside of layers."""

from __future__ import annotations

import math

import keras
import torch
from keras import layers, ops
from torch import nn
from torch.nn import functional

from tests.model_pairs.twins import pair


@pair("set_pooling", ("v", 7, 5))
def set_pooling():
    class MAB(nn.Module):
        def __init__(self, dq, dk, d):
            super().__init__()
            self.fc_q, self.fc_k, self.fc_v, self.fc_o = (
                nn.Linear(dq, d),
                nn.Linear(dk, d),
                nn.Linear(dk, d),
                nn.Linear(d, d),
            )
            self.ln0, self.ln1 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.d = d

        def forward(self, q, k):
            q, k, v = self.fc_q(q), self.fc_k(k), self.fc_v(k)
            a = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(self.d), 2)
            o = self.ln0(q + a @ v)
            return self.ln1(o + functional.relu(self.fc_o(o)))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.I = nn.Parameter(torch.randn(1, 3, 12))
            self.S = nn.Parameter(torch.randn(1, 2, 12))
            self.mab0 = MAB(12, 5, 12)
            self.mab1 = MAB(5, 12, 12)
            self.pma = MAB(12, 12, 12)
            self.dec = nn.Linear(12, 3)

        def forward(self, x):
            b = x.shape[0]
            h = self.mab0(self.I.repeat(b, 1, 1), x)
            h = self.mab1(x, h)
            return self.dec(self.pma(self.S.repeat(b, 1, 1), h))

    class AttentionBlock(layers.Layer):
        def __init__(self, dim, **kw):
            super().__init__(**kw)
            self.dim = dim
            self.query, self.key, self.value = layers.Dense(dim), layers.Dense(dim), layers.Dense(dim)
            self.norm_1, self.norm_2 = (
                layers.LayerNormalization(epsilon=1e-5),
                layers.LayerNormalization(epsilon=1e-5),
            )
            self.out = layers.Dense(dim, activation="relu")

        def call(self, q, k):
            q, k, v = self.query(q), self.key(k), self.value(k)
            a = ops.softmax(ops.matmul(q, ops.transpose(k, (0, 2, 1))) / self.dim**0.5)
            o = self.norm_1(q + ops.matmul(a, v))
            return self.norm_2(o + self.out(o))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.induce, self.project, self.pool = AttentionBlock(12), AttentionBlock(12), AttentionBlock(12)
            self.inducing = self.add_weight(shape=(1, 3, 12), name="inducing")
            self.seeds = self.add_weight(shape=(1, 2, 12), name="seeds")
            self.decoder = layers.Dense(3)

        def call(self, x):
            b = ops.shape(x)[0]
            h = self.induce(ops.tile(self.inducing, (b, 1, 1)), x)
            h = self.project(x, h)
            return self.decoder(self.pool(ops.tile(self.seeds, (b, 1, 1)), h))

    return K, T


@pair("latent_queries", ("v", 9, 6), ("v", 4, 5))
def latent_queries():
    class Attention(nn.Module):
        def __init__(self, q, kv):
            super().__init__()
            self.norm_q, self.norm_kv = nn.LayerNorm(q, eps=1e-3), nn.LayerNorm(kv, eps=1e-3)
            self.to_q = nn.Linear(q, 16, bias=False)
            self.to_kv = nn.Linear(kv, 32, bias=False)
            self.to_out = nn.Linear(16, q)

        def forward(self, x, ctx):
            c = self.norm_kv(ctx)
            q = self.to_q(self.norm_q(x))
            k, v = self.to_kv(c).chunk(2, -1)
            b = x.shape[0]
            q, k, v = (t.reshape(b, t.shape[1], 2, 8).permute(0, 2, 1, 3) for t in (q, k, v))
            a = (torch.einsum("bhid,bhjd->bhij", q, k) * 8**-0.5).softmax(-1)
            o = torch.einsum("bhij,bhjd->bhid", a, v).permute(0, 2, 1, 3).reshape(b, -1, 16)
            return x + self.to_out(o)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.latents = nn.Parameter(torch.randn(3, 12))
            self.cross_attend = Attention(12, 6)
            self.self_attend = Attention(12, 12)
            self.decoder = Attention(5, 12)
            self.to_logits = nn.Linear(5, 2)

        def forward(self, x, q):
            z = self.latents.unsqueeze(0).expand(x.shape[0], -1, -1)
            z = self.cross_attend(z, x)
            z = self.self_attend(z, z)
            return self.to_logits(self.decoder(q, z))

    class CrossAttention(layers.Layer):
        def __init__(self, width, **kw):
            super().__init__(**kw)
            self.ln_query, self.ln_context = layers.LayerNormalization(), layers.LayerNormalization()
            self.q = layers.Dense(16, use_bias=False)
            self.k = layers.Dense(16, use_bias=False)
            self.v = layers.Dense(16, use_bias=False)
            self.o = layers.Dense(width)

        def heads(self, t):
            return ops.transpose(ops.reshape(t, (-1, t.shape[1], 2, 8)), (0, 2, 1, 3))

        def call(self, x, context):
            c = self.ln_context(context)
            q, k, v = self.heads(self.q(self.ln_query(x))), self.heads(self.k(c)), self.heads(self.v(c))
            a = ops.softmax(ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) / 8**0.5)
            o = ops.reshape(ops.transpose(ops.matmul(a, v), (0, 2, 1, 3)), (-1, x.shape[1], 16))
            return x + self.o(o)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.encode, self.process, self.decode = CrossAttention(12), CrossAttention(12), CrossAttention(5)
            self.head = layers.Dense(2)
            self.latent_array = self.add_weight(shape=(3, 12), name="latent_array")

        def call(self, inputs):
            x, q = inputs
            z = ops.tile(self.latent_array[None], (ops.shape(x)[0], 1, 1))
            z = self.encode(z, x)
            z = self.process(z, z)
            return self.head(self.decode(q, z))

    return K, T


@pair("own_causal_attention", ("v", 4, 5), ("v", 4, 2), ("v", 4, 1))
def own_causal_attention():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_net = nn.Linear(16, 16)
            self.k_net = nn.Linear(16, 16)
            self.v_net = nn.Linear(16, 16)
            self.proj_net = nn.Linear(16, 16)
            self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
            self.ln1 = nn.LayerNorm(16, eps=1e-3)
            self.ln2 = nn.LayerNorm(16, eps=1e-3)
            self.register_buffer("mask", torch.tril(torch.ones(12, 12)).view(1, 1, 12, 12))

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = (f(x).view(b, t, 2, 8).transpose(1, 2) for f in (self.q_net, self.k_net, self.v_net))
            w = q @ k.transpose(2, 3) / math.sqrt(8)
            w = w.masked_fill(self.mask[..., :t, :t] == 0, -1e9)
            a = (functional.softmax(w, -1) @ v).transpose(1, 2).reshape(b, t, c)
            x = self.ln1(x + self.proj_net(a))
            return self.ln2(x + self.mlp(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())
            self.embed_ln = nn.LayerNorm(16, eps=1e-3)
            self.embed_timestep = nn.Parameter(torch.zeros(4, 16))
            self.embed_rtg = nn.Linear(1, 16)
            self.embed_state = nn.Linear(5, 16)
            self.embed_action = nn.Linear(2, 16)
            self.predict_action = nn.Linear(16, 2)

        def forward(self, s, a, r):
            e = self.embed_timestep
            h = torch.stack((self.embed_rtg(r) + e, self.embed_state(s) + e, self.embed_action(a) + e), 2)
            h = self.embed_ln(h.reshape(h.shape[0], 12, 16))
            h = self.blocks(h).view(-1, 4, 3, 16)
            return torch.tanh(self.predict_action(h[:, :, 1]))

    class CausalBlock(layers.Layer):
        def __init__(self, **kw):
            super().__init__(**kw)
            self.attention = layers.MultiHeadAttention(2, 8)
            self.norm_attention = layers.LayerNormalization()
            self.up = layers.Dense(64, activation="gelu")
            self.down = layers.Dense(16)
            self.norm_mlp = layers.LayerNormalization()

        def call(self, x):
            x = self.norm_attention(x + self.attention(x, x, use_causal_mask=True))
            return self.norm_mlp(x + self.down(self.up(x)))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.state_embedding = layers.Dense(16)
            self.action_embedding = layers.Dense(16)
            self.return_embedding = layers.Dense(16)
            self.norm = layers.LayerNormalization()
            self.block_0 = CausalBlock()
            self.block_1 = CausalBlock()
            self.head = layers.Dense(2, activation="tanh")
            self.time = self.add_weight(shape=(4, 16), name="time")

        def call(self, x):
            s, a, r = x
            h = ops.stack(
                [
                    self.return_embedding(r) + self.time,
                    self.state_embedding(s) + self.time,
                    self.action_embedding(a) + self.time,
                ],
                axis=2,
            )
            h = self.norm(ops.reshape(h, (-1, 12, 16)))
            h = ops.reshape(self.block_1(self.block_0(h)), (-1, 4, 3, 16))
            return self.head(h[:, :, 1])

    return K, T


@pair("denoising_unet", ("seqc", 8, 4), ("v", 12), out="seqc")
def denoising_unet():
    class ResBlock(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv1d(i, o, 5, padding=2), nn.Conv1d(o, o, 5, padding=2)
            self.norm1, self.norm2 = nn.GroupNorm(4, o, eps=1e-3), nn.GroupNorm(4, o, eps=1e-3)
            self.cond = nn.Linear(12, 2 * o)
            self.skip = nn.Conv1d(i, o, 1) if i != o else nn.Identity()

        def forward(self, x, c):
            h = functional.mish(self.norm1(self.conv1(x)))
            scale, bias = self.cond(functional.mish(c)).unsqueeze(-1).chunk(2, 1)
            h = functional.mish(self.norm2(self.conv2(h * scale + bias)))
            return h + self.skip(x)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1, self.down2 = ResBlock(4, 8), ResBlock(8, 16)
            self.pool = nn.Conv1d(8, 8, 3, 2, 1)
            self.upsample = nn.ConvTranspose1d(16, 8, 4, 2, 1)
            self.up = ResBlock(16, 8)
            self.final = nn.Conv1d(8, 4, 1)

        def forward(self, x, c):
            a = self.down1(x, c)
            b = self.down2(self.pool(a), c)
            return self.final(self.up(torch.cat((self.upsample(b), a), 1), c))

    class FiLMBlock(layers.Layer):
        def __init__(self, i, o, **kw):
            super().__init__(**kw)
            self.first, self.second = layers.Conv1D(o, 5, padding="same"), layers.Conv1D(o, 5, padding="same")
            self.gn_first, self.gn_second = layers.GroupNormalization(4), layers.GroupNormalization(4)
            self.film = layers.Dense(2 * o)
            self.residual = layers.Conv1D(o, 1) if i != o else layers.Identity()

        def call(self, x, c):
            h = keras.activations.mish(self.gn_first(self.first(x)))
            s, b = ops.split(ops.expand_dims(self.film(keras.activations.mish(c)), 1), 2, axis=-1)
            h = keras.activations.mish(self.gn_second(self.second(h * s + b)))
            return h + self.residual(x)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder_1, self.encoder_2 = FiLMBlock(4, 8), FiLMBlock(8, 16)
            self.padding = layers.ZeroPadding1D(1)
            self.downsample = layers.Conv1D(8, 3, 2)
            self.upsample = layers.Conv1DTranspose(8, 4, 2, padding="same")
            self.decoder = FiLMBlock(16, 8)
            self.head = layers.Conv1D(4, 1)

        def call(self, inputs):
            x, c = inputs
            a = self.encoder_1(x, c)
            b = self.encoder_2(self.downsample(self.padding(a)), c)
            x = ops.concatenate([self.upsample(b), a], -1)
            return self.head(self.decoder(x, c))

    return K, T


@pair("parameter_lists", ("img", 8, 8, 1))
def parameter_lists():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.vars = nn.ParameterList()
            for i, o in ((1, 8), (8, 8)):
                self.vars.append(nn.Parameter(torch.zeros(o, i, 3, 3)))
                self.vars.append(nn.Parameter(torch.zeros(o)))
            self.vars.append(nn.Parameter(torch.zeros(5, 32)))
            self.vars.append(nn.Parameter(torch.zeros(5)))

        def forward(self, x):
            v = self.vars
            x = functional.relu(functional.conv2d(x, v[0], v[1], stride=2, padding=1))
            x = functional.relu(functional.conv2d(x, v[2], v[3], stride=2, padding=1))
            return functional.linear(x.flatten(1), v[4], v[5])

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.w1 = self.add_weight(shape=(3, 3, 1, 8), name="w1")
            self.b1 = self.add_weight(shape=(8,), name="b1")
            self.w2 = self.add_weight(shape=(3, 3, 8, 8), name="w2")
            self.b2 = self.add_weight(shape=(8,), name="b2")
            self.w3 = self.add_weight(shape=(32, 5), name="w3")
            self.b3 = self.add_weight(shape=(5,), name="b3")

        def call(self, x):
            x = ops.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
            x = ops.relu(ops.conv(x, self.w1, strides=2) + self.b1)
            x = ops.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
            x = ops.relu(ops.conv(x, self.w2, strides=2) + self.b2)
            return ops.matmul(ops.reshape(x, (-1, 32)), self.w3) + self.b3

    return K, T
