"""Twins of convolutional and recurrent models, with the names of timm and of keras.applications."""

# ruff: noqa: E731, N802

from __future__ import annotations

import keras
import torch
from keras import layers
from torch import nn
from torch.nn import functional

from tests.model_pairs.twins import pair


def bn(**k):
    return layers.BatchNormalization(epsilon=1e-5, momentum=0.9, **k)


@pair("resnet_timm_vs_kapp", ("img", 8, 8, 3))
def resnet_timm_vs_kapp():
    def K():
        i = keras.Input((8, 8, 3))
        x = layers.Conv2D(8, 3, padding="same", use_bias=False, name="conv1_conv")(i)
        x = layers.ReLU()(bn(name="conv1_bn")(x))
        for st in (2, 3):
            for b in (1, 2):
                n = f"conv{st}_block{b}"
                s = x
                y = layers.Conv2D(8, 3, padding="same", use_bias=False, name=n + "_1_conv")(x)
                y = layers.ReLU()(bn(name=n + "_1_bn")(y))
                y = layers.Conv2D(8, 3, padding="same", use_bias=False, name=n + "_2_conv")(y)
                y = bn(name=n + "_2_bn")(y)
                x = layers.ReLU()(s + y)
        x = layers.GlobalAveragePooling2D()(x)
        return keras.Model(i, layers.Dense(5, name="predictions")(x))

    class BB(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(8)
            self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
            self.bn2 = nn.BatchNorm2d(8)

        def forward(self, x):
            return functional.relu(x + self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x))))))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(8)
            self.layer1 = nn.Sequential(BB(), BB())
            self.layer2 = nn.Sequential(BB(), BB())
            self.fc = nn.Linear(8, 5)

        def forward(self, x):
            x = functional.relu(self.bn1(self.conv1(x)))
            return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))

    return K, T


@pair("convnext_block", ("img", 8, 8, 8))
def convnext_block():
    class LS(layers.Layer):
        def build(self, sh):
            self.gamma = self.add_weight(shape=(8,), name="gamma")

        def call(self, x):
            return x * self.gamma

    def K():
        i = keras.Input((8, 8, 8))
        x = i
        for j in range(2):
            n = f"convnext_tiny_stage_0_block_{j}"
            y = (
                layers.DepthwiseConv2D(7, padding="same", name=n + "_depthwise_conv")(x)
                if 0
                else layers.Conv2D(8, 7, padding="same", groups=8, name=n + "_depthwise_conv")(x)
            )
            y = layers.LayerNormalization(epsilon=1e-6, name=n + "_layernorm")(y)
            y = layers.Dense(32, name=n + "_pointwise_conv_1")(y)
            y = layers.Activation("gelu", name=n + "_gelu")(y)
            y = layers.Dense(8, name=n + "_pointwise_conv_2")(y)
            y = LS(name=n + "_layer_scale")(y)
            x = x + y
        return keras.Model(i, x)

    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(8))
            self.conv_dw = nn.Conv2d(8, 8, 7, padding=3, groups=8)
            self.norm = nn.LayerNorm(8, eps=1e-6)
            self.mlp = nn.ModuleDict({"fc1": nn.Linear(8, 32), "fc2": nn.Linear(32, 8)})

        def forward(self, x):
            y = self.conv_dw(x).permute(0, 2, 3, 1)
            y = self.mlp["fc2"](functional.gelu(self.mlp["fc1"](self.norm(y))))
            return x + (y * self.gamma).permute(0, 3, 1, 2)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(B(), B())

        def forward(self, x):
            return self.blocks(x).permute(0, 2, 3, 1)

    return K, T


