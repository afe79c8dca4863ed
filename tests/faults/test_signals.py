"""Stop signals from a scheduler, a terminal or a job script, sent to real processes and process groups."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from support.endings import Ending, Traced
from support.harness import ROOT, STARTED, command, user_environment, wait_for
from support.killing import LEARNS, Forked, Reference, prepare, tail
from support.processes import children, stopped, waits

from fxtune.config import compose

GOES_ON = "The same command goes on from there."
WHOLE = 10**7
"""Characters of a log to search. A forked process may print much at its end."""


def stop(forked: Forked, how: signal.Signals, group: bool = False) -> int:
    """Send the signal `how` to the run, or to its process group like a terminal or a scheduler.

    Returns the exit code.
    """
    forked.send(how, group)
    return forked.wait()


def newest(folder: Path) -> int:
    """The step of the newest checkpoint."""
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("run/checkpoints/step-*")), default=0)


def logged(folder: Path) -> int:
    return json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])["train/step"]


@pytest.mark.slow
def test_run_stopped_in_any_phase_ends_bit_for_bit_equal(forks, tmp_path):
    """The run is stopped during start-up, the first question, a step, an evaluation, a save and the export, and
    resumes each time.
    """
    plain = prepare(tmp_path / "plain", "lora")
    reference = Reference.of(forks, plain, tmp_path / "plain")
    folder = tmp_path / "stopped"
    words = prepare(folder, "lora")
    said, attempts = [], []
    for number, (phase, occurrence, how, code) in enumerate(
        [
            ("building", 1, signal.SIGTERM, 75),
            ("asking", 1, signal.SIGUSR1, 75),
            ("training", 3, signal.SIGUSR1, 75),
            ("evaluating", 1, signal.SIGTERM, 75),
            ("training", 2, signal.SIGINT, 130),
            ("saving", 1, signal.SIGTERM, 75),
            ("exporting", 1, signal.SIGUSR1, 75),
        ]
    ):
        trace = f"trace-{number}.jsonl"
        forked = forks.start(words, folder, trace, stops=(phase, occurrence))
        assert forked.stopped(), tail(folder)
        assert stop(forked, how) == code, tail(folder)
        said.append([line for line in tail(folder, WHOLE).splitlines() if line.startswith("fxtune:")][-1])
        attempts.append(Traced.read(folder / trace))
        if occurrence > 1:
            assert newest(folder) == logged(folder), "finished steps were not saved"
    forked = forks.start(words, folder, "trace-last.jsonl")
    assert forked.wait() == 0, tail(folder)
    attempts.append(Traced.read(folder / "trace-last.jsonl"))
    assert not reference.ending.differences(Ending.of(folder / "run", attempts))
    assert said[0] == "fxtune: SIGTERM: ended before there was anything to save. Give the same command again."
    assert said[1] == "fxtune: SIGUSR1: ended before the first step. The same command starts again."
    assert said[2].startswith("fxtune: SIGUSR1: saved after step 2 of 22 in run. " + GOES_ON)
    assert said[3] == "fxtune: SIGTERM: saved after step 6 of 22 in run. " + GOES_ON
    assert said[4].startswith("fxtune: Ctrl-C: saved after step ")
    assert said[6] == "fxtune: SIGUSR1: all 22 steps are done and saved in run. The same command finishes the run."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "words", "how", "code"),
    [
        ("training", ("loader.num_workers=2", *LEARNS), signal.SIGINT, 130),
        (
            "tokenising",
            ("data.workers=2", "data.sources=[{path: many.jsonl}]", "train.epochs=1000"),  # only the signal ends it
            signal.SIGTERM,
            75,
        ),
    ],
)
def test_workers_leave_signals_to_the_main_process(forks, tmp_path, phase, words, how, code):
    """Ctrl-C and schedulers signal every process of the group or job."""
    prepare(tmp_path / "run", "tokenisers" if phase == "tokenising" else "lora")
    stops = ("training", 2) if phase == "training" else None
    forked = forks.start(command(tmp_path / "run", *words), tmp_path / "run", stops=stops)
    if stops:
        assert forked.stopped(), tail(tmp_path / "run")
    else:
        wait_for(lambda: forked.ended() or len(children(forked.pid, "spawn_main")) == 2)
    assert stop(forked, how, group=True) == code
    text = tail(tmp_path / "run", WHOLE)
    assert "died" not in text
    assert "killed" not in text
    assert "Traceback" not in text
    assert not forked.children_left()
    if phase == "training":
        assert newest(tmp_path / "run" / "run") == 0
        assert newest(tmp_path / "run") == logged(tmp_path / "run")


@pytest.mark.slow
def test_hanging_workers_delay_neither_checkpoint_nor_exit(forks, tmp_path):
    """Two stopped workers behave like workers that wait for a lost disk. The run waits for its next batch."""
    prepare(tmp_path / "run", "lora")
    words = command(
        tmp_path / "run", "loader.num_workers=2", "train.epochs=1000", "checkpoint.every=0", "train.log_every=1"
    )
    forked = forks.start(words, tmp_path / "run")
    assert forked.until("training", 3)
    servers = _below({forked.pid})
    workers = _below(servers)
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    os.kill(forked.pid, signal.SIGTERM)
    assert forked.wait() == 75, tail(tmp_path / "run")
    assert newest(tmp_path / "run") == logged(tmp_path / "run")
    assert not forked.children_left()


def _below(parents: set[int]) -> set[int]:
    """The children of these processes that are a fork server of multiprocessing or its children."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in parents and b"forkserver" in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_second_signal_ends_a_blocked_run(forks, tmp_path, how, code):
    """The run is blocked in a write to a stopped terminal (Ctrl-S).

    A signal at the same time as the first counts as the same one.
    """
    os.mkfifo(tmp_path / "log.txt")
    reader = os.open(tmp_path / "log.txt", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    forked = forks.start(command(tmp_path, "train.epochs=500"), tmp_path)
    trains = threading.Event()

    def drain() -> None:
        while not trains.wait(0.01):
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 4096)

    draining = threading.Thread(target=drain)  # what start-up prints is more than the pipe holds
    draining.start()
    try:
        assert forked.until("training", 1)
    finally:
        trains.set()
        draining.join()

    def unread() -> int:
        """Bytes in the pipe."""
        return int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, bytes(4)), sys.byteorder)

    def quiet() -> bool:
        before = Traced.read(forked.file).lines
        if unread() < 3500:  # there is room for lines: the run waits for something else
            time.sleep(0.1)
            return False
        for _ in range(30):  # longer than a step
            time.sleep(0.1)
            if not waits(forked.pid):  # as a run does that computes, and one that gets no processor
                return False
        return Traced.read(forked.file).lines == before

    wait_for(quiet)
    os.kill(forked.pid, signal.SIGSTOP)
    wait_for(lambda: stopped(forked.pid))
    for number in (signal.SIGTERM, signal.SIGINT):  # both arrive when it goes on
        os.kill(forked.pid, number)
    os.kill(forked.pid, signal.SIGCONT)
    time.sleep(0.6)
    assert not forked.ended()
    while not forked.ended():  # a busy machine may read the later signal so late that it counts as the first, too
        os.kill(forked.pid, how)
        time.sleep(1)
    assert forked.wait() == code
    os.close(reader)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")
