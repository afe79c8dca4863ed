import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import image_models
from support.decoder_sizes import decoder_sizes
from support.forecasts import QWEN3_5
from torch.utils.flop_counter import FlopCounterMode

from fxtune.data.batches.batch_images import NO_IMAGES, ImageSizes
from fxtune.tracking.throughput import Meter, TrainingCost, memory_gib, training_cost

SHAPE = dict(
    **decoder_sizes(vocabulary=96, hidden=32, intermediate=80, layers=3, heads=4, key_heads=2),
    max_position_embeddings=256,
)
LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 80  # q, k and v, o, gate and up and down
HEAD = 32 * 96
PAIR = 3.5 * 4 * 32 * 3  # FLOPs of a pair of query and key, over all heads and layers


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SHAPE, **more))


def with_lora(model, **more):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **more))


def test_flops_of_full_training():
    cost = training_cost(llama(tie_word_embeddings=False))
    assert (cost.per_token, cost.per_target) == (6 * 3 * LAYER, 6 * HEAD)
    # Three documents in one row: each sees itself alone.
    assert cost.flops(np.array([5, 7, 4]), 6) == 6 * 3 * LAYER * 16 + 6 * HEAD * 6 + PAIR * (25 + 49 + 16) / 2


def test_tied_head_counts_as_matmul_and_embedding_does_not():
    assert training_cost(llama(tie_word_embeddings=True)) == training_cost(llama(tie_word_embeddings=False))


def test_flops_of_lora():
    cost = training_cost(with_lora(llama()))
    adapters = 3 * 4 * ((32 + 32) + (80 + 32))
    assert (cost.per_token, cost.per_target) == (4 * 3 * LAYER + 6 * adapters, 4 * HEAD)


def test_a_pass_of_a_reference_costs_a_forward_pass():
    """2 of 6 FLOPs a weight, and one of attention's 3.5 passes."""
    one, two = training_cost(llama()), training_cost(llama(), forward_passes=1)
    assert (two.per_token, two.per_target) == (one.per_token * 8 / 6, one.per_target * 8 / 6)
    lengths = np.array([5, 7, 4])
    attention = [cost.flops(lengths, 0) - cost.per_token * 16 for cost in (one, two)]
    assert attention[1] == pytest.approx(attention[0] * 4.5 / 3.5)


def test_modules_to_save_are_counted_once_and_as_trained():
    assert training_cost(with_lora(llama(), modules_to_save=["lm_head"])).per_target == 6 * HEAD


@pytest.mark.parametrize("lora", [False, True])
def test_matmul_flops_equal_torchs_count(lora):
    model = llama(attn_implementation="eager")
    model = with_lora(model) if lora else model
    ids = torch.randint(0, 96, (1, 24))
    counter = FlopCounterMode(display=False)
    # Gradients from the embeddings on, or the first frozen layer has no input gradient to compute.
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    with counter:
        model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    # Eager attention computes whole squares, forward 1 and backward 2 without a second look at the scores.
    attention = 3 * 4 * 32 * 3 * 24 * 24
    rotary = sum(sum(ops.values()) for name, ops in counter.get_flop_counts().items() if name.endswith("rotary_emb"))
    cost = training_cost(model)
    counted = counter.get_total_flops() - attention - rotary
    assert counted == cost.per_token * 24 + cost.per_target * 24


