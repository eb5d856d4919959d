"""Twins of networks that see: blocks of known image models, with widths that differ between layers."""

# ruff: noqa: E731, N802

from __future__ import annotations

import keras
import torch
from keras import layers, ops
from torch import nn
from torch.nn import functional

from tests.model_pairs.twins import pair


def _bn(width):
    return nn.BatchNorm2d(width, eps=1e-3)


def _same(inputs, outputs, size=3, **settings):
    return nn.Conv2d(inputs, outputs, size, padding=size // 2, **settings)


def _conv(width, size=3, **settings):
    return layers.Conv2D(width, size, padding="same", **settings)


@pair("mobilenet_v3_block", ("img", 8, 8, 8), out="img")
def mobilenet_v3_block():
    class SqueezeExcite(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Conv2d(20, 6, 1), nn.Conv2d(6, 20, 1)

        def forward(self, x):
            y = functional.relu(self.fc1(x.mean((2, 3), keepdim=True)))
            return x * functional.hardsigmoid(self.fc2(y))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            expand = nn.Sequential(nn.Conv2d(8, 20, 1, bias=False), _bn(20), nn.Hardswish())
            depth = nn.Sequential(_same(20, 20, groups=20, bias=False), _bn(20), nn.Hardswish())
            project = nn.Sequential(nn.Conv2d(20, 8, 1, bias=False), _bn(8))
            self.block = nn.Sequential(expand, depth, SqueezeExcite(), project)

        def forward(self, x):
            return x + self.block(x)

    def K():
        i = keras.Input((8, 8, 8))
        x = layers.BatchNormalization(name="expand_bn")(_conv(20, 1, use_bias=False, name="expand")(i))
        x = layers.Activation("hard_swish")(x)
        x = layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="depthwise")(x)
        x = layers.Activation("hard_swish")(layers.BatchNormalization(name="depthwise_bn")(x))
        y = layers.GlobalAveragePooling2D(keepdims=True)(x)
        y = layers.ReLU()(_conv(6, 1, name="squeeze_excite_conv")(y))
        y = layers.Activation("hard_sigmoid")(_conv(20, 1, name="squeeze_excite_conv_1")(y))
        x = layers.Multiply()([x, y])
        x = layers.BatchNormalization(name="project_bn")(_conv(8, 1, use_bias=False, name="project")(x))
        return keras.Model(i, layers.Add()([i, x]))

    return K, T


@pair("convnext_layer_scale", ("img", 8, 8, 10), out="img")
def convnext_layer_scale():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.dwconv = nn.Conv2d(10, 10, 7, padding=3, groups=10)
            self.norm = nn.LayerNorm(10, eps=1e-6)
            self.pwconv1, self.pwconv2 = nn.Linear(10, 40), nn.Linear(40, 10)
            self.gamma = nn.Parameter(torch.zeros(10))

        def forward(self, x):
            y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
            y = self.gamma * self.pwconv2(functional.gelu(self.pwconv1(y)))
            return x + y.permute(0, 3, 1, 2)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.Sequential(Block(), Block())

        def forward(self, x):
            return self.stages(x)

    class LayerScale(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight((shape[-1],), name="scale")

        def call(self, x):
            return x * self.scale

    def K():
        x = i = keras.Input((8, 8, 10))
        for n in range(2):
            y = layers.DepthwiseConv2D(7, padding="same", name=f"block{n}_depthwise")(x)
            y = layers.LayerNormalization(epsilon=1e-6, name=f"block{n}_layernorm")(y)
            y = layers.Dense(40, activation="gelu", name=f"block{n}_pointwise_1")(y)
            y = layers.Dense(10, name=f"block{n}_pointwise_2")(y)
            x = layers.Add()([x, LayerScale(name=f"block{n}_layer_scale")(y)])
        return keras.Model(i, x)

    return K, T


@pair("densenet_block", ("img", 8, 8, 6))
def densenet_block():
    class DenseLayer(nn.Module):
        def __init__(self, used):
            super().__init__()
            self.norm1, self.conv1 = _bn(used), nn.Conv2d(used, 16, 1, bias=False)
            self.norm2, self.conv2 = _bn(16), _same(16, 4, bias=False)

        def forward(self, x):
            y = self.conv1(functional.relu(self.norm1(x)))
            return torch.cat([x, self.conv2(functional.relu(self.norm2(y)))], 1)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(*(DenseLayer(6 + 4 * n) for n in range(3)), _bn(18))
            self.transition = nn.Conv2d(18, 9, 1, bias=False)
            self.classifier = nn.Linear(9, 5)

        def forward(self, x):
            x = functional.avg_pool2d(self.transition(functional.relu(self.features(x))), 2)
            return self.classifier(x.mean((2, 3)))

    def K():
        x = i = keras.Input((8, 8, 6))
        for n in range(3):
            y = layers.ReLU()(layers.BatchNormalization(name=f"conv2_block{n}_0_bn")(x))
            y = _conv(16, 1, use_bias=False, name=f"conv2_block{n}_1_conv")(y)
            y = layers.ReLU()(layers.BatchNormalization(name=f"conv2_block{n}_1_bn")(y))
            y = _conv(4, use_bias=False, name=f"conv2_block{n}_2_conv")(y)
            x = layers.Concatenate()([x, y])
        x = layers.ReLU()(layers.BatchNormalization(name="pool2_bn")(x))
        x = layers.AveragePooling2D(2)(_conv(9, 1, use_bias=False, name="pool2_conv")(x))
        return keras.Model(i, layers.Dense(5, name="predictions")(layers.GlobalAveragePooling2D()(x)))

    return K, T


@pair("inception_module", ("img", 8, 8, 12), out="img")
def inception_module():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch1 = nn.Conv2d(12, 6, 1)
            self.branch2 = nn.Sequential(nn.Conv2d(12, 5, 1), nn.ReLU(), _same(5, 8))
            self.branch3 = nn.Sequential(nn.Conv2d(12, 3, 1), nn.ReLU(), _same(3, 4, 5))
            self.branch4 = nn.Conv2d(12, 4, 1)

        def forward(self, x):
            pooled = functional.max_pool2d(x, 3, 1, 1)
            parts = self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(pooled)
            return functional.relu(torch.cat(parts, 1))

    def K():
        i = keras.Input((8, 8, 12))
        one = _conv(6, 1, name="mixed_1x1")(i)
        three = _conv(8, name="mixed_3x3")(_conv(5, 1, activation="relu", name="mixed_3x3_reduce")(i))
        five = _conv(4, 5, name="mixed_5x5")(_conv(3, 1, activation="relu", name="mixed_5x5_reduce")(i))
        pooled = _conv(4, 1, name="mixed_pool")(layers.MaxPooling2D(3, 1, padding="same")(i))
        return keras.Model(i, layers.ReLU()(layers.Concatenate()([one, three, five, pooled])))

    return K, T


@pair("unet_transposed", ("img", 8, 8, 3), out="img")
def unet_transposed():
    def double(inputs, outputs):
        return nn.Sequential(_same(inputs, outputs), nn.ReLU(), _same(outputs, outputs), nn.ReLU())

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc1, self.enc2, self.bottleneck = double(3, 6), double(6, 10), double(10, 14)
            self.up2, self.up1 = nn.ConvTranspose2d(14, 10, 2, 2), nn.ConvTranspose2d(10, 6, 2, 2)
            self.dec2, self.dec1 = double(20, 10), double(12, 6)
            self.outc = nn.Conv2d(6, 2, 1)

        def forward(self, x):
            a = self.enc1(x)
            b = self.enc2(functional.max_pool2d(a, 2))
            c = self.bottleneck(functional.max_pool2d(b, 2))
            d = self.dec2(torch.cat([b, self.up2(c)], 1))
            return self.outc(self.dec1(torch.cat([a, self.up1(d)], 1)))

    def K():
        def double_conv(x, width):
            return _conv(width, activation="relu")(_conv(width, activation="relu")(x))

        x = i = keras.Input((8, 8, 3))
        skips = []
        for width in (6, 10):
            x = double_conv(x, width)
            skips.append(x)
            x = layers.MaxPooling2D()(x)
        x = double_conv(x, 14)
        for width in (10, 6):
            x = layers.Conv2DTranspose(width, 2, 2, padding="same")(x)
            x = double_conv(layers.Concatenate()([skips.pop(), x]), width)
        return keras.Model(i, layers.Conv2D(2, 1)(x))

    return K, T


@pair("unet_upsampled_swapped", ("img", 8, 8, 3), out="img")
def unet_upsampled_swapped():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.middle = _same(3, 8), _same(8, 12)
            self.up = _same(20, 7)
            self.final = nn.Conv2d(7, 3, 1)

        def forward(self, x):
            a = functional.relu(self.down(x))
            b = functional.relu(self.middle(functional.max_pool2d(a, 2)))
            b = functional.interpolate(b, scale_factor=2, mode="nearest")
            return self.final(functional.relu(self.up(torch.cat([a, b], 1))))

    def K():
        i = keras.Input((8, 8, 3))
        a = _conv(8, activation="relu", name="encoder_0")(i)
        b = _conv(12, activation="relu", name="encoder_1")(layers.MaxPooling2D()(a))
        x = layers.Concatenate()([layers.UpSampling2D()(b), a])
        x = _conv(7, activation="relu", name="decoder_0")(x)
        return keras.Model(i, layers.Conv2D(3, 1, name="segmentation")(x))

    return K, T


@pair("resnext_grouped", ("img", 6, 6, 12), out="img")
def resnext_grouped():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(12, 8, 1, bias=False), _bn(8)
            self.conv2, self.bn2 = _same(8, 8, groups=4, bias=False), _bn(8)
            self.conv3, self.bn3 = nn.Conv2d(8, 16, 1, bias=False), _bn(16)
            self.downsample = nn.Sequential(nn.Conv2d(12, 16, 1, bias=False), _bn(16))

        def forward(self, x):
            y = functional.relu(self.bn1(self.conv1(x)))
            y = functional.relu(self.bn2(self.conv2(y)))
            return functional.relu(self.bn3(self.conv3(y)) + self.downsample(x))

    def K():
        i = keras.Input((6, 6, 12))
        s = layers.BatchNormalization(name="0_bn")(_conv(16, 1, use_bias=False, name="0_conv")(i))
        x = layers.BatchNormalization(name="1_bn")(_conv(8, 1, use_bias=False, name="1_conv")(i))
        x = _conv(8, groups=4, use_bias=False, name="2_conv")(layers.ReLU()(x))
        x = layers.ReLU()(layers.BatchNormalization(name="2_bn")(x))
        x = layers.BatchNormalization(name="3_bn")(_conv(16, 1, use_bias=False, name="3_conv")(x))
        return keras.Model(i, layers.ReLU()(layers.Add()([s, x])))

    return K, T


@pair("squeezenet_fire", ("img", 9, 9, 6))
def squeezenet_fire():
    class Fire(nn.Module):
        def __init__(self, used, narrow, wide):
            super().__init__()
            self.squeeze = nn.Conv2d(used, narrow, 1)
            self.expand1x1, self.expand3x3 = nn.Conv2d(narrow, wide, 1), _same(narrow, wide)

        def forward(self, x):
            x = functional.relu(self.squeeze(x))
            return functional.relu(torch.cat([self.expand1x1(x), self.expand3x3(x)], 1))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(Fire(6, 4, 8), nn.MaxPool2d(3, 2), Fire(16, 5, 9))
            self.classifier = nn.Sequential(nn.Dropout(), nn.Conv2d(18, 7, 1), nn.ReLU())

        def forward(self, x):
            return self.classifier(self.features(x)).mean((2, 3))

    def K():
        def fire(x, narrow, wide, name):
            x = layers.Conv2D(narrow, 1, activation="relu", name=f"{name}_squeeze1x1")(x)
            left = layers.Conv2D(wide, 1, activation="relu", name=f"{name}_expand1x1")(x)
            right = _conv(wide, activation="relu", name=f"{name}_expand3x3")(x)
            return layers.Concatenate()([left, right])

        i = keras.Input((9, 9, 6))
        x = fire(layers.MaxPooling2D(3, 2)(fire(i, 4, 8, "fire2")), 5, 9, "fire3")
        x = layers.Conv2D(7, 1, activation="relu", name="conv10")(layers.Dropout(0.5)(x))
        return keras.Model(i, layers.GlobalAveragePooling2D()(x))

    return K, T


@pair("shufflenet_unit", ("img", 6, 6, 8), out="img")
def shufflenet_unit():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch2 = nn.Sequential(
                *(nn.Conv2d(4, 6, 1), nn.ReLU(), _same(6, 6, groups=6)),
                *(nn.Conv2d(6, 4, 1), nn.ReLU()),
            )
            self.head = nn.Conv2d(8, 5, 1)

        def forward(self, x):
            a, b = x.chunk(2, 1)
            x = torch.cat([a, self.branch2(b)], 1)
            n, c, h, w = x.shape
            x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
            return self.head(x)

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.expand = layers.Conv2D(6, 1, activation="relu")
            self.depthwise = layers.DepthwiseConv2D(3, padding="same")
            self.shrink = layers.Conv2D(4, 1, activation="relu")
            self.classes = layers.Conv2D(5, 1)

        def call(self, x):
            a, b = ops.split(x, 2, -1)
            x = ops.concatenate([a, self.shrink(self.depthwise(self.expand(b)))], -1)
            x = ops.transpose(ops.reshape(x, (-1, 6, 6, 2, 4)), (0, 1, 2, 4, 3))
            return self.classes(ops.reshape(x, (-1, 6, 6, 8)))

    return K, T


@pair("feature_pyramid", ("img", 8, 8, 3), out="img")
def feature_pyramid():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.ModuleList([_same(3, 6), _same(6, 10), _same(10, 14)])
            self.inner_blocks = nn.ModuleList(nn.Conv2d(n, 8, 1) for n in (6, 10, 14))
            self.layer_blocks = nn.ModuleList(_same(8, 8) for _ in range(3))

        def forward(self, x):
            features = []
            for n, conv in enumerate(self.body):
                x = functional.relu(conv(functional.max_pool2d(x, 2) if n else x))
                features.append(x)
            top = self.inner_blocks[2](features[2])
            merged = [self.layer_blocks[2](top)]
            for n in (1, 0):
                top = self.inner_blocks[n](features[n]) + functional.interpolate(top, scale_factor=2)
                merged.insert(0, self.layer_blocks[n](top))
            return tuple(merged)

    def K():
        i = keras.Input((8, 8, 3))
        c3 = _conv(6, activation="relu", name="c3")(i)
        c4 = _conv(10, activation="relu", name="c4")(layers.MaxPooling2D()(c3))
        c5 = _conv(14, activation="relu", name="c5")(layers.MaxPooling2D()(c4))
        lateral = [_conv(8, 1, name=f"lateral_{n}")(c) for n, c in ((3, c3), (4, c4), (5, c5))]
        p5 = lateral[2]
        p4 = layers.Add()([lateral[1], layers.UpSampling2D()(p5)])
        p3 = layers.Add()([lateral[0], layers.UpSampling2D()(p4)])
        return keras.Model(i, [_conv(8, name=f"p{n}")(p) for n, p in ((3, p3), (4, p4), (5, p5))])

    return K, T


@pair("bifpn_weighted_fusion", ("img", 4, 4, 6), ("img", 4, 4, 6), out="img")
def bifpn_weighted_fusion():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.p3_w1 = nn.Parameter(torch.ones(2))
            self.depthwise_conv = _same(6, 6, groups=6, bias=False)
            self.pointwise_conv = nn.Conv2d(6, 9, 1)
            self.bn = _bn(9)

        def forward(self, a, b):
            w = functional.relu(self.p3_w1)
            w = w / (w.sum() + 1e-4)
            x = functional.silu(w[0] * a + w[1] * b)
            return self.bn(self.pointwise_conv(self.depthwise_conv(x)))

    class Fuse(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight((2,), name="w")

        def call(self, inputs):
            w = ops.relu(self.w)
            w = w / (ops.sum(w) + 1e-4)
            return w[0] * inputs[0] + w[1] * inputs[1]

    def K():
        a, b = keras.Input((4, 4, 6), name="p3_in"), keras.Input((4, 4, 6), name="p4_up")
        x = layers.Activation("silu")(Fuse(name="fpn_node")([a, b]))
        x = layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="node_dw")(x)
        x = layers.BatchNormalization(name="node_bn")(layers.Conv2D(9, 1, name="node_pw")(x))
        return keras.Model([a, b], x)

    return K, T


@pair("darknet_blocks", ("img", 9, 9, 3), out="img")
def darknet_blocks():
    def unit(inputs, outputs, size, stride=1):
        conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
        return nn.Sequential(conv, _bn(outputs), nn.LeakyReLU(0.1))

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer1, self.layer2 = unit(12, 6, 1), unit(6, 12, 3)

        def forward(self, x):
            return x + self.layer2(self.layer1(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = unit(3, 8, 3), unit(8, 12, 3, 2)
            self.residuals = nn.Sequential(Residual(), Residual())
            self.yolo = nn.Conv2d(12, 7, 1)

        def forward(self, x):
            return self.yolo(self.residuals(self.conv2(self.conv1(x))))

    def K():
        count = iter(range(100))

        def unit(x, width, size, stride=1):
            n = next(count)
            x = layers.Conv2D(width, size, stride, padding="same", use_bias=False, name=f"conv_{n}")(x)
            x = layers.BatchNormalization(name=f"bnorm_{n}")(x)
            return layers.LeakyReLU(negative_slope=0.1, name=f"leaky_{n}")(x)

        i = keras.Input((9, 9, 3))
        x = unit(unit(i, 8, 3), 12, 3, 2)
        for _ in range(2):
            x = layers.Add()([x, unit(unit(x, 6, 1), 12, 3)])
        return keras.Model(i, layers.Conv2D(7, 1, name="conv_last")(x))

    return K, T


@pair("vit_fused_layer_scale", ("img", 8, 8, 3))
def vit_fused_layer_scale():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            n, t, c = x.shape
            q, k, v = self.qkv(x).reshape(n, t, 3, 2, 8).permute(2, 0, 3, 1, 4)
            y = ((q * 8**-0.5) @ k.transpose(-2, -1)).softmax(-1) @ v
            return self.proj(y.transpose(1, 2).reshape(n, t, c))

    class LayerScale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(16))

        def forward(self, x):
            return x * self.gamma

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.attn, self.ls1 = nn.LayerNorm(16, eps=1e-6), Attention(), LayerScale()
            self.norm2, self.ls2 = nn.LayerNorm(16, eps=1e-6), LayerScale()
            self.mlp = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16))

        def forward(self, x):
            x = x + self.ls1(self.attn(self.norm1(x)))
            return x + self.ls2(self.mlp(self.norm2(x)))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 16))
            self.pos_embed = nn.Parameter(torch.zeros(1, 5, 16))
            self.patch_embed = nn.Conv2d(3, 16, 4, 4)
            self.blocks = nn.Sequential(Block(), Block())
            self.norm, self.head = nn.LayerNorm(16, eps=1e-6), nn.Linear(16, 6)

        def forward(self, x):
            x = self.patch_embed(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
            return self.head(self.norm(self.blocks(x))[:, 0])

    class Scale(layers.Layer):
        def build(self, shape):
            self.lambda_ = self.add_weight((shape[-1],), name="lambda")

        def call(self, x):
            return x * self.lambda_

    class Tokens(layers.Layer):
        def build(self, shape):
            self.cls = self.add_weight((1, 1, shape[-1]), name="cls")
            self.pos = self.add_weight((1, shape[1] + 1, shape[-1]), name="pos")

        def call(self, x):
            cls = ops.broadcast_to(self.cls, (ops.shape(x)[0], 1, x.shape[-1]))
            return ops.concatenate([cls, x], 1) + self.pos

        def compute_output_shape(self, shape):
            return (shape[0], shape[1] + 1, shape[2])

    def K():
        norm = lambda name: layers.LayerNormalization(epsilon=1e-6, name=name)
        i = keras.Input((8, 8, 3))
        x = layers.Reshape((4, 16))(layers.Conv2D(16, 4, 4, name="embedding")(i))
        x = Tokens(name="tokens")(x)
        for n in range(2):
            y = norm(f"encoder_{n}_ln_a")(x)
            y = layers.MultiHeadAttention(2, 8, name=f"encoder_{n}_mha")(y, y)
            x = layers.Add()([x, Scale(name=f"encoder_{n}_scale_a")(y)])
            y = layers.Dense(40, activation="gelu", name=f"encoder_{n}_fc_a")(norm(f"encoder_{n}_ln_b")(x))
            y = layers.Dense(16, name=f"encoder_{n}_fc_b")(y)
            x = layers.Add()([x, Scale(name=f"encoder_{n}_scale_b")(y)])
        return keras.Model(i, layers.Dense(6, name="classes")(norm("encoder_norm")(x)[:, 0]))

    return K, T


@pair("mlp_mixer_image", ("img", 8, 8, 3))
def mlp_mixer_image():
    class Mlp(nn.Module):
        def __init__(self, width, hidden):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

        def forward(self, x):
            return self.fc2(functional.gelu(self.fc1(x)))

    class MixerBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.mlp_tokens = nn.LayerNorm(12, eps=1e-6), Mlp(16, 10)
            self.norm2, self.mlp_channels = nn.LayerNorm(12, eps=1e-6), Mlp(12, 30)

        def forward(self, x):
            x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
            return x + self.mlp_channels(self.norm2(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 12, 2, 2)
            self.blocks = nn.Sequential(MixerBlock(), MixerBlock())
            self.norm, self.head = nn.LayerNorm(12, eps=1e-6), nn.Linear(12, 5)

        def forward(self, x):
            x = self.stem(x).flatten(2).transpose(1, 2)
            return self.head(self.norm(self.blocks(x)).mean(1))

    def K():
        norm = lambda: layers.LayerNormalization(epsilon=1e-6)
        i = keras.Input((8, 8, 3))
        x = layers.Reshape((16, 12))(layers.Conv2D(12, 2, 2, name="patches")(i))
        for _ in range(2):
            y = layers.Permute((2, 1))(norm()(x))
            y = layers.Permute((2, 1))(layers.Dense(16)(layers.Dense(10, activation="gelu")(y)))
            x = layers.Add()([x, y])
            x = layers.Add()([x, layers.Dense(12)(layers.Dense(30, activation="gelu")(norm()(x)))])
        return keras.Model(i, layers.Dense(5)(layers.GlobalAveragePooling1D()(norm()(x))))

    return K, T


@pair("swin_window", ("v", 9, 12))
def swin_window():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.relative_position_bias_table = nn.Parameter(torch.zeros(25, 2))
            rows = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")).flatten(1)
            apart = rows[:, :, None] - rows[:, None, :] + 2
            self.register_buffer("relative_position_index", apart[0] * 5 + apart[1])
            self.norm1 = nn.LayerNorm(12, eps=1e-5)
            self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

        def forward(self, x):
            n, t, c = x.shape
            q, k, v = self.qkv(self.norm1(x)).reshape(n, t, 3, 2, 6).permute(2, 0, 3, 1, 4)
            bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
            score = (q * 6**-0.5) @ k.transpose(-2, -1) + bias.view(9, 9, 2).permute(2, 0, 1)
            return x + self.proj((score.softmax(-1) @ v).transpose(1, 2).reshape(n, t, c))

    class WindowAttention(layers.Layer):
        def __init__(self, **k):
            super().__init__(**k)
            self.qkv, self.proj = layers.Dense(36, name="qkv"), layers.Dense(12, name="projection")
            at = [(a, b) for a in range(3) for b in range(3)]
            self.index = [[(a - c + 2) * 5 + b - d + 2 for c, d in at] for a, b in at]

        def build(self, shape):
            self.table = self.add_weight((25, 2), name="bias_table")
            self.qkv.build(shape)
            self.proj.build(shape)

        def call(self, x):
            parts = ops.transpose(ops.reshape(self.qkv(x), (-1, 9, 3, 2, 6)), (2, 0, 3, 1, 4))
            q, k, v = parts[0], parts[1], parts[2]
            bias = ops.transpose(ops.take(self.table, ops.array(self.index), axis=0), (2, 0, 1))
            score = q * 6**-0.5 @ ops.transpose(k, (0, 1, 3, 2)) + bias
            y = ops.transpose(ops.softmax(score, -1) @ v, (0, 2, 1, 3))
            return self.proj(ops.reshape(y, (-1, 9, 12)))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.attention = WindowAttention()
            self.layer_norm = layers.LayerNormalization(epsilon=1e-5)

        def call(self, x):
            return x + self.attention(self.layer_norm(x))

    return K, T


@pair("cbam_attention", ("img", 7, 7, 12), out="img")
def cbam_attention():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 12))
            self.spatial = _same(2, 1, 5, bias=False)
            self.out = nn.Conv2d(12, 8, 1)

        def forward(self, x):
            gate = self.mlp(x.mean((2, 3))) + self.mlp(x.amax((2, 3)))
            x = x * gate.sigmoid()[..., None, None]
            pooled = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
            return self.out(x * self.spatial(pooled).sigmoid())

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.conv_out = layers.Conv2D(8, 1)
            self.conv_gate = _conv(1, 5, use_bias=False)
            self.reduce = layers.Dense(4, activation="relu")
            self.restore = layers.Dense(12)

        def call(self, x):
            gate = self.restore(self.reduce(ops.mean(x, (1, 2)))) + self.restore(
                self.reduce(ops.max(x, (1, 2)))
            )
            x = x * ops.reshape(ops.sigmoid(gate), (-1, 1, 1, 12))
            pooled = [ops.mean(x, -1, keepdims=True), ops.max(x, -1, keepdims=True)]
            return self.conv_out(x * ops.sigmoid(self.conv_gate(ops.concatenate(pooled, -1))))

    return K, T


