"""The arguments of a forward pass by attention backend."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from fxtune.techniques.attention.backends.registry import ALL
from fxtune.techniques.attention.inputs import KeyBounds, model_inputs

OURS = [backend.implementation for backend in ALL if backend.core is not None]


@pytest.mark.parametrize("backend", ["sdpa", "eager", "flash_attention_2", "kernels-community/flash-attn", *OURS])
def test_each_backend_gets_documents_in_its_own_form(backend):
    model = SimpleNamespace(config=LlamaConfig(attn_implementation=backend))
    ids, bounds = torch.arange(6)[None], torch.tensor([0, 4, 6], dtype=torch.int32)
    given = model_inputs(model, ids, torch.tensor([[0, 1, 2, 3, 0, 1]]), bounds)
    assert given["use_cache"] is False
    if backend in ("sdpa", "eager"):
        assert set(given) == {"input_ids", "position_ids", "use_cache"}, "transformers makes the mask of the positions"
    else:
        assert given["cu_seq_lens_q"] is given["cu_seq_lens_k"] is bounds
        assert given["max_length_q"] == given["max_length_k"] == 6, (
            "the row's length, so that nothing is compiled again"
        )
    assert ("attention_mask" in given) == (backend in OURS)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "flash_attention_2", "fxtune_cudnn"])
def test_no_backend_ignores_keys_of_other_documents(backend):
    model = SimpleNamespace(config=LlamaConfig(attn_implementation=backend))
    ids, bounds = torch.arange(6)[None], torch.tensor([0, 4, 6], dtype=torch.int32)
    keys = KeyBounds(torch.tensor([0, 4, 8], dtype=torch.int32), torch.zeros(8).long(), torch.zeros(2, 6).long())
    with pytest.raises(AssertionError, match="would ignore the keys"):
        model_inputs(model, ids, torch.tensor([[0, 1, 2, 3, 2, 3]]), bounds, keys=keys)
