"""Trains with one peer, for bench_peers.py: `python scripts/bench/peer_tools.py '{"tool": "trl", ...}'`.

It imports nothing of fxtune. The peer's own trainer runs its own loop. A callback records the end of each step with a
CUDA event and synchronizes the device after the second step, and before the first and after the last measured step.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import companions
from shapes import ENDS, with_positions

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DELTA = ["in_proj_qkv", "in_proj_z", "out_proj"]
"""The linears of a layer with the gated delta rule."""
EXPERTS = ["gate_up_proj", "down_proj"]
"""The experts' tensors of a mixture, as transformers names them."""
NEVER = 10**9


def adapters(request: dict[str, Any]) -> dict[str, Any]:
    """The LoRA settings of both peers: adapters on all linears of a block of the language model, and on the experts of
    a mixture."""
    common = dict(r=16, lora_alpha=32, lora_dropout=0.0, bias="none")
    shape = request["shape"]
    linears = [*LINEARS, *DELTA * ("linear_key_head_dim" in shape.get("text_config", shape))]
    if "vision_config" in shape:
        if request["tool"] == "unsloth":
            return dict(common, finetune_vision_layers=False, finetune_language_layers=True)
        # The tower has linears of the same names.
        return dict(common, target_modules=rf".*\.language_model\..*\.({'|'.join(linears)})")
    if not is_mixture(shape):
        return dict(common, target_modules=linears)
    if request["tool"] == "unsloth":
        return dict(common, target_modules=[*linears, *EXPERTS])
    # A shared expert has linears of the MLP's names.
    shares = "shared_expert_intermediate_size" in shape or shape["model_type"] == "llama4_text"
    linears = linears if shares else linears[:4]
    return dict(common, target_modules=linears, target_parameters=[f"mlp.experts.{name}" for name in EXPERTS])


def is_mixture(shape: dict[str, Any]) -> bool:
    return bool({"num_experts", "num_local_experts"} & shape.keys())


def main(request: dict[str, Any]) -> None:
    if request["tool"] == "write":
        write(request)
        return
    if request["tool"] == "unsloth":
        os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
        import unsloth  # noqa: F401  before transformers, which it patches
    import torch
    from transformers import AutoTokenizer

    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():  # torchrun has started it
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    images = "vision_config" in request["shape"]
    tokenizer = (read_processor if images else AutoTokenizer.from_pretrained)(request["tokenizer"])
    if not images:
        tokenizer.model_max_length = request["length"]
    clock = make_clock(request)
    if request["pairs"] or request["task"]:
        if request["task"]:
            request["adapters"] = adapters(request)
            trainer = companions.trainer(request, common_settings(request), clock)
            count_tokens(trainer, clock, "compute_loss")  # TRL's training_step gets rows without tensors
        else:
            trainer = preference_trainer(request, tokenizer, clock)
            count_tokens(trainer, clock)
        trainer.train()
        Path(request["out"]).write_text(json.dumps(results(request, trainer, clock)))
        return
    from trl import SFTTrainer

    rows = image_rows(request) if images else dataset(request)
    common: dict[str, Any] = dict(args=settings(request), train_dataset=rows, callbacks=[clock])
    if request["tool"] == "trl":
        from peft import LoraConfig

        model = random_model(request["shape"], request["length"], attention(request))
        trainer = SFTTrainer(
            model=model,
            processing_class=tokenizer,
            peft_config=None if request["full"] else LoraConfig(task_type="CAUSAL_LM", **adapters(request)),
            **common,
        )
    else:
        from unsloth import FastLanguageModel, FastVisionModel
        from unsloth.trainer import UnslothVisionDataCollator

        again = {"full": True, "unsloth": "unsloth", "none": False}[request["checkpointing"]]
        kind = FastVisionModel if images else FastLanguageModel
        model, tokenizer = kind.from_pretrained(
            request["model"],
            max_seq_length=request["length"],
            dtype=torch.bfloat16,
            load_in_4bit=False,
            local_files_only=True,
            **(dict(use_gradient_checkpointing=again) if images else {}),
        )
        draw_weights(model)
        model = kind.get_peft_model(model, random_state=0, use_gradient_checkpointing=again, **adapters(request))
        # "max": images keep their sizes. By default the collator makes them smaller.
        if images:
            common["data_collator"] = UnslothVisionDataCollator(model, tokenizer, resize="max")
        trainer = SFTTrainer(model=model, processing_class=tokenizer, **common)
    count_tokens(trainer, clock)
    trainer.train()
    accumulated = trainer.args.gradient_accumulation_steps
    assert accumulated == micro_batches(request), "the peer changed the batch size, so the result is not valid"
    found = results(request, trainer, clock)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(request["out"]).write_text(json.dumps(found))


