"""Forward and backward of a micro-batch as one launch: CUDA graphs of whatever a function does.

A layer of a small model is done on the device before the host has launched the next one, so the device waits for the host: 0.6
billion weights at 2,048 tokens keep an H200 busy for half of the time. A recorded pass is launched at once: layers, head, loss,
backward, and the addition to the gradients.

What is recorded reads and writes the same memory each time. So each shape of a batch has a recording and inputs of its own, into
which a batch is copied; gradients must lie in memory of their own (`Optimizer.keep_gradients`), to which every pass adds; and the
one number that is returned is copied out. What a pass notes on the host, which weights its gradients have reached
(`Optimizer.reached`), is noted again for each that is played. Random numbers go on as in plain code: torch hands the generator's
seed and offset to a recording when it is played. Recordings share one pool of memory, since one is played at a time: the largest
decides.

A shape's first pass runs as it is, on the stream that records: kernels are compiled and libraries loaded by that. The second one
is recorded, and played like all after it. A shape beyond the MOST-th runs as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fxtune.errors import ConfigError
from fxtune.system.oom import out_of_memory_reason

MOST = 64


class Recorder:
    """Calls one function, from recordings where it can. `passes` and `played`: how many calls there were, and how many of them
    were played.
    """

    def __init__(
        self,
        function: Callable[[Any, torch.Tensor], torch.Tensor],
        device: torch.device,
        reached: set[str] | None = None,
    ) -> None:
        """`function`: takes a dataclass of tensors and a float32 scalar, both on `device`, and returns a scalar. It must do
        the same for all inputs of a shape, and must not ask the device for anything. `reached`: what its calls add names to.
        """
        self.function, self.reached = function, set() if reached is None else reached
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.number = torch.ones((), device=device)
        self.known: dict[Any, _Recording | None] = {}
        self.passes = self.played = 0

    def __call__(self, given: Any, number: float) -> torch.Tensor:
        """function(given, number), a tensor that nothing writes to later. Raises ConfigError where it cannot be recorded."""
        self.passes += 1
        self.number.fill_(number)
        shape = tuple((name, tensor.shape) for name, tensor in _tensors(given).items())
        if shape not in self.known:
            if len(self.known) < MOST:
                self.known[shape] = None
            return self._aside(given)
        recording = self.known[shape]
        if recording is None:
            recording = self.known[shape] = self._record(given)
        self.played += 1
        self.reached |= recording.reached
        return recording.play(given)

    def drop(self) -> None:
        """Forget all recordings, whose memory is free when the device has played them, and begin anew."""
        self.known.clear()
        self.pool = torch.cuda.graph_pool_handle()

    def told(self) -> str:
        """One sentence about what became of the calls."""
        recordings = sum(recording is not None for recording in self.known.values())
        return (
            f"CUDA graphs: {self.played} of {self.passes} training passes were played from {recordings} recordings, one for "
            "each shape that came twice."
        )

    def _aside(self, given: Any) -> torch.Tensor:
        """Run it on the recording stream: autograd remembers the stream of what it has seen."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            out = self.function(given, self.number)
        current.wait_stream(self.stream)
        for tensor in _tensors(given).values():
            tensor.record_stream(self.stream)
        out.record_stream(current)
        return out

    def _record(self, given: Any) -> _Recording:
        inputs = dataclasses.replace(given, **{name: tensor.clone() for name, tensor in _tensors(given).items()})
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        before = set(self.reached)
        self.reached.clear()
        try:
            # Threads of the data loader may pin memory meanwhile: what they do is not recorded, and no error.
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                out = self.function(inputs, self.number)
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # torch leaves its own behind where a recording cannot even be ended
            if out_of_memory_reason(error):
                raise
            first = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
            raise ConfigError(
                f"techniques.compile.cuda_graphs: a training pass could not be recorded ({first}). Set it to off."
            ) from error
        reached = frozenset(self.reached)
        self.reached |= before
        return _Recording(graph, inputs, out, reached)


@dataclasses.dataclass
class _Recording:
    graph: Any
    inputs: Any
    out: torch.Tensor
    reached: frozenset[str]

    def play(self, given: Any) -> torch.Tensor:
        theirs = _tensors(given)
        for name, tensor in _tensors(self.inputs).items():
            tensor.copy_(theirs[name])
        self.graph.replay()
        return self.out.clone()


def _tensors(given: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(given).items() if isinstance(value, torch.Tensor)}
