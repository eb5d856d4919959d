"""Seven people who use ckpttool for the first time: their files, and what they type.

Files come from the user's own program, from other people's checkpoints (../shared/corpus) and the samples.
"""

# ruff: noqa: E501  # programs and rows of commands

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

CORPUS = ROOT.parent / "shared" / "corpus"
SB2, ZOO = CORPUS / "tf/sb2/zoo", CORPUS / "torch/sb3_zoo"
SAMPLES = ROOT / "sample_ckpts"
# CPython 3.13 without any package, where this machine has one.
_BARE = ("python3.13", *(str(p) for p in Path.home().glob(".pyenv/versions/3.13.*/bin/python3.13")))


@dataclass(frozen=True)
class User:
    """A person, files and commands.

    Args:
        name: name on the command line of `tests.everyday.users`.
        title: the row of docs/everyday.md.
        commands: shell commands, or cells of a notebook behind `>>> `.
        files: paths to copy, each as `source` or `source -> name`.
        maker: a program that writes more files; run once in the folder.
        program: what the user's own program defines before `load:` lines run.
        bare: neither this project nor a framework is installed.
    """

    name: str
    title: str
    commands: tuple[str, ...]
    files: tuple[tuple[Path, str], ...] = ()
    maker: str = ""
    program: str = ""
    bare: bool = False

    def missing(self) -> str:
        """Return what this machine lacks; empty if nothing."""
        if self.bare and _bare_python() is None:
            return "no Python 3.13"
        return "" if all(source.exists() for source, _ in self.files) else "no ../shared/corpus"

    def environment(self, home: Path) -> dict[str, str]:
        """Return the variables of a new account whose PATH has the installed programs."""
        system = ["/usr/local/bin", "/usr/bin", "/bin"]
        env = {
            "HOME": str(home),
            "TERM": "xterm-256color",
            "PAGER": "cat",
            "NO_COLOR": "1",
            "LANG": "C.UTF-8",
        }
        if self.bare:
            tools = _install_tools(home)
            # How this machine reaches an index of packages.
            network = re.compile("(?i)pip_|uv_|.*(_proxy|ssl_cert_|ca_bundle)")
            env |= {name: value for name, value in os.environ.items() if network.match(name)}
            return env | {"PATH": os.pathsep.join([f"{home}/.local/bin", tools, *system])}
        programs = _programs(home)
        return env | {"PATH": os.pathsep.join([programs, *system]), "TF_CPP_MIN_LOG_LEVEL": "3"}

    def prepare(self, folder: Path) -> None:
        """Write the user's files into an empty folder."""
        for source, name in self.files:
            copy = shutil.copytree if source.is_dir() else shutil.copy
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            copy(source, folder / name)
        if self.maker:
            (folder / "train.py").write_text(self.maker, encoding="utf-8")
            quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
            subprocess.run(
                [sys.executable, "train.py"], cwd=folder, env=quiet, check=True, capture_output=True
            )


def _programs(home: Path) -> str:
    """Return a folder with `ckpttool` and `python` of this environment, which import this project."""
    folder = home.parent / "bin"
    folder.mkdir()
    for name, words in (("ckpttool", "-m ckpttool"), ("python", "")):
        script = f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" {words} "$@"\n'
        (folder / name).write_text(script, encoding="utf-8")
        (folder / name).chmod(0o755)
    return str(folder)


def _bare_python() -> str | None:
    """Return the path of a Python 3.13."""
    for name in _BARE:
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None


def _install_tools(home: Path) -> str:
    """Build the wheel, install uv and pipx beside it, and return the folder of their programs."""
    python = _bare_python()
    assert python is not None
    tools, copy = home.parent / "tools", home.parent / "project"
    subprocess.run([python, "-m", "venv", tools], check=True)
    subprocess.run([tools / "bin/pip", "install", "-q", "uv", "pipx", "hatchling"], check=True)
    ignored = shutil.ignore_patterns(".git", ".venv", "*cache*", "build", "dist")
    shutil.copytree(ROOT, copy, ignore=ignored)
    build = [tools / "bin/python", "-m", "hatchling", "build", "-t", "wheel", "-d", home.parent / "dist"]
    subprocess.run(build, cwd=copy, check=True, capture_output=True)
    # A PATH without pip and python of the tools: what is installed must not end up there.
    folder = home.parent / "bin"
    folder.mkdir()
    for name in ("uv", "uvx", "pipx"):
        (folder / name).symlink_to(tools / "bin" / name)
    (folder / "python3").symlink_to(python)
    return str(folder)