def test_signal_is_handled_after_triton_has_compiled(tmp_path):
    """LLVM replaces Python's signal handlers, and its handler for SIGUSR1 does nothing."""
    (tmp_path / "compiled.py").write_text("""
import os, signal, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fxtune.system.process.signals import SIGNALS, Stopped

@triton.jit
def kernel(to, SIZE: tl.constexpr):
    tl.store(to + tl.arange(0, SIZE), 1.0)

with SIGNALS, SIGNALS.deferred():
    triton.compile(ASTSource(fn=kernel, signature={"to": "*fp32"}, constexprs={"SIZE": 128}), target=GPUTarget("cuda", 90, 32))
    SIGNALS.check()
    os.kill(os.getpid(), signal.SIGUSR1)
    try:
        SIGNALS.check()
    except Stopped as stop:
        print(stop.exit_code)
""")
    done = subprocess.run(
        [sys.executable, "compiled.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=user_environment(TRITON_CACHE_DIR=str(tmp_path / "cache")),
    )
    assert done.stdout == "75\n", done.stderr[-3000:]


@pytest.mark.slow
def test_signal_ends_a_sweep_with_its_current_run(forks, tmp_path):
    words = ["-m", *command(tmp_path, "optimizer.lr=1e-3,2e-3")]
    forked = forks.start(words, tmp_path, stops=("training", 3))
    assert forked.stopped(), tail(tmp_path)
    assert stop(forked, signal.SIGTERM) == 75
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["optimizer.lr=0.001"]
    assert "saved after step" in tail(tmp_path, WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["train.max_steps=1"], 0, "The adapter is in"),
        (["optimizer.lrr=1"], 2, "unknown key `optimizer.lrr`"),
        (["data.sources=[{path: missing.jsonl}]"], 3, "missing.jsonl"),
        (["run.device=cuda"], 4, "cuda"),
        (
            ["optimizer.lr=1e9", "techniques.lora.enabled=false", "train.max_skipped_steps=2"],
            5,
            "not finite in 2 steps in a row",
        ),
        (["run.dir=chats.jsonl/run"], 6, "chats.jsonl/run"),
    ],
)
def test_exit_codes(forks, tmp_path, words, code, message):
    if code == 4:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has the GPU whose absence is shown")
    forked = forks.start(command(tmp_path, *words), tmp_path)
    assert forked.wait() == code, tail(tmp_path)
    text = tail(tmp_path, WHOLE)
    assert message in text
    assert "Traceback" not in text
    if code == 5:  # the steps before the bad ones are saved, and the bad steps can be inspected
        assert newest(tmp_path) == logged(tmp_path)
        samples = json.loads((tmp_path / "run" / "skipped" / "step-00000002" / "samples.json").read_text())
        assert samples["micro_batches"][0][0][0]["source"] == "chats.jsonl"
        assert forks.start(command(tmp_path, *words), tmp_path).wait() == 5, "the run continued past the limit"


