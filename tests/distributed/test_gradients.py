"""How replicas add up their gradients, and the ways that send less."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.harness import command, run, user_environment
from support.killing import tail
from support.ranks import ONE_THREAD, free_port
from support.runs import losses
from support.sharded import run_ranks
from torch import nn
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from fxtune.distributed import averaging
from fxtune.distributed.averaging import WeightAverage
from fxtune.distributed.gradients import GradientSum
from fxtune.distributed.parallel import Compression, Degrees, ParallelConfig
from fxtune.distributed.powersgd import PowerSGD
from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.system.process.threads import PROCESSES


class Twins(World):
    """Two ranks of which the other has the same gradients. Counts the sums that were started."""

    def __init__(self):
        super().__init__(torch.device("cpu"), 0, 2)
        object.__setattr__(self, "started", [])

    def start_sum(self, tensor):
        self.started.append(tensor)

        class Doubling:
            def wait(self):
                tensor.mul_(2)

        return Doubling()


def chain(layers=4, width=8):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def summing(model, world, **options):
    """A sum with a bucket for each matrix of chain()."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return GradientSum(world, names, ParallelConfig(), **{"bucket_bytes": 8 * 8 * 4, **options})


def backward(model, sums, micro_batches=1):
    for number in sums.arming(range(micro_batches)):
        yield number
        model(torch.full((2, 8), float(number + 1))).square().sum().backward()


def result(model, sums):
    found, _ = sums.finish([parameter.grad for parameter in model.parameters()], torch.zeros(1))
    for parameter in model.parameters():
        parameter.grad = None
    return found


def test_buckets_start_in_their_order_beside_the_last_backward_pass_only():
    model, world = chain(), Twins()
    sums, seen = summing(model, world), []
    for number, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, n=number: seen.append((n, len(world.started))))
    for _ in backward(model, sums, 3):
        assert world.started == []
    assert seen[-4:] == [(3, 1), (2, 2), (1, 3), (0, 3)]  # the last bucket waits for the ranks to agree
    sums.start_remaining()
    assert len(world.started) == 3
    alone = [2 * parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, result(model, sums), alone))
    assert len(world.started) == 5  # the last bucket, and losses with metrics
    assert all(mine is bucket.buffer for mine, bucket in zip(world.started, sums.buckets, strict=False))


def test_buckets_keep_their_order_where_autograd_takes_another():
    model, world = chain(), Twins()
    sums = summing(nn.Sequential(*reversed(model)), world)
    for _ in backward(model, sums):
        pass
    assert len(world.started) == 3
    assert all(mine is bucket.buffer for mine, bucket in zip(world.started, sums.buckets, strict=False))


def test_rank_without_memory_takes_part_in_the_same_sums_and_repeats_the_step():
    model, world = chain(), Twins()
    sums, fails = summing(model, world), [True]

    def exhausted(_):
        if fails.pop():
            raise torch.OutOfMemoryError("injected")

    hook = model[1].weight.register_post_accumulate_grad_hook(exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        list(backward(model, sums))
    sums.start_remaining()
    assert len(world.started) == 3
    sums.drop()
    hook.remove()
    model.zero_grad()
    list(backward(model, sums))
    alone = [2 * parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, result(model, sums), alone))


def test_weight_without_gradient_on_any_rank_has_no_sum():
    model, world = chain(), Twins()
    sums = summing(model, world)
    model[2].weight.requires_grad_(False)
    list(backward(model, sums))
    assert len(world.started) == 1  # the second bucket is not full, so it and the third wait
    found = result(model, sums)
    assert [tensor is None for tensor in found] == [False, False, True, False]


def test_gradient_that_changes_after_its_sum_began_is_refused():
    model, world = chain(), Twins()
    sums = summing(model, world)
    for item in sums.arming([1.0]):
        model(torch.full((2, 8), item)).sum().backward()
        with pytest.raises(ConfigError, match=r"gradient of 3\.weight more than once.*run\.gpus=1"):
            model(torch.full((2, 8), item)).sum().backward()


def test_one_bucket_sends_nothing_before_the_ranks_agree():
    model, world = chain(), Twins()
    sums = summing(model, world, bucket_bytes=0)
    list(backward(model, sums))
    sums.start_remaining()
    assert world.started == []
    assert not summing(model, world, overlap=False).overlaps


def test_ways_to_sum_that_cannot_be_are_refused():
    def refusals(adapters=False, **keys):
        return "\n".join(ParallelConfig(**keys).refusals(adapters))

    assert refusals(compression=Compression.bfloat16) == refusals(adapters=True, average_every=8) == ""
    assert "exclude each other" in refusals(compression=Compression.powersgd, average_every=2)
    assert "adapters are small" in refusals(adapters=True, compression=Compression.powersgd)
    config = ParallelConfig(average_every=4)
    assert not list(config.degree_refusals(Degrees(replicate=2)))
    assert "this run has one rank" in next(config.degree_refusals(Degrees()))
    assert "is for replicas, and this run has shard 2" in next(config.degree_refusals(Degrees(shard=2)))
    assert (ParallelConfig().bucket_bytes(True), ParallelConfig().bucket_bytes(False)) == (0, 100 * 2**20)


