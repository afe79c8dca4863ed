"""From a data config to plans: settings that contradict each other, sources with nothing to learn, files to batches."""

from __future__ import annotations

import json

import pytest
from support.tables import natural, table, training

from fxtune.data.batches.build import plan_evaluation, prepare_data
from fxtune.data.config import DataConfig, SourceConfig
from fxtune.errors import ConfigError, DataError
from fxtune.models.load import ModelConfig, load_tokenizer


def test_source_without_targets_is_an_error_that_names_it():
    mute = table([([1, 2, 3], [True, False, False])] * 3, "mute.jsonl")
    with pytest.raises(DataError, match=r"mute.jsonl: nothing to learn from. documents: 3 without a supervised token"):
        training([natural(5, 10, 0), mute])
    with pytest.raises(
        DataError, match=r"nothing to evaluate on. documents: 3 not held out by data.eval_fraction=1e-06"
    ):
        plan_evaluation([natural(3, 10, 0)], DataConfig(eval_fraction=1e-6), micro_batch_size=1, shares=[1e-6])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (dict(micro=3, step=4), "train.global_batch_size=4 must be a multiple of train.micro_batch_size=3"),
        (dict(packing=False, buckets=[64, 32]), "ascending"),
        (dict(packing=True, buckets=[32]), "data.packing=true"),
        (dict(weights=[1.0, None]), "b without a weight"),
    ],
)
def test_contradicting_settings_are_refused_with_their_key(wrong, said):
    with pytest.raises(ConfigError, match=said):
        training([natural(5, 10, 0, "a"), natural(5, 10, 1, "b")], **wrong)


def test_prepare_data_reads_files_and_makes_plans(tmp_path):
    tokenizer = load_tokenizer(ModelConfig())
    for name, count in (("train", 20), ("eval", 7)):
        rows = [{"text": f"{name} {i}: a document of its own."} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(
        sources=[SourceConfig(path=str(tmp_path / "train.jsonl"))],
        sequence_length=64,
        cache_dir=str(tmp_path / "cache"),
    )
    sizes = dict(micro_batch_size=2, global_batch_size=4, progress=False)
    assert prepare_data(config, tokenizer, **sizes).evaluation is None
    config.eval_sources = [SourceConfig(path=str(tmp_path / "eval.jsonl"))]
    made = prepare_data(config, tokenizer, **sizes)
    assert made.training.summary()["documents"] == 20
    assert made.evaluation.summary()["documents"] == 7
    batch = made.training.batch(0, 0)
    used = sum(piece.length for piece in made.training.contents(0, 0)[0])
    assert (batch.input_ids[0, used:] == tokenizer.pad_token_id).all()
    [first] = made.evaluation.contents(0, 0)[0][:1]
    table = made.evaluation.tables[0]
    text = tokenizer.decode(table.ids[table.offsets[first.document] : table.offsets[first.document + 1]].tolist())
    assert text.startswith("eval ")
    sources, config.sources = config.sources, []
    with pytest.raises(ConfigError, match=r"data\.sources is empty"):
        prepare_data(config, tokenizer, **sizes)
    config.sources, config.eval_sources, config.eval_fraction = sources, [], 0.4
    made = prepare_data(config, tokenizer, **sizes)
    assert made.training.summary()["documents"] + made.evaluation.summary()["documents"] == 20