def settings(request: dict[str, Any]) -> Any:
    from trl import SFTConfig

    options: dict[str, Any] = {} if request["chats"] else dict(dataset_kwargs={"skip_prepare_dataset": True})
    if "fsdp" in request:
        options["fsdp"] = "full_shard auto_wrap"
        options["fsdp_config"] = dict(
            version=2,
            reshard_after_forward=True,
            auto_wrap_policy="TRANSFORMER_BASED_WRAP",
            transformer_layer_cls_to_wrap=["LlamaDecoderLayer"],
            activation_checkpointing=request["fsdp"] == "recompute",
        )
    rows = dict(per_device_train_batch_size=request["rows"], max_length=request["length"], packing=request["chats"])
    if "micro" in request:
        rows = dict(per_device_train_batch_size=int(request["micro"]), max_length=request["length"])
    if "micro" in request and not request["chats"]:
        rows, options = dict(rows, max_length=None), {}
        if request["tool"] == "unsloth":
            skipped = dict(skip_prepare_dataset=True)
            options = dict(remove_unused_columns=False, dataset_text_field="", dataset_kwargs=skipped)
    return SFTConfig(**common_settings(request), **rows, **options)


def micro_batches(request: dict[str, Any]) -> int:
    """Micro-batches of a step."""
    return int(request["step_documents"]) // int(request["micro"]) if "micro" in request else 1


def attention(request: dict[str, Any]) -> Any:
    """The attention of the model, or of each of its parts, as transformers takes it."""
    of_model = request.get("attention", "sdpa")
    return (
        {"": of_model, "text_config": of_model, "vision_config": request["tower"]} if "tower" in request else of_model
    )


def common_settings(request: dict[str, Any]) -> dict[str, Any]:
    """The arguments of TRL's trainers that all cases share."""
    import torch

    cuda = torch.cuda.is_available()
    return dict(
        output_dir=str(Path(request["out"]).with_suffix("")),
        gradient_accumulation_steps=micro_batches(request),
        max_steps=request["steps"] + request["warm_up"],
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=request.get("checkpointing") == "full",
        use_liger_kernel=request.get("liger") == "on" and cuda,
        report_to="none",
        logging_steps=NEVER,
        logging_first_step=True,
        save_strategy="no",
        optim="adamw_torch_fused",
        learning_rate=1e-4,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        dataloader_num_workers=max(2, request["workers"]) if cuda else 0,
        seed=0,
        disable_tqdm=True,
    )


