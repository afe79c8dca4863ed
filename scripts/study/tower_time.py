"""Times a vision encoder of Qwen2.5-VL-7B's shape with random weights, in plain transformers and with each change of
fxtune. Needs a GPU; on a CPU, an encoder of two small layers shows that the script works.

    python scripts/study/tower_time.py

`wait` is how often the host waits for the device in a forward pass. `host` is the time until the call returns. The last
columns compare the features of four images with float32 features of plain transformers.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

from fxtune.distributed.world import World
from fxtune.models.kinds.image_decoder.patch_embedding import replace_patch_embeddings
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import tower_layers, towers
from fxtune.techniques.attention import tower
from fxtune.techniques.compile.technique import Compile

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SHAPE = dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584)
SMALL = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64, fullatt_block_indexes=[1])
WIDTH = 3584 if GPU else 64
SAME = [(32, 32)] * 12 if GPU else [(4, 4)] * 12
MIXED = [(8, 8)] * 6 + [
    (9, 7),
    (17, 15),
    (16, 16),
    (16, 16),
    (12, 40),
    (16, 32),
    (30, 34),
    (32, 32),
    (32, 64),
    (64, 64),
]
MIXED = MIXED if GPU else [(rows // 4, columns // 4) for rows, columns in MIXED]
"""Rows and columns of images in tokens; a token is 2 x 2 patches."""
PEAK = 989e12
"""Dense bfloat16 FLOP/s of an H100 or H200."""
REPEATS = 5 if GPU else 1


def built(attention: str = "sdpa", dtype: torch.dtype = torch.bfloat16) -> Any:
    config = Qwen2_5_VLConfig(
        text_config=dict(
            hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1, num_attention_heads=28 if GPU else 4,
            num_key_value_heads=4, vocab_size=512,
        ),
        vision_config=SHAPE if GPU else SMALL,
        image_token_id=500, video_token_id=501, vision_start_token_id=502, vision_end_token_id=503,
    )  # fmt: skip
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation=attention)
        with torch.no_grad():  # attention that is far from uniform
            for name, weight in model.named_parameters():
                if "visual" in name and weight.dim() > 1:
                    weight.normal_(std=weight[0].numel() ** -0.5)
    return model.to(dtype).eval()


def with_product(model: Any) -> Any:
    replace_patch_embeddings(model)
    return model


def at_once(name: str, model: Any) -> Any:
    with_product(model)
    tower.prepare(model)
    tower.call(towers(model)[0], name)
    return model


def compiled(name: str, model: Any) -> Any:
    """Compiled as in a run."""
    Compile(enabled=True).apply(PreparedModel(at_once(name, model)), World(DEVICE))
    return model


def compiled_for_one_size(name: str, model: Any) -> Any:
    at_once(name, model)
    torch.compiler.reset()
    for layer in tower_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True)
    return model


def variants() -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
    """(title, attention of plain transformers, change to the model)"""
    yield "transformers, sdpa", "sdpa", lambda model: model
    if importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn_2_cuda"):
        yield "transformers, flash_attention_2", "flash_attention_2", lambda model: model
    yield "+ patches by a product", "sdpa", with_product
    cores = {"FlashAttention-2": "fxtune_tower_flash2", "FlashAttention-4": "fxtune_tower_flash4"} if GPU else {}
    for title, name in (cores or {"reference": "fxtune_tower_flash4"}).items():
        yield f"+ all images at once, {title}", "sdpa", partial(at_once, name)
        yield f"+ compiled, any size, {title}", "sdpa", partial(compiled, name)
        yield f"+ compiled for each size, {title}", "sdpa", partial(compiled_for_one_size, name)


def inputs(sizes: list[tuple[int, int]], dtype: torch.dtype, on_host: bool) -> tuple[torch.Tensor, torch.Tensor]:
    grid = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in sizes])
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(int(grid.prod(-1).sum()), 1176, generator=generator)
    return pixels.to(DEVICE, dtype), grid if on_host else grid.to(DEVICE)


def flops(sizes: list[tuple[int, int]], vision: Any) -> float:
    """FLOPs of the matmuls of a forward pass."""
    width, patches = vision.hidden_size, [4 * rows * columns for rows, columns in sizes]
    per_patch = 4 * width**2 + 3 * width * vision.intermediate_size
    full = len(vision.fullatt_block_indexes)
    pairs = full * sum(count**2 for count in patches) + (vision.depth - full) * 64 * sum(patches)
    merger = 4 * width**2 * 4 + width * vision.out_hidden_size
    return 2.0 * sum(patches) * (vision.depth * per_patch + merger) + 4.0 * width * pairs


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Medians of (time until the device has finished, time until the call returns)."""
    times = []
    for turn in range(2 + REPEATS):
        synchronize()
        begun = time.perf_counter()
        work()
        returned = time.perf_counter()
        synchronize()
        if turn >= 2:
            times.append((time.perf_counter() - begun, returned - begun))
    return statistics.median(total for total, _ in times), statistics.median(host for _, host in times)


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def waits(work: Callable[[], Any]) -> int:
    if not GPU:
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        work()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


