"""Every parser on bytes of any kind: only CkpttoolError leaves it (tests/hostile/fuzz.py runs for longer)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.conftest import ROOT
from tests.hostile.fuzz import FOUND

# Each of these reads a whole checkpoint, or lets every layout look at it: milliseconds, not microseconds.
DEAR = (
    "agent",
    "dcp_metadata",
    "keras_metadata",
    "saved_model",
    "sb3_pickle",
    "sb3_settings",
    "torch_pickle",
)
TARGETS = (
    *(
        "bundle_entries",
        "bundle_entry",
        "checkpoint_state",
        "d3rlpy",
        "hdf5_answer",
        "keras_config",
        "keras_map",
    ),
    *(
        "npy",
        "npy_header",
        "npz",
        "object_graph",
        "onnx",
        "pickle",
        "protobuf",
        "recorded_tree",
        "rllib_pickle",
    ),
    *("rule_file", "safetensors_header", "sb2_pickle", "sharded_index", "sidecar", "snappy_block", "sstable"),
    *("sstable_block", "summary_events", "tar", "tensorflow_v1", "text_proto", "tfrecord", "torch_legacy"),
    *("torch_script", "torch_tar", "yaml_settings", "zip"),
)


def survived(names: tuple[str, ...], count: int) -> dict[str, Any]:
    program = (
        "import json; from tests.hostile.trial import survived; "
        f"print(json.dumps(survived({names!r}, {count})))"
    )
    folder = Path(os.environ.get("TMPDIR", "/"))
    status, output = warm.run(
        "tests.hostile.started", program, folder, {**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert status == 0, output
    return json.loads(output)


@pytest.mark.parametrize(("names", "count"), [(DEAR, 8), (TARGETS, 25)], ids=["whole", "parsers"])
def test_only_our_errors_leave_a_parser(names: tuple[str, ...], count: int) -> None:
    outcomes = survived(names, count)
    assert {name: outcome["wrong"] for name, outcome in outcomes.items() if outcome["wrong"]} == {}
    # A target whose seeds are all refused tries nothing but the refusal.
    assert [name for name, outcome in outcomes.items() if not outcome["accepted"]] == []
    assert sum(outcome["tried"] for outcome in outcomes.values()) > len(names) * count


def test_every_target_is_tried() -> None:
    from tests.hostile.targets import BY_TARGET

    assert {*DEAR, *TARGETS} == set(BY_TARGET)


def test_what_was_found_belongs_to_a_target() -> None:
    for path in FOUND.glob("*"):
        assert path.name.startswith(tuple(f"{name}-" for name in (*DEAR, *TARGETS))), path
        assert path.stat().st_size < 10_000
