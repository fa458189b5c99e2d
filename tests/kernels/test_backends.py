"""Which backend runs, and that all of them give the same maps."""

import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rectgrad
from native_levels import LIBRARY, needs_native
from networks import NETWORKS
from rectgrad import kernels
from rectgrad.kernels import native
from rectgrad.kernels.linear_ops import Conv, Linear
from rectgrad.kernels.portable import Portable
from rectgrad.kernels.reference import SCORES, Reference, percentile, smallest
from rectgrad.kernels.sparse import dense

# ---- the choice ------------------------------------------------------------------------------------------


def test_every_choice_gives_the_same_percentile(monkeypatch):
    score = torch.randn(2, 1000)
    expected = score.kthvalue(980, dim=1).values
    for choice in kernels.CHOICES:
        monkeypatch.setenv("RECTGRAD_KERNELS", choice)
        assert torch.equal(smallest(score, 980), expected)
        assert torch.equal(percentile(score, 98), expected)


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ("reference", Reference),
        ("portable", Portable),
        ("fast", Portable if LIBRARY is None else native.Native),
    ],
)
def test_the_backend_of_a_choice(choice, kind, monkeypatch):
    monkeypatch.setenv("RECTGRAD_KERNELS", choice)
    assert type(kernels.backend_of(torch.ones(1))) is kind
    assert type(kernels.backend_of(torch.ones(1, device="meta"))) is Reference
    monkeypatch.delenv("RECTGRAD_KERNELS")
    monkeypatch.setenv("RECTGRAD_KERNELS", "")  # as if not set
    fast = kernels.backend_of(torch.ones(1)).name
    assert fast == "portable" if LIBRARY is None else fast.startswith("native")


def test_the_choice_is_checked(monkeypatch):
    monkeypatch.setenv("RECTGRAD_KERNELS", "quick")
    with pytest.raises(ValueError, match="'quick'; it must be one of fast, portable, reference"):
        rectgrad.attribute(nn.ReLU().eval(), torch.ones(1, 60))


@pytest.mark.parametrize("choice", ["reference", "portable"])
def test_in_use_says_what_runs(choice, monkeypatch):
    monkeypatch.setenv("RECTGRAD_KERNELS", choice)
    assert kernels.in_use()["cpu"] == kernels.backend_for("cpu").name == choice


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    """As where there was no C compiler."""
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    native.load.cache_clear()
    kernels._backend.cache_clear()
    yield
    monkeypatch.undo()
    native.load.cache_clear()
    kernels._backend.cache_clear()


@needs_native
def test_a_library_of_other_sources_is_not_used(tmp_path, no_library):
    """As after an update of a clone that was not installed again: arguments may have changed."""
    built = Path(native.__file__).parent
    for path in built.glob("_native_*.so"):
        shutil.copy(path, tmp_path)
    shutil.copytree(built / "native", tmp_path / "native")
    assert native.load() is not None
    with (tmp_path / "native" / "linear.c").open("a") as source:
        source.write("\n")
    native.load.cache_clear()
    with pytest.warns(UserWarning, match="built from other sources .* install rectgrad again"):
        assert native.load() is None


