"""doctor: each finding from a checkpoint that has just that fault, and none from one that is well."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.commands.digest import digest
from ckpttool.commands.doctor import Diagnosis, _orphan_slot_findings, diagnose
from ckpttool.conversion.write import save
from ckpttool.core import Checkpoint, Container, Sidecar, Tree, display, key
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from ckpttool.libraries import RecognizedAgent, recognize_tree
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden
from tests.pickles import ACTING
from tests.test_evaluate import fujimoto_set
from tests.trees import attributes, leaf, torch_tree


def topics(diagnosis: Diagnosis) -> list[str]:
    return [finding.topic for finding in diagnosis.findings]


def copied(folder: Path, **changes: Any) -> str:
    """Return a copy of the sample whose sidecar says something else."""
    path = shutil.copy(TORCH_SAMPLE, folder / "agent.pt")
    record = json.loads(Path(f"{TORCH_SAMPLE}.ckpttool.json").read_text())
    Path(f"{path}.ckpttool.json").write_text(json.dumps({**record, **changes}))
    return str(path)


@pytest.mark.environment
@pytest.mark.parametrize("sample", [TF_SAMPLE, TORCH_SAMPLE], ids=["tensorflow", "torch"])
def test_the_samples_are_well(sample: Path, golden: Golden) -> None:
    ran = in_process("doctor", sample)
    golden(ran)


def test_code_in_a_pickle_is_found_and_its_data_can_be_had(tmp_path: Path) -> None:
    data, name = ACTING["GLOBAL + REDUCE"]
    (tmp_path / "x.pkl").write_bytes(data)
    ran = in_process("doctor", tmp_path / "x.pkl", "--json")
    assert ran.status == 1
    findings = ran.json()["findings"]
    assert [finding["topic"] for finding in findings] == ["loading"]
    assert name in findings[0]["sentence"]
    assert findings[0]["fix"].startswith("ckpttool convert ")


@pytest.mark.parametrize("command", ["doctor", "check"])
def test_a_command_that_mends_takes_the_name_as_one_word(command: str, tmp_path: Path) -> None:
    path = tmp_path / "$(touch x) y.pkl"
    path.write_bytes(ACTING["GLOBAL + REDUCE"][0])
    document = in_process(command, path, "--json").json()
    (finding,) = document["findings"] if command == "doctor" else document["checkpoints"][0]["findings"]
    target = f"{path.name}.npz"
    assert shlex.split(finding["fix"]) == ["ckpttool", "convert", str(path), target, "--allow-missing"]


def test_nan_is_found_with_its_place(tmp_path: Path, golden: Golden) -> None:
    tree = open_checkpoint(str(TORCH_SAMPLE)).tree
    path = next(path for path, _ in tree.tensors() if display(path) == "critic/q2/l1/weight")
    array = tree[path].array().copy()  # type: ignore[union-attr]
    array[3, 1] = np.nan
    save(Tree({**tree.leaves, path: leaf(array, "critic.q2.l1.weight")}), str(tmp_path / "x.pt"))
    diagnosis = diagnose(str(tmp_path / "x.pt"), env="Pendulum-v1")
    (finding,) = (finding for finding in diagnosis.findings if finding.topic == "numbers")
    golden(finding.sentence)


def test_moments_without_a_weight_are_found() -> None:
    weight, moment = leaf(np.ones(3, np.float32), "w"), leaf(np.ones(3, np.float32), "w/m")
    alone = replace(moment, role="slot", slot="m")
    for of, count in ((None, 1), (attributes("w"), 0)):
        tree = Tree({attributes("w"): weight, attributes("w_m"): replace(alone, of=of)})
        assert len(list(_orphan_slot_findings(Checkpoint("x", "npz", tree, ()), None))) == count


@pytest.mark.environment
def test_an_environment_that_does_not_fit_is_found_with_those_that_would(
    tmp_path: Path, golden: Golden
) -> None:
    diagnosis = diagnose(copied(tmp_path), env="MountainCarContinuous-v0")
    assert "environment" in topics(diagnosis)
    sentence = next(finding for finding in diagnosis.findings if finding.topic == "environment")
    golden(sentence.sentence)
    assert "Pendulum" in str(sentence.fix)


@pytest.mark.environment
def test_drift_and_unknown_environments_are_found(tmp_path: Path) -> None:
    old = diagnose(copied(tmp_path, env={"id": "Pendulum-v1", "gymnasium": "0.26.0"}))
    assert [finding.sentence for finding in old.findings if "gymnasium 0.26.0" in finding.sentence]
    gone = diagnose(copied(tmp_path, env={"id": "Pendulum-v77"}))
    assert "environment" in topics(gone)


def test_a_module_that_a_sidecar_names_is_found_and_not_imported(tmp_path: Path, golden: Golden) -> None:
    diagnosis = diagnose(copied(tmp_path, env={"id": "evil_module:Env-v0"}))
    golden(next(finding.sentence for finding in diagnosis.findings if finding.topic == "environment"))


def test_a_sidecar_of_other_weights_is_found(tmp_path: Path, golden: Golden) -> None:
    diagnosis = diagnose(copied(tmp_path, target_sha256="0" * 64))
    golden("\n".join(finding.sentence for finding in diagnosis.findings))
    assert any("--env" in note for note in diagnosis.notes)


def test_facts_that_nothing_tells_are_found(tmp_path: Path) -> None:
    save(torch_tree(fujimoto_set()), str(tmp_path / "agent.pt"))  # type: ignore[arg-type]
    diagnosis = diagnose(str(tmp_path / "agent.pt"))
    assert any("action bounds" in item.sentence for item in diagnosis.findings if item.topic == "agent")


def test_damage_is_an_error_and_no_finding(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(TORCH_SAMPLE.read_bytes()[:5000])
    refused(in_process("doctor", tmp_path / "x.pt"))
    refused(in_process("doctor", tmp_path / "none.pt"))


@pytest.mark.parametrize(
    ("command", "times"),
    [
        (["doctor", TORCH_SAMPLE], 1),
        (["report", TORCH_SAMPLE, "--out", "page.html"], 1),
        (["report", TORCH_SAMPLE, TF_SAMPLE, "--out", "pages.html"], 2),
    ],
)
def test_a_checkpoint_is_recognised_once(
    command: list[Any], times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []

    def counted(tree: Tree, name: str, layout: str | None = None) -> RecognizedAgent | None:
        names.append(name)
        return recognize_tree(tree, name, layout)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ckpttool.libraries.recognize.recognize_tree", counted)
    assert in_process(*command).status == 0
    assert len(names) == times


@pytest.mark.parametrize(("tensors", "command"), [(2, "doctor"), (9, "check"), (1, "convert")])
def test_one_of_a_kind_is_in_the_singular(tensors: int, command: str, tmp_path: Path, golden: Golden) -> None:
    np.savez(tmp_path / "x.npz", **{f"a{n}": np.array([np.nan, 1.0]) for n in range(tensors)})
    more = [tmp_path / "x.pt", "--dry-run"] if command == "convert" else []
    lines = in_process(command, tmp_path / "x.npz", *more).out.splitlines()
    golden("\n".join(line for line in lines if re.search(r"\b1 (other|more|entry)", line)))


@pytest.mark.parametrize(
    ("facts", "is_found"),
    [
        ({}, True),
        ({"provenance": {"obs_norm": "given by train.py"}}, False),
        ({"obs_norm": {"mean": [0.0] * 3, "var": [1.0] * 3}}, False),
    ],
)
def test_a_sidecar_that_knows_no_statistics_hides_no_finding(
    facts: dict[str, Any], is_found: bool, tmp_path: Path
) -> None:
    from tests import sb3_files as sb3

    path = sb3.td3_agent(tmp_path / "agent.zip")
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "config.yml").write_text("policy: MlpPolicy\nnormalize: true\n")
    bounds: dict[str, Any] = {"action_low": list(sb3.LOW), "action_high": list(sb3.HIGH)}
    beside = Sidecar(digest(str(path)).sha256, **bounds, **facts)
    Path(f"{path}.ckpttool.json").write_bytes(beside.encode())
    diagnosis = diagnose(str(path))
    assert any(entry.open for entry in diagnosis.ledger) == is_found == bool(diagnosis.findings)


def test_a_receipt_says_of_statistics_what_the_source_did(tmp_path: Path) -> None:
    target, untold = tmp_path / "x.zip", tmp_path / "untold.zip"
    for source, is_stated in ((TORCH_SAMPLE, True), (untold, False)):
        assert convert(str(source), str(target), to="sb2", allow_missing=True, force=True).written
        ledger = restore_agent(str(target)).ledger
        unknown = [e for e in ledger if e.what == "observation statistics" and e.use == "cannot be known"]
        assert bool(unknown) != is_stated
        shutil.copy(target, untold)


@pytest.mark.parametrize("command", ["doctor", "check"])
def test_a_checkpoint_without_weights_is_a_finding(tmp_path: Path, command: str) -> None:
    h5py = pytest.importorskip("h5py")
    h5py.File(tmp_path / "critic.h5", "w").close()
    (tmp_path / "empty").mkdir()
    save(Tree({}, {}, {(): Container("dict")}), str(tmp_path / "empty" / "a.pt"))
    save(torch_tree({"l.weight": np.zeros((0, 3), np.float32)}), str(tmp_path / "none.safetensors"))
    for name in ("critic.h5", "empty/a.pt", "none.safetensors"):
        ran = in_process(command, tmp_path / name, "--json")
        assert ran.status == 1, name
        document = ran.json()
        findings = document["findings"] if command == "doctor" else document["checkpoints"][0]["findings"]
        assert "model" in {finding["topic"] for finding in findings}


def test_an_empty_network_beside_a_full_one_is_a_finding(tmp_path: Path) -> None:
    weight = leaf(np.ones((3, 4), np.float32), "l1.weight")
    tree = Tree(
        {(key("critic"), key("l1.weight")): weight},
        {},
        {(): Container("dict"), (key("actor"),): Container("dict"), (key("critic"),): Container("dict")},
    )
    save(tree, str(tmp_path / "x.pt"))
    findings = [finding for finding in diagnose(str(tmp_path / "x.pt")).findings if finding.topic == "model"]
    assert [finding.sentence.split()[0] for finding in findings] == ["actor"]
