"""Twins of networks of words, sounds, series and choices: transformers, recurrent nets, recommenders."""

# ruff: noqa: E731, N802

from __future__ import annotations

import keras
import numpy as np
import torch
from keras import layers, ops
from torch import nn
from torch.nn import functional

from tests.model_pairs.twins import pair


def _heads(x, count):
    n, t, c = x.shape
    return x.view(n, t, count, c // count).transpose(1, 2)


def _joined(x):
    return x.transpose(1, 2).flatten(2)


def _keras_heads(x, count):
    return ops.transpose(ops.reshape(x, (-1, x.shape[1], count, x.shape[2] // count)), (0, 2, 1, 3))


def _keras_joined(x):
    return ops.reshape(ops.transpose(x, (0, 2, 1, 3)), (-1, x.shape[2], x.shape[1] * x.shape[3]))


def _attend(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def _keras_attend(q, k, v, mask=None):
    scores = q @ ops.transpose(k, (0, 1, 3, 2)) / q.shape[-1] ** 0.5
    return ops.softmax(scores if mask is None else scores + mask, -1) @ v


_CAUSAL = np.triu(np.full((6, 6), -1e9, "float32"), 1)


@pair("gpt2_conv1d_fused", ("ids", 6, 40))
def gpt2_conv1d_fused():
    class Conv1D(nn.Module):
        def __init__(self, output, used):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(used, output))
            self.bias = nn.Parameter(torch.zeros(output))

        def forward(self, x):
            return x @ self.weight + self.bias

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn, self.c_proj = Conv1D(48, 16), Conv1D(16, 16)

        def forward(self, x):
            q, k, v = (_heads(part, 2) for part in self.c_attn(x).split(16, 2))
            return self.c_proj(_joined(_attend(q, k, v, torch.from_numpy(_CAUSAL))))

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_fc, self.c_proj = Conv1D(64, 16), Conv1D(16, 64)

        def forward(self, x):
            return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.attn = nn.LayerNorm(16), Attention()
            self.ln_2, self.mlp = nn.LayerNorm(16), MLP()

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(40, 16), nn.Embedding(6, 16)
            self.h = nn.ModuleList([Block(), Block()])
            self.ln_f = nn.LayerNorm(16)

        def forward(self, ids):
            x = self.wte(ids) + self.wpe(torch.arange(6))
            for block in self.h:
                x = block(x)
            return self.ln_f(x) @ self.wte.weight.T

    class DecoderBlock(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.attention_norm = layers.LayerNormalization(epsilon=1e-5)
            self.ffn_norm = layers.LayerNormalization(epsilon=1e-5)
            self.qkv, self.out = layers.Dense(48), layers.Dense(16)
            self.up, self.down = layers.Dense(64), layers.Dense(16)

        def call(self, x):
            q, k, v = (_keras_heads(e, 2) for e in ops.split(self.qkv(self.attention_norm(x)), 3, -1))
            x = x + self.out(_keras_joined(_keras_attend(q, k, v, _CAUSAL)))
            return x + self.down(ops.gelu(self.up(self.ffn_norm(x)), approximate=True))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = layers.Embedding(40, 16), layers.Embedding(6, 16)
            self.blocks = [DecoderBlock(), DecoderBlock()]
            self.final_norm = layers.LayerNormalization(epsilon=1e-5)

        def call(self, ids):
            x = self.tokens(ids) + self.positions(ops.arange(6))
            for block in self.blocks:
                x = block(x)
            return self.final_norm(x) @ ops.transpose(self.tokens.embeddings)

    return K, T


@pair("bert_three_embeddings", ("ids", 6, 40), ("ids", 6, 2))
def bert_three_embeddings():
    class Embeddings(nn.Module):
        def __init__(self):
            super().__init__()
            self.word_embeddings = nn.Embedding(40, 12)
            self.position_embeddings = nn.Embedding(6, 12)
            self.token_type_embeddings = nn.Embedding(2, 12)
            self.LayerNorm = nn.LayerNorm(12, eps=1e-12)

        def forward(self, ids, kinds):
            x = self.word_embeddings(ids) + self.token_type_embeddings(kinds)
            return self.LayerNorm(x + self.position_embeddings(torch.arange(6)))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(12, 12) for _ in range(3))
            self.output_dense, self.output_norm = nn.Linear(12, 12), nn.LayerNorm(12, eps=1e-12)
            self.intermediate, self.dense = nn.Linear(12, 30), nn.Linear(30, 12)
            self.LayerNorm = nn.LayerNorm(12, eps=1e-12)

        def forward(self, x):
            q, k, v = (_heads(layer(x), 3) for layer in (self.query, self.key, self.value))
            x = self.output_norm(x + self.output_dense(_joined(_attend(q, k, v))))
            return self.LayerNorm(x + self.dense(functional.gelu(self.intermediate(x))))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.embeddings = Embeddings()
            self.layer = nn.ModuleList([Layer(), Layer()])
            self.pooler = nn.Linear(12, 12)
            self.classifier = nn.Linear(12, 3)

        def forward(self, ids, kinds):
            x = self.embeddings(ids, kinds)
            for layer in self.layer:
                x = layer(x)
            return self.classifier(torch.tanh(self.pooler(x[:, 0])))

    def K():
        norm = lambda name: layers.LayerNormalization(epsilon=1e-12, name=name)
        ids, kinds = keras.Input((6,), dtype="int32"), keras.Input((6,), dtype="int32")
        x = layers.Embedding(40, 12, name="token_embedding")(ids)
        x = x + layers.Embedding(6, 12, name="position_embedding")(ops.cumsum(ops.ones_like(ids), 1) - 1)
        x = x + layers.Embedding(2, 12, name="segment_embedding")(kinds)
        x = norm("embedding_norm")(x)
        for n in range(2):
            y = layers.MultiHeadAttention(3, 4, name=f"transformer_{n}_attention")(x, x)
            x = norm(f"transformer_{n}_attention_norm")(x + y)
            y = layers.Dense(30, activation="gelu", name=f"transformer_{n}_ffn_in")(x)
            x = norm(f"transformer_{n}_ffn_norm")(x + layers.Dense(12, name=f"transformer_{n}_ffn_out")(y))
        pooled = layers.Dense(12, activation="tanh", name="pooled_dense")(x[:, 0])
        return keras.Model([ids, kinds], layers.Dense(3, name="logits")(pooled))

    return K, T


@pair("t5_encoder_relative", ("ids", 6, 30))
def t5_encoder_relative():
    buckets = np.abs(np.arange(6)[:, None] - np.arange(6)[None]).astype("int64")

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(12))

        def forward(self, x):
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Embedding(30, 12)
            self.relative_attention_bias = nn.Embedding(6, 2)
            self.q, self.k, self.v, self.o = (nn.Linear(12, 12, bias=False) for _ in range(4))
            self.layer_norm_0, self.layer_norm_1, self.final_layer_norm = Norm(), Norm(), Norm()
            self.wi_0, self.wi_1 = nn.Linear(12, 28, bias=False), nn.Linear(12, 28, bias=False)
            self.wo = nn.Linear(28, 12, bias=False)

        def forward(self, ids):
            x = self.shared(ids)
            y = self.layer_norm_0(x)
            q, k, v = (_heads(layer(y), 2) for layer in (self.q, self.k, self.v))
            bias = self.relative_attention_bias(torch.from_numpy(buckets)).permute(2, 0, 1)
            x = x + self.o(_joined((q @ k.transpose(-2, -1) + bias).softmax(-1) @ v))
            y = self.layer_norm_1(x)
            x = x + self.wo(functional.gelu(self.wi_0(y), approximate="tanh") * self.wi_1(y))
            return self.final_layer_norm(x)

    class RMS(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight((shape[-1],), name="scale")

        def call(self, x):
            return x * ops.rsqrt(ops.mean(ops.square(x), -1, keepdims=True) + 1e-6) * self.scale

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            dense = lambda width: layers.Dense(width, use_bias=False)
            self.embed, self.bias_table = layers.Embedding(30, 12), layers.Embedding(6, 2)
            self.query, self.key, self.value, self.attention_out = (dense(12) for _ in range(4))
            self.norm_a, self.norm_b, self.norm_c = RMS(), RMS(), RMS()
            self.gate, self.linear, self.out = dense(28), dense(28), dense(12)

        def call(self, ids):
            x = self.embed(ids)
            y = self.norm_a(x)
            q, k, v = (_keras_heads(layer(y), 2) for layer in (self.query, self.key, self.value))
            bias = ops.transpose(self.bias_table(buckets), (2, 0, 1))
            y = ops.softmax(q @ ops.transpose(k, (0, 1, 3, 2)) + bias, -1) @ v
            x = x + self.attention_out(_keras_joined(y))
            y = self.norm_b(x)
            return self.norm_c(x + self.out(ops.gelu(self.gate(y), approximate=True) * self.linear(y)))

    return K, T


@pair("llama_grouped_query", ("ids", 6, 40))
def llama_grouped_query():
    angles = np.arange(6)[:, None] * np.array([1.0, 0.1])[None]
    cos, sin = (np.tile(f(angles), 2).astype("float32") for f in (np.cos, np.sin))

    def rotate(x, concatenate):
        return concatenate([-x[..., 2:], x[..., :2]], -1)

    class RMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False)
            self.q_proj, self.k_proj, self.v_proj = linear(16, 16), linear(16, 8), linear(16, 8)
            self.o_proj = linear(16, 16)
            self.gate_proj, self.up_proj, self.down_proj = linear(16, 36), linear(16, 36), linear(36, 16)
            self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()

        def forward(self, x):
            y = self.input_layernorm(x)
            q, k, v = _heads(self.q_proj(y), 4), _heads(self.k_proj(y), 2), _heads(self.v_proj(y), 2)
            c, s = torch.from_numpy(cos), torch.from_numpy(sin)
            q, k = (tensor * c + rotate(tensor, torch.cat) * s for tensor in (q, k))
            k, v = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
            x = x + self.o_proj(_joined(_attend(q, k, v, torch.from_numpy(_CAUSAL))))
            y = self.post_attention_layernorm(x)
            return x + self.down_proj(functional.silu(self.gate_proj(y)) * self.up_proj(y))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(40, 16)
            self.layers = nn.ModuleList([Layer(), Layer()])
            self.norm, self.lm_head = RMSNorm(), nn.Linear(16, 40, bias=False)

        def forward(self, ids):
            x = self.embed_tokens(ids)
            for layer in self.layers:
                x = layer(x)
            return self.lm_head(self.norm(x))

    class KLayer(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            dense = lambda width: layers.Dense(width, use_bias=False)
            self.norm_1 = layers.RMSNormalization(epsilon=1e-5)
            self.norm_2 = layers.RMSNormalization(epsilon=1e-5)
            self.query, self.key, self.value, self.output_dense = dense(16), dense(8), dense(8), dense(16)
            self.ffn_gate, self.ffn_linear, self.ffn_output = dense(36), dense(36), dense(16)

        def call(self, x):
            y = self.norm_1(x)
            q, k, v = (
                _keras_heads(layer(y), n) for layer, n in ((self.query, 4), (self.key, 2), (self.value, 2))
            )
            q, k = (tensor * cos + rotate(tensor, ops.concatenate) * sin for tensor in (q, k))
            k, v = (ops.repeat(tensor, 2, 1) for tensor in (k, v))
            x = x + self.output_dense(_keras_joined(_keras_attend(q, k, v, _CAUSAL)))
            y = self.norm_2(x)
            return x + self.ffn_output(ops.silu(self.ffn_gate(y)) * self.ffn_linear(y))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.token_embedding = layers.Embedding(40, 16)
            self.transformer_layers = [KLayer(), KLayer()]
            self.final = layers.RMSNormalization(epsilon=1e-5)
            self.logits = layers.Dense(40, use_bias=False)

        def call(self, ids):
            x = self.token_embedding(ids)
            for layer in self.transformer_layers:
                x = layer(x)
            return self.logits(self.final(x))

    return K, T


@pair("conformer_block", ("v", 9, 12))
def conformer_block():
    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer_norm = nn.LayerNorm(12, eps=1e-5)
            self.linear1, self.linear2 = nn.Linear(12, 30), nn.Linear(30, 12)

        def forward(self, x):
            return self.linear2(functional.silu(self.linear1(self.layer_norm(x))))

    class ConvModule(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer_norm = nn.LayerNorm(12, eps=1e-5)
            self.pointwise_conv1, self.pointwise_conv2 = nn.Conv1d(12, 24, 1), nn.Conv1d(12, 12, 1)
            self.depthwise_conv = nn.Conv1d(12, 12, 5, padding=2, groups=12)
            self.batch_norm = nn.BatchNorm1d(12, eps=1e-3)

        def forward(self, x):
            x = functional.glu(self.pointwise_conv1(self.layer_norm(x).transpose(1, 2)), 1)
            x = functional.silu(self.batch_norm(self.depthwise_conv(x)))
            return self.pointwise_conv2(x).transpose(1, 2)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.ffn1, self.conv, self.ffn2 = FeedForward(), ConvModule(), FeedForward()
            self.self_attn_layer_norm = nn.LayerNorm(12, eps=1e-5)
            self.self_attn = nn.MultiheadAttention(12, 3, batch_first=True)
            self.final_layer_norm = nn.LayerNorm(12, eps=1e-5)

        def forward(self, x):
            x = x + 0.5 * self.ffn1(x)
            y = self.self_attn_layer_norm(x)
            x = x + self.self_attn(y, y, y, need_weights=False)[0]
            x = x + self.conv(x)
            return self.final_layer_norm(x + 0.5 * self.ffn2(x))

    def K():
        norm = lambda name: layers.LayerNormalization(epsilon=1e-5, name=name)

        def ffn(x, name):
            y = layers.Dense(30, activation="silu", name=f"{name}_expand")(norm(f"{name}_norm")(x))
            return layers.Dense(12, name=f"{name}_project")(y)

        i = keras.Input((9, 12))
        x = i + 0.5 * ffn(i, "macaron_a")
        y = norm("mha_norm")(x)
        x = x + layers.MultiHeadAttention(3, 4, name="mha")(y, y)
        y = layers.Conv1D(24, 1, name="conv_expand")(norm("conv_norm")(x))
        y = y[..., :12] * ops.sigmoid(y[..., 12:])
        y = layers.DepthwiseConv1D(5, padding="same", name="conv_depth")(y)
        y = layers.Activation("silu")(layers.BatchNormalization(name="conv_batch")(y))
        x = x + layers.Conv1D(12, 1, name="conv_project")(y)
        return keras.Model(i, norm("out_norm")(x + 0.5 * ffn(x, "macaron_b")))

    return K, T


@pair("wavenet_fused_gates", ("seqc", 16, 3), out="seqc")
def wavenet_fused_gates():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.start_conv = nn.Conv1d(3, 10, 1)
            self.dilated = nn.ModuleList(nn.Conv1d(10, 20, 2, dilation=2**n) for n in range(3))
            self.residual = nn.ModuleList(nn.Conv1d(10, 10, 1) for _ in range(3))
            self.skip = nn.ModuleList(nn.Conv1d(10, 14, 1) for _ in range(3))
            self.end_conv_1, self.end_conv_2 = nn.Conv1d(14, 16, 1), nn.Conv1d(16, 5, 1)

        def forward(self, x):
            x, skips = self.start_conv(x), 0.0
            for n, (dilated, residual, skip) in enumerate(
                zip(self.dilated, self.residual, self.skip, strict=True)
            ):
                y, gate = dilated(functional.pad(x, (2**n, 0))).chunk(2, 1)
                y = torch.tanh(y) * gate.sigmoid()
                x, skips = x + residual(y), skips + skip(y)
            return self.end_conv_2(functional.relu(self.end_conv_1(functional.relu(skips)))), x

    def K():
        i = keras.Input((16, 3))
        x, skips = layers.Conv1D(10, 1, name="causal_in")(i), []
        for n in range(3):
            y = layers.Conv1D(20, 2, dilation_rate=2**n, padding="causal", name=f"stack_{n}_gated")(x)
            y = ops.tanh(y[..., :10]) * ops.sigmoid(y[..., 10:])
            skips.append(layers.Conv1D(14, 1, name=f"stack_{n}_to_skip")(y))
            x = x + layers.Conv1D(10, 1, name=f"stack_{n}_to_next")(y)
        y = layers.ReLU()(layers.Add()(skips))
        y = layers.Conv1D(16, 1, activation="relu", name="post_1")(y)
        return keras.Model(i, [layers.Conv1D(5, 1, name="post_2")(y), x])

    return K, T


@pair("tcn_weight_norm", ("seqc", 12, 5), out="seqc")
def tcn_weight_norm():
    norm = nn.utils.parametrizations.weight_norm

    class TemporalBlock(nn.Module):
        def __init__(self, used, output, dilation):
            super().__init__()
            self.pad = 2 * dilation
            self.conv1 = norm(nn.Conv1d(used, output, 3, dilation=dilation))
            self.conv2 = norm(nn.Conv1d(output, output, 3, dilation=dilation))
            self.downsample = nn.Conv1d(used, output, 1)

        def forward(self, x):
            y = functional.relu(self.conv1(functional.pad(x, (self.pad, 0))))
            y = functional.relu(self.conv2(functional.pad(y, (self.pad, 0))))
            return functional.relu(y + self.downsample(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = nn.Sequential(TemporalBlock(5, 8, 1), TemporalBlock(8, 11, 2))

        def forward(self, x):
            return self.network(x)

    def K():
        x = i = keras.Input((12, 5))
        for n, width in enumerate((8, 11)):
            conv = lambda name, width=width, n=n: layers.Conv1D(
                width, 3, dilation_rate=2**n, padding="causal", activation="relu", name=f"block{n}_{name}"
            )
            y = conv("conv_b")(conv("conv_a")(x))
            x = layers.ReLU()(y + layers.Conv1D(width, 1, name=f"block{n}_match")(x))
        return keras.Model(i, x)

    return K, T


@pair("gru_seq2seq_bahdanau", ("ids", 5, 20), ("ids", 5, 25))
def gru_seq2seq_bahdanau():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder_embedding, self.decoder_embedding = nn.Embedding(20, 8), nn.Embedding(25, 9)
            self.encoder = nn.GRU(8, 14, batch_first=True)
            self.decoder = nn.GRU(9, 14, batch_first=True)
            self.W1, self.W2, self.V = nn.Linear(14, 10), nn.Linear(14, 10), nn.Linear(10, 1)
            self.fc = nn.Linear(28, 25)

        def forward(self, source, target):
            encoded, state = self.encoder(self.encoder_embedding(source))
            y, _ = self.decoder(self.decoder_embedding(target), state)
            score = self.V(torch.tanh(self.W1(encoded)[:, None] + self.W2(y)[:, :, None])).squeeze(-1)
            return self.fc(torch.cat([y, score.softmax(-1) @ encoded], -1))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.source_embedding, self.target_embedding = layers.Embedding(20, 8), layers.Embedding(25, 9)
            self.gru_encoder = layers.GRU(14, return_sequences=True, return_state=True)
            self.gru_decoder = layers.GRU(14, return_sequences=True)
            self.keys, self.queries, self.score = layers.Dense(10), layers.Dense(10), layers.Dense(1)
            self.words = layers.Dense(25)

        def call(self, inputs):
            source, target = inputs
            encoded, state = self.gru_encoder(self.source_embedding(source))
            y = self.gru_decoder(self.target_embedding(target), initial_state=state)
            score = self.score(ops.tanh(self.keys(encoded)[:, None] + self.queries(y)[:, :, None]))
            weights = ops.softmax(ops.squeeze(score, -1), -1)
            return self.words(ops.concatenate([y, weights @ encoded], -1))

    return K, T


@pair("char_bilstm_tagger", ("ids", 7, 30))
def char_bilstm_tagger():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.char_embeddings = nn.Embedding(30, 6)
            self.char_cnn = nn.Conv1d(6, 10, 3, padding=1)
            self.lstm = nn.LSTM(10, 8, num_layers=2, bidirectional=True, batch_first=True)
            self.hidden2tag = nn.Linear(16, 5)

        def forward(self, ids):
            x = functional.relu(self.char_cnn(self.char_embeddings(ids).transpose(1, 2))).transpose(1, 2)
            return self.hidden2tag(self.lstm(x)[0])

    def K():
        i = keras.Input((7,), dtype="int32")
        x = layers.Embedding(30, 6, name="characters")(i)
        x = layers.Conv1D(10, 3, padding="same", activation="relu", name="ngrams")(x)
        x = layers.Bidirectional(layers.LSTM(8, return_sequences=True), name="bilstm_1")(x)
        x = layers.Bidirectional(layers.LSTM(8, return_sequences=True), name="bilstm_2")(x)
        return keras.Model(i, layers.TimeDistributed(layers.Dense(5), name="tags")(x))

    return K, T


def _text_cnn(order):
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(35, 10)
            self.convs = nn.ModuleList(nn.Conv1d(10, 7, n) for n in (2, 3, 4))
            self.fc = nn.Linear(21, 4)

        def forward(self, ids):
            x = self.embedding(ids).transpose(1, 2)
            return self.fc(torch.cat([functional.relu(conv(x)).amax(2) for conv in self.convs], 1))

    def K():
        i = keras.Input((9,), dtype="int32")
        x = layers.Embedding(35, 10)(i)
        kinds = [
            layers.GlobalMaxPooling1D()(layers.Conv1D(7, n, activation="relu", name=f"gram_{n}")(x))
            for n in (4, 3, 2)
        ]
        return keras.Model(i, layers.Dense(4, name="topic")(layers.Concatenate()(kinds[::order])))

    return K, T


@pair("text_cnn", ("ids", 9, 35))
def text_cnn():
    return _text_cnn(-1)


@pair("text_cnn_swapped", ("ids", 9, 35))
def text_cnn_swapped():
    return _text_cnn(1)


@pair("two_tower", ("ids", 0, 50), ("ids", 0, 80), ("v", 6))
def two_tower():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.user_embedding, self.item_embedding = nn.Embedding(50, 12), nn.Embedding(80, 12)
            self.user_tower = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 8))
            self.item_tower = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))

        def forward(self, user, item, features):
            u = self.user_tower(torch.cat([self.user_embedding(user), features], 1))
            i = self.item_tower(self.item_embedding(item))
            return (functional.normalize(u, dim=1) * functional.normalize(i, dim=1)).sum(1, keepdim=True)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            tower = lambda: keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(8)])
            self.candidate_table, self.query_table = layers.Embedding(80, 12), layers.Embedding(50, 12)
            self.candidate_model, self.query_model = tower(), tower()

        def call(self, inputs):
            user, item, features = inputs
            u = self.query_model(ops.concatenate([self.query_table(user), features], -1))
            i = self.candidate_model(self.candidate_table(item))
            return ops.sum(ops.normalize(u, -1) * ops.normalize(i, -1), 1, keepdims=True)

    return K, T


@pair("deep_fm", ("ids", 0, 30), ("ids", 0, 40), ("ids", 0, 20))
def deep_fm():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = (30, 40, 20)
            self.fm_first_order_embeddings = nn.ModuleList(nn.Embedding(n, 1) for n in sizes)
            self.fm_second_order_embeddings = nn.ModuleList(nn.Embedding(n, 6) for n in sizes)
            self.linear_1, self.linear_2 = nn.Linear(18, 14), nn.Linear(14, 1)
            self.bias = nn.Parameter(torch.zeros(1))

        def forward(self, *ids):
            first = sum(e(x) for e, x in zip(self.fm_first_order_embeddings, ids, strict=True))
            rows = [e(x) for e, x in zip(self.fm_second_order_embeddings, ids, strict=True)]
            total = sum(rows)
            pairs = 0.5 * (total**2 - sum(row**2 for row in rows)).sum(1, keepdim=True)
            deep = self.linear_2(functional.relu(self.linear_1(torch.cat(rows, 1))))
            return torch.sigmoid(first + pairs + deep + self.bias)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            sizes = (30, 40, 20)
            self.linear = [layers.Embedding(n, 1) for n in sizes]
            self.factors = [layers.Embedding(n, 6) for n in sizes]
            self.hidden, self.out = layers.Dense(14, activation="relu"), layers.Dense(1)

        def build(self, shape):
            self.offset = self.add_weight((1,), name="offset")

        def call(self, ids):
            first = sum(e(x) for e, x in zip(self.linear, ids, strict=True))
            rows = [e(x) for e, x in zip(self.factors, ids, strict=True)]
            total = sum(rows)
            pairs = 0.5 * ops.sum(total**2 - sum(row**2 for row in rows), 1, keepdims=True)
            deep = self.out(self.hidden(ops.concatenate(rows, -1)))
            return ops.sigmoid(first + pairs + deep + self.offset)

    return K, T


@pair("dlrm", ("v", 7), ("ids", 0, 30), ("ids", 0, 45))
def dlrm():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb_l = nn.ModuleList([nn.Embedding(30, 8), nn.Embedding(45, 8)])
            self.bot_l = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())
            self.top_l = nn.Sequential(nn.Linear(17, 10), nn.ReLU(), nn.Linear(10, 1), nn.Sigmoid())

        def forward(self, x, a, b):
            x = self.bot_l(x)
            rows = torch.stack([x, self.emb_l[0](a), self.emb_l[1](b)], 1)
            dots = (rows @ rows.transpose(1, 2)).flatten(1)
            return self.top_l(torch.cat([x, dots], 1))

    def K():
        x, a, b = keras.Input((7,)), keras.Input((), dtype="int32"), keras.Input((), dtype="int32")
        h = layers.Dense(12, activation="relu", name="bottom_0")(x)
        h = layers.Dense(8, activation="relu", name="bottom_1")(h)
        rows = ops.stack([h, layers.Embedding(30, 8)(a), layers.Embedding(45, 8)(b)], 1)
        dots = layers.Flatten()(ops.matmul(rows, ops.transpose(rows, (0, 2, 1))))
        y = layers.Dense(10, activation="relu", name="top_0")(layers.Concatenate()([h, dots]))
        return keras.Model([x, a, b], layers.Dense(1, activation="sigmoid", name="top_1")(y))

    return K, T


