"""Pairs of recent and older architectures: agents, transformers, vision, sequences.

They were written, and not changed, before ckpttool first converted them.
"""

# ruff: noqa: B905, N802, N812

from __future__ import annotations

import math

import keras
import torch
from keras import layers, ops
from torch import nn
from torch.nn import functional as F

from tests.model_pairs.twins import pair


# 1. IMPALA's deep ResNet with an LSTM core, policy and value heads
@pair("impala_lstm", ("v", 5, 27))
def impala_lstm():
    # Frames come flattened for each step, with a dense torso of residual blocks.
    class Res(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.fc0 = nn.Linear(n, n)
            self.fc1 = nn.Linear(n, n)

        def forward(self, x):
            return x + self.fc1(F.relu(self.fc0(F.relu(x))))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.policy_head = nn.Linear(20, 6)
            self.value_head = nn.Linear(20, 1)
            self.core = nn.LSTM(24, 20, batch_first=True)
            self.stem = nn.Linear(27, 24)
            self.blocks = nn.ModuleList([Res(24), Res(24)])

        def forward(self, x):
            h = self.stem(x)
            for b in self.blocks:
                h = b(h)
            y, _ = self.core(F.relu(h))
            return self.policy_head(y), self.value_head(y)

    class ResidualUnit(layers.Layer):
        def __init__(self, n, **kw):
            super().__init__(**kw)
            self.inner = layers.Dense(n, activation="relu")
            self.outer = layers.Dense(n)

        def call(self, x):
            return x + self.outer(self.inner(ops.relu(x)))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed = layers.Dense(24)
            self.res_a = ResidualUnit(24)
            self.res_b = ResidualUnit(24)
            self.lstm = layers.LSTM(20, return_sequences=True)
            self.logits = layers.Dense(6)
            self.baseline = layers.Dense(1)

        def call(self, x):
            h = ops.relu(self.res_b(self.res_a(self.embed(x))))
            h = self.lstm(h)
            return [self.logits(h), self.baseline(h)]

    return K, T


@pair("impala_resnet_image", ("img", 12, 12, 3))
def impala_resnet_image():
    class ResidualBlock(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.conv0 = nn.Conv2d(c, c, 3, padding=1)
            self.conv1 = nn.Conv2d(c, c, 3, padding=1)

        def forward(self, x):
            return x + self.conv1(F.relu(self.conv0(F.relu(x))))

    class ConvSequence(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.conv = nn.Conv2d(i, o, 3, padding=1)
            self.res_block0 = ResidualBlock(o)
            self.res_block1 = ResidualBlock(o)

        def forward(self, x):
            x = F.max_pool2d(self.conv(x), 2)
            return self.res_block1(self.res_block0(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = nn.Sequential(
                ConvSequence(3, 8),
                ConvSequence(8, 16),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(144, 32),
                nn.ReLU(),
            )
            self.actor = nn.Linear(32, 7)
            self.critic = nn.Linear(32, 1)

        def forward(self, x):
            h = self.network(x)
            return self.actor(h), self.critic(h)

    def K():
        x = i = keras.Input((12, 12, 3))
        for n, c in enumerate((8, 16)):
            x = layers.Conv2D(c, 3, padding="same", name=f"seq{n}_conv")(x)
            x = layers.MaxPooling2D(2)(x)
            for r in range(2):
                y = layers.ReLU()(x)
                y = layers.Conv2D(c, 3, padding="same", activation="relu", name=f"seq{n}_res{r}_a")(y)
                y = layers.Conv2D(c, 3, padding="same", name=f"seq{n}_res{r}_b")(y)
                x = layers.add([x, y])
        x = layers.Flatten()(layers.ReLU()(x))
        x = layers.Dense(32, activation="relu", name="torso")(x)
        v = layers.Dense(1, name="value")(x)
        p = layers.Dense(7, name="policy")(x)
        return keras.Model(i, [p, v])

    return K, T


# 2. dueling C51
@pair("dueling_c51", ("v", 10))
def dueling_c51():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU())
            self.adv = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4 * 11))
            self.val = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 11))

        def forward(self, x):
            h = self.trunk(x)
            a = self.adv(h).view(-1, 4, 11)
            v = self.val(h).view(-1, 1, 11)
            return F.softmax(v + a - a.mean(1, keepdim=True), -1)

    def K():
        i = keras.Input((10,))
        h = layers.Dense(32, activation="swish")(layers.Dense(32, activation="swish")(i))
        v = layers.Dense(16, activation="relu", name="state_hidden")(h)
        v = layers.Reshape((1, 11))(layers.Dense(11, name="state_atoms")(v))
        a = layers.Dense(16, activation="relu", name="action_hidden")(h)
        a = layers.Reshape((4, 11))(layers.Dense(44, name="action_atoms")(a))
        q = v + a - ops.mean(a, axis=1, keepdims=True)
        return keras.Model(i, layers.Softmax(-1)(q))

    return K, T