def test_a_missing_native_library(no_library):
    """Everything runs, and the maps are the reference's to the bit."""
    assert native.load() is None
    assert type(kernels.backend_of(torch.ones(1))) is Portable
    assert kernels.in_use()["cpu"] == "portable"
    assert not kernels.is_native(torch.ones(1))
    torch.manual_seed(0)
    x = torch.randn(3, 3, 48, 48)
    model = calibrated(Residual(), x)
    maps = rectgrad.attribute(model, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECTGRAD_KERNELS", "reference")
        assert torch.equal(maps, rectgrad.attribute(model, x))


# ---- whole networks --------------------------------------------------------------------------------------


class Residual(nn.Module):
    """In-place ReLUs, a sum of two paths, an in-place sum, a path read twice, grouped layers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU(inplace=True))
        self.a = nn.Sequential(
            nn.Conv2d(24, 24, 3, 1, 1, groups=24), nn.BatchNorm2d(24), nn.ReLU6(inplace=True)
        )
        self.b = nn.Sequential(nn.Conv2d(24, 24, 1), nn.BatchNorm2d(24))
        self.c = nn.Sequential(nn.Conv2d(24, 20, 3, 2, 1, groups=4), nn.BatchNorm2d(20), nn.ReLU())
        self.d = nn.Sequential(nn.Conv2d(24, 20, 1, 2), nn.BatchNorm2d(20))
        self.head = nn.Sequential(
            nn.Linear(20 * 36, 90), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(90, 10)
        )

    def forward(self, x):
        x = self.stem(x)
        y = self.b(self.a(x))
        y += x
        x = F.relu(y, inplace=True)
        x = F.relu_(F.avg_pool2d(self.c(x) + self.d(x), 2))
        return self.head(F.interpolate(x, size=6).flatten(1))


def calibrated(model, x):
    torch.manual_seed(1)
    model.train()(x)
    return model.eval()


@needs_native
@pytest.mark.parametrize(
    "options", [{}, {"q": 90, "padding_trick": False}, {"rule": "mod", "q": 80}, {"tau": 0.0}]
)
def test_a_network_natively(options, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 48, 48)
    compare(calibrated(Residual(), x), x, options, monkeypatch)


@needs_native
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_every_kind_natively(name, monkeypatch):
    model, inputs = NETWORKS[name](3)
    inputs = tuple(x.float() for x in inputs) if isinstance(inputs, tuple) else inputs.float()
    compare(model.float(), inputs, {"q": 70.0}, monkeypatch)


def compare(model, inputs, options, monkeypatch):
    """Maps agree to 1e-5 of their maximum; a unit within rounding of tau may flip, and is counted. A flip
    changes what follows, so then layer by layer, each from the same arriving gradient."""
    options = {**options, "multiply_by_input": False, "positive_only": False}
    flips = Flips(monkeypatch)
    fast = as_tuple(rectgrad.attribute(model, inputs, **options))
    monkeypatch.undo()
    monkeypatch.setenv("RECTGRAD_KERNELS", "reference")
    slow = as_tuple(rectgrad.attribute(model, inputs, **options))
    assert flips.layers
    for f, s in zip(fast, slow, strict=True):
        if float((f - s).abs().max()) > 1e-5 * float(s.abs().max()):
            assert flips.near_tau, "the maps differ although no unit lies within rounding of tau"


class Flips:
    """Each layer's result is checked bit for bit against the reference on the same R; units whose score lies
    within rounding of tau are those that a last bit upstream may flip."""

    def __init__(self, monkeypatch):
        self.layers, self.near_tau, inner = 0, 0, native.Native.rectify

        def rectify(backend, a, R, rows, k, tau, rule, sums):
            result = inner(backend, a, R, rows, k, tau, rule, sums)
            assert torch.equal(dense(result), Reference().rectify(a, R, rows, k, tau, rule, []))
            self.layers += 1
            s = SCORES[rule](a, R).reshape(rows, -1)
            limit = s.kthvalue(k, dim=1).values if tau is None else torch.full((rows,), tau)
            near = ((s - limit.unsqueeze(1)).abs() < 1e-5 * s.abs().amax()) & (s != limit.unsqueeze(1))
            self.near_tau += int(near.sum())
            return result

        monkeypatch.setattr(native.Native, "rectify", rectify)


def as_tuple(maps):
    return maps if isinstance(maps, tuple) else (maps,)


@needs_native
def test_most_layers_of_a_network_take_the_sparse_path(monkeypatch):
    paths = []
    for kind in (Conv, Linear):
        monkeypatch.setattr(kind, "gradient", noting(kind.gradient, paths))
    torch.manual_seed(0)
    x = torch.randn(2, 3, 48, 48)
    rectgrad.attribute(calibrated(Residual(), x), x)
    # Dense is what comes from the score, and what passes the sum of two paths without an activation.
    assert paths == ["dense", "sparse", "dense", "sparse", "sparse", "sparse", "sparse"]


def noting(gradient, paths):
    def noted(op, R, within=None):
        grad, path = gradient(op, R, within)
        paths.append(path)
        return grad, path

    return noted


@needs_native
def test_threads_do_not_share_anything():
    torch.manual_seed(0)
    x = torch.randn(8, 3, 48, 48)
    model = calibrated(Residual(), x)
    expected = [rectgrad.attribute(model, x[i : i + 1]) for i in range(8)]
    wrong = []

    def work(i):
        for _ in range(10):
            if not torch.equal(rectgrad.attribute(model, x[i : i + 1]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_native
def test_an_in_place_relu_keeps_no_second_copy(monkeypatch):
    addresses, outputs = [], []

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x):
            y = F.relu(self.conv(x), inplace=True)
            with torch._C.DisableTorchFunction():
                addresses.append(y.data_ptr())
            return y.flatten(1)

    inner = native.Native.rectify

    def look(backend, a, *rest):
        outputs.append(a.data_ptr())
        return inner(backend, a, *rest)

    monkeypatch.setattr(native.Native, "rectify", look)
    rectgrad.attribute(Plain().eval(), torch.randn(1, 3, 20, 20))
    assert outputs == addresses


def test_without_the_native_part_maps_are_the_same_bits(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(3, 3, 48, 48)
    model = calibrated(Residual(), x)
    monkeypatch.setenv("RECTGRAD_KERNELS", "portable")
    portably = rectgrad.attribute(model, x)
    monkeypatch.setenv("RECTGRAD_KERNELS", "reference")
    assert torch.equal(portably, rectgrad.attribute(model, x))
