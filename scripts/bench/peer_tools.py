"""Trains with one peer, for bench_peers.py: `python scripts/bench/peer_tools.py '{"tool": "trl", ...}'`.

It imports nothing of fxtune. The peer's own trainer runs its own loop. A callback records the end of each step with a
CUDA event and synchronizes the device after the second step, and before the first and after the last measured step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["gate_up_proj", "down_proj"]
"""The experts' tensors of a mixture, as transformers names them."""
NEVER = 10**9


def adapters(request: dict[str, Any]) -> dict[str, Any]:
    """The LoRA settings of both peers: adapters on all linears of a block, and on the experts of a mixture."""
    common = dict(r=16, lora_alpha=32, lora_dropout=0.0, bias="none")
    if "num_experts" not in request["shape"]:
        return dict(common, target_modules=LINEARS)
    if request["tool"] == "unsloth":
        return dict(common, target_modules=[*LINEARS, *EXPERTS])
    return dict(common, target_modules=LINEARS[:4], target_parameters=[f"mlp.experts.{name}" for name in EXPERTS])


def main(request: dict[str, Any]) -> None:
    if request["tool"] == "write":
        write(request)
        return
    if request["tool"] == "unsloth":
        os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
        import unsloth  # noqa: F401  before transformers, which it patches
    import torch
    from transformers import AutoTokenizer
    from trl import SFTTrainer

    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():  # torchrun has started it
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    tokenizer = AutoTokenizer.from_pretrained(request["tokenizer"])
    tokenizer.model_max_length = request["length"]
    clock = make_clock(request)
    if request["pairs"]:
        trainer = preference_trainer(request, tokenizer, clock)
        count_tokens(trainer, clock)
        trainer.train()
        Path(request["out"]).write_text(json.dumps(results(request, trainer, clock)))
        return
    common: dict[str, Any] = dict(args=settings(request), train_dataset=dataset(request), callbacks=[clock])
    if request["tool"] == "trl":
        from peft import LoraConfig

        model = random_model(request["shape"], request["length"], request.get("attention", "sdpa"))
        trainer = SFTTrainer(
            model=model,
            processing_class=tokenizer,
            peft_config=None if request["full"] else LoraConfig(task_type="CAUSAL_LM", **adapters(request)),
            **common,
        )
    else:
        from unsloth import FastLanguageModel

        model, tokenizer = FastLanguageModel.from_pretrained(
            request["model"],
            max_seq_length=request["length"],
            dtype=torch.bfloat16,
            load_in_4bit=False,
            local_files_only=True,
        )
        model = FastLanguageModel.get_peft_model(
            model,
            random_state=0,
            use_gradient_checkpointing={"full": True, "unsloth": "unsloth", "none": False}[request["checkpointing"]],
            **adapters(request),
        )
        trainer = SFTTrainer(model=model, processing_class=tokenizer, **common)
    count_tokens(trainer, clock)
    trainer.train()
    assert trainer.args.gradient_accumulation_steps == 1, "the peer changed the batch size, so the result is not valid"
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
    return SFTConfig(
        **common_settings(request),
        per_device_train_batch_size=request["rows"],
        max_length=request["length"],
        packing=request["chats"],
        **options,
    )


def common_settings(request: dict[str, Any]) -> dict[str, Any]:
    """The arguments of TRL's trainers that all cases share."""
    import torch

    cuda = torch.cuda.is_available()
    return dict(
        output_dir=str(Path(request["out"]).with_suffix("")),
        gradient_accumulation_steps=1,
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
        dataloader_num_workers=2 if cuda else 0,
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


def random_model(shape: dict[str, Any], length: int, attention: str) -> Any:
    """A model of this shape with transformers' random weights, in bfloat16 on a GPU or in float32 on a CPU."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = {**shape, "max_position_embeddings": max(length, shape["max_position_embeddings"])}
    config = CONFIG_MAPPING[values.pop("model_type")](**values, bos_token_id=None, eos_token_id=2, pad_token_id=0)
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if cuda else torch.float32, attn_implementation=attention
        )


def write_model(shape: dict[str, Any], length: int, folder: Path, tokenizer: Path) -> Path:
    """The folder of a random model and a tokenizer. If it does not exist, another process writes it."""
    if not (folder / "complete").exists():
        request = dict(tool="write", shape=shape, length=length, model=str(folder), tokenizer=str(tokenizer))
        subprocess.run([sys.executable, __file__, json.dumps(request)], check=True, stdout=subprocess.DEVNULL)
    return folder


def write(request: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    folder = Path(request["model"])
    random_model(request["shape"], request["length"], "eager").save_pretrained(folder)
    AutoTokenizer.from_pretrained(request["tokenizer"]).save_pretrained(folder)
    (folder / "complete").touch()


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


def count_tokens(trainer: Any, clock: Any) -> None:
    """Count the tokens of each micro-batch that are not padding, on the device and without a synchronization."""
    import torch

    training_step = trainer.training_step

    def counting_step(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        masked = mask is not None and mask.shape == ids.shape
        clock.tokens.append(mask.sum() if masked else torch.tensor(ids.numel()))
        return training_step(model, inputs, *rest, **named)

    trainer.training_step = counting_step


def results(request: dict[str, Any], trainer: Any, clock: Any) -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    tokens, seconds = sum(int(count) for count in clock.tokens), clock.step_seconds()
    assert len(clock.tokens) == len(seconds) == request["steps"], "a step was not one micro-batch"
    if not request["chats"]:
        assert tokens == request["steps"] * request["rows"] * request["length"], (
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
    return {
        "tokens_per_second": tokens / clock.seconds,
        "step_seconds": statistics.median(seconds),
        "step_seconds_p5": min(seconds),
        "step_seconds_p95": max(seconds),
        "tokens_a_step": tokens / request["steps"],
        "second_step_at": clock.second_step_at,
        "first_loss": losses[0],
        "loss": losses[-1],
        "memory_gib": peak if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
