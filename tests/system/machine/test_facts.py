"""The facts of a machine: installed packages, and why a package cannot be used."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from fxtune.system.machine import facts
from fxtune.system.machine.facts import MachineFacts, c_compiler, installed_packages


def test_versions_are_those_of_the_installed_packages(monkeypatch):
    found = installed_packages()
    assert found["torch"] == metadata.version("torch")
    assert set(found) <= {*facts.PACKAGES, facts.APEX}
    monkeypatch.setitem(facts.BROKEN, "torch", "does not start")
    assert "torch" not in installed_packages()


def test_missing_and_broken_packages_have_a_reason():
    machine = MachineFacts(broken={"torchao": "undefined symbol"})
    assert machine.lacks("torchao") == "is installed and does not work here (undefined symbol)"
    assert machine.lacks("liger-kernel") == "is not installed"


@pytest.mark.parametrize(
    ("machine", "problem"),
    [
        (MachineFacts(), "runs on a GPU, and the device is cpu"),
        (MachineFacts(device="cuda"), "is not installed. Build it"),
        (MachineFacts(device="cuda", packages={"apex": "0.9"}), "has no CUDA extensions"),
        (MachineFacts(device="cuda", broken={facts.APEX: "no amp_C"}), r"does not work here \(no amp_C\)\. Repair it"),
    ],
)
def test_apex_that_cannot_run_says_why(machine, problem):
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(machine.apex_refusal())


def test_compiler_of_the_environment_comes_first(monkeypatch, tmp_path):
    compiler = tmp_path / "mycc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert c_compiler() == str(compiler)
    monkeypatch.setenv("CC", str(torch.__file__) + ".none")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert c_compiler() is None
