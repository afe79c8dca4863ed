"""llama.cpp: built from its source package for slow tests, and a stand-in of its tools for others.

The stand-in converts by PyPI's gguf, tokenizes by the vocabulary of the file, and serves its weights by transformers.
It knows Llama alone, and no tokenizer, as llama.cpp does not know builtin:tiny's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

VERSION = "0.3.36"
"""Of llama-cpp-python, whose source package has the source of llama.cpp."""
TOOLS = ("llama-quantize", "llama-server", "llama-tokenize")
CONVERTERS = ("convert_hf_to_gguf", "convert_lora_to_gguf")
CONVERSION = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("BPE pre-tokenizer was not recognized - update get_vocab_base_pre()")
"""


def real_llama_cpp() -> Path:
    """The folder of llama.cpp with its built tools, made once a machine: about half an hour on two cores."""
    folder = Path.home() / ".cache" / "fxtune-tests" / f"llama-cpp-{VERSION}"
    source = folder / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    if (folder / "ready").exists():
        return source
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
    subprocess.run([*pip, f"llama-cpp-python=={VERSION}"], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    options = ["-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF"]
    build = ["cmake", "-S", str(source), "-B", str(source / "build"), "-DCMAKE_BUILD_TYPE=Release", *options]
    subprocess.run(build, check=True)
    make = ["cmake", "--build", str(source / "build"), "-j", str(os.cpu_count() or 1), "-t", *TOOLS]
    subprocess.run(make, check=True)
    (folder / "ready").touch()
    return source


def fake_llama_cpp(folder: Path, *faults: str) -> Path:
    """A folder with stand-ins of llama.cpp's tools. `faults`: what goes wrong, by name:

    other_ids      with each pre-tokenizer, a text becomes other tokens than in training
    other_prompt   the server writes another text around messages
    endless        no answer ends
    babbles        the weights are others
    nulls          log-probabilities are null, as JSON has NaN
    dies           the server's process ends at its first answer
    without NAME   there is no tool of this name
    """
    for name in (*CONVERTERS, *TOOLS):
        if f"without {name}" in faults:
            continue
        script = folder / f"{name}.py" if name in CONVERTERS else folder / "build" / "bin" / name
        script.parent.mkdir(parents=True, exist_ok=True)
        function = name.removeprefix("llama-")
        script.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
            f"from support import llama_cpp\nllama_cpp.{function}(sys.argv[1:], {faults!r})\n"
        )
        script.chmod(0o755)
    (folder / "conversion").mkdir()
    (folder / "conversion" / "__init__.py").write_text(CONVERSION)
    return folder


def convert_hf_to_gguf(argv: list[str], faults: tuple[str, ...]) -> None:
    import gguf
    from conversion import TextModel  # beside the script

    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--outfile")
    parser.add_argument("--outtype", choices=["f32", "f16", "bf16"])
    parser.add_argument("--vocab-only", action="store_true")
    given = parser.parse_args(argv)
    config = json.loads((given.model / "config.json").read_text())
    if (name := config["architectures"][0]) != "LlamaForCausalLM":
        print(f"ERROR:hf-to-gguf:Model {name} is not supported")
        sys.exit(1)
    tokenizer = json.loads((given.model / "tokenizer.json").read_text())
    pre = TextModel().get_vocab_base_pre(None)
    writer = gguf.GGUFWriter(given.outfile, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_string("stand_in.config", json.dumps(config))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    vocabulary = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template((given.model / "chat_template.jinja").read_text())
    if not given.vocab_only:
        import torch
        from safetensors.torch import load_file

        for key, tensor in load_file(given.model / "model.safetensors").items():
            writer.add_tensor(key, tensor.to(torch.float16).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert_lora_to_gguf(argv: list[str], faults: tuple[str, ...]) -> None:
    Path(argv[argv.index("--outfile") + 1]).write_bytes(b"GGUF")


def quantize(argv: list[str], faults: tuple[str, ...]) -> None:
    source, target, kind = argv
    if kind not in ("Q8_0", "Q4_K_M"):
        print(f"main: invalid ftype '{kind}'")
        sys.exit(1)
    shutil.copyfile(source, target)


def fields(file: str) -> dict[str, Any]:
    """The metadata of a GGUF file."""
    from gguf import GGUFReader

    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}


def tokenizer_of(found: dict[str, Any], faults: tuple[str, ...]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = found["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in found["tokenizer.ggml.merges"]]
    made = Tokenizer(
        models.BPE({token: at for at, token in enumerate(tokens)}, [] if "other_ids" in faults else merges)
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [token for token, kind in zip(tokens, found["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    )
    return made


def tokenize(argv: list[str], faults: tuple[str, ...]) -> None:
    model, text = argv[argv.index("-m") + 1], argv[argv.index("-f") + 1]
    with open(text, encoding="utf-8", newline="") as file:
        print(tokenizer_of(fields(model), faults).encode(file.read()).ids)


def server(argv: list[str], faults: tuple[str, ...]) -> None:
    """Serve a GGUF file of the stand-in until the process is killed."""
    import torch
    from gguf import GGUFReader
    from transformers import LlamaConfig, LlamaForCausalLM

    file, port = argv[argv.index("-m") + 1], int(argv[argv.index("--port") + 1])
    found = fields(file)
    tokenizer = tokenizer_of(found, ())
    model = LlamaForCausalLM(LlamaConfig.from_dict(json.loads(found["stand_in.config"]))).eval()
    weights = {
        tensor.name: torch.from_numpy(np.array(tensor.data)).float().reshape(tensor.shape[::-1].tolist())
        for tensor in GGUFReader(file).tensors
    }
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    if "babbles" in faults:
        model.model.norm.weight.data.mul_(-1)
    end = found["tokenizer.ggml.eos_token_id"]

    def complete(given: dict[str, Any]) -> dict[str, Any]:
        ids, written, told = list(given["prompt"]), [], []
        assert given["repeat_penalty"] == 1, "a default of the file would change answers"
        for _ in range(given["n_predict"]):
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            known = logits.log_softmax(-1)
            for token, bias in given.get("logit_bias", []):
                logits[token] += bias
            if "endless" in faults:
                logits[end] = -1e9
            token = int(logits.argmax())
            top = known.topk(given["n_probs"])
            likely = [
                {"id": int(at), "logprob": None if "nulls" in faults else float(value)}
                for value, at in zip(*top, strict=True)
            ]
            told.append({"logprob": float(known[token]), "top_logprobs": likely})
            ids.append(token)
            written.append(token)
            if token == end:
                break
        stop = "eos" if written[-1] == end else "limit"
        return {"tokens": written, "stop_type": stop, "completion_probabilities": told}

    def template(given: dict[str, Any]) -> dict[str, Any]:
        from transformers.utils.chat_template_utils import render_jinja_template

        told = dict(itertools.pairwise(argv))
        source, variables = found["tokenizer.chat_template"], json.loads(told.get("--chat-template-kwargs", "{}"))
        ((text,), _) = render_jinja_template(
            [given["messages"]], chat_template=source, add_generation_prompt=True, **variables
        )
        return {"prompt": " " * ("other_prompt" in faults) + text}

    calls = {
        "/apply-template": template,
        "/tokenize": lambda given: {"tokens": tokenizer.encode(given["content"]).ids},
        "/completion": (lambda given: os._exit(1)) if "dies" in faults else complete,
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"status": "ok"})

        def do_POST(self) -> None:
            with torch.no_grad():
                self.reply(calls[self.path](json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def reply(self, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