@pair("wide_and_deep", ("v", 15), ("v", 8))
def wide_and_deep():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(15, 1)
            self.deep = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU())
            self.output = nn.Linear(7, 1)

        def forward(self, wide, deep):
            return torch.sigmoid(self.output(torch.cat([self.wide(wide), self.deep(deep)], 1)))

    def K():
        wide, deep = keras.Input((15,), name="wide_in"), keras.Input((8,), name="deep_in")
        h = layers.Dense(6, activation="relu")(layers.Dense(12, activation="relu")(deep))
        h = layers.Concatenate()([h, layers.Dense(1, name="linear")(wide)])
        return keras.Model([wide, deep], layers.Dense(1, activation="sigmoid", name="click")(h))

    return K, T


@pair("sasrec", ("ids", 6, 30))
def sasrec():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.item_emb, self.pos_emb = nn.Embedding(30, 12), nn.Embedding(6, 12)
            self.attention_layernorm, self.forward_layernorm = nn.LayerNorm(12), nn.LayerNorm(12)
            self.attention_layer = nn.MultiheadAttention(12, 1, batch_first=True)
            self.conv1, self.conv2 = nn.Conv1d(12, 12, 1), nn.Conv1d(12, 12, 1)
            self.last_layernorm = nn.LayerNorm(12)

        def forward(self, ids):
            x = self.item_emb(ids) * 12**0.5 + self.pos_emb(torch.arange(6))
            y = self.attention_layernorm(x)
            mask = torch.from_numpy(_CAUSAL)
            x = y + self.attention_layer(y, x, x, attn_mask=mask, need_weights=False)[0]
            y = self.forward_layernorm(x)
            z = self.conv2(functional.relu(self.conv1(y.transpose(1, 2)))).transpose(1, 2)
            return self.last_layernorm(y + z) @ self.item_emb.weight.T

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            norm = lambda: layers.LayerNormalization(epsilon=1e-5)
            self.items, self.steps = layers.Embedding(30, 12), layers.Embedding(6, 12)
            self.norm_in, self.norm_mid, self.norm_out = norm(), norm(), norm()
            self.attention = layers.MultiHeadAttention(1, 12)
            self.ffn_a, self.ffn_b = layers.Dense(12, activation="relu"), layers.Dense(12)

        def call(self, ids):
            x = self.items(ids) * 12**0.5 + self.steps(ops.arange(6))
            y = self.norm_in(x)
            x = y + self.attention(y, x, use_causal_mask=True)
            y = self.norm_mid(x)
            return self.norm_out(y + self.ffn_b(self.ffn_a(y))) @ ops.transpose(self.items.embeddings)

    return K, T


