"""The images of a step, from the token tables alone."""

from __future__ import annotations

import numpy as np
import pytest
from support import image_models
from support.processors import processor, write_picture_rows

from fxtune.data.batches.build import plan_training
from fxtune.data.config import DataConfig, SourceConfig
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.models.kinds.known import images_of

MARKS = {"qwen2_5_vl": 0, "gemma3": 2, "internvl": 2}
"""Tokens around the features of an image."""


def plan_of(family, folder):
    images = ImageProcessor(processor(family, folder / "model"))
    data = DataConfig(
        [SourceConfig(str(write_picture_rows(folder / "data")))],
        cache_dir=str(folder / "cache"),
        workers=1,
        sequence_length=400,
    )
    table = tokenize(data.sources[0], data, images.processor.tokenizer, progress=False, images=images)
    return plan_training([table], data, micro_batch_size=1, global_batch_size=4, epochs=1.0)


@pytest.mark.parametrize("family", MARKS)
def test_the_images_of_a_step_are_those_of_its_batches(family, tmp_path):
    plan = plan_of(family, tmp_path)
    table, config = plan.tables[0], image_models.config(family)
    token = table.image_processor.feature_token
    shape = images_of(config).shape(config)
    steps = [plan.images(step) for step in range(plan.steps)]
    assert sum(map(len, steps)) == len(table.images) == 36
    for step, images in enumerate(steps):
        batches = [plan.batch(step, micro) for micro in range(plan.micro_batches(step))]
        assert images.features.sum() == sum(int((batch.input_ids == token).sum()) for batch in batches)
        tensors = [batch.images for batch in batches if batch.images is not None]
        work = shape.work(images.features, images.heights, images.widths)
        if family == "qwen2_5_vl":
            assert work.patches == sum(int(found["image_grid_thw"].prod(-1).sum()) for found in tensors)
        else:
            assert work.features == 4 * sum(len(found["pixel_values"]) for found in tensors)
    features, heights, widths = table.image_sizes(np.arange(36))
    assert (heights[0], widths[0]) == table.image(0).size
    assert set(table.images["tokens"] - features) == {MARKS[family]}
