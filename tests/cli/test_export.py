"""`fxtune export`: what is written for each target, and what is refused before weights are read."""

from __future__ import annotations

import itertools
import json
import math
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from support.architectures import lora, on_disk, prepared_model
from support.cases import slow_but
from support.llama_cpp import fake_llama_cpp
from support.rows import write_jsonl

import fxtune
from fxtune.cli.main import main
from fxtune.export.save import save_model
from fxtune.models.load import DType, ModelConfig, load_tokenizer
from fxtune.outputs.targets.served import problems

ASSETS = Path(fxtune.__file__).parent / "assets"
TINY = ModelConfig(path="builtin:tiny", dtype=DType.float32)


def a_run(folder: Path, config: str = "", **options) -> Path:
    """A run whose adapter has moved a little, so that the model still answers and ends. `options`: of the technique
    lora. `config`: lines of its config.yaml."""
    prepared = prepared_model(lora(**options), TINY, dtype="float32")
    for name, parameter in prepared.module.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(1e-3)
    save_model(prepared, load_tokenizer(TINY), folder / "adapter")
    (folder / "config.yaml").write_text(f"run: {{name: {folder.name}}}\nmodel: {{path: 'builtin:tiny'}}\n{config}")
    (folder / "result.json").write_text('{"train/step": 1}')
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder of runs: `mine` with a plain adapter, `dora` with an adapter that servers do not take."""
    folder = tmp_path_factory.mktemp("made")
    asks = "sequence_length: 256, questions: {path: 'builtin:quickstart_test', limit: 2, max_new_tokens: 30}"
    a_run(folder / "runs" / "mine", f"data: {{system: Be brief., {asks}}}\n")
    a_run(folder / "runs" / "dora", f"data: {{{asks}}}\n", dora=True)
    a_run(folder / "runs" / "rslora", rslora=True)
    return folder


@pytest.fixture
def run(made, tmp_path, monkeypatch) -> Path:
    """A working directory that has the runs."""
    shutil.copytree(made, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work" / "runs" / "mine"


def export(capsys, *words: str, code: int = 0) -> str:
    """What the command prints; its one error if it ends with `code`."""
    assert main(["export", *words]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert err.count("fxtune: ") == (code > 0)
    return err if code else out


def exports_of(run: Path) -> dict[str, dict[str, float]]:
    result = json.loads((run / "result.json").read_text())
    assert result["train/step"] == 1
    return result["exports"]


def command(out: str) -> list[str]:
    (line,) = (line for line in out.splitlines() if line.startswith("Serve it: "))
    return shlex.split(line.removeprefix("Serve it: "))


def test_vllm_gets_an_adapter_where_it_is(run, capsys):
    words = command(export(capsys, "mine", "--to", "vllm"))
    assert words[:2] == ["vllm", "serve"]
    assert Path(words[2]).name == "tiny", "the base"
    given = dict(itertools.pairwise(words))
    assert given["--lora-modules"] == f"mine={run / 'adapter'}"
    assert given["--max-lora-rank"] == "8", "rank 4 needs the next value that vLLM has"
    assert given["--max-model-len"] == "512", "the positions of the model"
    assert given["--tokenizer"] == str(run / "adapter"), "with the chat template of training"
    assert [path.name for path in run.iterdir() if path.is_dir()] == ["adapter"], "nothing is copied"


def test_vllm_gets_the_merged_model_in_place_of_an_adapter_that_it_does_not_take(run, capsys):
    from transformers import AutoModelForCausalLM

    out = export(capsys, "dora", "--to", "vllm", "served")
    assert "vLLM serves no DoRA: it gets the merged model." in out
    assert command(out)[2] == str(Path("served").resolve())
    assert AutoModelForCausalLM.from_pretrained("served").config.model_type == "llama"
    assert command(export(capsys, "mine", "--to", "vllm", "--merged"))[2] == str(run / "merged")


def test_vllm_keeps_the_32_bits_of_a_merge_that_needs_them(tmp_path, monkeypatch, capsys):
    """A base in bfloat16, and an adapter whose update it cannot store."""
    monkeypatch.chdir(tmp_path)
    base = ModelConfig(path=str(on_disk(tmp_path / "half", dtype=torch.bfloat16)), dtype=DType.bfloat16)
    for name, size in (("weak", 1e-6), ("strong", 1e-1)):
        prepared = prepared_model(lora(), base, dtype="bfloat16")
        for key, parameter in prepared.module.named_parameters():
            if "lora_B" in key:
                parameter.data.fill_(size)
        save_model(prepared, load_tokenizer(base), tmp_path / name)
        words = command(export(capsys, name, "--to", "vllm", "--merged", f"{name}-merged"))
        assert ("--dtype" in words) == (name == "weak")


REFUSED = {
    "no target": (["mine"], 2, "add --to vllm"),
    "unknown target": (["mine", "--to", "vlm"], 2, "did you mean `vllm`?"),
    "merged": (["mine", "--to", "merged"], 2, "fxtune merge mine"),
    "unknown run": (["nobody", "--to", "vllm"], 2, "there is no run `nobody`"),
    "option of another target": (["mine", "--to", "model", "--merged"], 2, "--merged has no meaning for --to model"),
    "folder that exists": (["mine", "runs", "--to", "vllm"], 6, "runs exists"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_words_are_one_message(what, run, capsys):
    words, code, message = REFUSED[what]
    assert message in export(capsys, *words, code=code)


def llama(capsys, tools: Path, *words: str, code: int = 0) -> str:
    return export(capsys, *words, "--llama-cpp", str(tools), code=code)


def test_a_gguf_file_has_the_tokens_and_the_template_of_training_and_answers_as_trained(run, capsys):
    from gguf import GGUFReader

    tools = fake_llama_cpp(run.parent / "tools")
    out = llama(capsys, tools, "mine", "--to", "gguf")
    folder = run / "gguf"
    assert sorted(file.name for file in folder.iterdir()) == ["README.md", "export.json", "mine-f16.gguf"]
    reader = GGUFReader(str(folder / "mine-f16.gguf"))
    assert reader.get_field("tokenizer.ggml.pre").contents() == "gpt-2", "the first that gives the ids of training"
    assert reader.get_field("llama.context_length").contents() == 512
    assert "<|im_start|>" in reader.get_field("tokenizer.chat_template").contents()
    assert not any("lora" in tensor.name for tensor in reader.tensors), "the adapter is merged"
    assert command(out)[:3] == ["llama-server", "-m", "runs/mine/gguf/mine-f16.gguf"]
    found = exports_of(run)
    (figures,) = found.values()
    assert [figures[name] for name in ("equal", "equal_20", "prompts", "ended")] == [1, 1, 1, 1]
    assert figures["kl"] < 1e-4
    assert figures["perplexity"] > 1
    assert "mine-f16.gguf | 100.0%" in (folder / "README.md").read_text()
    assert main(["report", "mine"]) == 0
    assert "gguf/mine-f16.gguf" in (run / "report.html").read_text()


FAULTS = {
    "other_prompt": "the server writes 100% of the prompts with other tokens than training",
    "endless": "100% of the answers do not end as in training",
    "babbles": "its first tokens differ from the trained model",
    "nulls": "its first tokens differ from the trained model (KL nan nats)",
    "dies": "mine-f16.gguf: the server failed",
}


@pytest.mark.parametrize("fault", slow_but(FAULTS, "other_prompt"))
def test_an_export_that_does_not_answer_as_trained_is_said(fault, run, capsys):
    tools = fake_llama_cpp(run.parent / "tools", fault)
    assert main(["export", "mine", "--to", "gguf", "--llama-cpp", str(tools)]) == 1
    out, err = capsys.readouterr()
    assert FAULTS[fault] in err
    assert command(out)[0] == "llama-server"
    assert exports_of(run)
    assert "It stays in runs/mine/gguf" in err
    assert "Served" in (run / "gguf" / "README.md").read_text()


def test_without_a_server_nothing_counts_as_proven(run, capsys):
    tools = fake_llama_cpp(run.parent / "tools", "without llama-server")
    out = llama(capsys, tools, "mine", "--to", "gguf")
    assert "mine-f16.gguf: exported, not proven: there is no llama-server" in out
    assert "not_proven" in exports_of(run)["gguf/mine-f16.gguf"]
    assert "adapter: exported, not proven: vLLM is not reachable" in export(capsys, "mine", "--to", "vllm")


@pytest.mark.slow
def test_the_same_command_again_proves_what_was_written(run, capsys):
    """And other files, or another adapter's, are not taken for it."""
    missing = fake_llama_cpp(run.parent / "missing", "without llama-server")
    llama(capsys, missing, "mine", "--to", "gguf")
    written = (run / "gguf" / "mine-f16.gguf").stat().st_mtime_ns
    tools = fake_llama_cpp(run.parent / "tools", "without convert_lora_to_gguf")
    (tools / "convert_hf_to_gguf.py").write_text((missing / "convert_hf_to_gguf.py").read_text())
    llama(capsys, tools, "mine", "--to", "gguf")
    assert (run / "gguf" / "mine-f16.gguf").stat().st_mtime_ns == written
    assert exports_of(run)["gguf/mine-f16.gguf"]["equal"] == 1
    assert "gguf exists" in llama(capsys, tools, "mine", "--to", "gguf", "--quantize", "q8_0", code=6)
    assert "gguf exists" in llama(capsys, tools, "dora", str(run / "gguf"), "--to", "gguf", code=6)