@pair("perceiver_cross_attention", ("v", 10, 7))
def perceiver_cross_attention():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.latents = nn.Parameter(torch.zeros(4, 12))
            self.norm_latents, self.norm_inputs = nn.LayerNorm(12), nn.LayerNorm(7)
            self.to_q, self.to_kv = nn.Linear(12, 10, bias=False), nn.Linear(7, 20, bias=False)
            self.to_out = nn.Linear(10, 12)
            self.to_logits = nn.Linear(12, 3)

        def forward(self, x):
            z = self.latents.expand(len(x), -1, -1)
            k, v = self.to_kv(self.norm_inputs(x)).chunk(2, -1)
            q = self.to_q(self.norm_latents(z))
            z = z + self.to_out(_joined(_attend(*(_heads(tensor, 2) for tensor in (q, k, v)))))
            return self.to_logits(z.mean(1))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.queries = layers.Dense(10, use_bias=False)
            self.keys_values = layers.Dense(20, use_bias=False)
            self.project, self.logits = layers.Dense(12), layers.Dense(3)
            self.ln_latent = layers.LayerNormalization(epsilon=1e-5)
            self.ln_input = layers.LayerNormalization(epsilon=1e-5)

        def build(self, shape):
            self.latent = self.add_weight((4, 12), name="latent")

        def call(self, x):
            z = ops.repeat(self.latent[None], ops.shape(x)[0], 0)
            k, v = ops.split(self.keys_values(self.ln_input(x)), 2, -1)
            q = self.queries(self.ln_latent(z))
            z = z + self.project(_keras_joined(_keras_attend(*(_keras_heads(e, 2) for e in (q, k, v)))))
            return self.logits(ops.mean(z, 1))

    return K, T


