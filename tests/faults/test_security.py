"""Recipes, datasets, model folders and checkpoints are untrusted data. Each test is an attack through one of them.

A file `ran` shows that code ran. Time and memory show that a template was not limited. A file outside the folder shows
that a path left it. tests/config/test_validate.py (`STRANGE`) tests attacks through Hydra and YAML.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.cases import pairs

from fxtune.checkpoint.run_folder import RunFolder, claim
from fxtune.cli import main as program
from fxtune.cli import sync
from fxtune.config.root import Config, TrainConfig
from fxtune.data.chat.encode import Encoder
from fxtune.data.config import DataConfig, SourceConfig
from fxtune.data.formats.registry import FORMATS
from fxtune.data.read.sources import open_source
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, DataError, StorageError, UserError
from fxtune.export.save import save_model
from fxtune.models import load as models
from fxtune.models.load import Init, ModelConfig, load_tokenizer
from fxtune.outputs.merge import merge
from fxtune.system.files.hub import locate
from fxtune.system.process.resource_limits import limit_resources
from fxtune.tracking.tracker import DisplayKind, Tracker, TrackingConfig, WandbMode, run_id
from fxtune.training.trainer import run as train

# --- recipes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'# @package _global_\n"a\\e[31mb": 1\n', "unknown key `a\u241b[31mb`"),
        (b'# @package _global_\nrun: {name: "\\ud800"}\n', r"`run.name='\ud800'` has a character that no file"),
        (b'# @package _global_\nrun: {dir: "a\\0b"}\n', r"`run.dir='a\x00b'` has a character that no file"),
        (b'# @package _global_\nrun: {name: "a\\nb"}\n', "no line breaks"),
    ],
    ids=["escape", "surrogate", "nul", "line"],
)
def test_control_characters_and_invalid_file_names_are_refused(text, message, cwd, capfd):
    Path("odd.yaml").write_bytes(text)
    assert program.main(["+recipe=./odd.yaml", "data.sources=[{path: rows.jsonl}]"]) == 2
    out, err = capfd.readouterr()
    assert message in err
    assert "\x1b" not in out + err


def test_invalid_recipes_are_listed_and_cannot_be_copied(cwd, capfd):
    Path("recipes").mkdir()
    with Path("recipes/huge.yaml").open("wb") as file:
        file.truncate(4 << 30)
    Path("recipes/binary.yaml").write_bytes(b"\xff\xfe\0")
    Path("recipes/\x1b[31m.yaml").write_text("# \x1b[2J cleared\n")
    tracemalloc.start()
    try:
        assert program.main(["recipes"]) == 0
        assert tracemalloc.get_traced_memory()[1] < 1 << 30, "the 4 GiB of the huge file were read"
    finally:
        tracemalloc.stop()
    message = capfd.readouterr().out
    assert "\x1b" not in message
    assert "\u241b[2J cleared" in message
    assert program.main(["recipes", "copy", "binary", "mine.yaml"]) == 2
    assert "recipes/binary.yaml cannot be read as a text file" in capfd.readouterr().err.replace(f"{cwd}/", "")


# --- chat templates


GREEDY = {
    "text": "{{ 'x' * 10000000000 }}",
    "doubled": "{% set ns = namespace(x='x' * 99) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "padded": "{{ 'x' | center(10000000000) }}",
    "format": "{{ '%1000000000000d' % 1 }}",
    "format method": "{{ '{:>10000000000}'.format(1) }}",
    "json": "{{ messages | tojson(indent=100000000000) }}",
    "loops": "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
    "list in itself": "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "slices": "{{ [1] | slice(100000000000) | list }}",
    "power": "{{ 10 ** (10 ** 8) % 7 }}",
}
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ ''.format_map.__self__.__class__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('touch ran').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{% set x = messages.append(1) %}{{ messages }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch ran') }}",
    "{{ ''['__cla' ~ 'ss__'].mro() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ messages.__class__.__base__ }}",
]
CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello there"}]}
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def tokenizer():
    return load_tokenizer(ModelConfig())


@pytest.mark.vital
@pytest.mark.parametrize("what", GREEDY)
def test_template_time_and_memory_are_limited(what, cwd, tokenizer, monkeypatch):
    monkeypatch.setattr(
        "fxtune.data.chat.template.limit_resources", lambda: limit_resources(seconds=0.5, more=200 << 20)
    )
    Path("greedy.jinja").write_text(GREEDY[what])
    with pytest.raises(DataError, match=r"stopped: it needs more than (0\.5 s of processor time|200 MiB of memory)"):
        Encoder(tokenizer, FORMATS["messages"], "greedy.jinja")


@pytest.mark.parametrize("more", ["{{ 'x' * 10000000000 }}", GREEDY["loops"], GREEDY["doubled"]])
def test_template_that_attacks_at_a_later_row_is_limited(more, cwd, tokenizer, monkeypatch):
    seconds = 60.0
    monkeypatch.setattr("fxtune.data.chat.template.limit_resources", lambda: limit_resources(seconds, more=200 << 20))
    Path("late.jinja").write_text(PLAIN + "{% if 'wake' in messages[0].content %}" + more + "{% endif %}")
    encoder = Encoder(tokenizer, FORMATS["messages"], "late.jinja")
    assert not isinstance(encoder.encode([CHAT])[0], str)
    woken = {"messages": [{"role": "user", "content": "wake up"}, CHAT["messages"][1]]}
    seconds = 0.5
    with pytest.raises(DataError, match="stopped: it needs more than"):
        encoder.encode([CHAT, woken])
    seconds = 60.0
    assert not isinstance(encoder.encode([CHAT])[0], str), "the limits must be removed again"


@pytest.mark.parametrize("escape", ESCAPES)
def test_template_cannot_leave_its_sandbox(escape, cwd, tokenizer):
    Path("escape.jinja").write_text(PLAIN + escape)
    try:
        made = Encoder(tokenizer, FORMATS["messages"], "escape.jinja").encode([CHAT])[0]
    except DataError as error:
        made = str(error)
    assert not Path("ran").exists()
    if not isinstance(made, str):  # an unknown name is undefined and renders as nothing
        text = tokenizer.decode(made.ids)
        assert "class" not in text
        assert "root:" not in text


def test_template_of_gigabytes_is_not_read(cwd, tokenizer, stranger):
    for path in (Path("long.jinja"), stranger / "chat_template.jinja"):
        with path.open("wb") as file:
            file.truncate(4 << 30)
    with pytest.raises(DataError, match=r"4,294,967,296 bytes are too long for a chat template"):
        Encoder(tokenizer, FORMATS["messages"], "long.jinja")
    with pytest.raises(ConfigError, match="more than a chat template ever has"):
        opened(stranger)


# --- a folder of a model or an adapter


class _Loaded:
    """A pickle that creates the file `ran` in the working directory when it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("ran").absolute(),)


