"""CUDA graphs of training passes: forward and backward of a micro-batch as one launch.

In a small model the GPU finishes a layer before the host has launched the next layer: a model of 0.6 billion weights
at 2,048 tokens keeps an H200 busy for half of the time. A recorded pass needs one launch for layers, head, loss,
backward pass and the addition to the gradients.

A recording reads and writes the same memory each time. Therefore:

- each shape of a batch has its own recording, and a batch is copied into the inputs of its shape's recording;
- gradients stay in separate memory (`Optimizer.keep_gradients`), and every pass adds to this memory;
- the returned scalar is copied, because the next replay overwrites the original;
- a pass notes on the host which weights have a gradient (`Optimizer.reached`), and each replay adds the names that
  were noted while it was recorded.

A replay draws new random numbers, as plain code does: torch passes it the generator's seed and offset. The first pass
of a shape is not recorded: it compiles kernels and loads libraries, on the stream that records later. The second pass
is recorded and replayed, and all later passes are replayed. Shapes beyond the first MAX_SHAPES are not recorded.
Batches with images are not recorded either: their shapes differ each time, and models read image sizes on the host.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxtune.errors import ConfigError
from fxtune.system.process.oom import out_of_memory_reason

MAX_SHAPES = 64


class Recorder:
    """Calls one function, or replays a recording of it if the batch's shape was recorded. `passes` counts all calls,
    `replayed` counts the replayed calls."""

    def __init__(
        self,
        function: Callable[[Any, torch.Tensor], torch.Tensor],
        device: torch.device,
        reached: set[str] | None = None,
    ) -> None:
        """`function` takes a dataclass of tensors and a float32 scalar, both on `device`, and returns a scalar. It
        must do the same for all inputs of a shape, and must not wait for the device. `reached`: the set to which
        `function` adds the names of weights with a gradient."""
        self.function, self.reached = function, set() if reached is None else reached
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.scalar = torch.ones((), device=device)
        self.recordings: dict[Any, _Recording | None] = {}
        """The recording of each shape; None after the shape's first pass, which is not recorded."""
        self.passes = self.replayed = 0

    def __call__(self, batch: Any, scalar: float) -> torch.Tensor:
        """Return function(batch, scalar) as a tensor that later calls do not overwrite. Raises ConfigError if the
        function cannot be recorded."""
        self.passes += 1
        self.scalar.fill_(scalar)
        if getattr(batch, "images", None) is not None:
            return self._run(batch)
        shape = tuple((name, tensor.shape) for name, tensor in _tensors(batch).items())
        if shape not in self.recordings:
            if len(self.recordings) < MAX_SHAPES:
                self.recordings[shape] = None
            return self._run(batch)
        recording = self.recordings[shape]
        if recording is None:
            recording = self.recordings[shape] = self._record(batch)
        self.replayed += 1
        self.reached |= recording.reached
        return recording.replay(batch)

    def drop(self) -> None:
        """Forget all recordings. Their memory becomes free when the device has finished the last replay."""
        self.recordings.clear()
        self.pool = torch.cuda.graph_pool_handle()

    def summary(self) -> str:
        """A sentence that says how many calls were replays."""
        recordings = sum(recording is not None for recording in self.recordings.values())
        return (
            f"CUDA graphs: {self.replayed} of {self.passes} training passes were replayed from {recordings} "
            "recordings, one for each shape that occurred twice."
        )

    def _run(self, batch: Any) -> torch.Tensor:
        """Run the function without recording it, on the stream that records. Autograd runs a backward pass on the
        stream of its forward pass."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            out = self.function(batch, self.scalar)
        current.wait_stream(self.stream)
        for tensor in (*_tensors(batch).values(), *_images(batch)):
            tensor.record_stream(self.stream)
        out.record_stream(current)
        return out

    def _record(self, batch: Any) -> _Recording:
        inputs = dataclasses.replace(batch, **{name: tensor.clone() for name, tensor in _tensors(batch).items()})
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        before = set(self.reached)
        self.reached.clear()
        # Threads of the data loader may pin memory during a recording. With thread_local, CUDA allows their calls.
        capture = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
        try:
            with _no_garbage_collection(), capture:
                out = self.function(inputs, self.scalar)
            return _Recording(graph, inputs, out, frozenset(self.reached))
        except RuntimeError as error:
            if out_of_memory_reason(error):
                raise
            first = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
            raise ConfigError(
                f"techniques.compile.cuda_graphs: a training pass could not be recorded ({first}). Set it to off."
            ) from error
        finally:
            torch.cuda.set_stream(current)  # if a recording fails, torch may leave its stream as the current one
            self.reached |= before


@dataclasses.dataclass
class _Recording:
    graph: Any
    inputs: Any
    out: torch.Tensor
    reached: frozenset[str]

    def replay(self, batch: Any) -> torch.Tensor:
        new = _tensors(batch)
        for name, tensor in _tensors(self.inputs).items():
            tensor.copy_(new[name])
        self.graph.replay()
        return self.out.clone()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A context manager that switches Python's garbage collector off.

    The garbage of an earlier model may hold graphs, Triton modules and events. If the collector destroyed them in the
    thread that records, CUDA would refuse and the recording would be lost (pytorch#161037).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _images(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch's images that are on the device."""
    return [tensor for tensor in (getattr(batch, "images", None) or {}).values() if tensor.is_cuda]


def _tensors(batch: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
