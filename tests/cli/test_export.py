"""`fxtune export`: what is written for each target, and what is refused before weights are read."""

from __future__ import annotations

import itertools
import shlex
import shutil
from pathlib import Path

import pytest
from support.architectures import lora, prepared_model, trained

from fxtune.cli.main import main
from fxtune.export.save import save_model
from fxtune.models.load import DType, ModelConfig, load_tokenizer

TINY = ModelConfig(path="builtin:tiny", dtype=DType.float32)


def a_run(folder: Path, config: str = "", **options) -> Path:
    """A run whose adapter has moved. `options`: of the technique lora. `config`: lines of its config.yaml."""
    prepared = trained(prepared_model(lora(**options), TINY, dtype="float32"))
    save_model(prepared, load_tokenizer(TINY), folder / "adapter")
    (folder / "config.yaml").write_text(f"run: {{name: {folder.name}}}\nmodel: {{path: 'builtin:tiny'}}\n{config}")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder of runs: `mine` with a plain adapter, `dora` with an adapter that servers do not take."""
    folder = tmp_path_factory.mktemp("made")
    system = "data: {system: Be brief., sequence_length: 256, chat_template_kwargs: {style: short}}\n"
    a_run(folder / "runs" / "mine", system)
    a_run(folder / "runs" / "dora", dora=True)
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
    assert given["--default-chat-template-kwargs"] == '{"style": "short"}'
    assert [path.name for path in run.iterdir() if path.is_dir()] == ["adapter"], "nothing is copied"


def test_vllm_gets_the_merged_model_in_place_of_an_adapter_that_it_does_not_take(run, capsys):
    from transformers import AutoModelForCausalLM

    out = export(capsys, "dora", "--to", "vllm", "served")
    assert "vLLM serves no DoRA: it gets the merged model." in out
    assert command(out)[2] == "served"
    assert AutoModelForCausalLM.from_pretrained("served").config.model_type == "llama"
    assert command(export(capsys, "mine", "--to", "vllm", "--merged"))[2] == "runs/mine/merged"


REFUSED = {
    "no target": (["mine"], 2, "add --to vllm"),
    "unknown target": (["mine", "--to", "vlm"], 2, "did you mean `vllm`?"),
    "unknown run": (["nobody", "--to", "vllm"], 2, "there is no run `nobody`"),
    "option of another target": (["mine", "--to", "model", "--merged"], 2, "--merged has no meaning for --to model"),
    "folder that exists": (["mine", "runs", "--to", "vllm"], 6, "runs exists"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_words_are_one_message(what, run, capsys):
    words, code, message = REFUSED[what]
    assert message in export(capsys, *words, code=code)