PICKLES = (
    *("pytorch_model.bin", "model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "optimizer.bin"),
    *("scheduler.pt", "rng_state.pth", "model.pt", "model.pth", "model.pkl", "consolidated.00.pth", "tokenizer.pkl"),
    *("data.npy", "weights.npz"),
)


def plant_pickles(folder: Path) -> None:
    for name in PICKLES:
        (folder / name).write_bytes(pickle.dumps(_Loaded()))


@pytest.fixture
def stranger(cwd) -> Path:
    """A folder with a valid model, which a test may change."""
    shutil.copytree(locate("builtin:tiny").folder, cwd / "stranger")
    return cwd / "stranger"


@pytest.fixture
def adapter(cwd, stranger) -> Path:
    """A valid adapter of `stranger`, which a test may change: it has no proof.json."""
    from peft import LoraConfig, get_peft_model

    config = ModelConfig(path=str(stranger))
    prepared = models.build(config, models.load_config(config), World(torch.device("cpu")), 0)
    name = prepared.module.name_or_path
    options = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = prepared.module = get_peft_model(prepared.module, options)
    model.name_or_path = name
    model.peft_config["default"].base_model_name_or_path = str(stranger)
    save_model(prepared, load_tokenizer(config), cwd / "adapter")
    (cwd / "adapter" / "proof.json").unlink()
    return cwd / "adapter"


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def opened(folder: Path) -> None:
    """Read the config, tokenizer and weights of a model."""
    config = ModelConfig(path=str(folder))
    load_tokenizer(config)
    models.build(config, models.load_config(config), World(torch.device("cpu")), 0)


def test_planted_pickles_run_when_loaded(cwd):
    """The pickles run when they are loaded, so the tests below can fail."""
    plant_pickles(cwd)
    for name in PICKLES:
        Path("ran").unlink(missing_ok=True)
        pickle.loads((cwd / name).read_bytes())
        assert Path("ran").exists()


def test_pickles_of_a_model_are_not_read(stranger, adapter):
    plant_pickles(stranger)
    plant_pickles(adapter)
    opened(stranger)
    merge(adapter, "merged")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(StorageError, match=r"adapter_model\.safetensors is missing"):
        merge(adapter, "merged again")
    (stranger / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="pickled weights"):
        opened(stranger)
    (stranger / "model.safetensors").write_bytes(pickle.dumps(_Loaded()))
    with pytest.raises(StorageError, match="broken or cut short"):
        opened(stranger)
    assert not Path("ran").exists()


def test_model_code_does_not_run(stranger):
    code = "import pathlib\npathlib.Path('ran').touch()\nclass Mine: pass\n"
    for name in (
        *("mine.py", "modeling_mine.py", "tokenization_mine.py", "generate.py", "__init__.py"),
        *("setup.py", "conftest.py"),
    ):
        (stranger / name).write_text(code)
    (stranger / "custom_generate").mkdir()
    (stranger / "custom_generate" / "generate.py").write_text(code)
    change(
        stranger / "config.json", auto_map={"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "modeling_mine.Mine"}
    )
    opened(stranger)  # for a known model type transformers uses its own code
    change(
        stranger / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["tokenization_mine.Mine", "tokenization_mine.Mine"]},
        tokenizer_class="Mine",
    )
    with pytest.raises(ConfigError, match=r"stranger/tokenization_mine\.py is .*model\.trust_remote_code=true"):
        opened(stranger)
    change(stranger / "config.json", model_type="mine")
    with pytest.raises(ConfigError, match=r"stranger/mine\.py is Python code .*model\.trust_remote_code=true"):
        opened(stranger)
    assert not Path("ran").exists()


ODD_CONFIGS = {
    "a kernel of the hub": ({"attn_implementation": "evil/kernel"}, "compiled code of the hub"),
    "a kernel of the hub, inside": ({"_attn_implementation": "evil/kernel"}, "compiled code of the hub"),
    "a kernel, deeper": (
        {"text_config": {"_attn_implementation_internal": "evil/kernel@main"}},
        "compiled code of the hub",
    ),
    "experts of the hub": ({"experts_implementation": "evil/kernel"}, "compiled code of the hub"),
    "weights elsewhere": ({"transformers_weights": "../other.safetensors"}, "no safetensors file of this folder"),
    "pickled weights": ({"transformers_weights": "pytorch_model.bin"}, "no safetensors file of this folder"),
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is beyond"),
    "a size": ({"hidden_size": 10**30}, "hidden_size=1000.* is beyond"),
    "a negative size": ({"vocab_size": -(10**12)}, "is beyond"),
    "experts": ({"num_experts": 10**8}, "is beyond"),
    "no heads": ({"num_attention_heads": 0}, "modulo by zero"),
    "a size in words": ({"hidden_size": "large"}, "'hidden_size'.* int"),
}


@pytest.mark.parametrize("what", ODD_CONFIGS)
def test_config_with_code_or_impossible_sizes_is_refused(what, stranger):
    values, message = ODD_CONFIGS[what]
    change(stranger / "config.json", **values)
    with pytest.raises(ConfigError, match=message):
        opened(stranger)
    with pytest.raises(ConfigError, match=message):
        models.load_config(ModelConfig(init=Init.random, architecture={**values}))


@pytest.mark.parametrize("values", [{"intermediate_size": -5}, {"pad_token_id": 10**6}])
def test_sizes_that_torch_refuses_are_a_model_error(values, stranger):
    change(stranger / "config.json", **values)
    with pytest.raises(StorageError, match=r"the weights in .* cannot be loaded as its config\.json says"):
        opened(stranger)


@pytest.mark.parametrize(
    ("name", "text"),
    pairs(
        ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"],
        ["[" * 300_000, '{"a":' * 80 + "1" + "}" * 80, None],
    ),
    ids=["endless", "deep", "long", "endless index"],
)
def test_deeply_nested_model_json_is_refused(name, text, stranger):
    (stranger / name).write_text(text or "{")
    if text is None:
        os.truncate(stranger / name, 300 << 20)  # without content, and so without a disk's time
    with pytest.raises((ConfigError, StorageError), match=r"levels deep|more than such a file ever has"):
        opened(stranger)


@pytest.mark.parametrize("workers", [1, 2])
def test_regular_expression_that_backtracks_without_end_is_refused_in_one_message(
    workers, stranger, cwd, monkeypatch, capfd
):
    file = stranger / "tokenizer.json"
    content = json.loads(file.read_text())
    slow = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [slow, content["pre_tokenizer"]]}
    file.write_text(json.dumps(content))
    monkeypatch.setattr("fxtune.data.tokenized.tokenize.IN_PROCESS_BYTES", 0)
    rows = [{"text": f"{number} {'a' * 40}b"} for number in range(3)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["data.sources=[{path: rows.jsonl}]", "data.questions.path=null", f"data.workers={workers}"]
    assert program.main(["preview", "+recipe=quickstart", f"model.tokenizer={stranger}", *data]) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "panicked" not in said
    assert said.count("model.tokenizer") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chat_template.jinja", "out of the model's folder"),
        ("config.json", "out of the model's folder"),
        ("tokenizer.json", "out of the model's folder"),
        ("additional_chat_templates/more.jinja", "out of the model's folder"),
    ],
)
def test_link_out_of_a_model_folder_is_not_followed(name, message, stranger, cwd):
    (cwd / "secret").write_text("a private key")
    (stranger / name).unlink(missing_ok=True)
    (stranger / name).parent.mkdir(exist_ok=True)
    (stranger / name).symlink_to(cwd / "secret")
    with pytest.raises(ConfigError, match=message):
        opened(stranger)
    (stranger / name).unlink()
    (stranger / name).symlink_to("../../../../../../../etc/passwd")
    with pytest.raises((ConfigError, StorageError), match="is a link to"):
        opened(stranger)