def _repeat(files: tuple[str, ...], *commands: str) -> tuple[str, ...]:
    """Return the commands for every file; `{}` is its name, `[]` the name without its suffix."""
    return tuple(
        c.replace("{}", file).replace("[]", file.replace(".", "_")) for file in files for c in commands
    )


# --- A researcher with TensorFlow 1 -----------------------------------------------------------------------

TF1 = User(
    "tf1",
    "researcher with TensorFlow 1 agents",
    (
        *_repeat(
            ("sac.pkl", "dqn.pkl", "ppo2.zip", "estimator", "session", "rl_weights.h5f"),
            "ckpttool {}",
            "ckpttool eval {} --episodes 1",
            "ckpttool convert {} [].pt",
            "ckpttool convert {} []_c.pt --code []_c.py",
            "ckpttool doctor {}",
        ),
        "ckpttool estimator/model.ckpt-1000.index",
        "ckpttool estimator/model.ckpt-1000.data-00000-of-00001",
        "ckpttool session/export.meta",
        "ckpttool diff sac.pkl sac_pkl.pt",
        "ckpttool verify sac.pkl sac_pkl.pt",
        "ckpttool convert sac.pkl sac.zip --to sb3",
        "ckpttool convert dqn.pkl dqn.zip --to sb3",
        "ckpttool convert sac.pkl sac.onnx",
    ),
    files=(
        (SB2 / "sac_Pendulum-v0.pkl", "sac.pkl"),
        (SB2 / "dqn_CartPole-v1.pkl", "dqn.pkl"),
        (SB2 / "ppo2_CartPoleBulletEnv-v1.zip", "ppo2.zip"),
        (CORPUS / "tf/tf1_name_v2/tfx_estimator", "estimator"),
        (CORPUS / "tf/tf1_v1/serving_session_bundle", "session"),
        (CORPUS / "tf/keras_h5/yosider_kerasrl/dqn_CartPole-v0_weights.h5f", "rl_weights.h5f"),
    ),
)

# --- A student --------------------------------------------------------------------------------------------

STUDENT = User(
    "student",
    "student with DQN and PPO",
    (
        *_repeat(
            ("policy_net.pth", "dqn.cleanrl_model", "ppo_agent.pt", "checkpoint.pt", "whole.pt", "zoo.zip"),
            "ckpttool {}",
            "ckpttool eval {} --episodes 2",
            "ckpttool eval {} --env CartPole-v1 --episodes 2",
            "ckpttool convert {} []-tf.weights.h5",
            "ckpttool convert {} [].onnx --env CartPole-v1",
            "ckpttool convert {} []-c.pt --code []_c.py --env CartPole-v1",
        ),
        "ckpttool eval policy_net.pth --env CartPole-v1 --activation relu --episodes 2 --video a.gif",
        "ckpttool eval policy_net.pth --env Pendulum-v1 --activation relu",
        "ckpttool report zoo.zip --env CartPole-v1 --episodes 2",
        "ckpttool verify policy_net.pth policy_net_pth-tf.weights.h5",
        "ckpttool play policy_net.pth",
    ),
    files=((ZOO / "dqn/CartPole-v1_1/CartPole-v1.zip", "zoo.zip"),),
    maker="""
import torch, torch.nn as nn
class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))
class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1, self.layer2, self.layer3 = nn.Linear(4, 128), nn.Linear(128, 128), nn.Linear(128, 2)
    def forward(self, x):
        return self.layer3(torch.relu(self.layer2(torch.relu(self.layer1(x)))))
def mlp(outputs):
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic, self.actor = mlp(1), mlp(2)
if __name__ == "__main__":
    torch.manual_seed(0)
    net = DQN()
    torch.save(net.state_dict(), "policy_net.pth")
    torch.save(QNet().state_dict(), "dqn.cleanrl_model")
    torch.save(Agent().state_dict(), "ppo_agent.pt")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, amsgrad=True)
    networks = {"policy_net": net.state_dict(), "target_net": DQN().state_dict()}
    torch.save({**networks, "optimizer": optimizer.state_dict(), "steps_done": 1000}, "checkpoint.pt")
    torch.save(net, "whole.pt")
""",
    program="from keras import Input, Sequential\nfrom keras.layers import Dense\n",
)

