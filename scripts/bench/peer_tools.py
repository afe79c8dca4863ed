"""One peer's training run in this process, for bench_peers.py: `python scripts/bench/peer_tools.py '{"tool": "trl", ...}'`.

Nothing of fxtune is imported here. A peer's own trainer runs its own loop; a callback marks the ends of steps on the device's
clock and waits for the device at the beginning and at the end of the measured ones.
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
LORA = dict(r=16, lora_alpha=32, target_modules=LINEARS, bias="none")
"""lora_dropout is 0 in both libraries' defaults, and given all the same."""
NEVER = 10**9


def main(asked: dict[str, Any]) -> None:
    if asked["tool"] == "write":
        write(asked)
        return
    if asked["tool"] == "unsloth":
        os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
        import unsloth  # noqa: F401  before transformers, which it changes
    import torch
    from transformers import AutoTokenizer
    from trl import SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(asked["tokenizer"])
    tokenizer.model_max_length = asked["length"]
    clock = make_clock(asked)
    common: dict[str, Any] = dict(args=settings(asked), train_dataset=dataset(asked), callbacks=[clock])
    if asked["tool"] == "trl":
        from peft import LoraConfig

        model = random_model(asked["shape"], asked["length"], asked.get("attention", "sdpa"))
        trainer = SFTTrainer(
            model=model,
            processing_class=tokenizer,
            peft_config=LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **LORA),
            **common,
        )
    else:
        from unsloth import FastLanguageModel

        model, tokenizer = FastLanguageModel.from_pretrained(
            asked["model"],
            max_seq_length=asked["length"],
            dtype=torch.bfloat16,
            load_in_4bit=False,
            local_files_only=True,
        )
        model = FastLanguageModel.get_peft_model(
            model,
            lora_dropout=0,
            random_state=0,
            use_gradient_checkpointing={"full": True, "unsloth": "unsloth", "none": False}[asked["checkpointing"]],
            **LORA,
        )
        trainer = SFTTrainer(model=model, processing_class=tokenizer, **common)
    count_tokens(trainer, clock)
    trainer.train()
    assert trainer.args.gradient_accumulation_steps == 1, "the peer changed the batch: the figure would be wrong"
    Path(asked["out"]).write_text(json.dumps(figures(asked, trainer, clock)))


def settings(asked: dict[str, Any]) -> Any:
    import torch
    from trl import SFTConfig

    cuda = torch.cuda.is_available()
    more: dict[str, Any] = {} if asked["chats"] else dict(dataset_kwargs={"skip_prepare_dataset": True})
    return SFTConfig(
        output_dir=str(Path(asked["out"]).with_suffix("")),
        per_device_train_batch_size=asked["rows"],
        gradient_accumulation_steps=1,
        max_steps=asked["steps"] + asked["warm_up"],
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=asked["checkpointing"] == "full",
        use_liger_kernel=asked.get("liger") == "on" and cuda,
        report_to="none",
        logging_steps=NEVER,
        logging_first_step=True,
        save_strategy="no",
        max_length=asked["length"],
        packing=asked["chats"],
        optim="adamw_torch_fused",
        learning_rate=1e-4,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        dataloader_num_workers=2 if cuda else 0,
        seed=0,
        disable_tqdm=True,
        **more,
    )


def dataset(asked: dict[str, Any]) -> Any:
    """Chats as text, for the peer to tokenise and pack; token rows as they are, with a label on every token."""
    from datasets import Dataset

    with open(asked["documents"], encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    if asked["chats"]:
        return Dataset.from_list(rows)
    ids = [row["input_ids"] for row in rows]
    return Dataset.from_dict({"input_ids": ids, "labels": ids, "attention_mask": [[1] * len(row) for row in ids]})


def random_model(shape: dict[str, Any], length: int, attention: str) -> Any:
    """A model of this shape with weights as transformers draws them, in bfloat16 on the GPU (float32 without one)."""
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
    """The folder with such a model and a tokenizer, written by a process of its own where it is not there yet."""
    if not (folder / "whole").exists():
        asked = dict(tool="write", shape=shape, length=length, model=str(folder), tokenizer=str(tokenizer))
        subprocess.run([sys.executable, __file__, json.dumps(asked)], check=True, stdout=subprocess.DEVNULL)
    return folder


def write(asked: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    folder = Path(asked["model"])
    random_model(asked["shape"], asked["length"], "sdpa").save_pretrained(folder)
    AutoTokenizer.from_pretrained(asked["tokenizer"]).save_pretrained(folder)
    (folder / "whole").touch()


def make_clock(asked: dict[str, Any]) -> Any:
    """A callback of transformers' Trainer, which can be imported once Unsloth has been."""
    import torch
    from transformers import TrainerCallback

    first, last = asked["warm_up"], asked["warm_up"] + asked["steps"]
    cuda = torch.cuda.is_available()

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[Any] = []
            self.tokens: list[torch.Tensor] = []
            self.seconds = 0.0

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
            if state.global_step == first:
                self.seconds = -self.wait()
                self.tokens.clear()
                self.mark()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step > first:
                self.mark()
            if state.global_step == last:
                self.seconds += self.wait()
            if state.global_step in (first, last):
                control.should_log = True  # the mean loss up to here

        def each(self) -> list[float]:
            """Seconds of each measured step."""
            return [one.elapsed_time(other) / 1e3 if cuda else other - one for one, other in pairwise(self.marks)]

    return Clock()


def count_tokens(trainer: Any, clock: Any) -> None:
    """Note the tokens of each micro-batch that are not padding, on the device: nothing waits for it."""
    import torch

    whole = trainer.training_step

    def counted(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        masked = mask is not None and mask.shape == ids.shape
        clock.tokens.append(mask.sum() if masked else torch.tensor(ids.numel()))
        return whole(model, inputs, *rest, **named)

    trainer.training_step = counted


def figures(asked: dict[str, Any], trainer: Any, clock: Any) -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    tokens, each = sum(int(count) for count in clock.tokens), clock.each()
    assert len(clock.tokens) == len(each) == asked["steps"], "a step was not one micro-batch"
    if not asked["chats"]:
        assert tokens == asked["steps"] * asked["rows"] * asked["length"], (
            "the peer changed the rows: the figure would be wrong"
        )
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "tokens_per_second": tokens / clock.seconds,
        "step_seconds": statistics.median(each),
        "step_seconds_p5": min(each),
        "step_seconds_p95": max(each),
        "tokens_a_step": tokens / asked["steps"],
        "first_loss": losses[0],
        "loss": losses[-1],
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
