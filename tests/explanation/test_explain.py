"""explain: the same map as attribute, for every form of input."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import rectgrad
from every_method import EVERY, QUICK
from networks import NETWORKS
from rectgrad.api import record_for
from rectgrad.explanation import Network, Prepared, explain_record
from rectgrad.methods.catalog import describe
from tiny_model import tiny

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (40, 48, 3), dtype=np.uint8)


def inputs_of(model, pixels=PIXELS):
    return model.prepare(model.crop(Image.fromarray(pixels)))[None]


def forms(path):
    """One picture in every form except a tensor."""
    Image.fromarray(PIXELS).save(path)
    return {
        "path": path,
        "string": str(path),
        "PIL": Image.open(path),
        "uint8": PIXELS,
        "float": PIXELS / 255,
        "float32": (PIXELS / 255).astype(np.float32),
    }


@pytest.mark.parametrize("method", ["rectgrad", "saliency", "smoothgrad"])
def test_every_form_of_a_picture_gives_the_map_of_attribute(tmp_path, method):
    model = tiny()
    x = inputs_of(model)
    expected = rectgrad.attribute(model.module, x, method)
    for name, form in forms(tmp_path / "a.png").items():
        assert torch.equal(rectgrad.explain(form, model, method).map, expected[0]), name
    for tensor in (x, x[0]):
        assert torch.equal(rectgrad.explain(tensor, model, method).map, expected[0])


@pytest.mark.parametrize("composite", ["epsilon_gamma_box", "deep_taylor"])
def test_the_bounds_of_the_box_rule_are_those_of_a_pixel(composite):
    model = tiny()
    mean, std = torch.tensor(model.mean), torch.tensor(model.std)
    bounds = {"low": ((0 - mean) / std).view(3, 1, 1), "high": ((1 - mean) / std).view(3, 1, 1)}
    expected = rectgrad.attribute(model.module, inputs_of(model), "lrp", composite=composite, **bounds)
    found = rectgrad.explain(PIXELS, model, "lrp", composite=composite)
    torch.testing.assert_close(found.map, expected[0])
    assert len(found.method.low) == len(found.method.high) == 3
    smooth = rectgrad.explain(PIXELS, model, "smoothgrad", over=found.method, samples=1, noise=0.0)
    torch.testing.assert_close(smooth.map, expected[0])
    own = rectgrad.explain(PIXELS, model, "lrp", composite=composite, low=-9.0, high=9.0)
    assert (own.method.low, own.method.high) == (-9, 9)


def test_a_list_and_a_batch_give_a_list(tmp_path):
    model = tiny()
    other = RNG.integers(0, 256, (32, 60, 3), dtype=np.uint8)
    x = torch.cat([inputs_of(model), inputs_of(model, other)])
    expected = rectgrad.attribute(model.module, x, target=[1, 3], q=60)
    Image.fromarray(PIXELS).save(tmp_path / "a.png")
    for given in ([tmp_path / "a.png", other], (x[:1], x[1]), x):
        found = rectgrad.explain(given, model, target=[1, "blue fish"], q=60)
        assert [each.target.index for each in found] == [1, 3]
        for each, map in zip(found, expected, strict=True):
            assert torch.equal(each.map, map)
    one_by_one = rectgrad.explain(x, model, target=torch.tensor([1, 3]), q=60, batch_size=1)
    assert torch.allclose(torch.stack([e.map for e in one_by_one]), expected, atol=1e-5 * expected.max())
    assert rectgrad.explain([], model) == []
    assert rectgrad.explain(x[:0], model) == []


def test_pictures_of_several_sizes_for_a_model_that_takes_any():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    pictures = [torch.rand(3, 20, 20), torch.rand(3, 24, 20), torch.rand(3, 24, 20)]
    found = rectgrad.explain(pictures, net.eval(), "saliency")
    for picture, each in zip(pictures, found, strict=True):
        assert torch.allclose(each.map, rectgrad.attribute(net, picture[None], "saliency")[0])
        assert each.photo is None


def test_a_module_with_its_own_preparation_and_class_names():
    model = tiny()
    plain, names = model.module, ["ant", "bee", "cow", "dog"]
    prepared = []

    def prepare(picture):
        prepared.append(picture.size)
        return model.prepare(model.crop(picture))[None]  # the batch dimension is tolerated

    found = rectgrad.explain(PIXELS, plain, "saliency", "cow", prepare=prepare, labels=names)
    assert prepared == [(48, 40)]
    assert (found.target.index, found.target.label) == (2, "cow")
    assert torch.equal(found.map, rectgrad.attribute(plain, inputs_of(model), "saliency", 2)[0])
    assert found.photo.size == (32, 32)  # the crop, drawn from the tensor
    assert [guess.label for guess in found.top] == [names[i] for i in found.outputs.argsort(descending=True)]


def test_the_numbers_are_those_of_the_model():
    model = tiny()
    found = rectgrad.explain(PIXELS, model)
    outputs = model.module(inputs_of(model))[0].detach()
    assert torch.equal(found.outputs, outputs)
    assert found.top == tuple(model.top(outputs))
    assert found.target == found.top[0]
    assert found.method == rectgrad.METHODS[rectgrad.recommended("where")]
    assert np.array_equal(np.asarray(found.photo), np.asarray(model.crop(Image.fromarray(PIXELS))))
    again = rectgrad.explain(inputs_of(model), model)
    assert np.array_equal(np.asarray(again.photo), np.asarray(found.photo))  # the preparation undone
    assert "relu" in str(found.trace)
    assert "rectified" in str(found.trace)


def test_a_photo_on_its_side_is_turned_as_its_orientation_says(tmp_path):
    picture = Image.fromarray(PIXELS)
    turned, exif = picture.rotate(90, expand=True), Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "a.png", exif=exif)
    for given in (tmp_path / "a.png", Image.open(tmp_path / "a.png")):
        assert torch.equal(rectgrad.explain(given, tiny()).map, rectgrad.explain(picture, tiny()).map)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", EVERY)
@pytest.mark.filterwarnings("ignore")
def test_a_pass_recorded_for_one_method_gives_its_map_to_the_last_bit(network, method):
    model, x = NETWORKS[network](0)
    if isinstance(x, tuple):
        pytest.skip("pictures are single tensors")
    chosen = replace(rectgrad.METHODS[method], **QUICK.get(method, {}))
    try:
        expected = rectgrad.attribute(model, x, chosen, 1)
    except rectgrad.UnsupportedModelError:
        return
    kept = record_for(model, x, chosen)
    assert torch.equal(kept.attribute(chosen, 1), expected)
    assert torch.equal(kept.attribute(chosen, 0), rectgrad.attribute(model, x, chosen, 0))
    assert torch.equal(kept.attribute(chosen, 1), expected)


def test_one_forward_pass_for_the_map_and_the_specificity():
    model, calls = tiny(), []
    model.module.register_forward_pre_hook(lambda *_: calls.append(1))
    rectgrad.explain(PIXELS, model)
    assert len(calls) == 1
    rectgrad.explain(PIXELS, model, "integrated_gradients", steps=3)
    before = len(calls)
    rectgrad.explain(PIXELS, model, "integrated_gradients", steps=3, specificity=True)
    assert len(calls) - before > before - 1


def test_the_library_s_warnings_are_kept_and_raised():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3), nn.Dropout()).eval()
    with pytest.warns(UserWarning, match="passed nothing") as raised:
        found = rectgrad.explain(torch.rand(3, 2, 2), net)
    assert [str(each.message) for each in raised] == list(found.warnings)
    assert raised[0].filename == __file__
    assert len(found.warnings) == 1
    assert (found.specificity, found.specificity_note) == (None, "the map is zero")
    assert "passed nothing" in found._repr_html_()
    with pytest.warns(UserWarning, match="training mode"):
        found = rectgrad.explain(torch.rand(3, 2, 2), net.train(), "saliency")
    assert "training mode" in found.warnings[0]


def test_a_warning_about_one_picture_is_not_given_to_the_others():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 60), nn.ReLU(), nn.Linear(60, 3)).eval()
    x = torch.rand(2, 3, 2, 2)
    net[1].bias.data.zero_()
    x[1] *= 1e-6
    with pytest.warns(UserWarning, match="^the map is zero: layer '2'"):
        first, second = rectgrad.explain(x, net, tau=1e-3)
    assert not first.warnings
    assert second.warnings


@pytest.mark.parametrize("tau", [None, 1e-3])
def test_every_picture_without_a_map_has_its_warning(tau):
    """Ties leave nothing above the percentile; faint pictures nothing above tau, each with its own number."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 60), nn.ReLU(), nn.Linear(60, 3)).eval()
    x = torch.rand(12, 3, 2, 2)
    net[1].bias.data.zero_() if tau else net[1].bias.data.fill_(1e-3)
    x[[1, 4, 11]] *= 1e-6 if tau else 0
    net[3].weight.data.abs_().fill_(0.1)
    with pytest.warns(
        UserWarning, match="^the map is zero: layer '2' with 60 units passed nothing"
    ) as raised:
        found = rectgrad.explain(x, net, tau=tau, batch_size=12)
    assert [i for i, each in enumerate(found) if each.warnings] == [1, 4, 11]
    assert all(text.startswith("the map is zero: layer") for i in (1, 4, 11) for text in found[i].warnings)
    assert len(raised) == (3 if tau else 1)