@pair("mobilenet_v2_block", ("img", 8, 8, 8), out="img")
def mobilenet_v2_block():
    def K():
        i = keras.Input((8, 8, 8))
        x = i
        for j in (1, 2):
            n = f"block_{j}_"
            y = layers.ReLU(6.0)(
                bn(name=n + "expand_BN")(layers.Conv2D(16, 1, use_bias=False, name=n + "expand")(x))
            )
            y = layers.ReLU(6.0)(
                bn(name=n + "depthwise_BN")(
                    layers.DepthwiseConv2D(3, padding="same", use_bias=False, name=n + "depthwise")(y)
                )
            )
            x = x + bn(name=n + "project_BN")(layers.Conv2D(8, 1, use_bias=False, name=n + "project")(y))
        return keras.Model(i, x)

    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv_pw = nn.Conv2d(8, 16, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(16)
            self.conv_dw = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
            self.bn2 = nn.BatchNorm2d(16)
            self.conv_pwl = nn.Conv2d(16, 8, 1, bias=False)
            self.bn3 = nn.BatchNorm2d(8)

        def forward(self, x):
            return x + self.bn3(
                self.conv_pwl(
                    functional.relu6(self.bn2(self.conv_dw(functional.relu6(self.bn1(self.conv_pw(x))))))
                )
            )

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(B(), B())

        def forward(self, x):
            return self.blocks(x)

    return K, T


@pair("efficientnet_se", ("img", 8, 8, 16), out="img")
def efficientnet_se():
    def K():
        i = keras.Input((8, 8, 16))
        x = i
        for j in "ab":
            n = f"block1{j}_"
            y = layers.Activation("silu")(
                bn(name=n + "bn")(
                    layers.DepthwiseConv2D(3, padding="same", use_bias=False, name=n + "dwconv")(x)
                )
            )
            z = layers.Reshape((1, 1, 16))(layers.GlobalAveragePooling2D()(y))
            z = layers.Conv2D(16, 1, activation="silu", name=n + "se_reduce")(z)
            z = layers.Conv2D(16, 1, activation="sigmoid", name=n + "se_expand")(z)
            x = x + bn(name=n + "project_bn")(
                layers.Conv2D(16, 1, use_bias=False, name=n + "project_conv")(y * z)
            )
        return keras.Model(i, x)

    class SE(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv_reduce = nn.Conv2d(16, 16, 1)
            self.conv_expand = nn.Conv2d(16, 16, 1)

        def forward(self, x):
            return x * torch.sigmoid(
                self.conv_expand(functional.silu(self.conv_reduce(x.mean((2, 3), keepdim=True))))
            )

    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv_dw = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
            self.bn1 = nn.BatchNorm2d(16)
            self.se = SE()
            self.conv_pw = nn.Conv2d(16, 16, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(16)

        def forward(self, x):
            return x + self.bn2(self.conv_pw(self.se(functional.silu(self.bn1(self.conv_dw(x))))))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(nn.Sequential(B(), B()))

        def forward(self, x):
            return self.blocks(x)

    return K, T


@pair("unet", ("img", 8, 8, 8), out="img")
def unet():
    def K():
        i = keras.Input((8, 8, 8))
        cv = lambda n, x: layers.Conv2D(8, 3, padding="same", activation="relu", name=n)(x)
        a = cv("enc1", i)
        b = cv("enc2", layers.MaxPooling2D()(a))
        m = cv("bottleneck", layers.MaxPooling2D()(b))
        u2 = layers.Conv2DTranspose(8, 2, strides=2, name="up2")(m)
        d2 = cv("dec2", u2 + b)
        u1 = layers.Conv2DTranspose(8, 2, strides=2, name="up1")(d2)
        d1 = cv("dec1", u1 + a)
        return keras.Model(i, layers.Conv2D(8, 1, name="out")(d1))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            cv = lambda: nn.Conv2d(8, 8, 3, padding=1)
            self.inc = cv()
            self.down1 = cv()
            self.down2 = cv()
            self.up1 = nn.ConvTranspose2d(8, 8, 2, stride=2)
            self.conv_up1 = cv()
            self.up2 = nn.ConvTranspose2d(8, 8, 2, stride=2)
            self.conv_up2 = cv()
            self.outc = nn.Conv2d(8, 8, 1)

        def forward(self, x):
            a = functional.relu(self.inc(x))
            b = functional.relu(self.down1(functional.max_pool2d(a, 2)))
            m = functional.relu(self.down2(functional.max_pool2d(b, 2)))
            y = functional.relu(self.conv_up1(self.up1(m) + b))
            y = functional.relu(self.conv_up2(self.up2(y) + a))
            return self.outc(y)

    return K, T


@pair("unet_same_names", ("img", 8, 8, 8), out="img")
def unet_same_names():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            cv = lambda: layers.Conv2D(8, 3, padding="same", activation="relu")
            self.up1 = layers.Conv2DTranspose(8, 2, strides=2)
            self.up2 = layers.Conv2DTranspose(8, 2, strides=2)
            self.dec1 = cv()
            self.dec2 = cv()
            self.enc2 = cv()
            self.enc1 = cv()
            self.mid = cv()
            self.pool = layers.MaxPooling2D()

        def call(self, x):
            a = self.enc1(x)
            b = self.enc2(self.pool(a))
            m = self.mid(self.pool(b))
            y = self.dec2(self.up2(m) + b)
            return self.dec1(self.up1(y) + a)

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            cv = lambda: nn.Conv2d(8, 8, 3, padding=1)
            self.enc1 = cv()
            self.enc2 = cv()
            self.mid = cv()
            self.dec1 = cv()
            self.dec2 = cv()
            self.up1 = nn.ConvTranspose2d(8, 8, 2, stride=2)
            self.up2 = nn.ConvTranspose2d(8, 8, 2, stride=2)

        def forward(self, x):
            a = functional.relu(self.enc1(x))
            b = functional.relu(self.enc2(functional.max_pool2d(a, 2)))
            m = functional.relu(self.mid(functional.max_pool2d(b, 2)))
            y = functional.relu(self.dec2(self.up2(m) + b))
            return functional.relu(self.dec1(self.up1(y) + a))

    return K, T


@pair("wavenet", ("seqc", 12, 8), out="seqc")
def wavenet():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.skip = [layers.Conv1D(8, 1) for _ in range(3)]
            self.res = [layers.Conv1D(8, 1) for _ in range(3)]
            self.gate = [layers.Conv1D(8, 2, padding="causal", dilation_rate=2**i) for i in range(3)]
            self.filt = [layers.Conv1D(8, 2, padding="causal", dilation_rate=2**i) for i in range(3)]

        def call(self, x):
            o = 0
            for f, g, r, k in zip(self.filt, self.gate, self.res, self.skip, strict=False):
                z = keras.ops.tanh(f(x)) * keras.ops.sigmoid(g(x))
                o = o + k(z)
                x = x + r(z)
            return o

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            ml = lambda f: nn.ModuleList(f(i) for i in range(3))
            self.filter_convs = ml(lambda i: nn.Conv1d(8, 8, 2, dilation=2**i))
            self.gate_convs = ml(lambda i: nn.Conv1d(8, 8, 2, dilation=2**i))
            self.residual_convs = ml(lambda i: nn.Conv1d(8, 8, 1))
            self.skip_convs = ml(lambda i: nn.Conv1d(8, 8, 1))

        def forward(self, x):
            o = 0
            for i in range(3):
                p = functional.pad(x, (2**i, 0))
                z = torch.tanh(self.filter_convs[i](p)) * torch.sigmoid(self.gate_convs[i](p))
                o = o + self.skip_convs[i](z)
                x = x + self.residual_convs[i](z)
            return o

    return K, T


@pair("tcn", ("seqc", 12, 8), out="seqc")
def tcn():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.c = [
                layers.Conv1D(8, 3, padding="causal", dilation_rate=2 ** (i // 2), activation="relu")
                for i in range(4)
            ]
            self.down = layers.Conv1D(8, 1)

        def call(self, x):
            x = self.down(x) + self.c[1](self.c[0](x))
            return x + self.c[3](self.c[2](x))

    class TB(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.d = d
            self.conv1 = nn.Conv1d(8, 8, 3, dilation=d)
            self.conv2 = nn.Conv1d(8, 8, 3, dilation=d)

        def forward(self, x):
            p = lambda v: functional.pad(v, (2 * self.d, 0))
            return functional.relu(self.conv2(p(functional.relu(self.conv1(p(x))))))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = nn.ModuleList([TB(1), TB(2)])
            self.downsample = nn.Conv1d(8, 8, 1)

        def forward(self, x):
            x = self.downsample(x) + self.network[0](x)
            return x + self.network[1](x)

    return K, T


@pair("conv1x1_vs_dense", ("img", 4, 4, 8), out="img")
def conv1x1_vs_dense():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = layers.Dense(8, activation="relu")
            self.b = layers.Dense(8)

        def call(self, x):
            return self.b(self.a(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(8, 8, 1)
            self.b = nn.Conv2d(8, 8, 1)

        def forward(self, x):
            return self.b(functional.relu(self.a(x)))

    return K, T


@pair("sepconv_vs_two", ("img", 6, 6, 8), out="img")
def sepconv_vs_two():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.sep1 = layers.SeparableConv2D(8, 3, padding="same", activation="relu")
            self.sep2 = layers.SeparableConv2D(8, 3, padding="same")

        def call(self, x):
            return self.sep2(self.sep1(x))

    class SP(nn.Module):
        def __init__(self):
            super().__init__()
            self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
            self.pointwise = nn.Conv2d(8, 8, 1)

        def forward(self, x):
            return self.pointwise(self.depthwise(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.sep1 = SP()
            self.sep2 = SP()

        def forward(self, x):
            return self.sep2(functional.relu(self.sep1(x)))

    return K, T


@pair("depthwise_mult2", ("img", 6, 6, 4), out="img")
def depthwise_mult2():
    return (
        lambda: keras.Sequential(
            [
                keras.Input((6, 6, 4)),
                layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same"),
                layers.Conv2D(8, 1),
            ]
        ),
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, groups=4), nn.Conv2d(8, 8, 1)),
    )


@pair("aspp_parallel_dilated", ("img", 8, 8, 8), out="img")
def aspp_parallel_dilated():
    def K():
        i = keras.Input((8, 8, 8))
        return keras.Model(
            i,
            layers.Concatenate()(
                [
                    layers.Conv2D(8, 3, dilation_rate=r, padding="same", name=f"aspp_r{r}")(i)
                    for r in (1, 2, 3)
                ]
            ),
        )

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=r, dilation=r) for r in (3, 2, 1))

        def forward(self, x):
            return torch.cat([c(x) for c in reversed(self.convs)], 1)

    return K, T


@pair("inception_branches", ("img", 8, 8, 8), out="img")
def inception_branches():
    def K():
        i = keras.Input((8, 8, 8))
        b1 = layers.Conv2D(8, 1)(i)
        b3 = layers.Conv2D(8, 3, padding="same")(layers.Conv2D(8, 1)(i))
        bp = layers.Conv2D(8, 1)(layers.AveragePooling2D(3, 1, padding="valid")(layers.ZeroPadding2D(1)(i)))
        return keras.Model(i, layers.Concatenate()([b1, b3, bp]))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch_pool = nn.Conv2d(8, 8, 1)
            self.branch1x1 = nn.Conv2d(8, 8, 1)
            self.branch3x3_1 = nn.Conv2d(8, 8, 1)
            self.branch3x3_2 = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            return torch.cat(
                [
                    self.branch1x1(x),
                    self.branch3x3_2(self.branch3x3_1(x)),
                    self.branch_pool(functional.avg_pool2d(x, 3, 1, 1)),
                ],
                1,
            )

    return K, T


@pair("groupnorm_conv", ("img", 6, 6, 8), out="img")
def groupnorm_conv():
    return (
        lambda: keras.Sequential(
            [
                keras.Input((6, 6, 8)),
                layers.Conv2D(8, 3, padding="same"),
                layers.GroupNormalization(4, epsilon=1e-5),
                layers.ReLU(),
                layers.Conv2D(8, 3, padding="same"),
                layers.GroupNormalization(2, epsilon=1e-5),
            ]
        ),
        lambda: nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1),
            nn.GroupNorm(4, 8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
        ),
    )


@pair("prelu_noshared_vs_ln", ("img", 4, 4, 8), out="img")
def prelu_noshared_vs_ln():
    return (
        lambda: keras.Sequential(
            [
                keras.Input((4, 4, 8)),
                layers.Conv2D(8, 3, padding="same"),
                layers.LayerNormalization(axis=-1, epsilon=1e-5),
            ]
        ),
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(1, 8)),
    )  # not the same function


@pair("nature_dueling", ("img", 36, 36, 4))
def nature_dueling():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.adv_out = layers.Dense(6)
            self.val_out = layers.Dense(1)
            self.adv_hidden = layers.Dense(16, activation="relu")
            self.val_hidden = layers.Dense(16, activation="relu")
            self.c2 = layers.Conv2D(8, 4, 2, activation="relu")
            self.c1 = layers.Conv2D(8, 8, 4, activation="relu")
            self.f = layers.Flatten()

        def call(self, x):
            h = self.f(self.c2(self.c1(x)))
            a = self.adv_out(self.adv_hidden(h))
            return self.val_out(self.val_hidden(h)) + a

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(4, 8, 8, 4), nn.ReLU(), nn.Conv2d(8, 8, 4, 2), nn.ReLU())
            self.value = nn.Sequential(nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, 1))
            self.advantage = nn.Sequential(nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, 6))

        def forward(self, x):
            h = self.features(x).flatten(1)
            return self.value(h) + self.advantage(h)

    return K, T


@pair("flatten_concat", ("img", 6, 6, 4), ("v", 5))
def flatten_concat():
    def K():
        i, j = keras.Input((6, 6, 4), name="image"), keras.Input((5,), name="state")
        x = layers.Flatten()(layers.Conv2D(8, 3, activation="relu")(i))
        return keras.Model(
            [i, j], layers.Dense(8)(layers.Dense(16, activation="tanh")(layers.Concatenate()([x, j])))
        )

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.cnn = nn.Conv2d(4, 8, 3)
            self.l1 = nn.Linear(133, 16)
            self.l2 = nn.Linear(16, 8)

        def forward(self, i, j):
            return self.l2(torch.tanh(self.l1(torch.cat([functional.relu(self.cnn(i)).flatten(1), j], 1))))

    return K, T


@pair("dcgan_gen", ("v", 8), out="img")
def dcgan_gen():
    return (
        lambda: keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(4 * 4 * 8, use_bias=False),
                layers.Reshape((4, 4, 8)),
                bn(),
                layers.ReLU(),
                layers.Conv2DTranspose(8, 4, strides=2, padding="same", use_bias=False),
                bn(),
                layers.ReLU(),
                layers.Conv2DTranspose(3, 4, strides=2, padding="same", activation="tanh"),
            ]
        ),
        lambda: nn.Sequential(
            nn.Linear(8, 128, bias=False),
            nn.Unflatten(1, (8, 4, 4)),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 4, 2, 1),
            nn.Tanh(),
        ),
    )