@pair("linear_attention", ("v", 7, 12))
def linear_attention():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(12, 8), nn.Linear(12, 8)
            self.value, self.out = nn.Linear(12, 14), nn.Linear(14, 12)

        def forward(self, x):
            q, k = functional.elu(self.query(x)) + 1, functional.elu(self.key(x)) + 1
            kv = k.transpose(1, 2) @ self.value(x)
            return self.out(q @ kv / (q @ k.sum(1)[..., None]))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.o, self.v = layers.Dense(12), layers.Dense(14)
            self.k, self.q = layers.Dense(8), layers.Dense(8)

        def call(self, x):
            q, k = ops.elu(self.q(x)) + 1, ops.elu(self.k(x)) + 1
            kv = ops.transpose(k, (0, 2, 1)) @ self.v(x)
            return self.o(q @ kv / (q @ ops.sum(k, 1)[..., None]))

    return K, T


@pair("real_nvp", ("v", 8))
def real_nvp():
    class Coupling(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale_net = nn.Sequential(nn.Linear(4, 14), nn.ReLU(), nn.Linear(14, 4))
            self.translate_net = nn.Sequential(nn.Linear(4, 14), nn.ReLU(), nn.Linear(14, 4))

        def forward(self, x):
            a, b = x.chunk(2, 1)
            return torch.cat([b * torch.tanh(self.scale_net(a)).exp() + self.translate_net(a), a], 1)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.flows = nn.ModuleList(Coupling() for _ in range(3))

        def forward(self, x):
            for flow in self.flows:
                x = flow(x)
            return x

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            net = lambda: keras.Sequential([layers.Dense(14, activation="relu"), layers.Dense(4)])
            self.t_nets = [net() for _ in range(3)]
            self.s_nets = [net() for _ in range(3)]

        def call(self, x):
            for s, t in zip(self.s_nets, self.t_nets, strict=True):
                a, b = ops.split(x, 2, -1)
                x = ops.concatenate([b * ops.exp(ops.tanh(s(a))) + t(a), a], -1)
            return x

    return K, T


@pair("n_beats", ("v", 10))
def n_beats():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(10, 16), nn.Linear(16, 16)
            self.theta_b_fc, self.theta_f_fc = nn.Linear(16, 10), nn.Linear(16, 4)

        def forward(self, x):
            h = functional.relu(self.fc2(functional.relu(self.fc1(x))))
            return self.theta_b_fc(h), self.theta_f_fc(h)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.stacks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            forecast = 0.0
            for block in self.stacks:
                backcast, part = block(x)
                x, forecast = x - backcast, forecast + part
            return forecast, x

    def K():
        x = i = keras.Input((10,))
        forecasts = []
        for n in range(3):
            h = layers.Dense(16, activation="relu", name=f"generic_{n}_hidden_a")(x)
            h = layers.Dense(16, activation="relu", name=f"generic_{n}_hidden_b")(h)
            forecasts.append(layers.Dense(4, name=f"generic_{n}_forecast")(h))
            x = layers.Subtract()([x, layers.Dense(10, name=f"generic_{n}_backcast")(h)])
        return keras.Model(i, [layers.Add()(forecasts), x])

    return K, T


@pair("gated_residual_glu", ("v", 11), ("v", 5))
def gated_residual_glu():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.context = nn.Linear(11, 18), nn.Linear(5, 18, bias=False)
            self.fc2, self.gate = nn.Linear(18, 14), nn.Linear(14, 22)
            self.lnorm = nn.LayerNorm(11, eps=1e-3)

        def forward(self, x, c):
            h = self.fc2(functional.elu(self.fc1(x) + self.context(c)))
            return self.lnorm(x + functional.glu(self.gate(h)))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.elu_dense, self.context_dense = layers.Dense(18), layers.Dense(18, use_bias=False)
            self.linear_dense, self.glu_dense = layers.Dense(14), layers.Dense(22)
            self.norm = layers.LayerNormalization()

        def call(self, inputs):
            x, c = inputs
            h = self.linear_dense(ops.elu(self.elu_dense(x) + self.context_dense(c)))
            value, gate = ops.split(self.glu_dense(h), 2, -1)
            return self.norm(x + value * ops.sigmoid(gate))

    return K, T


@pair("geglu_swapped_halves", ("v", 10))
def geglu_swapped_halves():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj, self.out = nn.Linear(10, 36), nn.Linear(18, 7)

        def forward(self, x):
            value, gate = self.proj(x).chunk(2, -1)
            return self.out(value * functional.silu(gate))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.down, self.gate_up = layers.Dense(7), layers.Dense(36)

        def call(self, x):
            gate, value = ops.split(self.gate_up(x), 2, -1)
            return self.down(value * ops.silu(gate))

    return K, T


@pair("highway_layers", ("v", 9))
def highway_layers():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))
            self.gates = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))
            self.last = nn.Linear(9, 4)

        def forward(self, x):
            for plain, gate in zip(self.plain, self.gates, strict=True):
                g = gate(x).sigmoid()
                x = g * functional.relu(plain(x)) + (1 - g) * x
            return self.last(x)

    def K():
        x = i = keras.Input((9,))
        for n in range(2):
            g = layers.Dense(9, activation="sigmoid", name=f"highway_{n}_carry")(x)
            x = g * layers.Dense(9, activation="relu", name=f"highway_{n}_transform")(x) + (1 - g) * x
        return keras.Model(i, layers.Dense(4, name="logits")(x))

    return K, T


