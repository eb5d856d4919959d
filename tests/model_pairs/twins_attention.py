"""Twins of transformers, with the names of Hugging Face, timm and nanoGPT."""

# ruff: noqa: E731, E741, N806

from __future__ import annotations

import keras
import numpy as np
import torch
from keras import layers
from torch import nn
from torch.nn import functional

from tests.model_pairs.twins import pair

LN = lambda **k: layers.LayerNormalization(epsilon=1e-5, **k)


W = 8


H = 2


def kattn(q, k, v):
    _b, t, _ = q.shape
    sp = lambda z: keras.ops.transpose(keras.ops.reshape(z, (-1, z.shape[1], H, W // H)), (0, 2, 1, 3))
    q, k, v = sp(q), sp(k), sp(v)
    a = keras.ops.softmax(q @ keras.ops.transpose(k, (0, 1, 3, 2)) / np.float32(np.sqrt(W // H)))
    return keras.ops.reshape(keras.ops.transpose(a @ v, (0, 2, 1, 3)), (-1, t, W))


def tattn(q, k, v):
    b, t, _ = q.shape
    sp = lambda z: z.view(z.shape[0], z.shape[1], H, W // H).transpose(1, 2)
    q, k, v = sp(q), sp(k), sp(v)
    a = (q @ k.transpose(-1, -2) / (W // H) ** 0.5).softmax(-1)
    return (a @ v).transpose(1, 2).reshape(b, t, W)


class BertSelf(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(W, W)
        self.key = nn.Linear(W, W)
        self.value = nn.Linear(W, W)


class BertOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(W, W)
        self.LayerNorm = nn.LayerNorm(W)


class BertAtt(nn.Module):
    def __init__(self):
        super().__init__()
        self.self = BertSelf()
        self.output = BertOut()


class BertInt(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(W, W)


class BertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = BertAtt()
        self.intermediate = BertInt()
        self.output = BertOut()

    def forward(self, x):
        a = self.attention
        y = a.output.LayerNorm(x + a.output.dense(tattn(a.self.query(x), a.self.key(x), a.self.value(x))))
        return self.output.LayerNorm(y + self.output.dense(functional.gelu(self.intermediate.dense(y))))


class BertEnc(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(BertLayer() for _ in range(2))


class BertEmb(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(20, W)
        self.position_embeddings = nn.Embedding(20, W)
        self.token_type_embeddings = nn.Embedding(20, W)
        self.LayerNorm = nn.LayerNorm(W)


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = BertEmb()
        self.encoder = BertEnc()
        self.pooler = BertInt()

    def forward(self, x):
        e = self.embeddings
        h = e.LayerNorm(
            e.word_embeddings(x)
            + e.position_embeddings(torch.arange(x.shape[1]))
            + e.token_type_embeddings(torch.zeros_like(x))
        )
        for l in self.encoder.layer:
            h = l(h)
        return torch.tanh(self.pooler.dense(h[:, 0]))


def kbert(emb_order, lay_order):
    class KB(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            mk = {
                "query": lambda: layers.Dense(W),
                "key": lambda: layers.Dense(W),
                "value": lambda: layers.Dense(W),
                "attn_out": lambda: layers.Dense(W),
                "attn_norm": lambda: LN(),
                "ffn_in": lambda: layers.Dense(W, activation="gelu_exact" if 0 else None),
                "ffn_out": lambda: layers.Dense(W),
                "ffn_norm": lambda: LN(),
            }
            for n in lay_order:
                setattr(self, n, mk[n]())

        def call(self, x):
            y = self.attn_norm(x + self.attn_out(kattn(self.query(x), self.key(x), self.value(x))))
            return self.ffn_norm(y + self.ffn_out(keras.ops.gelu(self.ffn_in(y), approximate=False)))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [KB(name=f"block_{i}") for i in range(2)]
            self.pool = layers.Dense(W, activation="tanh")
            self.norm = LN()
            for n in emb_order:
                setattr(self, n, layers.Embedding(20, W))

        def call(self, x):
            o = keras.ops
            h = self.norm(self.tok(x) + self.pos(o.arange(6)) + self.typ(o.zeros_like(x)))
            for b in self.blocks:
                h = b(h)
            return self.pool(h[:, 0])

    return K


@pair("bert_hf_vs_subclassed", ("ids", 6, 20))
def bert_hf_vs_subclassed():
    return kbert(
        ["typ", "pos", "tok"],
        ["ffn_norm", "ffn_out", "ffn_in", "attn_norm", "attn_out", "value", "key", "query"],
    ), Bert


@pair("bert_hf_vs_tfhf_names", ("ids", 6, 20))
def bert_hf_vs_tfhf_names():
    # names of transformers' TF models
    class Out(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.LayerNorm = LN(name="LayerNorm")
            self.dense = layers.Dense(W, name="dense")

    class Self(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.value = layers.Dense(W, name="value")
            self.key = layers.Dense(W, name="key")
            self.query = layers.Dense(W, name="query")

        def call(self, x):
            return kattn(self.query(x), self.key(x), self.value(x))

    class Out2(Out):
        def call(self, a):
            x, y = a
            return self.LayerNorm(x + self.dense(y))

    class Att(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.dense_output = Out2(name="output")
            self.self_attention = Self(name="self")

        def call(self, x):
            return self.dense_output([x, self.self_attention(x)])

    class Int(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.dense = layers.Dense(W, name="dense")

        def call(self, x):
            return keras.ops.gelu(self.dense(x), approximate=False)

    class Lay(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.bert_output = Out2(name="output")
            self.intermediate = Int(name="intermediate")
            self.attention = Att(name="attention")

        def call(self, x):
            y = self.attention(x)
            return self.bert_output([y, self.intermediate(y)])

    class Emb(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.LayerNorm = LN(name="LayerNorm")
            self.token_type_embeddings = layers.Embedding(20, W, name="token_type_embeddings")
            self.position_embeddings = layers.Embedding(20, W, name="position_embeddings")
            self.word_embeddings = layers.Embedding(20, W, name="word_embeddings")

        def call(self, x):
            o = keras.ops
            return self.LayerNorm(
                self.word_embeddings(x)
                + self.position_embeddings(o.arange(6))
                + self.token_type_embeddings(o.zeros_like(x))
            )

    class Pool(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.dense = layers.Dense(W, activation="tanh", name="dense")

        def call(self, h):
            return self.dense(h[:, 0])

    class Enc(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.layer = [Lay(name=f"layer_._{i}") for i in range(2)]

        def call(self, h):
            for l in self.layer:
                h = l(h)
            return h

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.pooler = Pool(name="pooler")
            self.embeddings = Emb(name="embeddings")
            self.encoder = Enc(name="encoder")

        def call(self, x):
            return self.pooler(self.encoder(self.embeddings(x)))

    return K, Bert


class Conv1D(nn.Module):
    def __init__(self, o, i):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(i, o))
        self.bias = nn.Parameter(torch.zeros(o))

    def forward(self, x):
        return x @ self.weight + self.bias


class GA(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = Conv1D(3 * W, W)
        self.c_proj = Conv1D(W, W)

    def forward(self, x):
        q, k, v = self.c_attn(x).split(W, -1)
        return self.c_proj(tattn(q, k, v))


class GM(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.c_fc = Conv1D(h, W)
        self.c_proj = Conv1D(W, h)

    def forward(self, x):
        return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))


class GB(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.ln_1 = nn.LayerNorm(W)
        self.attn = GA()
        self.ln_2 = nn.LayerNorm(W)
        self.mlp = GM(h)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def gpt(h):
    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(20, W)
            self.wpe = nn.Embedding(20, W)
            self.h = nn.ModuleList(GB(h) for _ in range(2))
            self.ln_f = nn.LayerNorm(W)

        def forward(self, x):
            y = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
            for b in self.h:
                y = b(y)
            return self.ln_f(y) @ self.wte.weight.T

    return GPT


def kgpt(h, samenames, fused=True):
    N = (lambda n: {"name": n}) if samenames else (lambda n: {})

    class A(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.c_proj = layers.Dense(W, **N("c_proj"))
            if fused:
                self.c_attn = layers.Dense(3 * W, **N("c_attn"))
            else:
                self.q, self.v, self.k = (
                    layers.Dense(W, name="q"),
                    layers.Dense(W, name="v"),
                    layers.Dense(W, name="k"),
                )

        def call(self, x):
            if fused:
                q, k, v = keras.ops.split(self.c_attn(x), 3, -1)
            else:
                q, k, v = self.q(x), self.k(x), self.v(x)
            return self.c_proj(kattn(q, k, v))

    class M(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.c_proj = layers.Dense(W, **N("c_proj"))
            self.c_fc = layers.Dense(h, **N("c_fc"))

        def call(self, x):
            return self.c_proj(keras.ops.gelu(self.c_fc(x), approximate=True))

    class B(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.mlp = M(**N("mlp"))
            self.attn = A(**N("attn"))
            self.ln_2 = LN(**N("ln_2"))
            self.ln_1 = LN(**N("ln_1"))

        def call(self, x):
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.ln_f = LN(**N("ln_f"))
            self.h = [B(**N(f"h_._{i}")) for i in range(2)]
            self.wpe = layers.Embedding(20, W, **N("wpe"))
            self.wte = layers.Embedding(20, W, **N("wte"))

        def call(self, x):
            y = self.wte(x) + self.wpe(keras.ops.arange(6))
            for b in self.h:
                y = b(y)
            return self.ln_f(y) @ keras.ops.transpose(self.wte.embeddings)

    return K


for h in (8, 32):
    pair(f"gpt2_same_names_{h}", ("ids", 6, 20))(lambda h=h: (kgpt(h, True), gpt(h)))
    pair(f"gpt2_unnamed_{h}", ("ids", 6, 20))(lambda h=h: (kgpt(h, False), gpt(h)))


pair("gpt2_split_qkv", ("ids", 6, 20))(lambda: (kgpt(32, True, False), gpt(32)))


class NA(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(W, 3 * W)
        self.c_proj = nn.Linear(W, W)

    def forward(self, x):
        q, k, v = self.c_attn(x).split(W, -1)
        return self.c_proj(tattn(q, k, v))


class NB(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(W)
        self.attn = NA()
        self.ln_2 = nn.LayerNorm(W)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(W, W), "c_proj": nn.Linear(W, W)})

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class NG(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(20, W),
                "wpe": nn.Embedding(20, W),
                "h": nn.ModuleList(NB() for _ in range(2)),
                "ln_f": nn.LayerNorm(W),
            }
        )

    def forward(self, x):
        t = self.transformer
        y = t["wte"](x) + t["wpe"](torch.arange(x.shape[1]))
        for b in t["h"]:
            y = b(y)
        return t["ln_f"](y) @ t["wte"].weight.T


pair("nanogpt_same_names", ("ids", 6, 20))(lambda: (kgpt(W, True), NG))


def kmha_block(named):
    N = (lambda n: {"name": n}) if named else (lambda n: {})

    class B(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.ffn2 = layers.Dense(W, **N("linear2"))
            self.ffn1 = layers.Dense(W, activation="relu", **N("linear1"))
            self.n2 = LN(**N("norm2"))
            self.n1 = LN(**N("norm1"))
            self.att = layers.MultiHeadAttention(H, W // H, **N("self_attn"))

        def call(self, x):
            x = self.n1(x + self.att(x, x))
            return self.n2(x + self.ffn2(self.ffn1(x)))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.layers_ = [B(**N(f"layers_{i}")) for i in range(2)]

        def call(self, x):
            for b in self.layers_:
                x = b(x)
            return x

    return K


class TEL(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(W, H, W, 0.0, batch_first=True), 2, enable_nested_tensor=False
        )

    def forward(self, x):
        return self.encoder(x)


pair("torch_encoder_named", ("v", 5, 8))(lambda: (kmha_block(True), TEL))


@pair("cross_attention_decoder", ("v", 5, 8), ("v", 4, 8))
def cross_attention_decoder():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = nn.MultiheadAttention(W, H, batch_first=True)
            self.multihead_attn = nn.MultiheadAttention(W, H, batch_first=True)
            self.norm1 = nn.LayerNorm(W)
            self.norm2 = nn.LayerNorm(W)

        def forward(self, x, m):
            x = self.norm1(x + self.self_attn(x, x, x)[0])
            return self.norm2(x + self.multihead_attn(x, m, m)[0])

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.cross_attn = layers.MultiHeadAttention(H, W // H)
            self.self_attn = layers.MultiHeadAttention(H, W // H)
            self.n2 = LN()
            self.n1 = LN()

        def call(self, x):
            x, m = x
            x = self.n1(x + self.self_attn(x, x))
            return self.n2(x + self.cross_attn(x, m))

    return K, T


@pair("vit_timm", ("img", 8, 8, 3))
def vit_timm():
    class A(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(W, 3 * W)
            self.proj = nn.Linear(W, W)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.proj(tattn(q, k, v))

    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1 = nn.LayerNorm(W, eps=1e-6)
            self.attn = A()
            self.norm2 = nn.LayerNorm(W, eps=1e-6)
            self.mlp = nn.ModuleDict({"fc1": nn.Linear(W, W), "fc2": nn.Linear(W, W)})

        def forward(self, x):
            x = x + self.attn(self.norm1(x))
            return x + self.mlp["fc2"](functional.gelu(self.mlp["fc1"](self.norm2(x))))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.cls_token = nn.Parameter(torch.zeros(1, 1, W))
            self.pos_embed = nn.Parameter(torch.zeros(1, 17, W))
            self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, W, 2, 2)})
            self.blocks = nn.Sequential(B(), B())
            self.norm = nn.LayerNorm(W, eps=1e-6)
            self.head = nn.Linear(W, W)

        def forward(self, x):
            x = self.patch_embed["proj"](x).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
            return self.head(self.norm(self.blocks(x))[:, 0])

    n = lambda: layers.LayerNormalization(epsilon=1e-6)

    class KB(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.fc2 = layers.Dense(W)
            self.fc1 = layers.Dense(W)
            self.proj = layers.Dense(W)
            self.qkv = layers.Dense(3 * W)
            self.norm2 = n()
            self.norm1 = n()

        def call(self, x):
            q, k, v = keras.ops.split(self.qkv(self.norm1(x)), 3, -1)
            x = x + self.proj(kattn(q, k, v))
            return x + self.fc2(keras.ops.gelu(self.fc1(self.norm2(x)), approximate=False))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = layers.Dense(W)
            self.norm = n()
            self.b0 = KB()
            self.b1 = KB()
            self.patch = layers.Conv2D(W, 2, 2)

        def build(self, sh):
            self.cls = self.add_weight(shape=(1, 1, W), name="cls")
            self.pos = self.add_weight(shape=(1, 17, W), name="pos")
            self.built = True

        def call(self, x):
            o = keras.ops
            x = o.reshape(self.patch(x), (-1, 16, W))
            x = o.concatenate([o.repeat(self.cls, 3, 0), x], 1) + self.pos
            return self.head(self.norm(self.b1(self.b0(x)))[:, 0])

    return K, T


class RMS(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(W))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


@pair("t5_block", ("v", 5, 8))
def t5_block():
    class SA(nn.Module):
        def __init__(self):
            super().__init__()
            l = lambda: nn.Linear(W, W, bias=False)
            self.q = l()
            self.k = l()
            self.v = l()
            self.o = l()

        def forward(self, x):
            return self.o(tattn(self.q(x), self.k(x), self.v(x)))

    class L0(nn.Module):
        def __init__(self):
            super().__init__()
            self.SelfAttention = SA()
            self.layer_norm = RMS()

        def forward(self, x):
            return x + self.SelfAttention(self.layer_norm(x))

    class DD(nn.Module):
        def __init__(self):
            super().__init__()
            self.wi = nn.Linear(W, W, bias=False)
            self.wo = nn.Linear(W, W, bias=False)

        def forward(self, x):
            return self.wo(functional.relu(self.wi(x)))

    class L1(nn.Module):
        def __init__(self):
            super().__init__()
            self.DenseReluDense = DD()
            self.layer_norm = RMS()

        def forward(self, x):
            return x + self.DenseReluDense(self.layer_norm(x))

    class Bk(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.ModuleList([L0(), L1()])

        def forward(self, x):
            return self.layer[1](self.layer[0](x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.ModuleList([Bk(), Bk()])
            self.final_layer_norm = RMS()

        def forward(self, x):
            for b in self.block:
                x = b(x)
            return self.final_layer_norm(x)

    d = lambda n: layers.Dense(W, use_bias=False, name=n)
    rn = lambda n: layers.RMSNormalization(epsilon=1e-6, name=n)

    class KA(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.o, self.v, self.k, self.q = d("o"), d("v"), d("k"), d("q")
            self.ln = rn("layer_norm")

        def call(self, x):
            y = self.ln(x)
            return x + self.o(kattn(self.q(y), self.k(y), self.v(y)))

    class KF(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.wo, self.wi = d("wo"), d("wi")
            self.ln = rn("layer_norm")

        def call(self, x):
            return x + self.wo(keras.ops.relu(self.wi(self.ln(x))))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.fn = rn("final_layer_norm")
            self.ff = [KF(name=f"ffn_{i}") for i in range(2)]
            self.at = [KA(name=f"attn_{i}") for i in range(2)]

        def call(self, x):
            for a, f in zip(self.at, self.ff, strict=False):
                x = f(a(x))
            return self.fn(x)

    return K, T


@pair("llama_block", ("v", 5, 8))
def llama_block():
    l = lambda: nn.Linear(W, W, bias=False)

    class SA(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = l()
            self.k_proj = l()
            self.v_proj = l()
            self.o_proj = l()

        def forward(self, x):
            return self.o_proj(tattn(self.q_proj(x), self.k_proj(x), self.v_proj(x)))

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj = l()
            self.up_proj = l()
            self.down_proj = l()

        def forward(self, x):
            return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))

    class Bk(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = SA()
            self.mlp = MLP()
            self.input_layernorm = RMS()
            self.post_attention_layernorm = RMS()

        def forward(self, x):
            x = x + self.self_attn(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Bk(), Bk()])
            self.norm = RMS()

        def forward(self, x):
            for b in self.layers:
                x = b(x)
            return self.norm(x)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = M()

        def forward(self, x):
            return self.model(x)

    d = lambda n: layers.Dense(W, use_bias=False, name=n)
    rn = lambda n: layers.RMSNormalization(epsilon=1e-6, name=n)

    class KB(layers.Layer):  # keras_hub llama names
        def __init__(self, **k):
            super().__init__(**k)
            self._self_attention_layernorm = rn("self_attention_layernorm")
            self._feedforward_layernorm = rn("feedforward_layernorm")
            self.o, self.v, self.k, self.q = d("attention_output"), d("value"), d("key"), d("query")
            self.up = d("feedforward_intermediate_dense")
            self.gate = d("feedforward_gate_dense")
            self.down = d("feedforward_output_dense")

        def call(self, x):
            y = self._self_attention_layernorm(x)
            x = x + self.o(kattn(self.q(y), self.k(y), self.v(y)))
            y = self._feedforward_layernorm(x)
            return x + self.down(keras.ops.silu(self.gate(y)) * self.up(y))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.ls = [KB(name=f"transformer_layer_{i}") for i in range(2)]
            self.fn = rn("sequence_output_layernorm")

        def call(self, x):
            for b in self.ls:
                x = b(x)
            return self.fn(x)

    return K, T


@pair("decision_transformer", ("v", 5, 8), ("v", 5, 8), ("v", 5, 8))
def decision_transformer():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_timestep = nn.Linear(W, W)
            self.embed_return = nn.Linear(W, W)
            self.embed_state = nn.Linear(W, W)
            self.embed_action = nn.Linear(W, W)
            self.embed_ln = nn.LayerNorm(W)
            self.predict_state = nn.Linear(W, W)
            self.predict_action = nn.Linear(W, W)
            self.predict_return = nn.Linear(W, W)

        def forward(self, r, o, a):
            h = self.embed_ln(
                self.embed_return(r)
                + self.embed_state(o) * 2
                + self.embed_action(a) * 3
                + self.embed_timestep(a)
            )
            return self.predict_state(h), self.predict_action(h), self.predict_return(h)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.action_head = layers.Dense(W)
            self.state_head = layers.Dense(W)
            self.return_head = layers.Dense(W)
            self.ln = LN()
            self.action_embed = layers.Dense(W)
            self.state_embed = layers.Dense(W)
            self.return_embed = layers.Dense(W)
            self.timestep_embed = layers.Dense(W)

        def call(self, x):
            r, o, a = x
            h = self.ln(
                self.return_embed(r)
                + self.state_embed(o) * 2
                + self.action_embed(a) * 3
                + self.timestep_embed(a)
            )
            return [self.state_head(h), self.action_head(h), self.return_head(h)]

    return K, T
