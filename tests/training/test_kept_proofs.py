import json
from dataclasses import asdict, replace

import pytest
from support.architectures import facts_of, random_model

from fxtune.config.root import Config
from fxtune.distributed.parallel import Degrees
from fxtune.models.load import load_config
from fxtune.techniques.base import Evidence
from fxtune.techniques.pipeline import Pipeline
from fxtune.training import builder, kept_proofs
from fxtune.training.kept_proofs import keep, proof_file, read_kept

SEEN = [Evidence("attention", "apart", "apart", True), Evidence("lora", "learns", "learns", True)]
MODEL = random_model("llama")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def file_of(techniques=None, config=None, **facts):
    found = replace(facts_of(MODEL), device="cuda", device_name="H100", **facts)
    return proof_file(config or Config(model=MODEL), load_config(MODEL), found, techniques or Pipeline())


def test_evidence_is_kept_and_says_since_when():
    keep(file_of(), SEEN)
    assert [*read_kept(file_of())] == ["attention"]
    (seen,) = read_kept(file_of())["attention"]
    assert seen.acted
    assert seen.observed.startswith("apart (kept from 20")


def test_another_run_has_other_evidence():
    other = Pipeline()
    other.checkpointing.enabled = True
    changes = dict(packing=False), dict(dtype="bfloat16"), dict(micro_batch_size=2)
    assert len({file_of(packing=True), file_of(other), *(file_of(**change) for change in changes)}) == 5


def test_nothing_is_kept_of_a_model_with_its_own_code_nor_on_a_cpu():
    assert file_of(config=Config(model=replace(MODEL, trust_remote_code=True))) is None
    assert proof_file(Config(), load_config(MODEL), facts_of(MODEL), Pipeline()) is None
    keep(None, SEEN)
    assert read_kept(None) == {}


def test_nothing_is_kept_of_a_model_that_reads_images_nor_with_several_ranks():
    assert file_of(reads_images=True) is None
    assert file_of(degrees=Degrees(replicate=2)) is None


def test_variables_that_choose_kernels_count(monkeypatch):
    before = file_of()
    monkeypatch.setenv("TORCH_CUDNN_SDPA_ENABLED", "1")
    assert file_of() != before


def test_evidence_that_did_not_act_is_not_kept_and_removes_what_was():
    for _ in range(2):
        keep(file_of(), [*SEEN, replace(SEEN[0], acted=False)])
        assert read_kept(file_of()) == {}
        keep(file_of(), SEEN)
    keep(file_of(), [replace(SEEN[0], acted=False)])
    assert read_kept(file_of()) == {}


def test_what_could_not_be_observed_is_observed_again():
    keep(file_of(), [*SEEN, Evidence("liger", "replaced", "no kernels seen", True, lasting=False)])
    assert [*read_kept(file_of())] == ["attention"]


OTHERS = json.dumps({"at": 0, "evidence": [asdict(SEEN[1])]})


@pytest.mark.parametrize(
    "damage",
    [
        OTHERS,
        "",
        "[]",
        "{",
        json.dumps({"at": "now", "evidence": [{}]}),
        json.dumps({"at": 1e17, "evidence": [asdict(SEEN[0])]}),
        '{"evidence": 3}',
    ],
)
def test_a_damaged_file_counts_as_none(damage):
    keep(file_of(), SEEN)
    file_of().write_text(damage)
    assert read_kept(file_of()) == {}
    keep(file_of(), SEEN)
    assert read_kept(file_of())


def test_the_second_start_of_a_run_takes_them_and_verify_proves_anew(narrow, monkeypatch, tmp_path):
    monkeypatch.setattr(kept_proofs, "proof_file", lambda *_: tmp_path / "proofs.json")

    def kept(**how):
        made = builder.RunBuilder(narrow)
        made.read()
        return {seen.technique for seen in made.observed_model(**how)[1] if "kept from" in seen.observed}

    assert [kept(), kept(), kept(anew=True)] == [set(), {"attention"}, set()]