def test_a_merged_or_copied_adapter_for_vllm_is_written_once(run, capsys):
    for name, words in (("merged", ["--merged"]), ("copied", ["copied"])):
        first = command(export(capsys, "mine", "--to", "vllm", *words))
        file = next(place for place in (run / name, Path(name)) if place.is_dir()) / "proof.json"
        written = file.stat().st_mtime_ns
        assert command(export(capsys, "mine", "--to", "vllm", *words)) == first
        assert file.stat().st_mtime_ns == written
        assert "exists" in export(capsys, "dora", "--to", "vllm", str(file.parent), code=6)


def test_the_merges_of_a_checkpoint_and_of_its_run_lie_apart(run, capsys):
    shutil.copytree(run / "adapter", run / "exported-step-1")  # as `export mine/step-1` first writes it
    for name, place in (("mine/exported-step-1", "merged-step-1"), ("mine", "merged")):
        assert command(export(capsys, name, "--to", "vllm", "--merged"))[2] == str(run / place)
    assert {"vllm/merged-step-1", "vllm/merged"} == exports_of(run).keys()


@pytest.mark.parametrize("rows", ['{"text": "Only a text."}\n', None])
def test_data_without_questions_forbids_no_export(rows, run, capsys):
    """Rows of plain text, or a file that has moved."""
    if rows:
        Path("rows.jsonl").write_text(rows)
    (run / "config.yaml").write_text(
        "run: {name: mine}\nmodel: {path: 'builtin:tiny'}\ndata: {sources: [{path: rows.jsonl}]}\n"
    )
    out = export(capsys, "mine", "--to", "vllm", "--merged")
    assert "merged: exported, not proven: there are no questions" in out
    assert "data.questions.path" not in out, "no such key is set"
    assert command(out)


