"""What a run is built from: missing files, refusals before a weight is loaded, and agreement of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.decoder_sizes import decoder_sizes

from fxtune.cli.main import main
from fxtune.distributed.parallel import Degrees
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, UnavailableError
from fxtune.system.machine.facts import MachineFacts
from fxtune.training import builder
from fxtune.training.data import run_data

ATTENTION = "techniques.attention.backend"


def test_command_refuses_before_loading_weights(cwd, capsys):
    """The model is a folder that holds a config and nothing else: loading its weights would fail."""
    from transformers import LlamaConfig

    LlamaConfig(
        **decoder_sizes(64, 96, layers=2, heads=4, vocabulary=1024),
        max_position_embeddings=512,
    ).save_pretrained("base")
    Path("data.jsonl").write_text(json.dumps({"text": "a document"}) + "\n")
    assert (
        main(
            [
                "model.path=base",
                "data.sources=[{path: data.jsonl}]",
                "run.device=cpu",
                "data.sequence_length=1024",
                f"{ATTENTION}=flash4",
                "techniques.lora.enabled=true",
                "techniques.lora.alpha=16",
                "techniques.lora.modules_to_save=[lm_haed]",
                "run.dir=run",
            ]
        )
        == 2
    )
    output = capsys.readouterr().err
    for key in (ATTENTION, "techniques.lora.modules_to_save", "techniques.rope.enabled"):
        assert f"  {key}: " in output
    assert "safetensors" not in output
    assert not Path("run").exists(), "a run that came to nothing leaves no folder"


def test_ranks_settle_on_the_machine_of_rank_0(narrow, monkeypatch):
    first = MachineFacts(cores=3, memory=7 << 30, free_memory=7 << 30, host_memory=7 << 30)

    class Second(World):
        def gather(self, value, doing=""):
            return [value] * 2

        def agree(self, mine, doing=""):
            return mine

        def broadcast(self, value, doing=""):
            return None, first

    monkeypatch.setattr(World, "create", staticmethod(lambda *_: Second(torch.device("cpu"), 1, 2)))
    facts = builder.RunBuilder(narrow).facts
    assert (facts.cores, facts.memory) == (first.cores, first.memory)
    assert facts.degrees == Degrees(replicate=2)


def test_compiler_that_fails_where_ranks_share_weights_ends_the_run(monkeypatch, narrow):
    """The other ranks may wait in the pass for the weights of this rank, so no agreement with them is possible."""

    def fails(self, model, probe):
        raise UnavailableError("the layer cannot be one graph", "compile")

    narrow.techniques.compile.enabled = "auto"
    made = builder.RunBuilder(narrow)
    made.world = World(torch.device("cpu"), 0, 2).divided(Degrees(shard=2))
    monkeypatch.setattr(builder.RunBuilder, "build", lambda self: torch.nn.Linear(2, 2))
    monkeypatch.setattr(builder.RunBuilder, "language_model", lambda self, model: model)
    monkeypatch.setattr(builder.RunBuilder, "observe", lambda self, model, *given: fails(self, model, {}))
    with pytest.raises(ConfigError, match=r"compile: the layer cannot be one graph\. .* or set parallel.shard=1"):
        made.observed_model()


def test_padding_of_packed_documents_is_reported():
    def contents(step: int, micro: int) -> list[list[SimpleNamespace]]:
        return [[SimpleNamespace(length=length) for length in row] for row in ([40, 24], [60, 2, 2])]

    plan = SimpleNamespace(
        steps=2, micro_batches=lambda _: 1, contents=contents, micro_rows=lambda _: 2, max_row_length=lambda _: 64
    )
    line = run_data.documents_padding(plan)
    assert f"have up to {5 * 60 / 128:.1f} times the tokens of its rows (in the first 2 steps)" in line