def test_a_picture_in_which_nothing_speaks_for_the_class():
    """One reason for each picture: in the first nothing speaks for class 1, the last one is too faint."""
    net = nn.Sequential(nn.Conv2d(3, 1, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2, bias=False))
    with torch.no_grad():
        net[0].weight.fill_(1), net[3].weight.fill_(1), net[3].weight[1].fill_(-1)
    x = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0)) + 0.1
    x[2] *= 1e-6
    with pytest.warns(UserWarning, match="speaks for .hammer.$|map is zero") as raised:
        found = rectgrad.explain(
            x, net.eval(), "rectgrad_gated", target=[1, 0, 0], labels=["nail", "hammer"], tau=1e-3
        )
    assert found[0].warnings == ("nothing in the picture speaks for 'hammer'",)
    assert found[1].warnings == ()
    assert "the map is zero: layer '1' with 16 units passed nothing above tau" in found[2].warnings[0]
    assert [str(each.message) for each in raised] == [*found[0].warnings, *found[2].warnings]
    with pytest.warns(UserWarning, match="nothing in the input speaks for the class"):
        rectgrad.explain(x[0], net, "rectgrad_gated", target=rectgrad.contrast(1, 0))


def test_a_model_s_own_warnings_are_passed_on():
    class Noisy(nn.Module):
        def forward(self, x):
            warnings.warn("of the model", UserWarning, stacklevel=1)
            return x.relu().sum((2, 3))

    with pytest.warns(UserWarning, match="of the model"):
        found = rectgrad.explain(torch.rand(3, 8, 8), Noisy(), "saliency")
    assert found.warnings == ()