# 3. Decision Transformer block
@pair("decision_transformer_stacked", ("v", 4, 5), ("v", 4, 2), ("v", 4, 1))
def decision_transformer_stacked():
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
            a = (F.softmax(w, -1) @ v).transpose(1, 2).reshape(b, t, c)
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


# 4. set transformer: ISAB + PMA
@pair("set_transformer", ("v", 7, 5))
def set_transformer():
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
            return self.ln1(o + F.relu(self.fc_o(o)))

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


# 5. U-Net with a time embedding (diffusion policy)
@pair("unet1d_diffusion", ("seqc", 8, 4), ("v", 12), out="seqc")
def unet1d_diffusion():
    class ResBlock(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv1d(i, o, 5, padding=2), nn.Conv1d(o, o, 5, padding=2)
            self.norm1, self.norm2 = nn.GroupNorm(4, o, eps=1e-3), nn.GroupNorm(4, o, eps=1e-3)
            self.cond = nn.Linear(12, 2 * o)
            self.skip = nn.Conv1d(i, o, 1) if i != o else nn.Identity()

        def forward(self, x, c):
            h = F.mish(self.norm1(self.conv1(x)))
            scale, bias = self.cond(F.mish(c)).unsqueeze(-1).chunk(2, 1)
            h = F.mish(self.norm2(self.conv2(h * scale + bias)))
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
            h = (
                ops.nn.mish(self.gn_first(self.first(x)))
                if hasattr(ops.nn, "mish")
                else keras.activations.mish(self.gn_first(self.first(x)))
            )
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


# 6. ConvNeXt V2 block with global response normalization
@pair("convnext_v2_grn", ("img", 6, 6, 3))
def convnext_v2_grn():
    class GRN(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.gamma = nn.Parameter(torch.zeros(1, 1, 1, d))
            self.beta = nn.Parameter(torch.zeros(1, 1, 1, d))

        def forward(self, x):
            g = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
            n = g / (g.mean(-1, keepdim=True) + 1e-6)
            return self.gamma * (x * n) + self.beta + x

    class Block(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.dwconv = nn.Conv2d(d, d, 7, padding=3, groups=d)
            self.norm = nn.LayerNorm(d, eps=1e-6)
            self.pwconv1 = nn.Linear(d, 4 * d)
            self.grn = GRN(4 * d)
            self.pwconv2 = nn.Linear(4 * d, d)

        def forward(self, x):
            h = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
            h = self.pwconv2(self.grn(F.gelu(self.pwconv1(h))))
            return x + h.permute(0, 3, 1, 2)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.downsample_layers = nn.ModuleList([nn.Conv2d(3, 8, 2, 2)])
            self.stages = nn.ModuleList([nn.Sequential(Block(8), Block(8))])
            self.norm = nn.LayerNorm(8, eps=1e-6)
            self.head = nn.Linear(8, 5)

        def forward(self, x):
            for d, s in zip(self.downsample_layers, self.stages):
                x = s(d(x))
            return self.head(self.norm(x.mean([-2, -1])))

    class GlobalResponseNorm(layers.Layer):
        def build(self, shape):
            self.weight = self.add_weight(shape=(shape[-1],), name="weight")
            self.bias = self.add_weight(shape=(shape[-1],), name="bias")

        def call(self, x):
            g = ops.sqrt(ops.sum(x * x, axis=(1, 2), keepdims=True))
            n = g / (ops.mean(g, axis=-1, keepdims=True) + 1e-6)
            return self.weight * (x * n) + self.bias + x

    def K():
        i = keras.Input((6, 6, 3))
        x = layers.Conv2D(8, 2, 2, name="patchify")(i)
        for n in range(2):
            y = layers.DepthwiseConv2D(7, padding="same", name=f"block_{n}_dw")(x)
            y = layers.LayerNormalization(epsilon=1e-6, name=f"block_{n}_ln")(y)
            y = layers.Dense(32, name=f"block_{n}_expand")(y)
            y = GlobalResponseNorm(name=f"block_{n}_grn")(layers.Activation("gelu")(y))
            y = layers.Dense(8, name=f"block_{n}_reduce")(y)
            x = layers.Add()([x, y])
        x = layers.GlobalAveragePooling2D()(x)
        x = layers.LayerNormalization(epsilon=1e-6, name="final_ln")(x)
        return keras.Model(i, layers.Dense(5, name="classes")(x))

    return K, T


# 7. TCN with causal dilated convolutions
@pair("tcn_forecaster", ("seqc", 16, 4))
def tcn_forecaster():
    class TemporalBlock(nn.Module):
        def __init__(self, i, o, d):
            super().__init__()
            self.conv1 = nn.Conv1d(i, o, 3, dilation=d)
            self.conv2 = nn.Conv1d(o, o, 3, dilation=d)
            self.downsample = nn.Conv1d(i, o, 1) if i != o else None
            self.pad = 2 * d

        def forward(self, x):
            h = F.relu(self.conv1(F.pad(x, (self.pad, 0))))
            h = F.relu(self.conv2(F.pad(h, (self.pad, 0))))
            return F.relu(h + (x if self.downsample is None else self.downsample(x)))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = nn.Sequential(
                TemporalBlock(4, 8, 1), TemporalBlock(8, 8, 2), TemporalBlock(8, 8, 4)
            )
            self.linear = nn.Linear(8, 3)

        def forward(self, x):
            return self.linear(self.network(x)[:, :, -1])

    def K():
        x = i = keras.Input((16, 4))
        for n, d in enumerate((1, 2, 4)):
            y = layers.Conv1D(
                8, 3, padding="causal", dilation_rate=d, activation="relu", name=f"tcn{n}_first"
            )(x)
            y = layers.Conv1D(
                8, 3, padding="causal", dilation_rate=d, activation="relu", name=f"tcn{n}_second"
            )(y)
            s = x if x.shape[-1] == 8 else layers.Conv1D(8, 1, name=f"tcn{n}_match")(x)
            x = layers.Activation("relu")(layers.Add()([y, s]))
        x = layers.Lambda(lambda t: t[:, -1])(x)
        return keras.Model(i, layers.Dense(3, name="forecast")(x))

    return K, T


# 8. WaveNet with separate filter and gate convolutions, skip connections
@pair("wavenet_filter_gate", ("seqc", 12, 2), out="seqc")
def wavenet_filter_gate():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter_convs, self.gate_convs = nn.ModuleList(), nn.ModuleList()
            self.residual_convs, self.skip_convs = nn.ModuleList(), nn.ModuleList()
            self.start_conv = nn.Conv1d(2, 8, 1)
            for d in (1, 2):
                self.filter_convs.append(nn.Conv1d(8, 8, 2, dilation=d))
                self.gate_convs.append(nn.Conv1d(8, 8, 2, dilation=d))
                self.residual_convs.append(nn.Conv1d(8, 8, 1))
                self.skip_convs.append(nn.Conv1d(8, 10, 1))
            self.end_conv_1, self.end_conv_2 = nn.Conv1d(10, 10, 1), nn.Conv1d(10, 6, 1)

        def forward(self, x):
            x, skip = self.start_conv(x), 0
            for n, d in enumerate((1, 2)):
                p = F.pad(x, (d, 0))
                h = torch.tanh(self.filter_convs[n](p)) * torch.sigmoid(self.gate_convs[n](p))
                skip = skip + self.skip_convs[n](h)
                x = x + self.residual_convs[n](h)
            return self.end_conv_2(F.relu(self.end_conv_1(F.relu(skip))))

    class GatedUnit(layers.Layer):
        def __init__(self, d, **kw):
            super().__init__(**kw)
            self.tanh_conv = layers.Conv1D(8, 2, padding="causal", dilation_rate=d, activation="tanh")
            self.sigmoid_conv = layers.Conv1D(8, 2, padding="causal", dilation_rate=d, activation="sigmoid")
            self.skip_out = layers.Conv1D(10, 1)
            self.res_out = layers.Conv1D(8, 1)

        def call(self, x):
            h = self.tanh_conv(x) * self.sigmoid_conv(x)
            return x + self.res_out(h), self.skip_out(h)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.entry = layers.Conv1D(8, 1)
            self.units = [GatedUnit(1), GatedUnit(2)]
            self.post_a = layers.Conv1D(10, 1, activation="relu")
            self.post_b = layers.Conv1D(6, 1)

        def call(self, x):
            x, skips = self.entry(x), []
            for unit in self.units:
                x, s = unit(x)
                skips.append(s)
            return self.post_b(self.post_a(ops.relu(skips[0] + skips[1])))

    return K, T


# 9. SE-ResNet block
@pair("se_resnet", ("img", 8, 8, 3))
def se_resnet():
    class SELayer(nn.Module):
        def __init__(self, c, r):
            super().__init__()
            self.avg_pool = nn.AdaptiveAvgPool2d(1)
            self.fc = nn.Sequential(
                nn.Linear(c, c // r, bias=False), nn.ReLU(), nn.Linear(c // r, c, bias=False), nn.Sigmoid()
            )

        def forward(self, x):
            b, c, _, _ = x.size()
            return x * self.fc(self.avg_pool(x).view(b, c)).view(b, c, 1, 1)

    class SEBasicBlock(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.conv1, self.conv2 = (
                nn.Conv2d(c, c, 3, padding=1, bias=False),
                nn.Conv2d(c, c, 3, padding=1, bias=False),
            )
            self.bn1, self.bn2 = nn.BatchNorm2d(c), nn.BatchNorm2d(c)
            self.se = SELayer(c, 4)

        def forward(self, x):
            h = F.relu(self.bn1(self.conv1(x)))
            return F.relu(x + self.se(self.bn2(self.conv2(h))))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
            self.layer1 = nn.Sequential(SEBasicBlock(16), SEBasicBlock(16))
            self.fc = nn.Linear(16, 4)

        def forward(self, x):
            x = self.layer1(F.relu(self.bn1(self.conv1(x))))
            return self.fc(x.mean((2, 3)))

    def bn(name):
        return layers.BatchNormalization(epsilon=1e-5, name=name)

    def K():
        i = keras.Input((8, 8, 3))
        x = layers.Conv2D(16, 3, padding="same", use_bias=False, name="stem")(i)
        x = layers.ReLU()(bn("stem_bn")(x))
        for n in range(2):
            y = layers.Conv2D(16, 3, padding="same", use_bias=False, name=f"block{n}_conv_a")(x)
            y = layers.ReLU()(bn(f"block{n}_bn_a")(y))
            y = bn(f"block{n}_bn_b")(
                layers.Conv2D(16, 3, padding="same", use_bias=False, name=f"block{n}_conv_b")(y)
            )
            s = layers.GlobalAveragePooling2D()(y)
            s = layers.Dense(4, activation="relu", use_bias=False, name=f"block{n}_squeeze")(s)
            s = layers.Dense(16, activation="sigmoid", use_bias=False, name=f"block{n}_excite")(s)
            y = layers.Multiply()([y, layers.Reshape((1, 1, 16))(s)])
            x = layers.ReLU()(layers.Add()([x, y]))
        return keras.Model(i, layers.Dense(4, name="logits")(layers.GlobalAveragePooling2D()(x)))

    return K, T


# 10. MobileOne: over-parameterized branches at training time
@pair("mobileone_branches", ("img", 8, 8, 6), out="img")
def mobileone_branches():
    class Branch(nn.Sequential):
        def __init__(self, i, o, k, groups=1):
            super().__init__()
            self.add_module("conv", nn.Conv2d(i, o, k, padding=k // 2, groups=groups, bias=False))
            self.add_module("bn", nn.BatchNorm2d(o, eps=1e-3))

    class MobileOneBlock(nn.Module):
        def __init__(self, i, o, k, groups=1):
            super().__init__()
            self.rbr_skip = nn.BatchNorm2d(i, eps=1e-3) if i == o else None
            self.rbr_conv = nn.ModuleList([Branch(i, o, k, groups) for _ in range(2)])
            self.rbr_scale = Branch(i, o, 1, groups) if k > 1 else None

        def forward(self, x):
            y = 0
            if self.rbr_skip is not None:
                y = self.rbr_skip(x)
            if self.rbr_scale is not None:
                y = y + self.rbr_scale(x)
            for b in self.rbr_conv:
                y = y + b(x)
            return F.relu(y)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.depthwise = MobileOneBlock(6, 6, 3, 6)
            self.pointwise = MobileOneBlock(6, 10, 1)

        def forward(self, x):
            return self.pointwise(self.depthwise(x))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.dw_3x3_0 = layers.DepthwiseConv2D(3, padding="same", use_bias=False)
            self.dw_bn_0 = layers.BatchNormalization()
            self.dw_3x3_1 = layers.DepthwiseConv2D(3, padding="same", use_bias=False)
            self.dw_bn_1 = layers.BatchNormalization()
            self.dw_1x1 = layers.DepthwiseConv2D(1, use_bias=False)
            self.dw_bn_scale = layers.BatchNormalization()
            self.dw_bn_skip = layers.BatchNormalization()
            self.pw_0, self.pw_bn_0 = layers.Conv2D(10, 1, use_bias=False), layers.BatchNormalization()
            self.pw_1, self.pw_bn_1 = layers.Conv2D(10, 1, use_bias=False), layers.BatchNormalization()

        def call(self, x):
            y = (
                self.dw_bn_0(self.dw_3x3_0(x))
                + self.dw_bn_1(self.dw_3x3_1(x))
                + self.dw_bn_scale(self.dw_1x1(x))
            )
            x = ops.relu(y + self.dw_bn_skip(x))
            return ops.relu(self.pw_bn_0(self.pw_0(x)) + self.pw_bn_1(self.pw_1(x)))

    return K, T


# 11. Perceiver IO: cross attention with different widths, latent self attention
@pair("perceiver_io", ("v", 9, 6), ("v", 4, 5))
def perceiver_io():
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


# 12. GRU-D: decays, own gates
@pair("gru_d", ("v", 5, 6), ("v", 5, 6), ("v", 5, 6))
def gru_d():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma_x = nn.Parameter(torch.zeros(6))
            self.gamma_x_bias = nn.Parameter(torch.zeros(6))
            self.gamma_h = nn.Linear(6, 9)
            self.update, self.reset, self.candidate = nn.Linear(21, 9), nn.Linear(21, 9), nn.Linear(21, 9)
            self.register_buffer("x_mean", torch.zeros(6))
            self.out = nn.Linear(9, 2)

        def forward(self, x, m, d):
            h = torch.zeros(x.shape[0], 9)
            last = self.x_mean.expand(x.shape[0], 6)
            for t in range(5):
                gx = torch.exp(-F.relu(d[:, t] * self.gamma_x + self.gamma_x_bias))
                gh = torch.exp(-F.relu(self.gamma_h(d[:, t])))
                xt = m[:, t] * x[:, t] + (1 - m[:, t]) * (gx * last + (1 - gx) * self.x_mean)
                h = gh * h
                z = torch.cat([xt, h, m[:, t]], 1)
                u, r = torch.sigmoid(self.update(z)), torch.sigmoid(self.reset(z))
                c = torch.tanh(self.candidate(torch.cat([xt, r * h, m[:, t]], 1)))
                h = (1 - u) * h + u * c
                last = xt
            return self.out(h)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.mean = self.add_weight(shape=(6,), name="mean", trainable=False)
            self.decay_w = self.add_weight(shape=(6,), name="decay_w")
            self.decay_b = self.add_weight(shape=(6,), name="decay_b")
            self.hidden_decay = layers.Dense(9)
            self.z_gate = layers.Dense(9, activation="sigmoid")
            self.r_gate = layers.Dense(9, activation="sigmoid")
            self.h_tilde = layers.Dense(9, activation="tanh")
            self.classifier = layers.Dense(2)

        def call(self, inputs):
            x, m, d = inputs
            h = ops.zeros((ops.shape(x)[0], 9))
            last = ops.zeros_like(x[:, 0]) + self.mean
            for t in range(5):
                gx = ops.exp(-ops.relu(d[:, t] * self.decay_w + self.decay_b))
                gh = ops.exp(-ops.relu(self.hidden_decay(d[:, t])))
                xt = m[:, t] * x[:, t] + (1 - m[:, t]) * (gx * last + (1 - gx) * self.mean)
                h = gh * h
                z = ops.concatenate([xt, h, m[:, t]], 1)
                u, r = self.z_gate(z), self.r_gate(z)
                c = self.h_tilde(ops.concatenate([xt, r * h, m[:, t]], 1))
                h = (1 - u) * h + u * c
                last = xt
            return self.classifier(h)

    return K, T


# 13. NoisyNet, factorised, sigma used at evaluation with a fixed noise
@pair("noisynet_fixed", ("v", 8))
def noisynet_fixed():
    class NoisyLinear(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.weight_mu = nn.Parameter(torch.empty(o, i))
            self.weight_sigma = nn.Parameter(torch.empty(o, i))
            self.bias_mu = nn.Parameter(torch.empty(o))
            self.bias_sigma = nn.Parameter(torch.empty(o))
            self.register_buffer("weight_epsilon", torch.empty(o, i))
            self.register_buffer("bias_epsilon", torch.empty(o))

        def forward(self, x):
            return F.linear(
                x,
                self.weight_mu + self.weight_sigma * self.weight_epsilon,
                self.bias_mu + self.bias_sigma * self.bias_epsilon,
            )

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(8, 20)
            self.fc2 = NoisyLinear(20, 16)
            self.fc3 = NoisyLinear(16, 3)

        def forward(self, x):
            return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))

    class NoisyDense(layers.Layer):
        def __init__(self, units, **kw):
            super().__init__(**kw)
            self.units = units

        def build(self, shape):
            n = shape[-1]
            self.mu_w = self.add_weight(shape=(n, self.units), name="mu_w")
            self.mu_b = self.add_weight(shape=(self.units,), name="mu_b")
            self.sigma_w = self.add_weight(shape=(n, self.units), name="sigma_w")
            self.sigma_b = self.add_weight(shape=(self.units,), name="sigma_b")
            self.eps_w = self.add_weight(shape=(n, self.units), name="eps_w", trainable=False)
            self.eps_b = self.add_weight(shape=(self.units,), name="eps_b", trainable=False)

        def call(self, x):
            return (
                ops.matmul(x, self.mu_w + self.sigma_w * self.eps_w) + self.mu_b + self.sigma_b * self.eps_b
            )

    def K():
        i = keras.Input((8,))
        x = layers.Dense(20, activation="relu", name="features")(i)
        x = layers.ReLU()(NoisyDense(16, name="noisy_hidden")(x))
        return keras.Model(i, NoisyDense(3, name="noisy_q")(x))

    return K, T


# 14. MAML-style functional model: parameters in a ParameterList / plain weights
@pair("maml_functional", ("img", 8, 8, 1))
def maml_functional():
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
            x = F.relu(F.conv2d(x, v[0], v[1], stride=2, padding=1))
            x = F.relu(F.conv2d(x, v[2], v[3], stride=2, padding=1))
            return F.linear(x.flatten(1), v[4], v[5])

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


# 15. Capsule network with dynamic routing
@pair("capsule_routing", ("img", 10, 10, 1))
def capsule_routing():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 12, 3)
            self.primary = nn.Conv2d(12, 8, 3, stride=2)
            self.W = nn.Parameter(torch.zeros(1, 18, 3, 5, 4))

        @staticmethod
        def squash(x):
            n = (x * x).sum(-1, keepdim=True)
            return n / (1 + n) * x / torch.sqrt(n + 1e-7)

        def forward(self, x):
            x = self.primary(F.relu(self.conv(x)))
            b = x.shape[0]
            u = self.squash(x.permute(0, 2, 3, 1).reshape(b, 18, 4))
            uh = (self.W @ u[:, :, None, :, None]).squeeze(-1)
            logits = torch.zeros(b, 18, 3, 1)
            for i in range(2):
                c = torch.softmax(logits, 2)
                v = self.squash((c * uh).sum(1, keepdim=True))
                if i == 0:
                    logits = logits + (uh * v).sum(-1, keepdim=True)
            return v.squeeze(1).norm(dim=-1)

    def squash(x):
        n = ops.sum(ops.square(x), -1, keepdims=True)
        return n / (1 + n) * x / ops.sqrt(n + 1e-7)

    class DigitCaps(layers.Layer):
        def build(self, shape):
            self.transform = self.add_weight(shape=(1, shape[1], 3, 5, 4), name="transform")

        def call(self, u):
            uh = ops.squeeze(ops.matmul(self.transform, u[:, :, None, :, None]), -1)
            logits = ops.zeros_like(uh[..., :1])
            for i in range(2):
                v = squash(ops.sum(ops.softmax(logits, 2) * uh, 1, keepdims=True))
                if i == 0:
                    logits = logits + ops.sum(uh * v, -1, keepdims=True)
            return ops.sqrt(ops.sum(ops.square(ops.squeeze(v, 1)), -1))

    def K():
        i = keras.Input((10, 10, 1))
        x = layers.Conv2D(12, 3, activation="relu", name="features")(i)
        x = layers.Conv2D(8, 3, strides=2, name="primary_caps")(x)
        u = layers.Lambda(squash)(layers.Reshape((18, 4))(x))
        return keras.Model(i, DigitCaps(name="digit_caps")(u))

    return K, T
