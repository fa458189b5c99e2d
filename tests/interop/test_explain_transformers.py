"""explain with a model and an image processor of transformers: the map of attribute."""

import numpy as np
import pytest
import torch
from PIL import Image

import rectgrad

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config).eval()


@pytest.mark.parametrize("method", ["rectgrad", "saliency", "integrated_gradients"])
def test_a_model_and_its_processor(vit, method):
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    prepare = lambda picture: processor(picture, return_tensors="pt")["pixel_values"][0]  # noqa: E731
    pixels = np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    x = prepare(Image.fromarray(pixels))[None]
    found = rectgrad.explain(pixels, vit, method, prepare=prepare, labels=["a", "b", "c"])
    assert torch.equal(found.map, rectgrad.attribute(vit, x, method)[0])
    assert torch.equal(found.outputs, vit(x).logits[0])
    assert found.target.index == int(found.outputs.argmax())
    assert (found.specificity is None) == (method == "integrated_gradients")
    assert found.photo.size == (32, 32)