def test_the_published_cost_of_llama_8b():
    """4N of 7.5e9 parameters is 30.0 GFLOP a token; attention 0.9175 MFLOP for each token and token of context."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **decoder_sizes(vocabulary=128256, hidden=4096, intermediate=14336, layers=32, heads=32, key_heads=8),
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).requires_grad_(False)
    cost = training_cost(model)
    assert cost.per_token + cost.per_target == pytest.approx(30.0e9, rel=0.002)
    assert cost.flops(np.array([4096]), 0) / 4096 - cost.per_token == pytest.approx(0.9175e6 * 4096, rel=1e-3)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 60))
def test_attention_counts_only_pairs_inside_the_window(lengths, window):
    for reach in (window, None):
        cost = TrainingCost(0, 0, ((reach, 1.0),))
        exact = sum(min(query + 1, reach or query + 1) for length in lengths for query in range(length))
        half_diagonal = (
            sum(min(length, reach or length) for length in lengths) / 2
        )  # S^2/2 for S(S+1)/2, by convention
        assert cost.flops(np.array(lengths), 0) == pytest.approx(exact - half_diagonal)


def test_sliding_layers_are_counted_with_their_window():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=16, sliding_window_pattern=3)
    cost = training_cost(Gemma3ForCausalLM(config))
    kinds = config.layer_types
    assert dict(cost.attention) == {
        16: 3.5 * 4 * 32 * kinds.count("sliding_attention"),
        None: 3.5 * 4 * 32 * kinds.count("full_attention"),
    }


def test_unknown_architectures_have_no_cost():
    from transformers import AutoConfig, AutoModelForCausalLM

    assert training_cost(torch.nn.Linear(3, 3)) is None
    mamba = AutoConfig.for_model("mamba", hidden_size=64, num_hidden_layers=2, state_size=16, vocab_size=128)
    assert training_cost(AutoModelForCausalLM.from_config(mamba)) is None


class Plan:
    def lengths(self, step):
        return np.array([10, 20 + step])

    def shared(self, step):
        return np.zeros(2, np.int64)

    def supervised(self, step):
        return 7

    def images(self, step):
        return NO_IMAGES


def test_meter_reads_rates_of_the_interval_and_totals_of_the_run():
    now = [100.0]
    meter = Meter(llama(), Plan(), torch.device("cpu"), tokens=1000, supervised_tokens=100, clock=lambda: now[0])
    meter.peak = 1e9
    for step in (0, 1):
        now[0] += 2.0
        meter.add(step, waited=0.5)
    with meter.paused():
        now[0] += 50.0  # an evaluation
    figures = meter.read()
    assert figures["train/tokens"] == 1061
    assert figures["train/supervised_tokens"] == 114
    assert figures["train/tokens_per_second"] == 61 / 4
    assert figures["train/step_seconds"] == 2.0
    assert figures["train/data_wait"] == 0.25
    flops = meter.cost.flops(np.array([10, 20, 10, 21]), 14)
    assert figures["train/mfu"] == pytest.approx(flops / 4 / 1e9)
    now[0] += 1.0
    meter.add(2, waited=0.0)
    assert meter.read()["train/tokens_per_second"] == 32
    assert "train/mfu" not in Meter(llama(), Plan(), torch.device("cpu")).read()


def test_meter_counts_the_towers_of_images():
    class WithImages(Plan):
        def images(self, step):
            return ImageSizes(np.array([4, 4]), np.array([28, 28]), np.array([28, 28]), np.array([0, 1]))

    now = [0.0]
    model = image_models.model("gemma3").requires_grad_(False)
    meters = [Meter(model, plan, torch.device("cpu"), clock=lambda: now[0]) for plan in (WithImages(), Plan())]
    for meter in meters:
        meter.peak = 1e9
        meter.add(0, waited=0.0)
    now[0] += 4.0
    with_images, without = (meter.read() for meter in meters)
    assert with_images["train/images_per_second"] == 0.5
    assert "train/images_per_second" not in without
    assert with_images["train/tokens_per_second"] == without["train/tokens_per_second"]
    images = meters[0].cost.image_cost
    flops = images.flops(images.shape.work(np.array([4, 4]), np.zeros(2), np.zeros(2)))
    assert with_images["train/mfu"] - without["train/mfu"] == pytest.approx(flops / 4 / 1e9)


@pytest.mark.slow
def test_cpu_memory_is_the_peak_of_this_process():
    # In a process of its own: this one's peak may be from a test before.
    block = np.ones(300 * 2**20, np.uint8)
    del block
    code = (
        "import numpy as np, torch, fxtune.tracking.throughput as m; cpu = torch.device('cpu'); before = m.memory_gib(cpu); "
        "block = np.ones(300 * 2**20, np.uint8); print(before, m.memory_gib(cpu) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, grown = map(float, done.stdout.split())
    assert 0.2 < grown < 0.5
    assert before < memory_gib(torch.device("cpu")), "a small child of a big process must not report its parent's peak"


def test_of_a_mixture_the_experts_that_a_token_uses_count():
    from peft import LoraConfig, get_peft_model
    from transformers import MixtralConfig, MixtralForCausalLM

    dense = training_cost(llama(tie_word_embeddings=False)).per_token
    model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2))
    expert = 6 * 3 * SHAPE["hidden_size"] * SHAPE["intermediate_size"] * SHAPE["num_hidden_layers"]
    assert training_cost(model).per_token == dense + expert
    names = ["experts.gate_up_proj", "experts.down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names))
    rest = {"target_modules": ["q_proj"], "r": 4}
    plain = training_cost(get_peft_model(llama(tie_word_embeddings=False), LoraConfig(**rest))).per_token
    h, i, layers = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_hidden_layers"]
    assert training_cost(adapted).per_token == plain + layers * (4 * 3 * h * i + 2 * 6 * 4 * (2 * h + 3 * i))


def test_layers_with_heads_of_their_own_are_counted_each():
    """Gemma 4: five layers with a window and heads of 24, one without and with heads of 48; four heads each."""
    from support.published import PUBLISHED
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PUBLISHED["gemma4_31b"]))
    assert dict(training_cost(model).attention) == {32: 3.5 * 4 * 4 * 24 * 5, None: 3.5 * 4 * 4 * 48}


def test_recurrent_layers_cost_the_same_for_each_token():
    """Qwen3.5-9B: 24 recurrent layers with 32 heads of 128, 8 layers of attention, 9 billion weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.for_model(**QWEN3_5)
        model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    cost = training_cost(model)
    # 6 x 128 x 128 + 2 x 64 x 5 x 128 for a head; the backward pass computes two products and three of a chunk again.
    head, again = 180224, 4 * 128 * 128 + 2 * 64 * 3 * 128
    linears = 4 * sum(part.weight.numel() for part in model.model.modules() if isinstance(part, torch.nn.Linear))
    convolutions = 4 * 24 * 4 * (2 * 16 + 32) * 128
    assert cost.per_token == linears + convolutions + 24 * 32 * (3 * head + again)
    assert dict(cost.attention) == {None: 3.5 * 4 * 16 * 256 * 8}