@pytest.mark.parametrize("method", ["rectgrad", "lrp"])
def test_explanations_hold_no_activations(method):
    import gc

    def held():
        gc.collect()
        return sum(x.numel() for x in gc.get_objects() if type(x) is torch.Tensor)

    model = tiny()
    rectgrad.explain(PIXELS, model, method)
    before = held()
    kept = [rectgrad.explain(PIXELS, model, method) for _ in range(3)]
    assert held() - before <= sum(each.map.numel() + each.outputs.numel() for each in kept)


def test_pictures_are_read_as_they_are_needed(tmp_path):
    """A list of thousands must not be decoded at once."""
    model, ready, seen = tiny(), [], []

    def prepare(picture):
        ready.append(1)
        return model.prepare(model.crop(picture))

    model.module.register_forward_pre_hook(lambda *_: seen.append(len(ready)))
    rectgrad.explain([PIXELS] * 6, model.module, "saliency", prepare=prepare, batch_size=2, specificity=False)
    assert seen == [3, 5, 6]  # the one that fills the next batch is read ahead


def test_threads_get_their_own_warnings_and_leave_the_filters_alone():
    torch.manual_seed(0)
    small = nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3)).eval()
    large = nn.Sequential(nn.Flatten(), nn.Linear(12, 99), nn.ReLU(), nn.Linear(99, 3)).eval()
    x, before = torch.rand(3, 2, 2), (list(warnings.filters), warnings.showwarning)
    with warnings.catch_warnings(), ThreadPoolExecutor(4) as pool:
        warnings.simplefilter("ignore")
        during = list(warnings.filters)
        found = list(pool.map(lambda net: rectgrad.explain(x, net), [small, large] * 20))
        assert warnings.filters == during
    assert [len(each.warnings) for each in found] == [1, 0] * 20
    assert (warnings.filters, warnings.showwarning) == before


def test_what_is_no_picture_is_shown_as_text():
    found = rectgrad.explain(torch.rand(12), nn.Sequential(nn.Linear(12, 3)), "saliency")
    assert found._repr_html_() == f"<pre>{repr(found).replace(chr(39), '&#x27;')}</pre>"
    assert "map 12" in repr(found)


@pytest.mark.parametrize(
    ("method", "option"), [("deeplift", "baseline"), ("expected_gradients", "baselines")]
)
def test_an_option_that_is_a_tensor_is_described_by_its_shape(method, option, tmp_path):
    given = torch.zeros(inputs_of(tiny()).shape)
    found = rectgrad.explain(PIXELS, tiny(), method, **{option: given})
    assert describe(found.method) == f"{method.replace('_', ' ')} {option}=a tensor {tuple(given.shape)}"
    found.save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as saved:
        assert "a tensor (1, 3," in str(saved["settings"])


@pytest.mark.parametrize("name", ["occlusion", "random", "smoothgrad"])
def test_the_trace_of_a_shared_record_has_no_rules_of_an_earlier_method(name):
    net, inputs = tiny(), torch.rand(1, 3, 32, 32)
    network, batch = Network.of(net), [Prepared(inputs[0], None)]
    kept = rectgrad.record(net.module, inputs)
    [first] = explain_record(kept, network, batch, rectgrad.METHODS["gradcam"])
    assert any(note.startswith("Class layer") for note in first.notes)
    [found] = explain_record(kept, network, batch, rectgrad.METHODS[name])
    assert not any(note.startswith("Class layer") for note in found.notes)
    assert {row.rule for row in found.trace.rows} == {"plain"}


def test_a_record_forgets_the_completeness_error_of_deeplift():
    kept = rectgrad.record(tiny().module, torch.rand(1, 3, 32, 32))
    kept.attribute("deeplift")
    assert kept.trace.completeness_error is not None
    kept.attribute("rectgrad")
    assert kept.trace.completeness_error is None