def preference_trainer(request: dict[str, Any], tokenizer: Any, clock: Any) -> Any:
    """TRL's DPOTrainer on the ids of the file, whose own preparation would tokenize texts."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    class OnIds(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *rest: Any, **named: Any) -> Any:
            return dataset

    with open(request["documents"], encoding="utf-8") as file:
        groups = [json.loads(line)["documents"] for line in file]
    rows = []
    for chosen, rejected in groups:
        prompt = sum(label == -100 for label in chosen["labels"])
        ids = dict(prompt_ids=chosen["input_ids"][:prompt], chosen_ids=chosen["input_ids"][prompt:])
        rows.append(dict(ids, rejected_ids=rejected["input_ids"][prompt:], prompt="", chosen="", rejected=""))
    args = DPOConfig(
        **common_settings(request),
        max_length=request["length"],
        per_device_train_batch_size=request["pairs"],
        precompute_ref_log_probs=request["stored"],
        beta=0.1,
    )
    return OnIds(
        model=random_model(request["shape"], request["length"], request.get("attention", "sdpa")),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", **adapters(request)),
        callbacks=[clock],
    )


def dataset(request: dict[str, Any]) -> Any:
    """The rows of the file: chats as text, which the peer tokenizes and packs; token rows with a label for every
    token.
    """
    from datasets import Dataset

    with open(request["documents"], encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    if request["chats"]:
        return Dataset.from_list(rows)
    ids = [row["input_ids"] for row in rows]
    return Dataset.from_dict({"input_ids": ids, "labels": ids, "attention_mask": [[1] * len(row) for row in ids]})


def image_rows(request: dict[str, Any]) -> Any:
    """The chats of the file as prompts and completions; only the completions are supervised. Images are decoded
    when a row is read."""
    from datasets import Dataset, Image

    file = Path(request["documents"])
    rows = []
    for line in file.read_text().splitlines():
        row = json.loads(line)
        images = [str(file.parent / name) for name in row["images"]]
        rows.append(dict(prompt=row["messages"][:-1], completion=row["messages"][-1:], images=images))
    return Dataset.from_list(rows).cast_column("images", [Image()])


def read_processor(folder: str) -> Any:
    """The processor of a case with images. Without torchvision, which transformers needs for videos, Qwen2.5-VL's
    without videos."""
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, Qwen2_5_VLProcessor
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        return AutoProcessor.from_pretrained(folder)

    class WithoutVideos(Qwen2_5_VLProcessor):
        def check_argument_for_proper_class(self, name: str, argument: Any) -> type:
            return type(argument)

    images, tokenizer = AutoImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return WithoutVideos(images, tokenizer, images, chat_template=tokenizer.chat_template)


def random_model(shape: dict[str, Any], length: int, attention: Any, device: str | None = None, head: str = "") -> Any:
    """A model of this shape with transformers' random weights, in bfloat16 on a GPU or in float32 on a CPU. `device`:
    None: the GPU, or the CPU of a machine without one. `head`: as in write_model()."""
    import torch
    import transformers
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    values, kind = {**shape}, AutoModelForImageTextToText
    if "vision_config" not in shape:
        values, kind = with_positions({**shape, **ENDS}, length), AutoModelForCausalLM
    if head:
        kind = getattr(transformers, head)
        values["num_labels"] = companions.CLASSES
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with torch.device(device):
        return kind.from_config(
            config, dtype=torch.float32 if device == "cpu" else torch.bfloat16, attn_implementation=attention
        )


def write_model(shape: dict[str, Any], length: int, folder: Path, tokenizer: Path, head: str = "") -> Path:
    """The folder of a tokenizer and of a model. If it does not exist, another process writes it. With `head`, a class of
    transformers, weights are random. Without it they are zeros; after a tool has read the model, draw_weights() gives it
    random weights."""
    if not (folder / "complete").exists():
        request = dict(tool="write", shape=shape, length=length, model=str(folder), tokenizer=str(tokenizer))
        request["head"] = head
        subprocess.run([sys.executable, __file__, json.dumps(request)], check=True, stdout=subprocess.DEVNULL)
    return folder


def write(request: dict[str, Any]) -> None:
    """Write the folder of write_model(). Its file of weights is a hole of zeros, as long as the weights in bfloat16. A hole
    takes neither time nor space: to write the 57 GiB of Qwen3-30B-A3B would take minutes."""
    from transformers import AutoTokenizer

    folder = Path(request["model"])
    if head := request.get("head"):
        random_model(request["shape"], request["length"], "eager", head=head).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(request["tokenizer"], model_max_length=request["length"])
        if head != "AutoModelForCausalLM":
            tokenizer.chat_template = None  # sentence-transformers would write each text as a chat
        tokenizer.save_pretrained(folder)
        (folder / "complete").touch()
        return
    if "vision_config" in request["shape"]:
        shutil.copytree(request["tokenizer"], folder, dirs_exist_ok=True)
    else:
        AutoTokenizer.from_pretrained(request["tokenizer"]).save_pretrained(folder)
    model = random_model(request["shape"], request["length"], "eager", "meta")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in model.state_dict().items():
        if name not in model.all_tied_weights_keys:
            begin, end = end, end + 2 * weight.numel()
            header[name] = dict(dtype="BF16", shape=list(weight.shape), data_offsets=[begin, end])
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "complete").touch()


def draw_weights(model: Any) -> None:
    """Give a model of write_model() random weights: matrices from a normal distribution, ones for norms, zeros for
    biases. A card multiplies zeros with less power, so it would be faster than with a trained model's weights."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1 and name.endswith("weight"):
                weight.fill_(1.0)
            elif weight.dim() > 1 and "bias" not in name:
                weight.normal_(std=0.02)