def test_average_takes_no_more_memory_than_a_piece(monkeypatch):
    """The largest weight is cut by its rows; a row longer than a piece is one."""
    monkeypatch.setattr(averaging, "PIECE", 4 * 20)
    sent = []
    shapes = ((9, 6), (), (0, 3), (7,), (2, 30), (4, 4))
    weights = [torch.randn(shape).bfloat16() for shape in shapes]
    weights.append(torch.randn(6, 5).t())
    world = Twins()
    monkeypatch.setattr(World, "sum", lambda self, flat, doing: sent.append(flat.numel()) or flat.mul_(4))
    doubled = [2 * weight for weight in weights]
    average = WeightAverage(world, weights, 1)
    average.stepped()
    assert all(map(torch.equal, weights, doubled))
    assert sum(sent) == sum(weight.numel() for weight in weights)
    assert sorted(set(sent))[-1] == 30
    assert all(size <= 20 for size in sent if size != 30)


def test_powersgd_loads_nothing_but_what_was_saved():
    compression = PowerSGD(World(torch.device("cpu")), 2, 10)
    for memory in compression._memories().values():
        memory[0] = torch.ones(3)
    compression.load([{"steps": torch.tensor(4), "p/1": torch.zeros(2)}])
    assert sorted(compression.state()) == ["p/1", "steps"]
    assert compression.state()["steps"] == 4


def test_powersgd_on_the_cpu_of_a_host_with_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        ConfigError, match=r"parallel\.compression=powersgd cannot run with run\.device=cpu.*CUDA_VISIBLE"
    ):
        PowerSGD(World(torch.device("cpu"), 0, 2), 2, 10)


# Tests in two processes.


def drawn(world, step=0):
    """Weights, and gradients of this rank and of all."""
    shapes = ((40, 30), (30,), (30, 50), (7,), (60, 20))
    weights = {nn.Parameter(torch.zeros(shape)): str(number) for number, shape in enumerate(shapes)}
    ranks = []
    for rank in range(world.size):
        draw = torch.Generator().manual_seed(10 * step + rank)
        ranks.append([torch.randn(shape, generator=draw) for shape in shapes])
    return weights, ranks[world.rank], [first + second for first, second in zip(*ranks, strict=True)]


def _sums(world):
    weights, mine, exact = drawn(world)
    metrics = torch.tensor([1 / 3, world.rank])
    for bytes_ in (0, 1000, 6000):
        sums = GradientSum(world, weights, ParallelConfig(), bytes_)
        for _ in range(2):
            found, totals = sums.finish(mine, metrics)
            assert all(map(torch.equal, found, exact))
            assert torch.equal(totals, torch.tensor([1 / 3, 0]) + torch.tensor([1 / 3, 1]))
    found, totals = GradientSum(world, weights, ParallelConfig(compression=Compression.bfloat16), 1000).finish(
        mine, metrics
    )
    assert totals.dtype is torch.float32
    assert torch.equal(totals, torch.tensor([1 / 3, 0]) + torch.tensor([1 / 3, 1]))
    _, other, _ = drawn(World(world.device, 1 - world.rank, 2))
    for rounded, total, gradient, further in zip(found, exact, mine, other, strict=True):
        error = (rounded.float() - total).abs()
        assert rounded.dtype is torch.bfloat16
        assert error.max() > 0
        assert (error <= (gradient.abs() + further.abs() + total.abs()) / 250).all()