@pair("nonlocal_block", ("img", 5, 5, 10), out="img")
def nonlocal_block():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.g, self.theta, self.phi = (nn.Conv2d(10, 6, 1) for _ in range(3))
            self.W_z = nn.Conv2d(6, 10, 1)

        def forward(self, x):
            q, k, v = (layer(x).flatten(2).transpose(1, 2) for layer in (self.theta, self.phi, self.g))
            y = (q @ k.transpose(1, 2)).softmax(-1) @ v
            return x + self.W_z(y.transpose(1, 2).reshape(len(x), 6, 5, 5))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.query, self.key = layers.Conv2D(6, 1), layers.Conv2D(6, 1)
            self.value, self.out = layers.Conv2D(6, 1), layers.Conv2D(10, 1)

        def call(self, x):
            q, k, v = (ops.reshape(layer(x), (-1, 25, 6)) for layer in (self.query, self.key, self.value))
            y = ops.softmax(q @ ops.transpose(k, (0, 2, 1)), -1) @ v
            return x + self.out(ops.reshape(y, (-1, 5, 5, 6)))

    return K, T


@pair("siamese_contrastive", ("img", 8, 8, 2), ("img", 8, 8, 2))
def siamese_contrastive():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            steps = nn.Conv2d(2, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 9, 2), nn.ReLU()
            self.cnn = nn.Sequential(*steps)
            self.embedding = nn.Linear(36, 10)
            self.similarity = nn.Linear(10, 1)

        def forward(self, a, b):
            e, f = (self.embedding(self.cnn(x).flatten(1)) for x in (a, b))
            return self.similarity((e - f).abs())

    def K():
        i = keras.Input((8, 8, 2))
        x = layers.MaxPooling2D()(layers.Conv2D(6, 3, activation="relu", name="conv_a")(i))
        x = layers.Flatten()(layers.Conv2D(9, 2, activation="relu", name="conv_b")(x))
        tower = keras.Model(i, layers.Dense(10, name="embed")(x), name="tower")
        a, b = keras.Input((8, 8, 2), name="left"), keras.Input((8, 8, 2), name="right")
        return keras.Model([a, b], layers.Dense(1, name="score")(ops.abs(tower(a) - tower(b))))

    return K, T