# --- An engineer ------------------------------------------------------------------------------------------

GATE = User(
    "gate",
    "engineer: unknown files, and a gate in CI",
    (
        *_repeat(
            (
                "evil.pt",
                "nan.pt",
                "cut.pt",
                "flip.pt",
                "lfs.pt",
                "page.pt",
                "bundle.zip",
                "x.tar.gz",
                "whole.pt",
                "arr.npz",
            ),
            "ckpttool {}",
            "ckpttool check {}",
            "ckpttool convert {} []-safe.npz",
        ),
        "ckpttool doctor nan.pt",
        "ckpttool check .",
        "ckpttool check . --strict",
        "ckpttool check '*.pt' --sarif out.sarif",
        "ckpttool check nowhere",
        "ckpttool check",
        "ckpttool inspect arr.npz --json > shapes.json; ckpttool check nan.pt --shapes shapes.json",
        "cat arr.npz | ckpttool inspect -",
        "cat evil.pt | ckpttool -",
        "echo hi | ckpttool inspect -",
        "ckpttool digest arr.npz --json > d.json; ckpttool digest nan.pt --check d.json",
        "ckpttool digest arr.npz --check notes.txt",
        "ckpttool eval two --env CartPole-v1",
        "ckpttool two",
        "ckpttool diff arr.npz nan.pt",
        "ckpttool insepct arr.npz",
        "ckpttool arr.npz --detph 2",
        "ckpttool export arr.npz",
        "ckpttool play arr.npz",
        "ckpttool list",
        "ckpttool ar.npz",
        "ckpttool --limit foo=1 inspect arr.npz",
        "ckpttool inspect arr.npz --layout foo",
        "ckpttool inspect arr.npz --graph x.png",
        "ckpttool convert arr.npz out.foo",
        "ckpttool report nan.pt",
    ),
    maker="""
import gzip, os, zipfile
import numpy as np, torch
class Evil:
    def __reduce__(self):
        return os.system, ("echo executed > executed",)
torch.save({"w": torch.ones(3, 3), "b": torch.tensor([1.0, float("nan"), 2.0])}, "nan.pt")
torch.save({"w": Evil()}, "evil.pt")
data = open("nan.pt", "rb").read()
open("cut.pt", "wb").write(data[: len(data) // 2])
flipped = bytearray(data)
flipped[len(flipped) // 2] ^= 255
open("flip.pt", "wb").write(flipped)
open("lfs.pt", "w").write("version https://git-lfs.github.com/spec/v1\\noid sha256:" + "0" * 64 + "\\nsize 12345\\n")
open("page.pt", "w").write("<!DOCTYPE html><html><body>Not found</body></html>")
open("notes.txt", "w").write("hello")
zipfile.ZipFile("bundle.zip", "w").writestr("a.txt", "hi")
open("x.tar.gz", "wb").write(gzip.compress(b"abc"))
torch.save(torch.nn.Linear(3, 3), "whole.pt")
np.savez("arr.npz", a=np.ones(3))
os.makedirs("two")
torch.save({"w": torch.ones(2)}, "two/m.pt")
torch.save({"w": torch.ones(3)}, "two/n.pt")
""",
)

# --- A team ------------------------------------------------------------------------------------------------