def test_linked_template_folder_is_not_followed(stranger, cwd):
    (cwd / "private").mkdir()
    (cwd / "private" / "notes.txt").write_text("private")
    (stranger / "additional_chat_templates").symlink_to(cwd / "private")
    with pytest.raises(ConfigError, match="out of the model's folder"):
        opened(stranger)


def test_pipes_and_devices_do_not_block(stranger):
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        kept = (stranger / name).read_bytes()
        (stranger / name).unlink()
        os.mkfifo(stranger / name)
        with pytest.raises(ConfigError, match="no regular file"):
            opened(stranger)
        (stranger / name).unlink()
        (stranger / name).write_bytes(kept)
    (stranger / "extra.safetensors").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="no regular file"):
        opened(stranger)


def test_common_links_are_followed(stranger, cwd):
    """The hub's cache, a folder that is a link, and weights on another disk."""
    cache = cwd / "models--a--b"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "blobs").mkdir()
    snapshot = cache / "snapshots" / ("a" * 40)
    snapshot.mkdir()
    for number, file in enumerate(stranger.iterdir()):
        shutil.copy(file, cache / "blobs" / f"{number:040}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040}")
    opened(snapshot)
    (cwd / "link").symlink_to(stranger)
    opened(cwd / "link")
    shutil.move(stranger / "model.safetensors", cwd / "elsewhere.safetensors")
    (stranger / "model.safetensors").symlink_to(cwd / "elsewhere.safetensors")
    opened(stranger)


