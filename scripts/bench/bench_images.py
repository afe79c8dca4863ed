"""Measures images per second of fxtune's loader, of torchvision, and of Pillow with transformers' processor.

    python scripts/bench/bench_images.py [--megapixels 12,1] [--workers 1,2,4,8] [--seconds 8] [--tokens 1024]

Writes JPEGs with the spectrum of photographs, and rows that name the JPEGs. Each tool then decodes, resizes and normalizes
the images and divides them into Qwen2.5-VL's patches, four images a batch:

- fxtune: the rows tokenized, packed and delivered by fxtune's Loader, on the GPU if there is one.
- torchvision: decode_jpeg() and transformers' processor of the torchvision backend, in torch's DataLoader.
- Pillow: Image.open() and transformers' processor of the PIL backend, in torch's DataLoader.

A worker has one thread. Tables: milliseconds of each part in one process; images/s by number of workers; and
images/s of tokenizing, which decodes each file once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoImageProcessor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.processors import tokenizer, write_processor

from fxtune.data.batches.build import plan_training
from fxtune.data.batches.loader import Loader, LoaderConfig
from fxtune.data.config import DataConfig, SourceConfig
from fxtune.data.images.decode import decode, measure
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.upstream.transformers import read_processor

FAMILY = "qwen2_5_vl"
FILES = 24
BATCH = 4
PREFETCH = 4
SIDE = 28
"""Pixels on each side of the square of an image token."""


def photograph(height: int, width: int, seed: int = 0) -> np.ndarray:
    """uint8 [height, width, 3]: noise whose amplitude falls with the frequency, as in photographs."""
    draw = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    channels = []
    for _ in range(3):
        noise = np.fft.rfft2(draw.standard_normal((height, width), np.float32)) / frequency**1.2
        channel = np.fft.irfft2(noise, s=(height, width))
        channels.append(channel / channel.std())
    brightness = channels[0]
    return (
        np.stack([128 + 50 * (0.8 * brightness + 0.4 * channel) for channel in channels], -1).clip(0, 255).astype("u1")
    )


def write_rows(folder: Path, megapixels: float) -> tuple[Path, list[str]]:
    """Write JPEGs and a row for each. Returns the file of rows, and the images."""
    folder.mkdir(parents=True)
    height = round((megapixels * 1e6 * 3 / 4) ** 0.5)
    pixels, paths = photograph(height, round(height * 4 / 3)), []
    for number in range(FILES):
        paths.append(str(folder / f"{number}.jpg"))
        shifted = np.roll(pixels, (number * 517, number * 731), (0, 1))
        Image.fromarray(shifted).save(paths[-1], quality=90)
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A picture. " * 27}]
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": turns, "images": [path]}) + "\n" for path in paths))
    return rows, paths


def write_settings(folder: Path, tokens: int) -> Path:
    write_processor(FAMILY, folder)
    file = folder / "preprocessor_config.json"
    size = {"shortest_edge": 4 * SIDE**2, "longest_edge": tokens * SIDE**2}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"size": size}))
    return folder


class Files(Dataset[dict[str, torch.Tensor]]):
    """Batches of images, made by torchvision or by Pillow."""

    def __init__(self, paths: Sequence[str], settings: Path, backend: str, batches: int) -> None:
        self.paths, self.settings, self.backend, self.batches = paths, settings, backend, batches
        self.processor: Any = None

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.processor is None:
            self.processor = AutoImageProcessor.from_pretrained(self.settings, backend=self.backend)
        paths = [self.paths[(index * BATCH + number) % len(self.paths)] for number in range(BATCH)]
        return dict(self.processor([self.read(path) for path in paths], return_tensors="pt"))

    def read(self, path: str) -> Any:
        if self.backend == "pil":
            return Image.open(path).convert("RGB")
        from torchvision.io import ImageReadMode, decode_jpeg, read_file

        return decode_jpeg(read_file(path), ImageReadMode.RGB)


def of_fxtune(images: ImageProcessor, rows: Path, workers: int, device: torch.device) -> tuple[Loader, Generator[int]]:
    """(fxtune's loader, the number of images in each micro-batch)"""
    source, cache = SourceConfig(str(rows)), str(rows.parent / "cache")
    whole = DataConfig([source], cache_dir=cache, workers=1)
    table = tokenize(source, whole, images.processor.tokenizer, progress=False, images=images)
    data = DataConfig([source], cache_dir=cache, sequence_length=BATCH * table.longest)
    plan = plan_training([table], data, micro_batch_size=1, global_batch_size=1, epochs=10_000.0)
    loader = Loader(plan, LoaderConfig(num_workers=workers, prefetch_factor=PREFETCH), device)

    def counts() -> Generator[int]:
        for step in loader.steps():
            for batch in step.micro_batches:
                assert batch.images is not None
                yield len(batch.images["image_grid_thw"])

    return loader, counts()


def speed(counts: Iterator[int], first: int, seconds: float) -> float:
    """Images/s. The `first` batches were prefetched and do not count."""
    for _ in range(first):
        next(counts)
    started, images = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds:
        images += next(counts)
    return images / passed


def milliseconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """CPU time of the fastest call, in one thread."""
    times = []
    for _ in range(repeats + 1):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times) * 1e3