def _powersgd(world):
    config = ParallelConfig(compression=Compression.powersgd)
    weights, mine, exact = drawn(world)
    sums = GradientSum(world, weights, config, 6000)
    sums.compression = PowerSGD(world, 2, 2)
    yes, total, compressed = torch.tensor(True), [torch.zeros_like(tensor) for tensor in exact], 0.0
    for step in range(12):
        found, _ = sums.finish(mine, torch.zeros(1))
        sums.compression.keep(yes)
        close = [torch.allclose(result, expected, atol=1e-5) for result, expected in zip(found, exact, strict=True)]
        assert close == [True] * 5 if step < 2 else [False, True, False, True, False]
        assert step < 2 or all(torch.linalg.matrix_rank(found[number]) == 2 for number in (0, 2, 4))
        compressed += step >= 2
        if step >= 2:
            total = [first + second for first, second in zip(total, found, strict=True)]
    for _ in range(3):  # the rest arrives also in steps in which no rank has a gradient
        found, _ = sums.finish([None, *mine[1:]], torch.zeros(1))
        sums.compression.keep(yes)
        total = [first + second for first, second in zip(total, found, strict=True)]
    # What was not sent is in the errors: nothing is lost.
    errors = sums.compression.state()
    assert sorted(key for key in errors if key.startswith("error")) == ["error/0", "error/1"]
    for bucket in sums.buckets:
        left = world.sum(errors[f"error/{bucket.number}"].clone()) / world.size
        for member, part in zip(bucket.members, left.split([weight.numel() for weight in bucket.parts]), strict=True):
            if exact[member].dim() == 2:
                steps = compressed if member == 0 else compressed + 3
                assert torch.allclose(total[member] + part.view_as(total[member]), steps * exact[member], atol=1e-3)
    # A step that does not count leaves no trace, also one that is not finite.
    before = {name: tensor.clone() for name, tensor in sums.compression.state().items()}
    sums.finish([gradient * float("nan") for gradient in mine], torch.zeros(1))
    sums.compression.keep(torch.tensor(False))
    after = sums.compression.state()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items() if name[:1] in "eq")
    # The state as a checkpoint brings it back: to the same ranks, and to one that takes both errors.
    again = GradientSum(world, weights, config, 6000)
    again.compression = PowerSGD(world, 2, 2)
    again.compression.load(world.gather(after))
    assert all(map(torch.equal, again.finish(mine, torch.zeros(1))[0], sums.finish(mine, torch.zeros(1))[0]))
    both = world.gather(after)
    again.compression.load([*both, both[0]])
    mean = (2 * both[0]["error/0"] + both[1]["error/0"]) / 3
    assert torch.allclose(again.compression.state()["error/0"], mean)


