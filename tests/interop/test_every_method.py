"""Every method on every kind of image classifier that transformers has: small, with random weights.

A map is finite and does not depend on the batch, or the method refuses the model and names the reason.
"""

import threading

import pytest
import torch
from torch import Tensor, nn

import rectgrad

transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZE = 64
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "patch_size": 8,
}
STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
HEADS = dict(**STAGES, num_attention_heads=[1, 1, 2, 2])
SWIN = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "patch_size": 4}
MODELS = {
    "ResNet": dict(embedding_size=8, **STAGES),
    "RegNet": dict(embedding_size=8, groups_width=8, **STAGES),
    "Bit": dict(embedding_size=8, num_groups=4, **STAGES),
    "ConvNext": STAGES,
    "ConvNextV2": STAGES,
    "MobileNetV1": {"depth_multiplier": 0.25},
    "MobileNetV2": {"depth_multiplier": 0.25},
    "ViT": VIT,
    "DeiT": VIT,
    "Beit": VIT,
    "Data2VecVision": VIT,
    "Dinov2": VIT,
    "Dinov2WithRegisters": VIT,
    "ViTMSN": VIT,
    "IJepa": VIT,
    "Swin": SWIN,
    "Swinv2": SWIN,
    "DonutSwin": SWIN,
    "Pvt": dict(**HEADS, sequence_reduction_ratios=[4, 2, 1, 1]),
    "PvtV2": dict(**HEADS, sr_ratios=[4, 2, 1, 1]),
    "Segformer": HEADS,
    "PoolFormer": STAGES,
    "SwiftFormer": {"embed_dims": [8, 16, 16, 32], "depths": [1, 1, 1, 1]},
    "MobileViT": {
        "hidden_sizes": [16, 16, 24],
        "neck_hidden_sizes": [8, 8, 16, 16, 16, 24, 32],
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    },
    "MobileViTV2": {"width_multiplier": 0.25},
    "Levit": {
        "hidden_sizes": [16, 24, 32],
        "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
        "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]],
    },
    "FocalNet": {
        "embed_dim": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "patch_size": 4,
        "focal_levels": [2, 2],
        "focal_windows": [3, 3],
    },
    "Hiera": {
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "patch_stride": [4, 4],
        "query_stride": [2, 2],
        "num_query_pool": 1,
        "masked_unit_size": [4, 4],
        "image_size": [SIZE, SIZE],
    },
}
# Few evaluations of the methods that take many.
FEW = {
    "smoothgrad": {"samples": 2},
    "integrated_gradients": {"steps": 2},
    "expected_gradients": {"samples": 2},
    "occlusion": {"window": 32},
    "rise": {"masks": 6},
    "deeplift_shap": {"baselines": torch.zeros(1, 3, SIZE, SIZE, dtype=torch.float64)},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request) -> nn.Module:
    name = request.param
    config = getattr(transformers, f"{name}Config")(**{"num_labels": 5, "image_size": SIZE, **MODELS[name]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = getattr(transformers, f"{name}ForImageClassification")(config)
        for parameter in built.parameters():
            if parameter.dim() < 2:  # fresh biases and scales are all alike
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return built.double().eval()


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def state(model: nn.Module) -> dict:
    """What a call might leave on a model."""
    values = {
        name: (id(x), x._version, x.grad is None) for name, x in model.state_dict(keep_vars=True).items()
    }
    hooks = [
        len(m._forward_hooks) + len(m._backward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
    ]
    return values | {"hooks": hooks, "attributes": [sorted(vars(m)) for m in model.modules()]}


def mapped(model: nn.Module, pixels: Tensor, method: str, options: dict) -> tuple[Tensor | None, str]:
    """The maps, or why there are none."""
    try:
        return rectgrad.attribute(model, pixels, method, **options), ""
    except rectgrad.UnsupportedModelError as error:
        return None, str(error)


@pytest.mark.filterwarnings("ignore")  # of zero maps and large relevance, which random weights may give
@pytest.mark.parametrize("method", rectgrad.METHODS)
def test_a_finite_map_or_a_refusal_with_its_reason(model, pixels, method):
    options, before = FEW.get(method, {}), state(model)
    maps, refusal = mapped(model, pixels, method, options)
    assert state(model) == before
    if maps is None:
        assert len(refusal) > 40  # a sentence
        return
    assert maps.shape == pixels.shape
    assert maps.isfinite().all()
    alone = torch.cat([rectgrad.attribute(model, x[None], method, **options) for x in pixels])
    # With random weights, hiding a part may change a score by rounding alone.
    torch.testing.assert_close(maps, alone, rtol=0, atol=1e-13 + 1e-5 * float(maps.abs().max()))


@pytest.mark.filterwarnings("ignore")
def test_all_methods_at_once_in_threads(model, pixels):
    """Two threads on one model, in opposite order: the maps are those of one thread."""
    asked = [name for name in rectgrad.METHODS if name not in FEW and name != "random"]

    def run(names, found):
        for name in names:
            found[name] = mapped(model, pixels[:1], name, {})[0]

    expected, first, second = {}, {}, {}
    run(asked, expected)
    threads = [
        threading.Thread(target=run, args=(asked, first)),
        threading.Thread(target=run, args=(asked[::-1], second)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, maps in expected.items():
        for found in (first, second):
            assert (found[name] is None) == (maps is None)
            if maps is not None:
                atol = 1e-9 * float(maps.abs().max())
                torch.testing.assert_close(found[name], maps, rtol=0, atol=atol)