@pair("vgg_named", ("img", 8, 8, 3))
def vgg_named():
    def K():
        i = keras.Input((8, 8, 3))
        x = layers.Conv2D(8, 3, padding="same", activation="relu", name="block1_conv1")(i)
        x = layers.Conv2D(8, 3, padding="same", activation="relu", name="block1_conv2")(x)
        x = layers.MaxPooling2D()(x)
        x = layers.Conv2D(8, 3, padding="same", activation="relu", name="block2_conv1")(x)
        x = layers.Conv2D(8, 3, padding="same", activation="relu", name="block2_conv2")(x)
        x = layers.MaxPooling2D()(x)
        x = layers.Flatten(name="flatten")(x)
        x = layers.Dense(32, activation="relu", name="fc1")(x)
        x = layers.Dense(32, activation="relu", name="fc2")(x)
        return keras.Model(i, layers.Dense(32, name="predictions")(x))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            c = lambda a: [nn.Conv2d(a, 8, 3, padding=1), nn.ReLU()]
            self.features = nn.Sequential(*c(3), *c(8), nn.MaxPool2d(2), *c(8), *c(8), nn.MaxPool2d(2))
            self.classifier = nn.Sequential(
                nn.Linear(32, 32),
                nn.ReLU(),
                nn.Dropout(),
                nn.Linear(32, 32),
                nn.ReLU(),
                nn.Dropout(),
                nn.Linear(32, 32),
            )

        def forward(self, x):
            return self.classifier(self.features(x).flatten(1))

    return K, T


