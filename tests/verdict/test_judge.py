"""What is judged, and what is said about the rest."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import rectgrad
from planted import PatchNet, Shown, pictures
from rectgrad.methods import Method
from rectgrad.verdict.matched import VARIANTS, Matched, matched_rows
from rectgrad.verdict.presets import PRESETS
from rectgrad.verdict.rows import rows_of
from tiny_model import tiny

SMALL = replace(
    PRESETS["quick"],
    photos=9,
    evaluated=6,
    repeated=4,
    costly=4,
    costly_repeated=2,
    matched=4,
    composites=4,
    steps=3,
    draws=2,
    stages=2,
    subsets=4,
    squares=4,
    samples=3,
    chunk=4,
)
CONTROLS = ["random", "edges", "centre", "brightness"]


@pytest.fixture(autouse=True)
def small_counts(monkeypatch):
    monkeypatch.setattr("rectgrad.verdict.presets.Preset.enough", lambda self, rows, measures: self)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for i in range(9):
        values = random.integers(0, 255, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(values).resize((32, 32)).save(folder / f"photo{i}.png")
    return folder


@dataclass(frozen=True)
class Refusing(Method):
    """Refuses every network."""

    def raw(self, request):
        raise rectgrad.UnsupportedModelError("this network is not for me")


@dataclass(frozen=True)
class Nothing(Method):
    """A map that is zero for some pictures."""

    def finish(self, raw, inputs):
        return tuple(r * (x.mean((1, 2, 3), keepdim=True) > 0) for r, x in zip(raw, inputs, strict=True))


@pytest.fixture(scope="module")
def network(photos):
    """The tiny network, with a bias for which it sees several classes in the photos."""
    found = tiny()
    x = torch.stack([found.prepare(found.crop(Image.open(path))) for path in sorted(photos.iterdir())])
    with torch.no_grad():
        found.module[-1].bias -= found.module(x).mean(0)
    return found


@pytest.fixture(scope="module")
def verdict(photos, network):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rectgrad.verdict.presets.Preset.enough", lambda self, rows, measures: self)
        return rectgrad.judge(network, photos, ["rectgrad", "gradcam", "integrated_gradients"], preset=SMALL)


def test_every_measure_has_methods_and_controls_with_the_counts_of_the_preset(verdict):
    rows = ["rectgrad", "gradcam", "integrated_gradients", *CONTROLS]
    without = {"inside", "pointing_game", "randomisation_alone"}  # no masks, and a quick preset
    assert set(verdict.table) == set(verdict.record["measures"]) - without
    for measure, expected in {
        "gini": (9, 9, 4),
        "specificity": (9, 9, 2),
        "insertion_blur": (6, 6, 4),
        "road": (6, 6, 4),
        "sensitivity_n": (6, 6, 4),
        "max_sensitivity": (4, 4, 2),
        "randomisation": (4, 4, 2),
    }.items():
        cells = verdict.table[measure]
        assert list(cells) == rows
        assert tuple(cells[row]["n"] for row in rows[:3]) == expected, measure
        assert all(cell["low"] <= cell["mean"] <= cell["high"] for cell in cells.values())
    assert [(each["kind"], each["what"]) for each in verdict.failures] == [
        ("question", f'"{question}"') for question in verdict.answers
    ]
    assert all("are too few" in each["why"] for each in verdict.failures)
    assert set(verdict.answers) == {"where", "why this class", "how much"}


def test_controls_do_not_depend_on_class_or_weights(verdict):
    for control in CONTROLS:
        assert verdict.table["specificity"][control]["mean"] == 0
        assert verdict.table["randomisation_last"][control]["mean"] == pytest.approx(1)


def test_values_are_those_of_the_metrics(photos, network, verdict):
    """The verdict shares evaluations between rows and keeps those of unchanged photos."""
    net = network
    x = torch.stack([net.prepare(net.crop(Image.open(p))) for p in sorted(photos.iterdir())])[:6]
    target = net.module(x).argmax(1)
    maps = rectgrad.attribute(net.module, x, "rectgrad", target)
    metrics = rectgrad.metrics

    def probabilities(images):
        return net.module(images).softmax(1)

    expected = {
        "insertion_blur": metrics.area(
            metrics.insertion(probabilities, x, maps, target, steps=3, baseline="blur")
        ),
        "deletion_mean": metrics.area(
            metrics.deletion(probabilities, x, maps, target, steps=3, baseline="mean")
        ),
        "road_most": metrics.road(net.module, x, maps, target).probability.mean(1),
        "sensitivity_n": metrics.sensitivity_n(
            net.module, x, maps, target, fractions=SMALL.fractions, subsets=4, baseline="mean"
        ).nanmean(1),
        "gini": metrics.gini(rectgrad.attribute(net.module, x, "rectgrad", target)),
    }
    for measure, values in expected.items():
        found = verdict.table[measure]["rectgrad"]
        if found["n"] == len(values):
            assert found["mean"] == pytest.approx(float(values.mean()), abs=1e-5), measure
    worst = net.module(x).argmin(1)
    other = rectgrad.attribute(net.module, x, "rectgrad", worst)
    assert float(metrics.specificity(maps, other).mean()) == pytest.approx(
        verdict.table["specificity"]["rectgrad"]["mean"], abs=0.3
    )


def test_evaluations_that_do_not_depend_on_the_method_are_shared(photos, network):
    """One more method adds its maps alone to the passes for sensitivity-n and infidelity."""

    def passes(methods):
        seen = []
        hook = network.module.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
        rectgrad.judge(network, photos, methods, measures="sensitivity_n,infidelity", preset=SMALL)
        hook.remove()
        return sum(seen)

    more = passes(["saliency", "gradient_x_input"]) - passes(["saliency"])
    assert more == SMALL.evaluated  # 16 passes for each photo are shared


def test_the_chunks_do_not_matter(photos, network, verdict):
    other = rectgrad.judge(
        network,
        photos,
        ["rectgrad"],
        preset=replace(SMALL, chunk=9),
        measures="insertion,road,sensitivity_n,gini",
    )
    for measure, cells in other.table.items():
        for row, cell in cells.items():
            assert cell["mean"] == pytest.approx(verdict.table[measure][row]["mean"], abs=1e-6)


def test_an_unreadable_photo_is_listed_and_the_rest_judged(photos, tmp_path):
    for path in list(photos.iterdir())[:3]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "broken.png").write_text("no picture")
    found = rectgrad.judge(tiny(), tmp_path, ["saliency"], measures="gini", preset=SMALL)
    assert [(each["kind"], each["what"]) for each in found.failures] == [("photo", "broken")]
    assert "not an image" in found.failures[0]["why"]
    assert found.table["gini"]["saliency"]["n"] == 3


def test_a_method_that_refuses_is_said_and_the_rest_judged():
    network = PatchNet().eval()
    x = pictures(network, 6, 0)
    x[0], x[1] = -1, -0.9  # without evidence, and with a mean below 0
    methods = {"refusing": Refusing(), "nothing": Nothing(), "truth": Shown(network.regions)}
    found = rectgrad.judge(network, x, methods, measures="gini,deletion,grid", preset=SMALL)
    said = {each["what"]: each["why"] for each in found.failures}
    assert said["refusing"] == "this network is not for me"
    assert said["nothing"] == "the maps of 4 photos are zero, and left out"
    assert set(found.table["gini"]) == {"nothing", "truth", *CONTROLS}
    assert found.table["gini"]["nothing"]["n"] < found.table["gini"]["truth"]["n"] == 6
    assert found.ranks["order"].count("truth") == 1
    assert "refusing" not in found.ranks["order"]


@dataclass(frozen=True)
class Moody(Method):
    """Fails for batches with a picture whose first value is 7, and for single pictures."""

    one_backward = False

    def raw(self, request):
        if len(request.inputs[0]) == 1 or (request.inputs[0][:, 0, 0, 0] == 7).any():
            raise RuntimeError(f"odd batch of {len(request.inputs[0])}")
        return tuple(x.detach() for x in request.inputs)


def test_a_method_that_fails_for_some_photos_is_judged_on_the_others():
    """Its map of a single photo is not drawn."""
    network = PatchNet().eval()
    x = pictures(network, 7, 0)
    x[4:, 0, 0, 0] = 7
    methods = {"moody": Moody(), "truth": Shown(network.regions), "saliency": rectgrad.Saliency()}
    preset = replace(SMALL, evaluated=7, repeated=7, costly=7, costly_repeated=7)
    found = rectgrad.judge(network, x, methods, measures="gini,deletion", preset=preset)
    assert found.table["gini"]["moody"]["n"] == 4 < found.table["gini"]["truth"]["n"]
    said = [each["why"] for each in found.failures if each["what"] == "moody"]
    assert len(said) == 1
    assert said[0].startswith("RuntimeError: odd batch of")
    assert [set(each["maps"]) for each in found.pictures] == [{"truth", "saliency"}] * 3


def test_inputs_without_positions():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3)).eval()
    found = rectgrad.judge(network, torch.randn(6, 12), ["saliency", "guided_backprop"], preset=SMALL)
    assert {"gini", "specificity", "randomisation", "max_sensitivity"} <= set(found.table)
    assert set(found.table["gini"]) >= {"saliency", "guided_backprop", "random"}
    said = " ".join(f"{each['what']}: {each['why']}" for each in found.failures)
    assert "insertion (blurred): the inputs have no rows and columns: (12,)" in said
    assert "edges" in said
    assert found.answers["where"] == "inconclusive"


def test_networks_with_probabilities_or_in_training_mode():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3), nn.Softmax(1))
    with pytest.raises(ValueError, match=r"in training mode; call model.eval\(\) first"):
        rectgrad.judge(network, torch.randn(5, 3, 8, 8), ["saliency"], preset=SMALL)
    found = rectgrad.judge(
        network.eval(), torch.randn(5, 3, 8, 8), ["saliency"], measures="deletion_mean", preset=SMALL
    )
    assert [each["kind"] for each in found.failures] == ["network", "question"]
    assert "look like probabilities" in found.failures[0]["why"]


def test_a_single_output():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 1)).eval()
    found = rectgrad.judge(network, torch.randn(5, 3, 8, 8), ["saliency"], preset=SMALL)
    assert {"insertion_mean", "deletion_blur", "sensitivity_n", "infidelity"} <= set(found.table)
    assert {
        "what": "specificity",
        "why": "the network has a single output",
        "kind": "measure",
    } in found.failures
    assert "road" not in found.table


def test_masks():
    network = PatchNet().eval()
    mask = torch.zeros(24, 24, dtype=torch.bool)
    mask[network.regions[0]] = True
    found = rectgrad.judge(
        network,
        pictures(network, 5, 0),
        {"truth": Shown(network.regions)},
        masks=mask.expand(5, -1, -1),
        measures="inside,pointing_game",
        preset=SMALL,
    )
    assert found.table["pointing_game"]["truth"]["mean"] == 1
    assert found.table["inside"]["truth"]["mean"] > 0.9 > 0.2 > found.table["inside"]["centre"]["mean"]


def test_names_of_methods_may_be_long_and_have_colons(tmp_path):
    network = PatchNet().eval()
    names = ["truth: one", "truth: two", f"truth {'long ' * 60}"]
    methods = {name: Shown(network.regions, 1 - i / 4) for i, name in enumerate(names)}
    x = pictures(network, 6, 0)
    found = rectgrad.judge(network, x, methods, measures="deletion,insertion", preset=SMALL, out=tmp_path)
    for own in found.record["matched"].values():
        assert set(own["table"]["deletion_blur"]) == set(names)
    assert set(found.record["times"]["matched"]) == set(names)


def test_ties_and_copies(verdict):
    """A rank counts the rows that are significantly better, and an order names every row once."""
    for measure, own in verdict.ranks["by_measure"].items():
        for row, rank in own.items():
            better = [
                pair
                for pair in verdict.pairs
                if pair["measure"] == measure
                and row in (pair["a"], pair["b"])
                and pair["better"] not in (None, row)
            ]
            assert rank == 1 + len(better)
    assert sorted(verdict.ranks["order"]) == sorted(
        ["rectgrad", "gradcam", "integrated_gradients", *CONTROLS]
    )


def test_matched_comparisons_have_equal_steps(verdict):
    assert list(verdict.record["matched"]) == [
        "no post-processing",
        "times input, positive part",
        "times input, positive part, padding trick",
        "times input, positive part, same Gini index",
    ]
    cut = verdict.record["matched"]["times input, positive part, same Gini index"]["table"]["gini"]
    assert all(cell["n"] == 4 for cell in cut.values())
    assert min(cell["mean"] for cell in cut.values()) > 0.5


def test_every_leader_is_in_every_matched_comparison(photos, network):
    """The padding trick is a method's own where it has one: a class gate cannot run from its rules alone."""
    methods = ["rectgrad_gated", "saliency", "gradcam"]
    found = rectgrad.judge(network, photos, methods, measures="insertion_blur", preset=SMALL)
    for variant, own in found.record["matched"].items():
        assert set(own["table"]["insertion_blur"]) == set(methods), variant
    rows = {row.name: row for row in rows_of(methods, SMALL, 0) if not row.control}
    padded = matched_rows(list(rows.values()), {})["times input, positive part, padding trick"]
    gated, saliency, gradcam = (row.method.over for row in padded)
    assert (gated.padding_trick, gated.gate, gated.positive_only) == (True, "class", False)
    assert "conv" in saliency.rules()
    assert "conv" not in rows["saliency"].method.rules()
    assert gradcam == rows["gradcam"].method