@pytest.mark.slow
def test_job_script_requeues_a_preempted_job(tmp_path):
    """Fake srun and scontrol act like Slurm's: they run the step, forward signals and record the requeue."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "srun").write_text(
        "#!/bin/bash\nshift\n\"$@\" &\nchild=$!\ntrap 'kill -USR1 $child' USR1\ntrap 'kill -TERM $child' TERM\n"
        "while true; do wait $child; code=$?; kill -0 $child 2>/dev/null || exit $code; done\n"
    )
    (bin_ / "scontrol").write_text('#!/bin/bash\necho "$@" >> requeued\n')
    (bin_ / "fxtune").write_text(f'#!/bin/bash\nexec {sys.executable} -m fxtune "$@"\n')
    for file in bin_.iterdir():
        file.chmod(0o755)
    words = command(tmp_path, "train.epochs=10000", "optimizer.lr=1e-3")  # only the signal ends it
    words.remove("run.dir=run")
    script = ["bash", str(ROOT / "scripts" / "slurm.sbatch"), *words]
    environ = user_environment(PATH=f"{bin_}:{os.environ['PATH']}", SLURM_JOB_ID="17")
    run = tmp_path / "runs" / "slurm-17"
    with (tmp_path / "log.txt").open("w") as log:

        def job() -> subprocess.Popen[bytes]:
            return subprocess.Popen(script, cwd=tmp_path, stdout=log, stderr=log, env=environ, start_new_session=True)

        first = job()
        STARTED.append(first)
        wait_for(
            lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count("train/loss") > 3,
            first,
        )
        first.send_signal(signal.SIGUSR1)
        assert first.wait(600) == 0, tail(tmp_path)
        assert (tmp_path / "requeued").read_text() == "requeue 17\n"
        assert list(run.glob("checkpoints/step-*"))
        assert not (run / "result.json").exists()


def test_job_script_passes_other_exit_codes_on(tmp_path):
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, text in (
        ("srun", 'shift; exec "$@"'),
        ("scontrol", "touch requeued; exit $SCONTROL"),
        ("fxtune", "echo $@; exit $CODE"),
    ):
        (bin_ / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin_ / name).chmod(0o755)

    def job(**environ: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "requeued").unlink(missing_ok=True)
        return subprocess.run(
            ["bash", str(ROOT / "scripts" / "slurm.sbatch"), "+recipe=mine", *environ.pop("words", "").split()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            env={**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", **environ},
        )

    for code in ("0", "2", "3", "4", "5", "6", "1", "143"):
        assert job(CODE=code).returncode == int(code)
        assert not (tmp_path / "requeued").exists()
    assert job(CODE="0").stdout == "+recipe=mine run.dir=runs/slurm-17\n"
    composed = compose.load(job(CODE="0").stdout.replace("mine", "llama_lora", 1).split())
    assert composed.run.dir == "runs/slurm-17"
    few = job(CODE="0", SLURM_NNODES="2", SLURM_NTASKS_PER_NODE="1", SLURM_GPUS_ON_NODE="8")
    assert (few.returncode, few.stdout) == (2, "")
    assert "2 nodes with 8 GPUs each need --ntasks-per-node=8" in few.stderr
    assert job(CODE="0", SLURM_NNODES="2", SLURM_NTASKS_PER_NODE="8", SLURM_GPUS_ON_NODE="8").returncode == 0
    assert job(CODE="0", words="run.dir=mine").stdout == "+recipe=mine run.dir=mine\n"
    assert job(CODE="75", SCONTROL="0").returncode == 0
    assert (tmp_path / "requeued").exists()
    refused = job(CODE="75", SCONTROL="1")
    assert refused.returncode == 75
    assert "To continue, submit: +recipe=mine run.dir=runs/slurm-17" in refused.stderr
    tired = job(CODE="75", SLURM_RESTART_COUNT="100")
    assert tired.returncode == 75
    assert not (tmp_path / "requeued").exists()