def test_rows_in_quarantine_are_no_questions(run, capsys):
    """The rows that the run has learned from are."""
    pair, bad = ({"prompt": "Say yes.", "chosen": "Yes.", "rejected": text} for text in ("No.", "Yes."))
    write_jsonl(Path("rows.jsonl"), [bad, pair])
    data = "sources: [{path: rows.jsonl}], on_bad_row: quarantine"
    (run / "config.yaml").write_text(f"run: {{name: mine}}\nmodel: {{path: 'builtin:tiny'}}\ndata: {{{data}}}\n")
    tools = fake_llama_cpp(run.parent / "tools")
    llama(capsys, tools, "mine", "--to", "gguf")
    assert exports_of(run)["gguf/mine-f16.gguf"]["equal"] == 1.0


def test_a_penalty_for_repetitions_is_said(run, capsys):
    (run / "adapter" / "generation_config.json").write_text('{"repetition_penalty": 1.3}')
    assert "generation_config.json has repetition_penalty 1.3" in export(capsys, "mine", "--to", "vllm")


def test_a_first_token_without_probabilities_is_no_proof():
    assert problems({"kl": math.nan}, exact=True)
    assert not problems({"kl": 0.0}, exact=True)


def test_half_of_a_copy_does_not_stay(run, capsys, monkeypatch):
    def full(source, target, **_):
        Path(target).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    assert "copied cannot be written" in export(capsys, "mine", "copied", "--to", "vllm", code=6)
    assert not [path for path in Path().iterdir() if "copied" in path.name]