def parts(path: str, images: ImageProcessor, settings: Path) -> dict[str, float]:
    data = Path(path).read_bytes()
    opened = decode(data)
    pil = Files([path], settings, "pil", 1)
    pil[0]
    found = {
        "measure (tokenizing)": milliseconds(lambda: measure(data)),
        "decode": milliseconds(lambda: decode(data)),
        "fxtune's processor": milliseconds(lambda: images.tensors([opened])),
        "Pillow: decode": milliseconds(lambda: Image.open(BytesIO(data)).convert("RGB")),
        "PIL processor": milliseconds(lambda: pil.processor([opened], return_tensors="pt")),
    }
    fast = Files([path], settings, "torchvision", 1)
    try:
        fast[0]
    except Exception as error:  # noqa: BLE001 - torchvision is missing, or was built for another torch
        print(f"torchvision cannot be measured: {error}".splitlines()[0])
        return found
    tensor = fast.read(path)
    return found | {
        "torchvision: decode_jpeg": milliseconds(lambda: fast.read(path)),
        "torchvision processor": milliseconds(lambda: fast.processor([tensor], return_tensors="pt")),
    }


def show(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", min_width=100)
    for name in head:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*line)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megapixels", default="12,1")
    parser.add_argument("--workers", default="1,2,4,8")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--tokens", type=int, default=1024, help="most tokens of an image")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workers = [int(count) for count in arguments.workers.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        settings = write_settings(Path(temporary) / "model", arguments.tokens)
        config = AutoConfig.for_model(FAMILY)
        images = ImageProcessor(read_processor(settings, tokenizer(FAMILY), config))
        for megapixels in map(float, arguments.megapixels.split(",")):
            rows, paths = write_rows(Path(temporary) / f"{megapixels}", megapixels)
            size = sum(Path(path).stat().st_size for path in paths) / len(paths) / 1e6
            name = f"JPEGs of {megapixels:g} MP, {size:.1f} MB, at most {arguments.tokens:,} tokens"
            own = parts(paths[0], images, settings)
            show(f"{name}: CPU time of an image in ms, one thread", list(own), [[f"{ms:.1f}" for ms in own.values()]])
            measured = {"pil", *(["torchvision"] if any("torchvision" in part for part in own) else [])}
            measure_speeds(name, images, rows, paths, settings, workers, arguments.seconds, device, measured)
            measure_tokenizing(name, images, rows, workers)


def measure_speeds(
    name: str,
    images: ImageProcessor,
    rows: Path,
    paths: Sequence[str],
    settings: Path,
    workers: Sequence[int],
    seconds: float,
    device: torch.device,
    measured: Collection[str],
) -> None:
    """`measured`: the backends that work here."""
    lines = []
    for count in workers:
        ahead = count * PREFETCH + 2
        loader, counts = of_fxtune(images, rows, count, device)
        try:
            cells = [f"{speed(counts, ahead, seconds):,.1f}"]
        finally:
            counts.close()
            loader.close()
        for backend in ("torchvision", "pil"):
            files = Files(paths, settings, backend, 1_000_000)
            cells.append(f"{speed_of_files(files, count, ahead, seconds):,.1f}" if backend in measured else "-")
        lines.append([str(count), *cells])
    show(f"{name}: images/s to {device}", ["workers", "fxtune", "torchvision", "Pillow, PIL processor"], lines)


def speed_of_files(files: Files, workers: int, ahead: int, seconds: float) -> float:
    batches = DataLoader(
        files,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=PREFETCH,
        multiprocessing_context="forkserver",
        worker_init_fn=one_thread,
    )
    counts = (len(batch["image_grid_thw"]) for batch in batches)
    try:
        return speed(counts, ahead, seconds)
    finally:
        counts.close()


def one_thread(worker: int) -> None:
    torch.set_num_threads(1)


def measure_tokenizing(name: str, images: ImageProcessor, rows: Path, workers: Sequence[int]) -> None:
    """Tokenize rows with ten times as many images."""
    many = rows.with_name("many.jsonl")
    many.write_text(rows.read_text() * 10)
    lines = []
    for count in workers:
        with tempfile.TemporaryDirectory() as cache:
            data = DataConfig([SourceConfig(str(many))], cache_dir=cache, workers=count)
            started = time.perf_counter()
            tokenize(data.sources[0], data, images.processor.tokenizer, progress=False, images=images)
            lines.append([str(count), f"{10 * FILES / (time.perf_counter() - started):,.1f}"])
    show(f"{name}: tokenizing", ["data.workers", "images/s"], lines)


if __name__ == "__main__":
    main()