def klstm(n, **k):
    return layers.LSTM(n, return_sequences=True, **k)


@pair("lstm_stacked_seq", ("v", 6, 8))
def lstm_stacked_seq():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(8, 8, num_layers=3, batch_first=True)
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(self.rnn(x)[0])

    return (lambda: keras.Sequential([keras.Input((6, 8)), klstm(8), klstm(8), klstm(8), layers.Dense(8)]), T)


@pair("lstm_bidirectional", ("v", 6, 8))
def lstm_bidirectional():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(16, 8)

        def forward(self, x):
            return self.fc(self.rnn(x)[0])

    return (
        lambda: keras.Sequential(
            [
                keras.Input((6, 8)),
                layers.Bidirectional(klstm(8)),
                layers.Bidirectional(klstm(8)),
                layers.Dense(8),
            ]
        ),
        T,
    )


@pair("gru_reset_before", ("v", 6, 8), expect="refuse")
def gru_reset_before():
    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(8, 8, batch_first=True)

        def forward(self, x):
            return self.gru(x)[0]

    return (
        lambda: keras.Sequential(
            [keras.Input((6, 8)), layers.GRU(8, return_sequences=True, reset_after=False)]
        ),
        T,
    )


@pair("seq2seq_gru_unnamed", ("v", 6, 8), ("v", 4, 8))
def seq2seq_gru_unnamed():
    def K():
        a, b = keras.Input((6, 8)), keras.Input((4, 8))
        dec = layers.GRU(8, return_sequences=True)
        h = layers.GRU(8)(a)
        return keras.Model([a, b], layers.Dense(8)(dec(b, initial_state=h)))

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.GRU(8, 8, batch_first=True)
            self.decoder = nn.GRU(8, 8, batch_first=True)
            self.out = nn.Linear(8, 8)

        def forward(self, a, b):
            _, h = self.encoder(a)
            return self.out(self.decoder(b, h)[0])

    return K, T


@pair("dreamer_rssm_like", ("v", 8), ("v", 8))
def dreamer_rssm_like():
    class K(keras.Model):
        def __init__(self):
            super().__init__()
            self.img_out = layers.Dense(8, activation="elu")
            self.obs_out = layers.Dense(8, activation="elu")
            self.cell = layers.GRUCell(8)
            self.img_in = layers.Dense(8, activation="elu")

        def call(self, x):
            a, h = x
            y, _ = self.cell(self.img_in(a), [h])
            return [self.img_out(y), self.obs_out(y)]

    class T(nn.Module):
        def __init__(self):
            super().__init__()
            self._obs_out = nn.Linear(8, 8)
            self._img_out = nn.Linear(8, 8)
            self._cell = nn.GRUCell(8, 8)
            self._img_in = nn.Linear(8, 8)

        def forward(self, a, h):
            y = self._cell(functional.elu(self._img_in(a)), h)
            return functional.elu(self._img_out(y)), functional.elu(self._obs_out(y))

    return K, T