def test_an_unreadable_record_of_exports_is_not_replaced(run, capsys):
    (run / "result.json").write_text("{")
    assert "result.json cannot be read" in export(capsys, "mine", "--to", "vllm", code=6)


def test_the_card_has_the_last_proof_of_an_adapter_and_an_unfinished_run_stays_unfinished(run, capsys):
    (run / "result.json").unlink()
    before = (run / "adapter" / "README.md").read_text()
    for _ in range(2):
        export(capsys, "mine", "--to", "vllm")
        card = (run / "adapter" / "README.md").read_text()
        assert card.startswith(before.rstrip())
        assert card.count("not proven: vLLM is not reachable") == 1
    assert not (run / "result.json").exists()


def test_the_perplexity_is_of_held_out_rows(run, capsys):
    """The rows of data.eval_sources have other answers than the questions."""
    tools = fake_llama_cpp(run.parent / "tools")
    llama(capsys, tools, "mine", "--to", "gguf")
    questions = exports_of(run)["gguf/mine-f16.gguf"]
    Path("held_out.jsonl").write_text('{"prompt": "Tell a colour.", "completion": "Xylophone zebra quartz."}\n')
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("{system", "{eval_sources: [{path: held_out.jsonl}], system"))
    llama(capsys, tools, "mine", "--to", "gguf")
    held_out = exports_of(run)["gguf/mine-f16.gguf"]
    assert held_out["right"] == questions["right"]
    assert held_out["perplexity"] > 2 * questions["perplexity"]


def test_variables_of_the_chat_template_are_in_the_command(run, capsys):
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("{system", "{chat_template_kwargs: {enable_thinking: false}, system"))
    tools = fake_llama_cpp(run.parent / "tools", "without llama-server")
    words = command(llama(capsys, tools, "mine", "--to", "gguf"))
    assert words[words.index("--chat-template-kwargs") + 1] == '{"enable_thinking": false}'


def test_a_text_that_breaks_a_modelfile_is_refused(run, capsys):
    config = run / "config.yaml"
    before = config.read_text()
    config.write_text(before.replace("Be brief.", '\'Be """ brief.\''))
    tools = fake_llama_cpp(run.parent / "tools")
    assert "data.system" in llama(capsys, tools, "mine", "--to", "ollama", code=2)
    config.write_text(before)
    for file in (run / "adapter").glob("*.json*"):
        if file.name in ("tokenizer.json", "tokenizer_config.json"):
            file.write_text(file.read_text().replace("<|im_end|>", r"<|im_\"end|>"))
    (run / "adapter" / "proof.json").unlink()
    assert "eos_token_id" in llama(capsys, tools, "mine", "--to", "ollama", code=2)
    assert not (run / "ollama").exists()


def test_an_adapter_stays_one_only_where_llama_cpp_scales_it_rightly(run, capsys):
    tools = fake_llama_cpp(run.parent / "tools", "without llama-server")
    words = command(llama(capsys, tools, "mine", "--to", "gguf", "--unmerged", "apart"))
    assert words[words.index("--lora") + 1] == "apart/adapter-f16.gguf"
    assert (run.parents[1] / "apart" / "base-f16.gguf").exists()
    for name, why in (("rslora", "no scale of rsLoRA"), ("dora", "no DoRA")):
        out = llama(capsys, tools, name, "--to", "gguf", "--unmerged")
        assert f"llama.cpp takes an adapter with {why}: this one is merged." in out
        assert "--lora" not in command(out)


