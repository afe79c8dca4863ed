from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from fxtune.models.flops import matmul_sizes, weight_flops


def test_of_a_wrapper_only_the_linears_inside_count():
    model = get_peft_model(nn.Sequential(nn.Linear(3, 5)), LoraConfig(r=2, target_modules=["0"]))
    found = [matmul_sizes(module) for module in model.modules()]
    assert [sizes for sizes in found if sizes] == [(3, 5), (3, 2), (2, 5)]


def test_linears_of_gpt2_and_lookups():
    assert matmul_sizes(Conv1D(5, 3)) == (3, 5)
    assert matmul_sizes(nn.Embedding(3, 5)) is None


def test_forward_and_both_gradients_cost_the_same():
    assert weight_flops(trained=True, forward_passes=0) == 6
    assert weight_flops(trained=False, forward_passes=1) == 6
    assert weight_flops(trained=False, forward_passes=0, backward=False) == 2