@pytest.mark.parametrize(
    "shard", ["../other/model.safetensors", "/etc/passwd", "pytorch_model.bin", "*.safetensors", 7, None]
)
def test_index_may_only_name_files_of_its_folder(shard, stranger):
    (stranger / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ConfigError, match="only safetensors files of this folder"):
        opened(stranger)


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "", "a/b", ".."])
def test_name_of_a_chat_template_is_not_a_path(name, stranger):
    """transformers writes a file for each name when a run saves its tokenizer at the end."""
    (stranger / "chat_template.jinja").unlink()
    change(
        stranger / "tokenizer_config.json",
        chat_template=[{"name": "default", "template": PLAIN}, {"name": name, "template": "x"}],
    )
    with pytest.raises(ConfigError, match="a name has letters"):
        load_tokenizer(ModelConfig(path=str(stranger)))


ODD_ADAPTERS = {
    "modules by name": ({"megatron_config": {"a": 1}, "megatron_core": "adapter.evil"}, "megatron_config"),
    "files by name": (
        {"init_lora_weights": "corda", "corda_config": {"cache_file": "optimizer.pt"}},
        "init_lora_weights",
    ),
    "layers": ({"layer_replication": [[0, 10**9]]}, "layer_replication"),
    "rank": ({"r": 10**12}, "is no rank"),
    "ranks": ({"rank_pattern": {"q_proj": 10**12}}, "is no rank"),
    "pattern": ({"target_modules": "([a-z._0-9]+)+!"}, r"target_modules cannot be used .* processor time"),
    "patterns": ({"rank_pattern": {"([a-z._0-9]+)+!": 2}}, r"rank_pattern cannot be used .* processor time"),
    "no pattern": ({"target_modules": "(("}, "target_modules cannot be used"),
    "no such module": ({"target_modules": ["nope"]}, "does not fit its base"),
    "alpha": ({"lora_alpha": "x"}, "does not fit its base"),
    "token": ({"trainable_token_indices": [10**9]}, "does not fit its base"),
    "base": ({"base_model_name_or_path": 7}, "base_model_name_or_path=7 is no text"),
}