TEAM = User(
    "team",
    "team: Keras to PyTorch, with proof",
    (
        *_repeat(
            ("dense.keras", "dense.weights.h5", "trained.keras", "exported"),
            "ckpttool {}",
            "ckpttool convert {} []-1.pt",
            "ckpttool convert {} []-2.pt --code []_2.py",
            "ckpttool convert {} []-3.pt --like models:Dense",
            "ckpttool verify {} []-3.pt --like-b models:Dense",
            "ckpttool convert {} [].onnx",
        ),
        "ckpttool conv.keras",
        "ckpttool convert conv.keras conv.pt --like models:Conv",
        "ckpttool verify conv.keras conv.pt --like-b models:Conv",
        "ckpttool convert conv.weights.h5 conv-w.pt --code conv_w.py",
        "ckpttool convert rnn.keras rnn.pt",
        "ckpttool convert rnn.weights.h5 rnn-w.pt --code rnn_w.py",
        "ckpttool verify dense.keras wrong.pt --like-b models:Wrong",
        "ckpttool verify dense.keras dense_keras-3.pt",
        "ckpttool convert dense.keras s.pt --like models:Small",
        "ckpttool convert dense.keras s.pt --like models:Nope",
        "ckpttool convert dense.keras s.pt --like nomodule:Net",
        "ckpttool convert dense.keras s.pt --like models.py:Dense",
        "ckpttool convert dense.keras s.keras",
        "ckpttool convert dense.keras s",
        "ckpttool convert dense.keras s --to pytorch",
        "ckpttool convert dense.keras dense.weights.h5",
        "ckpttool convert dense.keras",
        "ckpttool verify dense.keras models:Dense",
        "ckpttool verify dense.keras conv.keras",
        "ckpttool verify dense.keras nowhere.pt",
        "ckpttool diff dense.keras dense_keras-3.pt",
    ),
    maker="""
import subprocess
import sys
import keras
from keras import Input, Model, layers
import numpy as np
def dense():
    inputs = Input((8,))
    x = layers.Dense(32, activation="relu", name="a")(inputs)
    x = layers.LayerNormalization(epsilon=1e-5, name="n")(x)
    return Model(inputs, layers.Dense(3, name="c")(layers.Dense(32, activation="gelu", name="b")(x)))
def conv():
    inputs = Input((16, 16, 3))
    x = layers.BatchNormalization()(layers.Conv2D(8, 3, activation="relu")(inputs))
    x = layers.Dense(16, activation="relu")(layers.Flatten()(layers.MaxPooling2D()(x)))
    return Model(inputs, layers.Dense(4, activation="softmax")(x))
def rnn():
    inputs = Input((10,))
    return Model(inputs, layers.Dense(2)(layers.LSTM(16)(layers.Embedding(50, 16)(inputs))))
MODELS = '''
import torch
from torch import nn
from torch.nn.functional import gelu, max_pool2d
class Dense(nn.Module):
    approximate = "none"
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2, self.out = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 3)
    def forward(self, x):
        return self.out(gelu(self.fc2(self.norm(torch.relu(self.fc1(x)))), approximate=self.approximate))
class Wrong(Dense):
    approximate = "tanh"
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.out = nn.Linear(8, 32), nn.Linear(32, 4)
    def forward(self, x):
        return self.out(torch.relu(self.fc1(x)))
class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps=1e-3)
        self.fc, self.out = nn.Linear(392, 16), nn.Linear(16, 4)
    def forward(self, x):
        x = torch.flatten(max_pool2d(self.bn(torch.relu(self.conv(x))), 2), 1)
        return torch.softmax(self.out(torch.relu(self.fc(x))), -1)
'''
if __name__ == "__main__":
    open("models.py", "w").write(MODELS)
    for make in (dense, conv, rnn):
        make().save(f"{make.__name__}.keras")
        make().save_weights(f"{make.__name__}.weights.h5")
    model = dense()
    model.compile("adam", "mse")
    model.fit(np.ones((8, 8)), np.ones((8, 3)), verbose=0)
    model.save("trained.keras")
    model.export("exported", verbose=False)
    command = "convert dense.keras wrong.pt --like models:Wrong --no-verify".split()
    subprocess.run([sys.executable, "-m", "ckpttool", *command], check=True)
""",
)

# --- A folder of 200 checkpoints ----------------------------------------------------------------------------

