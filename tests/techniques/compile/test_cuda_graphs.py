"""Recording of training passes on a fake CUDA: which passes are recorded, and what an error leaves behind."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass

import pytest
import torch

from fxtune.errors import ConfigError
from fxtune.techniques.compile import cuda_graphs
from fxtune.techniques.compile.cuda_graphs import Recorder


@dataclass
class Batch:
    x: torch.Tensor
    tokens: int = 0
    images: dict[str, torch.Tensor] | None = None


class Stream:
    def wait_stream(self, other):
        pass


class Cuda:
    """Imitates recording: what runs inside of graph() is run again, on the same tensors, by replay()."""

    def __init__(self, monkeypatch):
        self.current, self.pools, self.recording = Stream(), 0, None
        for name in ("graph_pool_handle", "current_stream", "stream", "graph", "set_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)

    def graph_pool_handle(self):
        self.pools += 1
        return self.pools

    def current_stream(self):
        return self.current

    def set_stream(self, stream):
        self.current = stream

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        before, self.current, self.recording = self.current, stream, graph
        yield  # like torch's, it leaves its stream in place where an error ends it
        self.current, self.recording = before, None


class Graph:
    def replay(self):
        self.again()


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


def recorder(cuda, reached=None):
    """Of a function that adds up its input, divided by the scalar, and notes the shape of its input."""
    names = set() if reached is None else reached

    def add(batch, scalar):
        out = batch.x.sum() / scalar
        if cuda.recording is not None:
            cuda.recording.again = lambda: out.copy_(batch.x.sum() / scalar)
        names.add(f"rows of {len(batch.x)}")
        return out

    return Recorder(add, torch.device("cpu"), names)


def test_the_second_pass_of_a_shape_is_recorded_and_later_ones_are_replayed(cuda):
    call = recorder(cuda)
    found = [call(Batch(torch.full((rows,), value)), 2.0).item() for value in (1.0, 2.0, 3.0, 4.0) for rows in (4, 6)]
    assert found == [value * rows / 2 for value in (1.0, 2.0, 3.0, 4.0) for rows in (4, 6)]
    assert (call.passes, call.replayed) == (8, 6)
    assert "6 of 8 training passes were replayed from 2 recordings" in call.summary()


def test_batches_with_images_are_not_recorded(cuda):
    """A recording would read the images of the pass that was recorded."""
    call = recorder(cuda)
    images = {"pixel_values": torch.ones(2), "image_grid_thw": torch.ones(1, 3)}
    for _ in range(3):
        call(Batch(torch.ones(4), images=images), 1.0)
    assert (call.passes, call.replayed) == (3, 0)
    for _ in range(3):
        call(Batch(torch.ones(4)), 1.0)
    assert call.replayed == 2


def test_results_are_not_overwritten_by_later_passes(cuda):
    call = recorder(cuda)
    kept = [call(Batch(torch.full((4,), value)), 1.0) for value in (1.0, 2.0, 3.0)]
    assert [scalar.item() for scalar in kept] == [4.0, 8.0, 12.0]


def test_a_replay_notes_the_names_that_its_recording_reached(cuda):
    reached: set[str] = set()
    call = recorder(cuda, reached)
    for _ in range(2):
        call(Batch(torch.ones(4)), 1.0)
    reached.clear()
    reached.add("of another pass")
    call(Batch(torch.ones(4)), 1.0)
    assert reached == {"of another pass", "rows of 4"}


def test_shapes_beyond_the_limit_are_not_recorded(cuda, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MAX_SHAPES", 1)
    call = recorder(cuda)
    for rows in (4, 6, 6, 6):
        call(Batch(torch.ones(rows)), 1.0)
    assert call.replayed == 0


def test_dropped_recordings_are_made_again_in_a_new_pool(cuda):
    call = recorder(cuda)
    for _ in range(2):
        call(Batch(torch.ones(4)), 1.0)
    pool = call.pool
    call.drop()
    assert call.pool != pool
    assert call(Batch(torch.ones(4)), 1.0).item() == 4.0
    assert call.replayed == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_a_pass_is_recorded(cuda, enabled):
    seen = []

    def look(batch, scalar):
        seen.append(gc.isenabled())
        if cuda.recording is not None:
            cuda.recording.again = lambda: None
        return batch.x.sum()

    call = Recorder(look, torch.device("cpu"))
    (gc.enable if enabled else gc.disable)()
    try:
        for _ in range(2):
            call(Batch(torch.ones(4)), 1.0)
        assert seen == [enabled, False]
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("\nnot permitted"), ConfigError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
    ],
)
def test_a_failed_recording_leaves_stream_names_and_garbage_collection_as_they_were(cuda, error, expected):
    reached = {"of another pass"}
    current = cuda.current

    def fail(batch, scalar):
        if cuda.recording is not None:
            raise error
        return batch.x.sum()

    call = Recorder(fail, torch.device("cpu"), reached)
    call(Batch(torch.ones(4)), 1.0)
    with pytest.raises(expected, match=r"not permitted|out of memory"):
        call(Batch(torch.ones(4)), 1.0)
    assert cuda.current is current
    assert reached == {"of another pass"}
    assert gc.isenabled()