@pytest.mark.vital
@pytest.mark.parametrize("what", ODD_ADAPTERS)
def test_malicious_adapter_config_neither_runs_code_nor_hangs(what, adapter, monkeypatch):
    values, message = ODD_ADAPTERS[what]
    seconds = 0.5 if "processor time" in message else 60.0
    monkeypatch.setattr("fxtune.outputs.adapter.limit_resources", lambda: limit_resources(seconds))
    (adapter / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.syspath_prepend(adapter.parent)
    change(adapter / "adapter_config.json", **values)
    with pytest.raises(ConfigError, match=message):
        merge(adapter, "merged")
    assert not Path("merged").exists()
    assert not Path("ran").exists()


def test_valid_adapter_config_merges(adapter):
    change(adapter / "adapter_config.json", target_modules=r".*\.(q_proj|[d-f]x)", megatron_core="megatron.core")
    assert (merge(adapter, "merged") / "model.safetensors").exists()


# --- data


IMAGE = {"_type": "Image"}
FEATURES = {
    "text": {"dtype": "string", "_type": "Value"},
    "image": IMAGE,
    "sound": {"_type": "Audio"},
    "inside": {"deep": IMAGE},
    "listed": {"feature": IMAGE, "_type": "List"},
}
"""Features of a dataset with images and audio, also nested in other values."""


def _media(path: Path, address: str) -> None:
    """Write a Parquet file in the format of `datasets`, with images and audio that refer to `address`."""
    named, kind = {"bytes": None, "path": address}, pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {
            "text": ["a"],
            "image": pa.array([named], kind),
            "sound": pa.array([named], kind),
            "inside": pa.array([{"deep": named}], pa.struct([("deep", kind)])),
            "listed": pa.array([[named]], pa.list_(kind)),
        }
    )
    pq.write_table(
        table.replace_schema_metadata({b"huggingface": json.dumps({"info": {"features": FEATURES}}).encode()}), path
    )


def test_paths_and_addresses_in_rows_are_not_opened(cwd):
    """`datasets` decodes an image by opening the path in its row: a local file or any local address."""
    import datasets

    (cwd / "private.png").write_bytes(b"not for the model")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        for address in (
            f"http://127.0.0.1:{server.getsockname()[1]}/x.png",
            str(cwd / "private.png"),
            "file:///etc/passwd",
        ):
            _media(cwd / "rows.parquet", address)
            rows = list(open_source(SourceConfig(path="rows.parquet")).rows())
            assert [row.value["text"] for row in rows] == ["a"]
            assert not {"image", "sound"} & set(rows[0].value)
            assert rows[0].value["inside"] == {"deep": {"path": address}}
            plain = pq.read_table("rows.parquet").replace_schema_metadata({})
            datasets.Dataset(plain).save_to_disk("saved")
            change(Path("saved/dataset_info.json"), features=FEATURES)
            saved = list(open_source(SourceConfig(path="saved")).rows())
            assert [row.value for row in saved] == [row.value for row in rows]
            shutil.rmtree("saved")
        with pytest.raises(TimeoutError):
            server.accept()


def test_pickles_in_data_are_not_read(cwd):
    payload = pickle.dumps(_Loaded())
    field = pa.field(
        "text",
        pa.string(),
        metadata={b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": payload},
    )
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])], schema=pa.schema([field])), "rows.parquet")
    assert [row.value for row in open_source(SourceConfig(path="rows.parquet")).rows()] == [{"text": "a"}]
    for name in (
        *("rows.pkl", "rows.pt", "rows.npy", "rows.npz", "rows.bin", "rows.joblib", "rows.tar"),
        *("rows.zip", "rows.arrow"),
    ):
        (cwd / name).write_bytes(payload)
        with pytest.raises(DataError, match="no file that fxtune reads"):
            open_source(SourceConfig(path=name))
    for name in ("rows.jsonl", "rows.json", "rows.csv", "rows.txt", "rows.jsonl.gz", "broken.parquet"):
        (cwd / name).write_bytes(payload)
        with contextlib.suppress(DataError):
            list(open_source(SourceConfig(path=name)).rows())
    assert not Path("ran").exists()