FOLDER = User(
    "folder",
    "folder of 200 checkpoints",
    (
        "ckpttool run",
        "ckpttool check run",
        "ckpttool eval run --episodes 1",
        "ckpttool eval run --env Pendulum-v1 --episodes 1",
        "ckpttool eval 'run/ckpt-1*' --env Pendulum-v1 --episodes 1 --top 3 --csv a.csv",
        "ckpttool eval run --env Pendulum-v1 --episodes 1 --out r.json --plot c.png",
        "ckpttool report run",
        "ckpttool report run --eval r.json -o e.html",
        "ckpttool stats run",
        "ckpttool doctor run",
        "ckpttool digest run",
        "ckpttool convert run x.pt",
        "ckpttool verify run run/ckpt-1000.pt",
        "ckpttool diff run/ckpt-1000.pt run/ckpt-200000.pt",
        "ckpttool report run/ckpt-1000.pt run/ckpt-200000.pt -o ab.html",
        "ckpttool mixed",
        "ckpttool check mixed",
        "ckpttool eval mixed --env Pendulum-v1 --episodes 1",
        "ckpttool report mixed",
        "ckpttool eval seeds/s1 seeds/s2 --runs --env Pendulum-v1 --episodes 1",
        "ckpttool eval seeds/s1 --runs --against seeds/s2 --env Pendulum-v1 --episodes 1",
        "ckpttool eval seeds/s1 --runs --last 9 --env Pendulum-v1 --episodes 1",
        "ckpttool seeds",
        "ckpttool eval run --last 3",
        "ckpttool eval nowhere",
        "ckpttool eval 'run/zzz*'",
        *(
            f"ckpttool eval run/ckpt-1000.pt --episodes 1 {options}"
            for options in (
                *("--env CartPole-v1", "--env Pendulum-v7", "--env Foo-v1", "--env HalfCheetah-v5"),
                *("--env Pendulum-v1 --backend jax", "--env Pendulum-v1 --backend torch --device cuda"),
                *("--env Pendulum-v1 --video x.avi", "--env Pendulum-v1 --plot x.foo"),
                *("--env Pendulum-v1 --out r.json", "--env Pendulum-v1 --network critic/q1"),
                *("--env Pendulum-v1 --network foo", "--env Pendulum-v1 --stochastic"),
                *("--env Pendulum-v1 --engine foo", "--env Pendulum-v1 --wrapper Foo"),
                "--env Pendulum-v1 --epsilon 0.1",
            )
        ),
    ),
    files=(
        (SAMPLES / "td3_pendulum_torch/ckpt-15000.pt", "base.pt"),
        (ZOO / "dqn/CartPole-v1_1/CartPole-v1.zip", "mixed/dqn.zip"),
    ),
    maker="""
import os, shutil, torch
os.makedirs("run")
base = torch.load("base.pt", weights_only=True)
for number in range(1, 201):
    actor = {key: value + 0.0005 * (200 - number) * torch.randn_like(value) for key, value in base["actor"].items()}
    torch.save({**base, "actor": actor}, f"run/ckpt-{number * 1000}.pt")
for number in (1, 2, 3):
    shutil.copy(f"run/ckpt-{number}000.pt", f"mixed/a-{number}.pt")
    for seed in (1, 2):
        os.makedirs(f"seeds/s{seed}", exist_ok=True)
        shutil.copy(f"run/ckpt-{number + seed}000.pt", f"seeds/s{seed}/ckpt-{number}000.pt")
open("mixed/broken.pt", "wb").write(b"PK\\x03\\x04abc")
""",
)

# --- A notebook ----------------------------------------------------------------------------------------------

_CELLS = """
ckpttool.inspect('agent.pt')
ckpttool.inspect('agnt.pt')
ckpttool.inspekt('agent.pt')
ckpttool.open('agent.pt')
ckpttool.open('agent.pt')['actor/l1/weight']
ckpttool.open('agent.pt')['actor']
ckpttool.open('agent.pt')['foo']
ckpttool.load('agent.pt')
ckpttool.stats('agent.pt')
ckpttool.doctor('agent.pt')
ckpttool.doctor('net.pt')
ckpttool.digest('agent.pt')
ckpttool.check('agent.pt')
ckpttool.check('evil.pt')
ckpttool.inspect('evil.pt')
ckpttool.convert('agent.pt', 'a.weights.h5')
ckpttool.convert('agent.pt', 'agent.pt')
ckpttool.convert('agent.pt', 'a.foo')
ckpttool.convert('agent.pt', 'b.pt', to='pytorch')
ckpttool.convert('agent.pt', 'b.pt', too='torch')
ckpttool.convert('net.pt', 'net.onnx')
ckpttool.convert('net.pt', 'net.zip', to='sb3')
ckpttool.convert('net.pt', 'net.weights.h5')
ckpttool.convert('dqn.zip', 'dqn.onnx')
ckpttool.diff('agent.pt', 'tf/ckpt-15000')
ckpttool.diff('agent.pt', 'net.pt')
ckpttool.verify('agent.pt', 'tf/ckpt-15000')
ckpttool.verify('agent.pt', 'net.pt')
ckpttool.verify('net.pt', 'agent.pt')
ckpttool.evaluate('agent.pt', episodes=2)
ckpttool.evaluate('agent.pt', episodes=2, env='Pendulum-v9')
ckpttool.evaluate('agent.pt', episode=2)
ckpttool.evaluate('net.pt', env='Pendulum-v1')
ckpttool.evaluate('net.pt')
ckpttool.evaluate('tf', episodes=2)
ckpttool.evaluate('dqn.zip', episodes=2)
ckpttool.load_agent('agent.pt')
ckpttool.load_agent('agent.pt').act([0.1, 0.2, 0.3])
ckpttool.load_agent('agent.pt').act([1, 2])
ckpttool.load_agent('net.pt')
ckpttool.load_agent('dqn.zip').act([0, 0, 0, 0])
ckpttool.report('agent.pt')
ckpttool.report('agent.pt', output='r.html')
ckpttool.eval('agent.pt')
"""