def test_a_modelfile_writes_what_training_wrote(run, capsys):
    tools = fake_llama_cpp(run.parent / "tools", "without llama-server")
    out = llama(capsys, tools, "mine", "--to", "ollama", "--quantize", "q4_k_m")
    lines = (run / "ollama" / "Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ./mine-q4_k_m.gguf"
    assert lines[1:3] == [
        'TEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system',
        "{{ .Content }}<|im_end|>",
    ]
    assert 'SYSTEM """Be brief."""' in lines
    assert lines[-4:] == [
        'PARAMETER stop "<|im_end|>"',
        "PARAMETER num_ctx 512",
        "PARAMETER repeat_penalty 1.0",
        "PARAMETER temperature 0",
    ]
    assert "ollama create mine -f runs/mine/ollama/Modelfile && ollama run mine" in out


def test_a_template_without_an_exact_form_is_left_to_jinja(run, capsys):
    tools = fake_llama_cpp(run.parent / "tools", "without llama-server")
    template = run / "adapter" / "chat_template.jinja"
    template.write_text(template.read_text().replace("message['content']", "message['content'] | trim"))
    (run / "adapter" / "proof.json").unlink()
    llama(capsys, tools, "mine", "--to", "ollama")
    modelfile = (run / "ollama" / "Modelfile").read_text()
    assert "TEMPLATE" not in modelfile.replace("no exact TEMPLATE", "")
    assert "runs the Jinja template of the file" in modelfile


BEFORE_WEIGHTS = {  # faults of the tools, what is done to the run, words, the message
    "no tools": (None, None, [], "llama.cpp: there is no convert_hf_to_gguf.py"),
    "no quantiser": (["without llama-quantize"], None, ["--quantize", "q8_0"], "there is no llama-quantize"),
    "no tokenizer tool": (["without llama-tokenize"], None, [], "there is no llama-tokenize"),
    "unknown tokenizer": (["other_ids"], None, [], "llama.cpp does not know this tokenizer"),
    "unknown architecture": ([], "architecture", [], "does not know the architecture MagicForCausalLM"),
    "little disk": ([], "disk", [], "has no room for the copies of the model"),
    "folder that exists": ([], None, ["runs"], "runs exists"),
    "code of a stranger": ([], "code", [], "names Python code (evil.py), which llama.cpp's converter may run"),
}


@pytest.mark.parametrize(
    "what", slow_but(BEFORE_WEIGHTS, "no tools", "unknown tokenizer", "unknown architecture", "little disk")
)
def test_what_llama_cpp_cannot_serve_is_refused_before_weights_are_read(what, run, capsys, monkeypatch):
    faults, change, words, message = BEFORE_WEIGHTS[what]
    tools = run.parent / "tools"
    tools.mkdir()
    if faults is not None:
        fake_llama_cpp(tools, *faults)
    if change == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40, 2**20))
    if change == "code":  # the base in another folder
        shutil.copytree(ASSETS / "tiny", run / "base")
        config = json.loads((run / "base" / "config.json").read_text())
        (run / "base" / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoTokenizer": "evil.Fast"}}))
        description = run / "adapter" / "adapter_config.json"
        description.write_text(description.read_text().replace(str(ASSETS / "tiny"), str(run / "base")))
    if change == "architecture":
        converter = tools / "convert_hf_to_gguf.py"
        converter.write_text(
            "print('ERROR:hf-to-gguf:Model MagicForCausalLM is not supported')\nraise SystemExit(1)\n"
        )
    (run / "adapter" / "adapter_model.safetensors").write_bytes(b"")  # reading it would be another error
    (run / "adapter" / "proof.json").unlink()
    code = 6 if change == "disk" or words == ["runs"] else 2
    assert message in llama(capsys, tools, "mine", "--to", "gguf", *words, code=code)
    assert {path.name for path in run.iterdir() if path.is_dir()} <= {"adapter", "base"}


def test_an_unknown_type_is_what_llama_quantize_says(run, capsys):
    tools = fake_llama_cpp(run.parent / "tools")
    error = llama(capsys, tools, "mine", "--to", "gguf", "--quantize", "q9", code=2)
    assert "--quantize q9: llama-quantize failed: main: invalid ftype 'Q9'" in error
    assert [path.name for path in run.iterdir() if path.is_dir()] == ["adapter"], "no half of an export stays"
