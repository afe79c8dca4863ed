import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.checkpoints import save
from transformers import AutoModelForCausalLM, LlamaConfig

from fxtune.checkpoint.manager import CheckpointConfig, Checkpoints
from fxtune.checkpoint.train_state import TrainState
from fxtune.errors import StorageError
from fxtune.estimate.memory import forecast
from fxtune.facts.execution import OptimizerState
from fxtune.facts.recomputation import RecomputePlan
from fxtune.facts.run import Facts
from fxtune.optim.config import OptimizerConfig, OptimizerName
from fxtune.optim.optimizer import Optimizer, moment_bytes, state_of


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_saved_checkpoint_loads(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, 3, tokens=7, best_loss=1.5, best_step=3, wandb_id="abc", optimizer={"w/step": 3})
    got = checkpoints.load_newest()
    assert got.state == TrainState(
        step=3, tokens=7, best_loss=1.5, best_step=3, wandb_id="abc", optimizer={"w/step": 3}
    )
    assert torch.equal(got.weights["w"], torch.full((4,), 3.0))
    assert torch.equal(got.moments["w/exp_avg"], torch.ones(4))


def test_damaged_checkpoint_never_displaces_a_complete_one(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    save(checkpoints, 8)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "step-00000008", kept)
    (save(checkpoints, 10) / "weights.safetensors").unlink()
    kept.rename(tmp_path / "step-00000008")
    assert checkpoints.load_newest().state.step == 8
    save(checkpoints, 9)
    assert checkpoints.load_newest().state.step == 9
    assert names(tmp_path) == ["step-00000009"]


def test_only_damaged_checkpoints_are_an_error_and_none_is_not(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    assert checkpoints.load_newest() is None
    (save(checkpoints, 1) / "state.json").unlink()
    with pytest.raises(StorageError, match=r"step-00000001.*state\.json"):
        checkpoints.load_newest()


def test_unchanged_state_is_not_saved_again(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    path = save(checkpoints, 1)
    before = path.stat().st_ino
    save(checkpoints, 1, clock={"seconds": 2.5})  # which goes on in between
    assert path.stat().st_ino == before
    save(checkpoints, 1, tokens=3)
    assert path.stat().st_ino != before


@pytest.mark.parametrize(
    ("options", "lora"),
    [
        (dict(name="adamw"), False),
        (dict(name="adamw", stochastic_rounding=True), False),
        (dict(name="adamw_8bit"), False),
        (dict(name="sgd"), False),
        (dict(name="lion"), False),
        (dict(name="muon"), False),
        (dict(name="muon"), True),
    ],
)
def test_estimated_moments_equal_the_optimizers_state(options, lora):
    """moment_bytes() of an optimizer, and memory.forecast() by the model's shape alone, which adds the gradients. The
    model is a bfloat16 Llama of which the embedding and the head are the largest part. Adapters are float32, and one of
    them is on the head.
    """
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=3072, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    ).to(torch.bfloat16)
    if lora:
        model = get_peft_model(
            model, LoraConfig(r=8, target_modules=["q_proj", "down_proj", "lm_head"], use_dora=True)
        )
    config = OptimizerConfig(**{**options, "name": OptimizerName(options["name"])})
    optimizer, state = Optimizer(model, config), state_of(config)
    for parameter in optimizer.names:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-6, torch.tensor(True))
    kept = sum(tensor.nbytes for name, tensor in optimizer.state()[0].items() if not name.endswith("/step"))
    # 8-bit moments have tables of 1 KiB for each tensor, a large share of tensors as small as these.
    tables = 0.06 if "8bit" in options["name"] else 0
    assert moment_bytes(state, optimizer.parts) == pytest.approx(kept, rel=tables)
    if not lora:
        facts = Facts(
            model=model.config.to_dict(),
            dtype="bfloat16",
            optimizer=state,
        )
        gradients = sum(parameter.nbytes for parameter in optimizer.names)
        assert forecast(facts, RecomputePlan("everything")).trained == pytest.approx(
            gradients + kept, rel=0.02 + tables
        )


def test_eight_bit_moments_are_a_quarter_of_float32_ones():
    parts = [torch.optim.SGD([torch.zeros(100, dtype=torch.bfloat16)])]  # of any optimizer
    assert moment_bytes(OptimizerState(0.5, size=4), parts) == 200