NOTEBOOK = User(
    "notebook",
    "notebook",
    tuple(f">>> {cell}" for cell in _CELLS.strip().splitlines()),
    files=(
        (SAMPLES / "td3_pendulum_torch/ckpt-15000.pt", "agent.pt"),
        (SAMPLES / "td3_pendulum_tf", "tf"),
        (ZOO / "dqn/CartPole-v1_1/CartPole-v1.zip", "dqn.zip"),
    ),
    maker="""
import os
import torch
from torch import nn
class Evil:
    def __reduce__(self):
        return os.system, ("echo executed > executed",)
torch.save({"w": Evil()}, "evil.pt")
torch.save(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).state_dict(), "net.pt")
""",
)

# --- A bare Python 3.13 ----------------------------------------------------------------------------------------

_UVX = "uvx --python python3 --from ../dist/*.whl ckpttool"
BARE = User(
    "bare",
    "bare Python 3.13, pipx and uvx",
    (
        "pipx install --python python3 ../dist/*.whl",
        "ckpttool",
        "ckpttool --version",
        "ckpttool agent.pt",
        "ckpttool check .",
        "ckpttool digest tf/ckpt-15000",
        "ckpttool stats agent.pt",
        "ckpttool doctor agent.pt",
        "ckpttool convert agent.pt a.npz",
        "ckpttool convert agent.pt a.safetensors",
        "ckpttool convert agent.pt a.weights.h5",
        "ckpttool convert tf/ckpt-15000 b.pt",
        "ckpttool convert dqn.zip dqn.safetensors",
        "ckpttool convert agent.pt a.onnx",
        "ckpttool convert agent.pt c.pt --code actor_code.py",
        "ckpttool diff agent.pt a.npz",
        "ckpttool verify agent.pt tf/ckpt-15000",
        "ckpttool browse agent.pt < /dev/null",
        "ckpttool report agent.pt",
        "ckpttool report dqn.zip -o dqn.html",
        "ckpttool inspect agent.pt --graph agent.svg",
        "ckpttool eval agent.pt --episodes 2",
        "ckpttool eval agent.pt --episodes 2 --video a.gif",
        "ckpttool eval agent.pt --episodes 2 --plot a.png",
        "ckpttool eval dqn.zip --episodes 2",
        "ckpttool inspect https://127.0.0.1:9/agent.pt",
        *(
            f"{_UVX} {words}"
            for words in (
                "--version",
                "inspect agent.pt",
                "check agent.pt",
                "digest agent.pt",
                "convert agent.pt u.npz",
                "convert agent.pt u.safetensors",
                "browse agent.pt",
                "report agent.pt -o u.html",
                "convert agent.pt u.onnx",
                "eval agent.pt --episodes 1",
            )
        ),
    ),
    files=(
        (SAMPLES / "td3_pendulum_torch/ckpt-15000.pt", "agent.pt"),
        (SAMPLES / "td3_pendulum_torch/ckpt-15000.pt.ckpttool.json", "agent.pt.ckpttool.json"),
        (SAMPLES / "td3_pendulum_tf", "tf"),
        (ZOO / "dqn/CartPole-v1_1/CartPole-v1.zip", "dqn.zip"),
    ),
    bare=True,
)

USERS = {user.name: user for user in (TF1, STUDENT, GATE, TEAM, FOLDER, NOTEBOOK, BARE)}