def test_dataset_scripts_do_not_run(cwd):
    folder = cwd / "evil"
    folder.mkdir()
    (folder / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    (folder / "dataset_infos.json").write_text("{}")
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    assert [row.value for row in open_source(SourceConfig(path="evil")).rows()] == [{"text": "a"}]
    (folder / "rows.jsonl").unlink()
    (folder / "dataset_infos.json").unlink()
    with pytest.raises(DataError, match="no file that fxtune reads"):
        open_source(SourceConfig(path="evil"))
    assert not Path("ran").exists()


@pytest.mark.parametrize("name", ["../outside.arrow", "/etc/passwd", 7, None])
def test_saved_dataset_may_only_name_files_of_its_folder(name, cwd):
    import datasets

    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk("saved")
    shutil.copy(next(Path("saved").glob("*.arrow")), "outside.arrow")
    change(Path("saved/state.json"), _data_files=[{"filename": name}])
    with pytest.raises(DataError, match="cannot be loaded"):
        open_source(SourceConfig(path="saved"))


def test_forged_token_cache_runs_no_code(cwd, tokenizer):
    """An attacker can compute the name of a cache folder, so its files may hold anything."""
    import numpy as np

    Path("rows.jsonl").write_text('{"text": "a document"}\n' * 4)
    data = DataConfig(sources=[SourceConfig(path="rows.jsonl")], cache_dir="cache")
    table = tokenize(data.sources[0], data, tokenizer, progress=False)
    file = table.folder / "ids.npy"
    size = file.stat().st_size
    del table
    with file.open("wb") as out:
        np.lib.format.write_array(out, np.array([_Loaded()], dtype=object), allow_pickle=True)
    assert file.stat().st_size > 0
    meta = json.loads((file.parent / "table.json").read_text())
    meta["sizes"]["ids.npy"] = file.stat().st_size
    (file.parent / "table.json").write_text(json.dumps(meta))
    assert size != file.stat().st_size
    with contextlib.suppress(UserError, ValueError):
        tokenize(data.sources[0], data, tokenizer, progress=False)
    assert not Path("ran").exists()


@pytest.mark.parametrize("saved", [False, True])
def test_oversized_row_of_a_column_file_is_not_decoded(saved, cwd):
    """30 kB of Parquet may decode to a text of 1 GB, and a tokenizer needs 300 bytes of memory per byte of text."""
    import datasets

    table = pa.table({"text": ["a", "x" * (17 << 20), "b", "c"]})
    if saved:
        datasets.Dataset(table).save_to_disk("rows.parquet")
    else:
        pq.write_table(table, "rows.parquet", compression="zstd")
    rows = list(open_source(SourceConfig(path="rows.parquet")).rows())
    assert [row.value and row.value["text"] for row in rows] == ["a", None, "b", "c"]
    assert [row.where for row in rows] == [f"rows.parquet row {number}" for number in range(1, 5)]
    assert rows[1].error.startswith("a row of 17.0 MiB; the limit is 16 MiB")


# --- a run folder and its checkpoints


def test_pickles_in_a_run_folder_are_not_read(small, cwd):
    small.run.dir, small.checkpoint.every, small.train.max_steps = "run", 1, 2
    small.tracking.wandb.mode = WandbMode.disabled
    train(small)
    Path("run/result.json").unlink()  # the run was killed before its end
    for folder in (Path("run"), Path("run/adapter"), *Path("run/checkpoints").glob("step-*")):
        plant_pickles(folder)
    with contextlib.suppress(StorageError):  # a checkpoint with unknown files is not valid
        train(small)
    for folder in Path("run/checkpoints").glob("step-*"):
        (folder / "weights.safetensors").write_bytes(pickle.dumps(_Loaded()))
        (folder / "state.json").write_bytes(pickle.dumps(_Loaded()))
    with contextlib.suppress(StorageError):
        train(small)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a [x, x]\n"
        + "".join(f"a{n}: &{chr(97 + n)} [{', '.join([f'*{chr(96 + n)}'] * 10)}]\n" for n in range(1, 12)),
        "a: &a {b: *a}\n",
        "!!python/object/apply:os.system ['touch ran']\n",
        "run: !!python/name:os.system\n",
        "[" * 20_000,
        "just text",
    ],
    ids=["million million", "endless", "call", "name", "deep", "text"],
)
def test_malicious_run_config_is_refused_and_runs_no_code(text, cwd):
    Path("run").mkdir()
    Path("run/config.yaml").write_text(text)
    with pytest.raises(StorageError, match="the config of the run there"):  # read on, "million million" never ends
        claim("run", "run", "auto", {"run": {"seed": 1}})
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *(
            (name, os.mkfifo)
            for name in ("config.yaml", "metrics.jsonl", "result.json", ".lock", "adapter", "checkpoints")
        ),
        ("metrics.jsonl", os.mkdir),
        ("result.json", os.mkdir),
        ("checkpoints", Path.touch),
    ],
)
def test_special_file_in_a_run_folder_is_an_error_and_does_not_block(name, make, cwd):
    Path("run").mkdir()
    make(Path("run", name))
    with pytest.raises(StorageError, match=rf"run/{name} is a (pipe|folder|file).*set run\.dir to another"):
        claim("run", "run", "auto", {})