def test_what_fails_in_matched_comparisons_is_said(photos, network, monkeypatch):
    def refused(self, maps, inputs):
        raise ValueError("no such steps")

    monkeypatch.setattr(Matched, "processed", refused)
    found = rectgrad.judge(network, photos, ["saliency"], measures="insertion_blur", preset=SMALL)
    said = {each["what"]: each["why"] for each in found.failures if each["kind"] == "method"}
    assert said == {f"saliency: {variant}": "no such steps" for variant in VARIANTS}
    assert found.record["matched"] == {}


def test_saved_files_and_representation(verdict, tmp_path):
    page = verdict.save(tmp_path / "new")
    assert page == tmp_path / "new" / "verdict.html"
    assert {path.name for path in page.parent.iterdir()} == {"verdict.html", "verdict.json"}
    assert repr(verdict).startswith("Verdict on tiny: 3 methods, 9 photos")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"preset": "slow"}, "unknown preset 'slow'; presets are quick, full"),
        ({"measures": "beauty"}, "unknown measure 'beauty'; measures are insertion_blur"),
        ({"seed": -1}, "seed=-1: needs an integer from 0"),
        ({"seed": 2**63}, "needs an integer from 0"),
        ({"engine": "spark"}, "unknown engine 'spark'; engines are local, ray"),
        ({"methods": {"edges": rectgrad.Saliency()}}, "'edges' is the name of a control"),
        ({"methods": "deeplift_shap"}, "methods=deeplift_shap: needs further options"),
        ({"methods": "magic"}, "unknown method 'magic'"),
        ({"methods": {}}, "no methods to judge"),
        ({"masks": torch.ones(3, 5, 5)}, "masks of shape (3, 5, 5)"),
    ],
)
def test_errors_name_what_would_be_valid(options, said):
    with pytest.raises(ValueError) as error:
        rectgrad.judge(tiny(), torch.randn(3, 3, 32, 32), **{"methods": "saliency"} | options)
    assert said in str(error.value)


@pytest.mark.parametrize("methods", [rectgrad.Saliency(), [rectgrad.Saliency()], ["saliency", 3]])
def test_methods_without_names_are_refused(methods):
    with pytest.raises(TypeError, match='methods must be names, "all", or a mapping from names to methods'):
        rectgrad.judge(tiny(), torch.randn(3, 3, 32, 32), methods)
