"""Each family of decoders that read images, compared with plain transformers one document at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import image_models
from support.image_models import CONFIGS, FAMILIES, assert_alike, documents, gradients

from fxtune.diagnostics.plain_model import PlainModel
from fxtune.errors import ConfigError
from fxtune.models.kinds.image_decoder.parts import image_modules
from fxtune.models.kinds.known import images_of, kind_of
from fxtune.models.prepared import PreparedModel
from fxtune.models.probe import probe_logits
from fxtune.objectives.language_model import LanguageModel
from fxtune.techniques.attention import recurrent
from fxtune.techniques.attention.backends.flex import FLEX
from fxtune.upstream.transformers import set_attention


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("packed", "backend"), [(True, "sdpa"), (True, "eager"), (False, "sdpa")])
def test_loss_and_gradients_are_those_of_plain_transformers(family, packed, backend):
    model = image_models.model(family)
    model.set_attn_implementation(backend)
    shown = documents(family, model)
    expected = image_models.plain_loss(model, shown)
    wanted = gradients(model, expected)
    rows = [shown[:3], shown[3:]] if packed else [[document] for document in shown]
    loss = image_models.language_model(model).summed_loss(image_models.batch(model, rows, packed))
    assert abs(loss.item() - expected.item()) < 1e-5 * expected.item()
    assert_alike(gradients(model, loss), wanted)


@pytest.mark.parametrize("packed", [True, False])
def test_recurrent_layers_without_operators_find_documents_in_the_positions_of_the_text(packed):
    """As on a GPU without the package of the operators."""
    model = image_models.model("qwen3_5")
    shown = documents("qwen3_5", model)
    expected = image_models.plain_loss(model, shown)
    wanted = gradients(model, expected)
    rows = [shown[:3], shown[3:]] if packed else [[document] for document in shown]
    recurrent.separate(model, operators=False)
    loss = LanguageModel(PreparedModel(model)).summed_loss(image_models.batch(model, rows, packed))
    assert abs(loss.item() - expected.item()) < 1e-5 * expected.item()
    assert_alike(gradients(model, loss), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_are_delivered_in_the_dtype_of_the_weights_for_the_same_bits(family):
    model = image_models.model(family).bfloat16()
    kind = kind_of(model.config)
    dtype = kind.images.pixel_dtype(model.config, torch.bfloat16)
    assert (dtype == torch.float32) == (family == "gemma4")
    assert kind.images.pixel_dtype(model.config, torch.float32) == torch.float32
    rows = [[image_models.document(family, model, [3, (2, 2), 3], 0)]]
    whole = image_models.batch(model, rows)
    cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in whole.images.items()}
    language_model = image_models.language_model(model)
    with torch.no_grad():
        expected, found = (language_model.log_probs(batch) for batch in (whole, replace(whole, images=cast)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", CONFIGS)
def test_moving_one_image_moves_the_logits_of_its_document_alone(family):
    model = image_models.model(family)
    shown = documents(family, model)
    moved = documents(family, model)
    moved[2].images["pixel_values"] = moved[2].images["pixel_values"].neg()
    language_model = image_models.language_model(model)
    with torch.no_grad():
        before, after = (language_model.log_probs(image_models.batch(model, [rows])) for rows in (shown, moved))
    batch = image_models.batch(model, [shown])
    shifts = (after - before).abs()
    document = batch.document_of_target()
    assert shifts[document == 2].max() > 1e-3
    assert shifts[document != 2].max() == 0


@pytest.mark.parametrize("family", [family for family in CONFIGS if family.startswith("qwen")])
def test_rope_positions_are_those_of_the_family(family):
    model = image_models.model(family)
    rope = images_of(model.config).rope_positions(model.config)
    for document in documents(family, model):
        ids = document.ids[None]
        grid = document.images.get("image_grid_thw")
        expected, _ = model.model.get_rope_index(
            ids, mm_token_type_ids=(ids == image_models.IMAGE_TOKEN).int(), image_grid_thw=grid
        )
        assert torch.equal(rope(document.ids, document.images), expected[:, 0])


def test_adjacent_images_have_positions_of_their_own():
    model = image_models.model("qwen2_5_vl")
    rope = images_of(model.config).rope_positions(model.config)
    found = rope(*vars(image_models.document("qwen2_5_vl", model, [1, (1, 2), (2, 1), 1], 0)).values())
    assert found.tolist() == [[0, 1, 1, 3, 3, 5], [0, 1, 1, 3, 4, 5], [0, 1, 2, 3, 3, 5]]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_positions_of_a_batch_without_images_tell_documents_apart(family):
    model = image_models.model(family)
    shown = [image_models.document(family, model, [length], seed) for seed, length in enumerate((5, 7, 6))]
    expected = image_models.plain_loss(model, shown).item()
    batch = image_models.batch(model, [shown])
    assert batch.rope_positions is None
    loss = image_models.language_model(model).summed_loss(batch)
    assert abs(loss.item() - expected) < 1e-5 * expected
    model.model.visual = None  # a batch without images passes by the vision encoder
    assert image_models.language_model(model).summed_loss(batch).item() == loss.item()


@pytest.mark.parametrize("family", FAMILIES)
def test_image_row_runs(family):
    model = image_models.model(family)
    ids, images = images_of(model.config).row(model)
    assert (ids == image_models.IMAGE_TOKEN).any()
    with torch.no_grad():
        assert model(input_ids=ids, **images, **image_models.type_ids(model, ids)).logits.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_parts(family):
    model = image_models.model(family)
    kind = kind_of(model.config)
    assert len(kind.layers(model)) == 2
    of_decoder = {id(weight) for weight in kind.backbone(model).parameters()}
    beside = {id(weight) for part in image_modules(model) for weight in part.parameters()}
    named = dict(model.model.named_parameters())
    assert not of_decoder & beside
    assert {name for name, weight in named.items() if id(weight) not in of_decoder | beside} <= {"image_newline"}
    assert not any(name.startswith("model.") for name in named)


def test_an_attention_without_masks_refuses_images_that_see_each_other():
    model = image_models.model("gemma3")
    batch = image_models.batch(model, [documents("gemma3", model)])
    language_model = image_models.language_model(model)
    set_attention(model.config, FLEX.implementation)
    with pytest.raises(ConfigError, match=r"gemma3 see each other.*flex takes no mask"):
        language_model.summed_loss(batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_a_batch_are_divided_among_its_documents(family):
    """As the model that `verify --loss` compares with takes them."""
    model = image_models.model(family)
    shown = documents(family, model)
    batch = image_models.batch(model, [shown])
    with torch.no_grad():
        found = PlainModel(PreparedModel(model)).summed_loss(batch).item()
        assert abs(found - image_models.plain_loss(model, shown).item()) < 1e-5 * found


@pytest.mark.parametrize("family", FAMILIES)
def test_probe_depends_on_the_tower(family):
    """So an export whose vision encoder differs is refused."""
    model = image_models.model(family)
    before = probe_logits(model)
    with torch.no_grad():
        for tower in images_of(model.config).vision_encoders(model):
            for weight in tower.parameters():
                weight.mul_(1.1)
    shift = (probe_logits(model) - before).abs().amax(-1)[0]
    assert shift[:8].max() == 0
    assert shift[8:].max() > 1e-4