def test_unmounted_checkpoint_disk_is_an_error_at_the_start(cwd):
    """The error comes at the start, not after hours when the last checkpoint cannot be written."""
    Path("run").mkdir()
    Path("run/checkpoints").symlink_to("/scratch/not-mounted")
    with pytest.raises(
        StorageError, match=r"run/checkpoints is a link to /scratch/not-mounted, which is not there\. Mount"
    ):
        claim("run", "run", "auto", {})


def test_forged_metrics_lines_are_dropped(cwd):
    Path("metrics.jsonl").write_text(
        "[" * 200_000 + '\n{"train/step": "x"}\n{"train/step": 1e999}\n[]\n{"train/step": 1}\n'
    )
    with Tracker(TrackingConfig(display=DisplayKind.none), cwd, "name", {}, resume_step=1):
        assert Path("metrics.jsonl").read_text() == '{"train/step": 1}\n'


def test_forged_wandb_id_is_ignored(cwd):
    Path("mine").write_text("private")
    for number, make in enumerate((os.mkfifo, lambda path: Path(path).symlink_to(cwd / "mine"))):
        Path(f"run{number}/wandb").mkdir(parents=True)
        make(f"run{number}/wandb/id")
        assert re.fullmatch("[a-z0-9]{8}", run_id(Path(f"run{number}"), "wandb", None))
    assert Path("mine").read_text() == "private"


