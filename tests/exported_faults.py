"""Faults of the networks of agent_nets.py in exported programs, written before `verify` saw them.

`python -m tests.exported_faults` compares all: in ONNX and SavedModel exports of A's framework, and in one
further direction each, in turn. The layer and the words of the cause are what a person would have to know.
"""

from __future__ import annotations

from tests import ported_faults
from tests.planted_faults import Fault, blocks, on_all, put, rows, swap

_OPERATION = (
    "|multiply.*|add.*|subtract.*|conc.*|get_item.*|reshape.*|transpose.*|true_divide.*|where.*|.*model.*"
)
_OUT = "outputs?|\\d+|output_.*|(inner_)?model" + _OPERATION
FURTHER = ("onnx-torch", "program-keras", "torch-script", "torch-program", "keras-onnx")

EXPORTED_FAULTS = {
    # A dueling network of pixels
    "pixels divided by 256": Fault(
        "dueling_pixels", "conv1" + _OPERATION, options={"scale": 256.0}, words="255.*256|0\\.996"
    ),
    "frames in reverse": Fault(
        "dueling_pixels", "conv1" + _OPERATION, options={"frames": "new first"}, words="flip|reverse|order"
    ),
    "advantages less their maximum": Fault(
        "dueling_pixels", _OUT + "|adv2|value2", options={"centre": "max"}, words="mean.*max"
    ),
    "advantages not centred": Fault(
        "dueling_pixels", _OUT + "|adv2|value2", options={"centre": ""}, words="mean|adv2, B computes .*adv2"
    ),
    "value counted twice": Fault(
        "dueling_pixels", _OUT + "|adv2|value2", options={"twice": True}, words=r"2 \*|\* 2|2 times"
    ),
    "no activation before flattening": Fault(
        "dueling_pixels", "value1|adv1|conv2" + _OPERATION, options={"flat": ""}, words="relu"
    ),
    # A squashed Gaussian
    "deviation clipped, not rescaled": Fault(
        "sac_head", _OUT + "|both", options={"rescaled": False}, words="tanh.*(clip|maximum|minimum|clamp)"
    ),
    "lower bound of the deviation": Fault(
        "sac_head", _OUT + "|both", options={"low": -20.0}, words="-5|-20|20|3\\.5|11"
    ),
    "mean and deviation exchanged": Fault(
        "sac_head", _OUT + "|both", options={"halves": "deviation first"}, words="slice|half|order|part|both"
    ),
    "another correction of the density": Fault(
        "sac_head", _OUT + "|both", options={"correction": "none"}, words="softplus|log|exp"
    ),
    "centre of the actions lost": Fault("sac_head", _OUT + "|both", options={"centre": 0.0}, words=r"0\.5"),
    "softplus for the exponential": Fault(
        "sac_head", _OUT + "|both", options={"spread": "softplus"}, words="exp.*softplus"
    ),
    # A recurrent actor and critic
    "cell not reset": Fault(
        "recurrent_ppo", "memory" + _OPERATION, options={"reset": "h"}, words="input 3|c\\b"
    ),
    "reset inverted": Fault(
        "recurrent_ppo", "memory" + _OPERATION, options={"inverted": True}, words=r"1 - |- input 1|input 1"
    ),
    "observations behind features": Fault(
        "recurrent_ppo", "memory" + _OPERATION, options={"joined": "features first"}, words="conc|parts|order"
    ),
    "features without activation": Fault(
        "recurrent_ppo", "memory|body" + _OPERATION, options={"active": ""}, words="tanh"
    ),
    "value of the features": Fault(
        "recurrent_ppo", "vf" + _OPERATION, options={"value": "features"}, words="memory|tanh|conc|shape"
    ),
    # A gated transformer
    "bias of a gate": Fault(
        "gated_memory", _OUT + "|u.|w.|sigmoid.*", options={"bias": 0.0}, words=r"- 2|2\b"
    ),
    "gates exchanged": Fault("gated_memory", _OUT + "|u.|w.", options={"swapped": True}, words=r"1 -"),
    "no activation before the gates": Fault(
        "gated_memory", "w.|proj" + _OPERATION, options={"active": False}, words="relu"
    ),
    "memory behind the input": Fault(
        "gated_memory",
        "norm|query|key" + _OPERATION,
        options={"order": "input first"},
        words="conc|parts|order",
    ),
    "scores by the width": Fault(
        "gated_memory", "proj" + _OPERATION, options={"scale": 0.25}, words=r"0\.25|0\.5 times|2 times"
    ),
    "later steps seen": Fault(
        "gated_memory", "proj" + _OPERATION, options={"masked": False}, words="mask|where|causal|-1e\\+09"
    ),
    # A variational world model
    "noise not scaled": Fault(
        "world_vae", "decode|reward" + _OPERATION, options={"drawn": "noise"}, words="exp"
    ),
    "divergence without 1": Fault(
        "world_vae", _OUT + "|mean|log_var", options={"one": False}, words=r"- 1|1\b"
    ),
    "divergence averaged": Fault(
        "world_vae", _OUT + "|mean|log_var", options={"over": "mean"}, words="sum.*mean|0\\.3333|3 times"
    ),
    "divergence not halved": Fault(
        "world_vae", _OUT + "|mean|log_var", options={"half": 1.0}, words=r"0\.5|2 times"
    ),
    "pixels not squashed": Fault(
        "world_vae", _OUT + "|pixels|sigmoid.*", options={"last": ""}, words="sigmoid"
    ),
    # Routed experts
    "one expert for two": Fault(
        "routed_experts", "out" + _OPERATION, options={"best": 1}, words=">=|where|max"
    ),
    "shares not normalized again": Fault(
        "routed_experts", "out" + _OPERATION, options={"renormed": False}, words="/|sum"
    ),
    "warmer shares": Fault(
        "routed_experts", "out|gate|softmax" + _OPERATION, options={"warmth": 2.0}, words="2|0\\.5"
    ),
    "largest for the weighed sum": Fault(
        "routed_experts", "out" + _OPERATION, options={"use": "max"}, words="sum.*max"
    ),
    "units before experts": Fault(
        "routed_experts", "out" + _OPERATION, options={"first": False}, words="order|transpose|reshape"
    ),
    # Features that a task modulates
    "norm behind the modulation": Fault(
        "modulated", "head|norm" + _OPERATION, options={"early": False}, words=r"body|norm"
    ),
    "scales and shifts in turn": Fault(
        "modulated", "head" + _OPERATION, options={"apart": "in turn"}, words="half|slice|order|film"
    ),
    "activation before the modulation": Fault(
        "modulated", "head|norm" + _OPERATION, options={"active": "both"}, words="relu"
    ),
    "scales in reverse": Fault(
        "modulated", "head" + _OPERATION, options={"turned": True}, words="flip|reverse|order"
    ),
    "scales bounded": Fault("modulated", "head" + _OPERATION, options={"bounded": True}, words="tanh"),
    # Truncated critics
    "lowest quantiles dropped": Fault(
        "truncated_critics", _OUT + "|q2_out|sort.*", options={"dropped": "lowest"}, words="slice|order|part"
    ),
    "quantiles not sorted": Fault(
        "truncated_critics", _OUT + "|q._out|sort.*", options={"sorted_": False}, words="sort|topk|order"
    ),
    "three quantiles dropped": Fault(
        "truncated_critics", _OUT + "|q._out", options={"count": 3}, words="slice|shape|8|7"
    ),
    "maximum of the quantiles": Fault(
        "truncated_critics", _OUT + "|q._out", options={"over": "max"}, words="mean.*max"
    ),
    # Values in the units of returns
    "deviation of returns lost": Fault("pop_art", _OUT + "|value", options={"deviation": 1.0}, words=r"3\b"),
    "mean of returns lost": Fault("pop_art", _OUT + "|value", options={"mean": 0.0}, words=r"1\.5"),
    "observations not centred": Fault(
        "pop_art", "body1" + _OPERATION, options={"centred": False}, words=r"0\.3"
    ),
    "observations clipped wider": Fault(
        "pop_art", "body1" + _OPERATION, options={"limit": 5.0}, words=r"clip.*clip|maximum|minimum|range"
    ),
    "values not in their own units": Fault(
        "pop_art", _OUT + "|value", options={"root": True}, words="sqrt|sign"
    ),
    # Units in a set
    "mean over absent units": Fault(
        "entity_pool", "head" + _OPERATION, options={"count": "all"}, words=r"/ 5|sum"
    ),
    "absent units as zeros": Fault(
        "entity_pool", "head" + _OPERATION, options={"hidden": "zero"}, words=r"-1e\+09|where|0\b"
    ),
    "maximum before the mean of units": Fault(
        "entity_pool", "head" + _OPERATION, options={"order": "max first"}, words="conc|parts|order"
    ),
    "absent units in the sum": Fault(
        "entity_pool", "head" + _OPERATION, options={"masked": False}, words=r"\*"
    ),
    # A recurrent world model
    "classes not mixed": Fault(
        "discrete_world", _OUT + "|prior", options={"mix": 0.0}, words=r"0\.99|0\.0025|1e-08"
    ),
    "shares over groups": Fault(
        "discrete_world", _OUT + "|prior", options={"over": "groups"}, words="softmax.*axis"
    ),
    "bias of an update": Fault(
        "discrete_world", _OUT + "|prior|sigmoid.*", options={"update": 0.0}, words=r"- 1|1\b"
    ),
    "state not reset": Fault("discrete_world", _OUT + "|prior", options={"reset": ""}, words=r"sigmoid|\*"),
    # Steps of decisions
    "action of another token": Fault(
        "decision_steps", "act" + _OPERATION, options={"token": 2}, words="slice|rows|order"
    ),
    "states before returns": Fault(
        "decision_steps", "norm" + _OPERATION, options={"order": "sra"}, words="conc|parts|order|stack"
    ),
    "actions without their time": Fault(
        "decision_steps", "norm|a" + _OPERATION, options={"timed": "rs"}, words=r"time|\+"
    ),
    "later decisions seen": Fault(
        "decision_steps", "proj" + _OPERATION, options={"causal": False}, words="mask|where|causal|-1e\\+09"
    ),
    # Values that a state joins
    "weights of either sign": Fault(
        "mixed_values", _OUT + "|w1|w2|b1", options={"positive": ""}, words="abs"
    ),
    "softplus for the magnitude": Fault(
        "mixed_values", _OUT + "|w1|w2|b1", options={"positive": "softplus"}, words="abs.*softplus"
    ),
    "joined values without a shift": Fault(
        "mixed_values", _OUT + "|w1|w2|b1|elu", options={"shifted": False}, words="b1"
    ),
    "agents behind features": Fault(
        "mixed_values", _OUT + "|w1|w2|b1", options={"turned": True}, words="order|transpose|reshape"
    ),
    # Numbers of layers
    "kernel of a task's second half": Fault(
        "modulated", "film", put("film.weight", blocks(2, 1, 0)), words="order"
    ),
    "gates of a memory in the order of another library": Fault(
        "recurrent_ppo", "memory", on_all(blocks(4, 0, 2, 1, 3), "memory."), words="gates|order"
    ),
    "experts exchanged": Fault(
        "routed_experts", "experts|swap|gelu", put("experts.weight", blocks(4, 1, 0, 2, 3)), words="order"
    ),
    "critics exchanged": Fault(
        "truncated_critics",
        "q[12]_(in|out)",
        swap("q1_in", "q2_in"),
        words="weights|exchanged",
    ),
    "query in half precision": Fault(
        "gated_memory", "query", put("query.weight", lambda x: x.half().float()), words="float16"
    ),
    "rows of times one late": Fault(
        "decision_steps", "time|norm" + _OPERATION, put("time.weight", lambda x: x.roll(1, 0)), words="order"
    ),
    "norm's scale less 1": Fault("modulated", "norm", put("norm.weight", lambda x: x - 1), words="-1 plus"),
    "two rows of a critic's quantiles exchanged": Fault(
        "truncated_critics", "q2_out" + _OPERATION, put("q2_out.weight", rows(0, 3)), words="order|rows"
    ),
}


def directions(name: str) -> tuple[str, ...]:
    """Return the directions of a fault: an export of either framework, and a further one in turn."""
    number = [*EXPORTED_FAULTS].index(name)
    return "torch-onnx", "keras-program", FURTHER[number % len(FURTHER)]


def main() -> None:
    """Print a row for each fault and direction, and their shares."""
    ported_faults.main(EXPORTED_FAULTS, directions)


if __name__ == "__main__":
    main()