def _averages(world):
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(torch.bfloat16)
    theirs = [weight.detach().float().clone() for weight in model.parameters()]
    average_parameters(iter(theirs), torch.distributed.group.WORLD)
    average = WeightAverage(world, model.parameters(), 2)
    before = [weight.clone() for weight in model.parameters()]
    average.stepped()
    assert all(map(torch.equal, before, model.parameters()))
    assert average.steps == 1
    average.stepped()
    assert average.steps == 0
    for mine, other in zip(model.parameters(), theirs, strict=True):
        assert torch.equal(mine, other.bfloat16())
    # Local steps of plain SGD that are averaged each time are the steps of summed gradients.
    torch.manual_seed(0)
    local, summed = nn.Linear(4, 4), nn.Linear(4, 4)
    summed.load_state_dict(local.state_dict())
    average = WeightAverage(world, local.parameters(), 1)
    for step in range(5):
        data = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + world.rank))
        for model in (local, summed):
            model.zero_grad()
            (model(data).square().sum() / 8).backward()
            for weight in model.parameters():
                gradient = 2 * weight.grad if model is local else world.sum(weight.grad)
                weight.data -= 0.1 * gradient
        average.stepped()
    for mine, other in zip(local.parameters(), summed.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("work", [_sums, _powersgd, _averages])
def test_two_processes(work):
    assert run_ranks(2, work) == [None, None]


# Whole runs.

FULL = ("techniques.lora.enabled=false", "optimizer.lr=1e-3")
SMALL_BUCKETS = """
from fxtune.distributed import parallel
parallel.BUCKET = 20_000
"""
REPORT = """
import os, torch
from fxtune.training import trainer
finish, rank = trainer.Trainer._finish, os.environ["RANK"]
def reporting(self):
    weights = [weight.detach() for weight in self.train_step.optimizer.names]
    torch.save(weights, f"weights-{rank}.pt")
    sums = self.train_step.gradient_sum
    assert sums is None or sums.compression or len(sums.buckets) > 3
    return finish(self)
trainer.Trainer._finish = reporting
"""
EXHAUSTED = """
from fxtune.training.step import TrainStep
inner, failed = TrainStep._pass, []
def passing(self, batch, normalizer, index=0, lr=None):
    def fail(_):
        if self.current == 3 and not failed and self.gradient_sum._missing:
            failed.append(self.gradient_sum._started_buckets)
            open(f"failed-{rank}", "w").write(str(failed[0]))
            raise torch.OutOfMemoryError("CUDA out of memory. Injected.")
    self.current = index
    if rank == "1" and not hasattr(self, "hooked"):
        self.hooked = list(self.optimizer.names)[4].register_post_accumulate_grad_hook(fail)
    return inner(self, batch, normalizer, index, lr)
TrainStep._pass = passing
"""


def run_twice(folder: Path, words: list[str], patch: str = REPORT, **environment: str) -> list[int]:
    """The exit codes of two ranks that execute the Python code `patch` before the run."""
    shared = {"WORLD_SIZE": "2", PROCESSES: "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code = f"{patch}\nimport sys\nfrom fxtune.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    with (folder / "log.txt").open("a") as log:
        both = [
            subprocess.Popen(
                [sys.executable, "-c", code, *words],
                cwd=folder,
                stdout=log,
                stderr=log,
                env=user_environment(**shared, **environment, RANK=str(rank), LOCAL_RANK=str(rank)),
            )
            for rank in range(2)
        ]
        try:
            return [process.wait(600) for process in both]
        finally:
            for process in both:
                process.kill()


def weights_of(folder: Path, rank: int) -> list[torch.Tensor]:
    return torch.load(folder / f"weights-{rank}.pt")


def made(folder: Path, *words: str) -> list[str]:
    folder.mkdir(parents=True)
    return command(folder, *FULL, *words)


@pytest.mark.slow
def test_buckets_learn_what_one_process_learns_bit_for_bit(ranks, tmp_path):
    """Each process has one thread: the number of threads changes sums."""
    alone = run(made(tmp_path / "alone"), tmp_path / "alone", **ONE_THREAD)
    assert alone.code == 0, alone.text
    for name, started in (
        ("buckets", run_twice(tmp_path / "buckets", made(tmp_path / "buckets"), SMALL_BUCKETS, **ONE_THREAD)),
        ("one", ranks.run(made(tmp_path / "one"), tmp_path / "one")),
    ):
        assert started == [0, 0], tail(tmp_path / name)
        assert losses(tmp_path / name / "run") == losses(tmp_path / "alone" / "run")
        ours, theirs = (load_file(tmp_path / place / "run/model/model.safetensors") for place in (name, "alone"))
        assert all(torch.equal(ours[key], weight) for key, weight in theirs.items())


@pytest.mark.slow
def test_memory_that_runs_out_in_one_ranks_last_backward_pass_halves_all(tmp_path):
    whole, short = tmp_path / "whole", tmp_path / "short"
    rows = ("train.micro_batch_size=2", "train.global_batch_size=8")
    assert run_twice(whole, made(whole, *rows), SMALL_BUCKETS + REPORT) == [0, 0], tail(whole)
    assert run_twice(short, made(short, *rows), SMALL_BUCKETS + REPORT + EXHAUSTED) == [0, 0], tail(short)
    assert int((short / "failed-1").read_text()) > 0  # sums had started
    assert not (short / "failed-0").exists()
    assert "rank 1: CUDA out of memory. Injected" in tail(short, 10**6)
    assert "From here on 1 at a time" in tail(short, 10**6)
    assert losses(short / "run") == pytest.approx(losses(whole / "run"), abs=1e-5)
    assert all(map(torch.equal, weights_of(short, 0), weights_of(short, 1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [("parallel.compression=powersgd",), ("parallel.average_every=3",)],
    ids=("powersgd", "local steps"),
)
def test_killed_run_that_sends_less_resumes_bit_for_bit(ranks, tmp_path, words):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert ranks.run(made(whole, *words), whole) == [0, 0], tail(whole)
    line = made(killed, *words)
    codes = ranks.run(line, killed, "before", faults={1: "SIGKILL@14"})
    assert codes == [7, -signal.SIGKILL], tail(killed)
    assert ranks.run(line, killed) == [0, 0], tail(killed)
    assert "Resuming" in tail(killed, 10**6)
    assert losses(killed / "run") == losses(whole / "run")
    ours, theirs = (load_file(folder / "run/model/model.safetensors") for folder in (killed, whole))
    assert all(torch.equal(ours[key], weight) for key, weight in theirs.items())
    # Each rank has written what it has of its own, so rank 0 needs no memory for it.
    own = load_file(next(killed.glob("run/checkpoints/step-*/optimizer-2-of-2.safetensors")))
    assert own
    assert all(name.startswith("rank-1/") for name in own)


@pytest.mark.slow
def test_local_steps_end_with_equal_weights_and_stop_at_an_average(ranks, tmp_path):
    """24 steps and an average after 5: the last, before the export, comes early."""
    apart, stopped = tmp_path / "apart", tmp_path / "stopped"
    assert run_twice(apart, made(apart, "parallel.average_every=5", "checkpoint.every=0")) == [0, 0], tail(apart)
    assert all(map(torch.equal, weights_of(apart, 0), weights_of(apart, 1)))
    line = made(stopped, "parallel.average_every=5", "checkpoint.every=0")
    assert ranks.run(line, stopped, faults={1: "SIGTERM@7"}) == [75, 75], tail(stopped)
    saved = int(max(stopped.glob("run/checkpoints/step-*")).name.removeprefix("step-"))
    assert saved % 5 == 0
    assert ranks.run(line, stopped) == [0, 0], tail(stopped)
    assert losses(stopped / "run") == losses(apart / "run")