def forward(part: nn.Module, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        features: torch.Tensor = part(pixels, grid_thw=grid).pooler_output
    return features


def step(part: nn.Module, pixels: torch.Tensor, grid: torch.Tensor) -> None:
    part(pixels, grid_thw=grid).pooler_output.float().square().mean().backward()
    part.zero_grad()


def measure(change: Callable[[Any], Any], attention: str, expected: torch.Tensor) -> list[str]:
    model = change(built(attention))
    part = towers(model)[0]
    on_host = tower.attends_at_once(part)
    cells = []
    for sizes in (SAME, MIXED):
        given = inputs(sizes, torch.bfloat16, on_host)
        total, host = seconds(lambda given=given: forward(part, *given))
        work = flops(sizes, part.config)
        cells += [f"{total * 1e3:9.1f}", f"{host * 1e3:7.1f}", f"{100 * work / total / PEAK:4.0f}%"]
    cells.append(f"{waits(lambda: forward(part, *given)):5}")
    # Three images: without checkpointing, a tower keeps 8 GB for each image.
    for sizes in (SAME[:3], MIXED[:12]):
        given = inputs(sizes, torch.bfloat16, on_host)
        cells.append(f"{seconds(lambda given=given: step(part, *given))[0] * 1e3:9.1f}")
    cells.append(f"{relative(forward(part, *inputs(MIXED[4:8], torch.bfloat16, on_host)), expected):9.1e}")
    if "flash" in attention:
        return [*cells, "        -"]
    del model, part
    clean()
    model = change(built(attention, torch.float32))
    part = towers(model)[0]
    if GPU and tower.attends_at_once(part):  # FlashAttention computes in half precision only
        return [*cells, "        -"]
    return [*cells, f"{relative(forward(part, *inputs(MIXED[4:8], torch.float32, on_host)), expected):9.1e}"]


def clean() -> None:
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    print(torch.cuda.get_device_name() if GPU else "CPU, small tower", torch.__version__)
    plain = built(dtype=torch.float32)
    expected = forward(towers(plain)[0], *inputs(MIXED[4:8], torch.float32, False))
    del plain
    clean()
    print(
        f"forward, ms: 12 images of 1,024 tokens | {len(MIXED)} images of {63} to 4,096 tokens, "
        f"{sum(rows * columns for rows, columns in MIXED):,} together; host = until the call returns; % = of peak; "
        "wait = times that the host waits; step = forward and backward, 3 images of 1,024 | 12 small ones; "
        "bf16, f32 = difference from plain float32"
    )
    heads = "same host % | mixed host % | wait | step step | bf16 f32"
    print(f"{'':42}{heads}")
    for name, attention, change in variants():
        begun = time.perf_counter()
        try:
            cells = " ".join(measure(change, attention, expected))
        except Exception as error:  # noqa: BLE001 - the other variants are measured, too
            cells = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}" if str(error) else repr(error)
            )
        print(f"{name:42}{cells}   ({time.perf_counter() - begun:.0f} s)", flush=True)
        clean()


if __name__ == "__main__":
    main()