def make_clock(request: dict[str, Any]) -> Any:
    """A callback that measures steps.

    The class is defined here because transformers must be imported after Unsloth.
    """
    import torch
    from transformers import TrainerCallback

    first_step, last_step = request["warm_up"], request["warm_up"] + request["steps"]
    cuda = torch.cuda.is_available()

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[Any] = []
            self.tokens: list[torch.Tensor] = []
            self.seconds = 0.0
            self.waited = 0.0
            """Seconds that the loop waited for data, among the measured ones."""
            self.second_step_at = 0.0
            """Seconds since 1970 at the end of the second step."""

        def mark(self) -> None:
            if cuda:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                self.marks.append(event)
            else:
                self.marks.append(time.perf_counter())

        def wait(self) -> float:
            if cuda:
                torch.cuda.synchronize()
            return time.perf_counter()

        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == first_step:
                self.seconds = -self.wait()
                self.tokens.clear()
                self.waited = 0.0
                self.mark()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == 2:
                self.wait()
                self.second_step_at = time.time()
            if state.global_step > first_step:
                self.mark()
            if state.global_step == last_step:
                self.seconds += self.wait()
            if state.global_step in (first_step, last_step):
                control.should_log = True  # the mean loss since the last log line

        def step_seconds(self) -> list[float]:
            """Seconds of each measured step."""
            return [first.elapsed_time(last) / 1e3 if cuda else last - first for first, last in pairwise(self.marks)]

    return Clock()


def count_tokens(trainer: Any, clock: Any, hook: str = "training_step") -> None:
    """Count the tokens of each micro-batch that are not padding, on the device and without a synchronization, and the
    seconds that the loop waits for data. `hook`: the trainer's method that gets a micro-batch."""
    hooked, get_batch_samples = getattr(trainer, hook), trainer.get_batch_samples

    def counting(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        clock.tokens.append(companions.unpadded(inputs))
        return hooked(model, inputs, *rest, **named)

    def waiting(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        found = get_batch_samples(*given, **named)
        clock.waited += time.perf_counter() - began
        return found

    setattr(trainer, hook, counting)
    trainer.get_batch_samples = waiting


def results(request: dict[str, Any], trainer: Any, clock: Any) -> dict[str, Any]:
    import numpy as np
    import torch

    cuda = torch.cuda.is_available()
    tokens, seconds = sum(int(count) for count in clock.tokens), clock.step_seconds()
    assert len(seconds) == request["steps"], "a step is missing"
    assert len(clock.tokens) == request["steps"] * micro_batches(request), "a step had other micro-batches"
    if request["step_tokens"]:
        assert tokens == request["steps"] * request["step_tokens"], (
            "the peer changed the rows, so the result is not valid"
        )
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    if torch.distributed.is_initialized():
        device = "cuda" if cuda else "cpu"
        all_tokens, fullest = torch.tensor(float(tokens), device=device), torch.tensor(peak, device=device)
        torch.distributed.all_reduce(all_tokens)
        torch.distributed.all_reduce(fullest, torch.distributed.ReduceOp.MAX)
        tokens, peak = int(all_tokens), float(fullest)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    spread = np.percentile(seconds, (5, 50, 95))
    return {
        "tokens_per_second": tokens / clock.seconds,
        **dict(zip(("step_seconds_p5", "step_seconds", "step_seconds_p95"), map(float, spread), strict=True)),
        "tokens_a_step": tokens / request["steps"],
        "second_step_at": clock.second_step_at,
        "first_loss": losses[0],
        "loss": losses[-1],
        "memory_gib": peak if cuda else None,
        "data_wait": clock.waited / clock.seconds,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