@pair("xception_block", ("img", 9, 9, 6), out="img")
def xception_block():
    class Separable(nn.Module):
        def __init__(self, used, output):
            super().__init__()
            self.conv1 = _same(used, used, groups=used, bias=False)
            self.pointwise = nn.Conv2d(used, output, 1, bias=False)

        def forward(self, x):
            return self.pointwise(self.conv1(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.skip, self.skipbn = nn.Conv2d(6, 10, 1, 2, bias=False), _bn(10)
            self.rep = nn.Sequential(
                *(nn.ReLU(), Separable(6, 10), _bn(10), nn.ReLU(), Separable(10, 10), _bn(10)),
                nn.MaxPool2d(3, 2, 1),
            )

        def forward(self, x):
            return self.rep(x) + self.skipbn(self.skip(x))

    def K():
        i = keras.Input((9, 9, 6))
        s = layers.BatchNormalization()(layers.Conv2D(10, 1, 2, padding="same", use_bias=False)(i))
        x = layers.Activation("relu")(i)
        x = layers.SeparableConv2D(10, 3, padding="same", use_bias=False, name="block2_sepconv1")(x)
        x = layers.Activation("relu")(layers.BatchNormalization(name="block2_sepconv1_bn")(x))
        x = layers.SeparableConv2D(10, 3, padding="same", use_bias=False, name="block2_sepconv2")(x)
        x = layers.BatchNormalization(name="block2_sepconv2_bn")(x)
        return keras.Model(i, layers.Add()([layers.MaxPooling2D(3, 2, padding="same")(x), s]))

    return K, T


@pair("film_language_image", ("img", 6, 6, 4), ("v", 9))
def film_language_image():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = _same(4, 10)
            self.film = nn.Linear(9, 20)
            self.conv = _same(10, 6)
            self.fc = nn.Linear(216, 8)

        def forward(self, x, text):
            gamma, beta = self.film(text).chunk(2, 1)
            x = functional.relu(self.stem(x)) * gamma[..., None, None] + beta[..., None, None]
            return self.fc(functional.relu(self.conv(x)).flatten(1))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.modulation = layers.Dense(20)
            self.first, self.second = _conv(10, activation="relu"), _conv(6, activation="relu")
            self.answer = layers.Dense(8)
            self.flat = layers.Flatten()

        def call(self, inputs):
            x, text = inputs
            gamma, beta = ops.split(self.modulation(text)[:, None, None], 2, -1)
            return self.answer(self.flat(self.second(self.first(x) * gamma + beta)))

    return K, T


@pair("glu_conv_halves", ("seqc", 12, 8), out="seqc")
def glu_conv_halves():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(8, 20, 3, padding=1)
            self.proj = nn.Conv1d(10, 6, 1)

        def forward(self, x):
            return self.proj(functional.glu(self.conv(x), 1))

    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.gated = layers.Conv1D(20, 3, padding="same")
            self.out = layers.Conv1D(6, 1)

        def call(self, x):
            gate, value = ops.split(self.gated(x), 2, -1)
            return self.out(value * ops.sigmoid(gate))

    return K, T


@pair("esrgan_dense_residual", ("img", 6, 6, 3), out="img")
def esrgan_dense_residual():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv_first = _same(3, 8)
            self.conv1, self.conv2, self.conv3 = _same(8, 4), _same(12, 4), _same(16, 8)
            self.upconv, self.conv_last = _same(8, 8), _same(8, 3)

        def forward(self, x):
            leaky = lambda y: functional.leaky_relu(y, 0.2)
            x = self.conv_first(x)
            a = leaky(self.conv1(x))
            b = leaky(self.conv2(torch.cat([x, a], 1)))
            x = x + 0.2 * self.conv3(torch.cat([x, a, b], 1))
            return self.conv_last(leaky(self.upconv(functional.interpolate(x, scale_factor=2))))

    def K():
        leaky = lambda y: layers.LeakyReLU(negative_slope=0.2)(y)
        i = keras.Input((6, 6, 3))
        x = _conv(8)(i)
        a = leaky(_conv(4)(x))
        b = leaky(_conv(4)(layers.Concatenate()([x, a])))
        x = x + 0.2 * _conv(8)(layers.Concatenate()([x, a, b]))
        return keras.Model(i, _conv(3)(leaky(_conv(8)(layers.UpSampling2D()(x)))))

    return K, T