@pair("deep_speech", ("img", 8, 10, 1))
def deep_speech():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 6, (3, 3), stride=(1, 2), padding=(1, 1))
            self.bn = nn.BatchNorm2d(6, eps=1e-3)
            self.rnn = nn.GRU(30, 11, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(22, 9)

        def forward(self, x):
            x = functional.relu(self.bn(self.conv(x)))
            x = x.transpose(1, 2).flatten(2)
            return self.fc(self.rnn(x)[0])

    def K():
        i = keras.Input((8, 10, 1))
        x = layers.Conv2D(6, 3, (1, 2))(layers.ZeroPadding2D(1)(i))
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Reshape((8, 30))(x)
        x = layers.Bidirectional(layers.GRU(11, return_sequences=True), name="birnn")(x)
        return keras.Model(i, layers.Dense(9, name="characters")(x))

    return K, T


@pair("seq2seq_transformer", ("ids", 6, 30), ("ids", 6, 35))
def seq2seq_transformer():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.src_emb, self.tgt_emb = nn.Embedding(30, 12), nn.Embedding(35, 12)
            self.transformer = nn.Transformer(
                12, 3, 1, 1, 28, dropout=0.0, batch_first=True, layer_norm_eps=1e-5
            )
            self.generator = nn.Linear(12, 35)

        def forward(self, source, target):
            mask = torch.from_numpy(_CAUSAL)
            return self.generator(self.transformer(self.src_emb(source), self.tgt_emb(target), tgt_mask=mask))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            norm = lambda: layers.LayerNormalization(epsilon=1e-5)
            attention = lambda: layers.MultiHeadAttention(3, 4)
            self.source_embed, self.target_embed = layers.Embedding(30, 12), layers.Embedding(35, 12)
            self.enc_attention, self.enc_norm_1, self.enc_norm_2 = attention(), norm(), norm()
            self.enc_up, self.enc_down = layers.Dense(28, activation="relu"), layers.Dense(12)
            self.enc_final, self.dec_final = norm(), norm()
            self.dec_attention, self.cross_attention = attention(), attention()
            self.dec_norm_1, self.dec_norm_2, self.dec_norm_3 = norm(), norm(), norm()
            self.dec_up, self.dec_down = layers.Dense(28, activation="relu"), layers.Dense(12)
            self.words = layers.Dense(35)

        def call(self, inputs):
            x, y = self.source_embed(inputs[0]), self.target_embed(inputs[1])
            x = self.enc_norm_1(x + self.enc_attention(x, x))
            x = self.enc_final(self.enc_norm_2(x + self.enc_down(self.enc_up(x))))
            y = self.dec_norm_1(y + self.dec_attention(y, y, use_causal_mask=True))
            y = self.dec_norm_2(y + self.cross_attention(y, x))
            y = self.dec_final(self.dec_norm_3(y + self.dec_down(self.dec_up(y))))
            return self.words(y)

    return K, T


@pair("memory_policy_swapped", ("v", 5, 6), ("v", 4))
def memory_policy_swapped():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(6, 10, batch_first=True)
            self.goal = nn.Linear(4, 7)
            self.policy = nn.Linear(17, 3)

        def forward(self, x, g):
            return self.policy(torch.cat([self.gru(x)[1][0], torch.tanh(self.goal(g))], 1))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.target, self.memory = layers.Dense(7, activation="tanh"), layers.GRU(10)
            self.action = layers.Dense(3)

        def call(self, inputs):
            x, g = inputs
            return self.action(ops.concatenate([self.target(g), self.memory(x)], -1))

    return K, T
