"""RoPE scaling on a GPU: the frequencies' digest is the same on all devices, and plain transformers agrees at the long
length.
"""

from __future__ import annotations

import re
import subprocess
import sys

import torch
from support import reference
from support.architectures import word_tokenizer

from fxtune.distributed.world import World
from fxtune.export.save import save_model
from fxtune.facts.run import Facts
from fxtune.models.load import DType, ModelConfig, load_config
from fxtune.techniques.assemble import assemble
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.techniques.rope import Rope

LENGTH = 2000
"""Tokens per row. The shapes count as trained on 512 positions and are scaled to 2,048."""


def test_scaled_and_saved_model_equals_plain_transformers(tmp_path):
    """One process without fxtune loads all four families; float32, sdpa in both."""
    wanted, script = {}, "import torch\nfrom transformers import AutoModelForCausalLM\n"
    ids = ((torch.arange(LENGTH) * 7919 + 3) % 4096).unsqueeze(0)
    for shape in reference.SHAPES:
        base = reference.path({**reference.SHAPES[shape], "max_position_embeddings": 512})
        model, pipeline = ModelConfig(path=str(base), dtype=DType.float32), Pipeline()
        pipeline.rope, pipeline.attention.backend = Rope(enabled=True, factor=4.0), "sdpa"
        pipeline.precision.tf32 = False
        world, config = World.create(), load_config(model)
        facts = Facts.of(
            world.facts(),
            model=config.to_dict(),
            dtype="float32",
            packing=True,
            sequence_length=LENGTH,
            rows=(LENGTH,),
        )
        ready, _ = pipeline.resolved(facts)
        prepared = assemble(ready, model, config, world, 0)
        built = prepared.module
        [seen] = [one for one in ready.prove(prepared, make_probe(built)) if one.technique == "rope"]
        names = [re.search(r"inv_freq ([0-9a-f]{12})", text)[1] for text in (seen.asked, seen.observed)]
        assert names[0] == names[1], seen
        with torch.no_grad():
            wanted[shape] = built.eval()(input_ids=ids.cuda()).logits.float().cpu()
        folder = save_model(prepared, word_tokenizer(4096, eos_token="t2", unk_token="t0"), tmp_path / shape)
        script += (
            f"ids = ((torch.arange({LENGTH}) * 7919 + 3) % 4096).unsqueeze(0).cuda()\n"
            f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype=torch.float32).cuda().eval()\n"
            f"torch.save(model(input_ids=ids).logits.detach().cpu(), {str(tmp_path / (shape + '.pt'))!r})\n"
        )
    subprocess.run([sys.executable, "-c", script], check=True)
    for shape, logits in wanted.items():
        found = reference.relative(logits, torch.load(tmp_path / f"{shape}.pt"))
        assert found < reference.LIMITS["float32"], f"{shape}: {found:.1e}"
