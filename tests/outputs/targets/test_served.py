"""The proof of exports by the real servers, llama.cpp and vLLM, which answer as plain transformers does."""

from __future__ import annotations

import base64
import io
import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.architectures import lora, on_disk, prepared_model
from support.llama_cpp import real_llama_cpp
from support.ranks import free_port
from support.vllm_server import real_vllm
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

import fxtune
from fxtune.cli.main import main
from fxtune.export.save import save_model
from fxtune.models.load import DType, Init, ModelConfig, load_tokenizer
from fxtune.training.rollouts.client import Client

ASSETS = Path(fxtune.__file__).parent / "assets"
pytestmark = pytest.mark.slow


def proofs(run: Path, *folder: str, **words: str) -> dict[str, dict[str, float]]:
    """The figures of an export, by the name of its file."""
    options = [part for name, value in words.items() for part in (f"--{name.replace('_', '-')}", value)]
    answer = run.parent / "answer.json"
    assert main(["export", str(run), *folder, *filter(None, options), "--json", str(answer)]) == 0
    return json.loads(answer.read_text())["proofs"]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "quickstart"
    assert main(["+recipe=quickstart", f"run.dir={folder}"]) == 0
    return folder


def test_quickstart_answers_in_llama_cpp_as_trained(quickstart):
    found = proofs(quickstart, to="gguf", quantize="f16,q8_0,q4_k_m", llama_cpp=str(real_llama_cpp()))
    exact, eight, four = (found[f"quickstart-{kind}.gguf"] for kind in ("f16", "q8_0", "q4_k_m"))
    for figure in ("equal", "equal_20", "prompts", "ended", "right"):
        assert exact[figure] == 1
    assert exact["kl"] < 1e-4
    assert min(eight["right"], eight["equal"]) >= 0.99
    assert four["right"] >= 0.9
    assert four["perplexity"] > exact["perplexity"] > 1


def test_an_adapter_answers_beside_its_base_in_llama_cpp(quickstart):
    found = proofs(quickstart, str(quickstart / "apart"), to="gguf", unmerged="", llama_cpp=str(real_llama_cpp()))
    assert found["base-f16.gguf"]["right"] == found["base-f16.gguf"]["prompts"] == 1


def test_quickstart_answers_in_vllm_as_trained(quickstart, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    for words in ({}, {"merged": ""}):
        (found,) = proofs(quickstart, to="vllm", venv=str(real_vllm()), **words).values()
        assert [found[name] for name in ("prompts", "ended", "right")] == [1, 1, 1]
        assert found["kl"] < 0.02


SIZES = dict(vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=32, max_position_embeddings=512, eos_token_id=2)
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
FAMILIES = {"llama": {}, "qwen3": {}, "qwen3_moe": MIXTURE}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_answer_in_vllm_as_in_transformers(family, tmp_path, monkeypatch):
    """Random weights in float32 with builtin:tiny's tokenizer: the answers mean nothing, and are the same."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    architecture = {"model_type": family, **SIZES, **FAMILIES[family]}
    drawn = ModelConfig(path=None, init=Init.random, architecture=architecture)
    base, run = on_disk(tmp_path / "base", model=drawn), tmp_path / "run"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ASSETS / "tiny" / name, base)
    model = ModelConfig(path=str(base), dtype=DType.float32)
    adapted = prepared_model(lora(target_modules=["q_proj", "v_proj"]), model, dtype="float32")
    for name, parameter in adapted.module.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.1)
    save_model(adapted, load_tokenizer(model), run / "adapter")
    questions = "{path: 'builtin:quickstart_test', limit: 8, max_new_tokens: 24}"
    (run / "config.yaml").write_text(
        f"run: {{name: run}}\nmodel: {{path: '{base}'}}\ndata: {{questions: {questions}}}\n"
    )
    # On a CPU, vLLM 0.32 computes no adapters beside experts: their kernel needs Triton.
    for words in ({}, {"merged": ""})[family == "qwen3_moe" :]:
        (found,) = proofs(run, to="vllm", venv=str(real_vllm()), **words).values()
        assert found["prompts"] == 1
        assert found["kl"] < 1e-4
        assert found["equal_20"] == 1


def test_vision_quickstart_answers_in_llama_cpp_through_its_mmproj_file(tmp_path):
    """llama.cpp maps a projector only if the vision encoder has at least three blocks, so the model gets two more,
    which change nothing. It enlarges an image of fewer than eight tokens, so the rows have larger ones."""
    run, whole, out = tmp_path / "seen", tmp_path / "whole", tmp_path / "answer.json"
    assert main(["+recipe=vision_quickstart", f"run.dir={run}"]) == 0
    assert main(["merge", str(run), str(whole)]) == 0
    deeper = with_deeper_encoder(whole, tmp_path / "deeper")
    tools = real_llama_cpp()
    words = ["--to", "gguf", "--llama-cpp", str(tools), "--json", str(out)]
    assert main(["export", str(deeper), *words, str(tmp_path / "files")]) == 0
    program, *options = shlex.split(json.loads(out.read_text())["command"])
    port = free_port()
    server = subprocess.Popen([str(tools / "build" / "bin" / program), *options, "--port", str(port)])
    try:
        client = Client(f"http://127.0.0.1:{port}", 60)
        client.wait(lambda: server.poll() is not None)
        rows = [json.loads(line) for line in (ASSETS / "data" / "vision_test.jsonl").read_text().splitlines()]
        large = [row["messages"] for row in rows if image_tokens(row["messages"]) >= 8][:20]
        assert len(large) == 20
        asked = {"temperature": 0, "max_tokens": 64, "repeat_penalty": 1.0}
        given = [
            client.call("/v1/chat/completions", {"messages": [as_openai(turn) for turn in row[:-1]], **asked})
            for row in large
        ]
    finally:
        server.kill()
        server.wait()
    right = [row[-1]["content"] for row in large]
    assert [answer["choices"][0]["message"]["content"] for answer in given] == right


def with_deeper_encoder(folder: Path, deeper: Path) -> Path:
    """The model of a folder, with two more blocks in its vision encoder that add zero, and with the numbers that
    transformers takes by default for the colours of an image, because llama.cpp needs them."""
    model = AutoModelForImageTextToText.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    config.vision_config.depth += 2
    config.vision_config.fullatt_block_indexes = [1, 3]
    made, own = AutoModelForImageTextToText.from_config(config), model.state_dict()
    zero = {name: torch.zeros_like(tensor) for name, tensor in made.state_dict().items() if name not in own}
    made.load_state_dict(zero | own)
    shutil.copytree(folder, deeper, ignore=shutil.ignore_patterns("*.safetensors", "proof.json"))
    made.save_pretrained(deeper)
    file = deeper / "preprocessor_config.json"
    colours = {"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD}
    file.write_text(json.dumps(json.loads(file.read_text()) | colours))
    return deeper


def as_openai(turn: dict) -> dict:
    """A message as the API of servers has it."""
    if isinstance(turn["content"], str):
        return turn
    parts = [
        {"type": "image_url", "image_url": {"url": part["image"]}} if part["type"] == "image" else part
        for part in turn["content"]
    ]
    return {**turn, "content": parts}


def image_tokens(messages: list[dict]) -> int:
    """The tokens of a row's image: one for 28 x 28 pixels."""
    parts = [part for turn in messages if not isinstance(turn["content"], str) for part in turn["content"]]
    (data,) = [part["image"] for part in parts if part["type"] == "image"]
    with Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2]))) as image:
        return image.width // 28 * (image.height // 28)
