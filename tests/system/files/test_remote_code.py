"""A model's folder names Python code in auto_map for each auto class of transformers. The code marks a file when it
runs. Calls with trust_remote_code=True stand for a mistake in fxtune's own code.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from support.cases import slow_but
from support.strangers import CODE, change, stranger_in

from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.export.save import save_model
from fxtune.models import shards, weights
from fxtune.models.load import ModelConfig, build, load_config, load_tokenizer
from fxtune.system.files import remote_code

READ = "AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoTokenizer", "AutoProcessor", "AutoImageProcessor"
"""Auto classes whose files a folder of a text model, made into a stranger's, is enough for."""
of_fxtune = eval("lambda call, *given, **options: call(*given, **options)", {"__name__": "fxtune.mistake"})
"""Calls a function as a module of fxtune does."""


@pytest.fixture
def stranger(tmp_path, canary) -> Path:
    """A model whose auto_map names code for each auto class; its type is one that transformers has."""
    return stranger_in(tmp_path)


@pytest.mark.parametrize("native", [True, False], ids=["native type", "unknown type"])
@pytest.mark.parametrize("auto", READ)
def test_a_wrong_argument_does_not_run_the_code_of_a_folder(auto, native, stranger, canary):
    if not native:
        change(stranger / "config.json", model_type="mine")
    try:
        read = getattr(transformers, auto).from_pretrained
    except ImportError:
        pytest.skip("transformers 5.17 needs torchvision for AutoImageProcessor")
    with pytest.raises(ConfigError, match=r"evil\.py is Python code that came with .*model\.trust_remote_code=true"):
        of_fxtune(read, str(stranger), trust_remote_code=True)
    assert not canary.exists()
    with pytest.raises(Exception):  # noqa: B017  the class in the file is no model
        read(str(stranger), trust_remote_code=True)
    assert canary.exists(), "without the guard it runs, so this test can fail"


def test_functions_of_fxtune_do_not_run_it_with_a_wrong_argument(stranger, canary):
    config, world = load_config(ModelConfig(path=str(stranger))), World(torch.device("cpu"))
    for call in (
        lambda: shards.empty(config, torch.float32, world, True),
        lambda: weights.bytes_of(config, torch.float32, True),
        lambda: weights.draw(config, torch.float32, world, 0, True),
    ):
        with pytest.raises(ConfigError, match="Python code that came with"):
            call()
    assert not canary.exists()


def test_generation_code_of_a_folder_does_not_run(stranger, canary):
    (stranger / "custom_generate").mkdir()
    (stranger / "custom_generate" / "generate.py").write_text(CODE + "def generate(*_, **__): pass\n")
    model = build(ModelConfig(), load_config(ModelConfig()), World(torch.device("cpu")), 0).module
    with pytest.raises(ConfigError, match=r"custom_generate/generate\.py is Python code"):
        of_fxtune(model.load_custom_generate, str(stranger), trust_remote_code=True)
    assert not canary.exists()
    model.load_custom_generate(str(stranger), trust_remote_code=True)
    assert canary.exists()


def test_an_export_is_proven_without_the_code_of_its_base(stranger, canary, tmp_path):
    config = ModelConfig(path=str(stranger))
    model = build(config, load_config(config), World(torch.device("cpu")), 0)
    figures: list = []
    save_model(model, load_tokenizer(config), tmp_path / "model", record=lambda proof: figures.append(proof.figures()))
    assert "auto_map" in json.loads((tmp_path / "model" / "config.json").read_text())
    assert "export/kl" in figures[0], "the proof must have built the plain model"
    assert not canary.exists()


def test_a_copy_of_the_code_that_others_have_made_does_not_run(stranger, canary):
    from transformers.dynamic_module_utils import get_cached_module_file, get_class_in_module

    copy = get_cached_module_file(str(stranger), "evil.py")
    with pytest.raises(ConfigError, match=r"evil\.py is Python code"):
        of_fxtune(get_class_in_module, "Evil", copy)
    assert not canary.exists()
    get_class_in_module("Evil", copy)
    assert canary.exists()


def test_the_code_of_a_trusted_folder_runs_and_no_other(stranger, canary, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(stranger, other)
    remote_code.trust(other)
    with pytest.raises(ConfigError):
        of_fxtune(transformers.AutoModel.from_pretrained, str(stranger), trust_remote_code=True)
    assert not canary.exists()
    with pytest.raises(AttributeError):  # the class in the file is no config
        of_fxtune(transformers.AutoConfig.from_pretrained, str(other), trust_remote_code=True)
    assert canary.exists()


def test_a_trusted_folder_cannot_name_the_code_of_another(stranger, canary, tmp_path):
    trusted = stranger_in(tmp_path)
    change(trusted / "config.json", auto_map={"AutoConfig": f"{stranger}--evil.Evil"})
    remote_code.trust(trusted)
    with pytest.raises(ConfigError, match=rf"{stranger.name}/evil\.py is Python code"):
        of_fxtune(transformers.AutoConfig.from_pretrained, str(trusted), trust_remote_code=True)
    assert not canary.exists()
    with pytest.raises(AttributeError):  # the class in the file is no config
        transformers.AutoConfig.from_pretrained(str(trusted), trust_remote_code=True)
    assert canary.exists()


def _mistake(folder: str) -> str:
    try:
        of_fxtune(transformers.AutoConfig.from_pretrained, folder, trust_remote_code=True)
    except ValueError as error:
        return str(error)
    return ""


def _mistake_of_child(folder: str, answer) -> None:
    answer.put(_mistake(folder))


@pytest.mark.parametrize(
    "first",
    slow_but(
        ["import fxtune, transformers", "import transformers.generation, fxtune"],
        "import fxtune, transformers",
    ),
)
def test_a_process_is_guarded_whatever_it_imports_first(first, stranger, canary):
    lines = [
        first,
        "from transformers.dynamic_module_utils import get_cached_module_file as copy",
        "of_fxtune = eval('lambda call, *given: call(*given)', {'__name__': 'fxtune.mistake'})",
        f"try: of_fxtune(copy, {str(stranger)!r}, 'evil.py')",
        "except ValueError as error: print(error)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert "evil.py is Python code that came with" in done.stdout
    assert not canary.exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_child_processes_are_guarded(method, stranger, canary):
    context = multiprocessing.get_context(method)
    answer = context.Queue()
    child = context.Process(target=_mistake_of_child, args=(str(stranger), answer))
    child.start()
    assert "evil.py is Python code that came with" in answer.get(timeout=300)
    child.join()
    assert not canary.exists()


def test_a_loader_without_the_guarded_functions_is_refused():
    with pytest.raises(AttributeError):
        remote_code._guard(object())
