"""Facts: the properties that techniques read, and what World adds about the machine."""

from __future__ import annotations

import dataclasses

import pytest
from support.architectures import CPU, enable

from fxtune.facts.run import Facts
from fxtune.system.machine.facts import APEX, MachineFacts


def test_facts_of_a_world_have_its_machine_and_the_given_fields():
    facts = Facts.of(CPU.facts(), dtype="bfloat16", packages={"torch": "1"}, deterministic=True)
    assert (facts.device, facts.dtype, facts.packages) == ("cpu", "bfloat16", {"torch": "1"})
    assert facts.memory == facts.free_memory == facts.host_memory > 0


def test_facts_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Facts().dtype = "float16"


def test_compute_dtype_is_autocast_s_unless_precision_is_off():
    techniques = enable(precision={"autocast": "bfloat16"})
    assert Facts(dtype="float32", techniques=techniques).compute_dtype == "bfloat16"
    techniques.precision.enabled = False
    assert Facts(dtype="float32", techniques=techniques).compute_dtype == "float32"
    assert Facts(dtype="float16").compute_dtype == "float16"


def test_tokens_count_the_longest_rows():
    assert Facts(sequence_length=64, micro_batch_size=2).tokens == 128
    assert Facts(sequence_length=64, rows=(16, 32), micro_batch_size=2).tokens == 64


def test_the_text_model_s_config_is_found_inside_a_multimodal_one():
    assert Facts(model={"text_config": {"hidden_size": 8}}).text == {"hidden_size": 8}
    assert Facts(model={"hidden_size": 4}).text == {"hidden_size": 4}


@pytest.mark.parametrize(
    ("machine", "problem"),
    [
        (MachineFacts(), "the device is cpu"),
        (MachineFacts(device="cuda"), "not installed"),
        (MachineFacts(device="cuda", packages={"apex": "0.9"}), "it is PyPI's"),
        (MachineFacts(device="cuda", packages={APEX: "0.1"}), None),
    ],
)
def test_apex_problem(machine, problem):
    found = machine.apex_refusal()
    assert found is None if problem is None else problem in found