@pytest.mark.parametrize("text", ["[" * 200_000, '"x"'], ids=["deep", "text"])
def test_malicious_result_file_is_refused(text, cwd):
    found = claim("run", "run", "auto", {})
    Path("run/result.json").write_text(text)
    with pytest.raises(StorageError, match=r"result\.json, which says that this run is finished, cannot be read"):
        RunFolder.result(found)
    found.release()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rows": {"training": "x"}}, "`rows` are no numbers of rows"),
        ({"optimizer": {"groups": [1]}}, "its state is not as fxtune writes it"),
    ],
)
def test_forged_state_is_a_checkpoint_error(values, message, begun, cwd):
    """The manifest is valid for the forged state."""
    shutil.copytree(begun.run.dir, "run")
    begun = dataclasses.replace(begun, run=dataclasses.replace(begun.run, dir="run"))
    folder = Path("run/checkpoints/step-00000001")
    change(folder / "state.json", **values)
    text, manifest = (folder / "state.json").read_bytes(), json.loads((folder / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StorageError, match=message):
        train(begun)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The config of a run that was killed after its first step."""
    home = tmp_path_factory.mktemp("begun")
    (home / "rows.jsonl").write_text('{"text": "a b c"}\n' * 4)
    config = Config(
        data=DataConfig(
            sources=[SourceConfig(path=str(home / "rows.jsonl"))], cache_dir=str(home / "cache"), sequence_length=16
        ),
        tracking=TrackingConfig(display=DisplayKind.none),
        train=TrainConfig(max_steps=1, micro_batch_size=1, global_batch_size=1),
    )
    config.run.dir, config.techniques.lora.enabled = str(home / "run"), True
    train(config)
    (home / "run" / "result.json").unlink()
    return config


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "a: b",
        "a: [",
        "tracking: {wandb: 3}",
        "run: {name: x}",
        "[" * 20_000,
        "!!python/object/apply:os.system ['touch ran']",
        "a: &a [x]\nb: [*a, *a]",
        None,
    ],
)
def test_malicious_run_folder_is_refused_by_sync(text, cwd, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    Path("run").mkdir()
    Path("run/metrics.jsonl").touch()
    if text is None:
        os.mkfifo("run/config.yaml")
    else:
        Path("run/config.yaml").write_text(text)
    with pytest.raises(StorageError, match=r"run/config\.yaml"):
        sync.run("run")
    assert not Path("ran").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", ".lock", "quarantine.jsonl", "wandb", "skipped"])
def test_run_folder_with_links_out_of_it_is_not_written_to(name, cwd):
    (cwd / "mine").mkdir()
    (cwd / "mine" / "notes").write_text("mine")
    Path("run").mkdir()
    Path("run", name).symlink_to(cwd / "mine" if name in ("wandb", "skipped") else cwd / "mine" / "notes")
    with pytest.raises(StorageError, match="out of the run folder"):
        claim("run", "run", "auto", {})
    assert [path.name for path in (cwd / "mine").iterdir()] == ["notes"]
    assert (cwd / "mine" / "notes").read_text() == "mine"


def test_common_links_in_a_run_folder_stay(cwd):
    (cwd / "disk").mkdir()
    (cwd / "real").mkdir()
    (cwd / "run").symlink_to("real")
    Path("run/checkpoints").symlink_to(cwd / "disk")
    Path("run/latest").symlink_to("adapter")
    claim("run", "run", "auto", {}).release()
    links = {name: os.readlink(name) for name in ("run", "run/checkpoints", "run/latest")}
    assert links == {"run": "real", "run/checkpoints": str(cwd / "disk"), "run/latest": "adapter"}


def test_saving_follows_no_link_out_of_the_run_folder(stranger, cwd):
    """An attacker with write access to a run folder creates links at the paths of the model files."""
    config = ModelConfig(path=str(stranger))
    model, tokenizer = (
        models.build(config, models.load_config(config), World(torch.device("cpu")), 0),
        load_tokenizer(config),
    )
    (cwd / "private").mkdir()
    (cwd / "private" / "notes").write_text("mine")
    for name in ("model", ".model.partial", ".model.old"):
        run = cwd / f"run{name}"
        run.mkdir()
        (run / name).symlink_to(cwd / "private")
        with contextlib.suppress(StorageError):
            save_model(model, tokenizer, run / "model")
        assert [path.name for path in (cwd / "private").iterdir()] == ["notes"]
        assert (cwd / "private" / "notes").read_text() == "mine"


# --- the working directory, and fxtune's own code


@pytest.mark.vital
def test_working_directory_modules_are_not_imported(cwd):
    """An untrusted data folder may contain a wandb.py, which `python -m` would import in place of the library."""
    for name in (
        *("wandb", "torch", "numpy", "yaml", "transformers", "datasets", "peft", "hydra", "omegaconf", "jinja2"),
        *("filelock", "safetensors", "tokenizers", "rich", "hydra_plugins/evil", "multiprocessing", "fxtune_plugin"),
    ):
        file = cwd / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"import pathlib\npathlib.Path({str(cwd / 'ran')!r}).write_text({name!r})\n")
    (cwd / "rows.jsonl").write_text('{"text": "a b c"}\n' * 8)
    words = [
        *("data.sources=[{path: rows.jsonl}]", "train.max_steps=1", "data.packing=false", "techniques=lora"),
        *("run.device=cpu", "loader.num_workers=1", "data.cache_dir=cache", "data.sequence_length=256"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "fxtune", *words],
        capture_output=True,
        text=True,
        timeout=600,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr
    assert not (cwd / "ran").exists(), (cwd / "ran").read_text()


SAFE = {
    ("fxtune/data/tokenized/tokenize.py", "pickle.loads"),
    ("fxtune/data/tokenized/tokenize.py", "pickle.dumps"),
    ("fxtune/plugins.py", "compile"),
    ("fxtune/plugins.py", "exec"),
    ("fxtune/upstream/llama_cpp.py", "runpy.run_path"),
}
"""Pickles between processes of the same run; a plugin, and llama.cpp's converter, which the command line or the
environment names and a recipe cannot."""
DANGEROUS = re.compile(
    r"(pickle|marshal|shelve|joblib|dill|cloudpickle)\.(load|loads|dump|dumps|Unpickler)|torch\.load|np\.load"
    r"|(?:yaml\.)(load|full_load|unsafe_load|load_all)|os\.(system|popen)|tarfile\..*|zipfile\..*|shutil\.unpack_archive"
    r"|eval|exec|compile|hydra\.utils\..*|instantiate|runpy\..*"
)


def test_source_has_no_call_that_runs_data_as_code():
    package, found = Path(models.__file__).parents[1], set()
    for file in package.rglob("*.py"):
        name = str(file.relative_to(package.parent))
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called, words = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if DANGEROUS.fullmatch(called) and not (called == "np.load" and "allow_pickle" not in words):
                found.add((name, called))
            assert words.get("shell", "False") == "False", f"{name}:{node.lineno} starts a shell"
            assert words.get("trust_remote_code", "False") != "True", f"{name}:{node.lineno} trusts remote code"
            assert words.get("weights_only", "True") == "True", f"{name}:{node.lineno} unpickles"
    assert found == SAFE
