"""What `rectgrad bench` measures and how it reports it. Nothing is timed here: the clock is fake."""

import contextlib
import functools
import json
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import rectgrad
from rectgrad import bench, cli
from rectgrad.bench import comparison, measure, memory, naive, networks, paths, peers, scaling, selection
from rectgrad.bench.case import case_of
from rectgrad.bench.contenders import contenders, plain
from rectgrad.bench.plan import applied
from rectgrad.kernels.reference import percentile
from rectgrad.models import vit
from rectgrad.photos import files

TINY = {"pixels": 32, "rounds": 2, "methods": ("rectgrad",), "captum": False, "naive": False}
PARAMETERS = {
    "vgg16": 138_357_544,
    "resnet50": 25_557_032,
    "vit_b_16": 86_567_656,
    "inception_v4": 42_679_816,
    "efficientnet_lite0": 4_652_008,
}
KEYS = {
    "vgg16": (32, "features.28.bias", "classifier.6.weight"),
    "resnet50": (320, "layer1.0.downsample.1.weight", "layer4.2.bn3.running_var", "fc.bias"),
    "vit_b_16": (152, "pos_embed", "patch_embed.proj.bias", "blocks.11.attn.qkv.weight", "head.weight"),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_vit(monkeypatch):
    monkeypatch.setattr(vit, "DEPTH", 2)
    monkeypatch.setattr(vit, "WIDTH", 96)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """run("--rounds", "1", ...) -> (status, stdout, stderr), in an empty folder, without measuring memory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "peak", lambda *_: memory.Peak(2**20, 2**21))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["rectgrad", "bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return stopped.value.code, out, err

    return call


@functools.cache
def case(model, pixels=64, batch=2):
    return case_of(bench.Plan(models=(model,), pixels=pixels), model, pixels, batch)


def error(maps, right):
    return float((maps - right).abs().max() / right.abs().max())


# Networks


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_networks_have_the_published_size(name):
    with torch.device("meta"):
        module = networks.NETWORKS[name].make(networks.NETWORKS[name].pixels)
    assert sum(p.numel() for p in module.parameters()) == PARAMETERS[name]
    if name in KEYS:
        count, *keys = KEYS[name]
        assert len(module.state_dict()) == count
        assert set(keys) <= set(module.state_dict())


def test_a_resnet_block_strides_in_its_3x3_convolution():
    with torch.device("meta"):
        block = networks.NETWORKS["resnet50"].make(224).layer2[0]
    assert (block.conv1.stride, block.conv2.stride) == ((1, 1), (2, 2))


@pytest.mark.parametrize(
    ("name", "pixels"), [("efficientnet_lite0", 64), ("resnet50", 64), ("inception_v4", 80)]
)
def test_gradient_flows_through_every_block(name, pixels):
    module = networks.build(name, pixels)
    x = torch.randn(2, 3, pixels, pixels, generator=torch.Generator().manual_seed(3))
    layers = rectgrad.layer_attributions(module, x, "saliency", target=[0, 1])
    assert all(float(values.abs().max()) > 1e-6 for _, values in layers)
    assert not any(layer.training for layer in module.modules())
    assert not any(p.requires_grad for p in module.parameters())


def test_running_statistics_are_those_of_the_data():
    module = networks.build("resnet50", 64)
    x = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    networks.calibrate(module, x)
    spreads = []
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.momentum == 0.1
            layer.register_forward_hook(lambda m, i, out: spreads.append((out.mean(), out.std())))
    module(x)
    assert len(spreads) == 53
    for mean, std in spreads:
        assert abs(float(mean)) < 0.1
        assert 0.8 < float(std) < 1.1


def test_a_network_is_the_same_every_time_and_leaves_the_random_state():
    state = torch.get_rng_state()
    first, second = (networks.build("efficientnet_lite0", 32).state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(torch.get_rng_state(), state)


# Contenders


def test_plain_is_saliency():
    given = case("efficientnet_lite0", 32)
    maps = rectgrad.attribute(given.module, given.inputs, "saliency", given.target)
    assert error(plain(given), maps) < 1e-5


@pytest.mark.usefixtures("small_vit")
@pytest.mark.parametrize(
    ("model", "but"), [("resnet50", ()), ("efficientnet_lite0", ("torch.quantile",)), ("vit_b_16", ())]
)
def test_naive_contenders_compute_rectgrad(model, but):
    """Except torch.quantile, if a layer's tau is halfway between two units."""
    given = case(model)
    before = {name: value.clone() for name, value in given.module.state_dict().items()}
    right = rectgrad.attribute(given.module, given.inputs, "rectgrad", given.target, padding_trick=False)
    field = [each for each in contenders(given, bench.Plan(captum=False)) if each.group == "naive"]
    assert [each.name for each in field] == ["ours", *(f"torch.{name}" for name in naive.TAUS)]
    assert error(plain(given), right) > 0.1
    for each in field:
        if each.name not in but:
            assert error(each.run(), right) < 1e-5, each.name
    assert all(torch.equal(before[name], value) for name, value in given.module.state_dict().items())


@pytest.mark.filterwarnings("ignore:Setting backward hooks")
def test_captum_answers_the_same_question():
    """Signed gradients of the same classes, on a network whose activations write in place."""
    given = case("resnet50")
    for name in ("saliency", "gradient_x_input"):
        maps = peers.peer(given, name)()
        assert error(maps, rectgrad.attribute(given.module, given.inputs, name, given.target)) < 1e-5
    assert not peers.has_no_effect(
        "GuidedBackprop", peers.peer(given, "guided_backprop"), given.inputs, plain(given)
    )
    assert all(layer.inplace for layer in given.module.modules() if isinstance(layer, nn.ReLU))


def test_a_peer_that_changes_nothing_is_found_out():
    given = case("efficientnet_lite0", 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method in ("guided_backprop", "deconv", "deeplift"):
            assert peers.has_no_effect(
                peers.PEERS[method], peers.peer(given, method), given.inputs, plain(given)
            )


def test_methods_chosen_choose_their_counterparts():
    slow = ("smoothgrad", "integrated_gradients", "expected_gradients", "deeplift_shap", "occlusion", "rise")
    assert bench.Plan().chosen == [n for n in rectgrad.METHODS if n not in slow]
    assert bench.Plan(averages=True).chosen == [
        n for n in rectgrad.METHODS if n not in ("deeplift_shap", "rise")
    ]
    plan = bench.Plan(methods=("smoothgrad", "deconv"))
    names = [each.name for each in contenders(case("efficientnet_lite0", 32), plan)]
    assert names == ["plain", "smoothgrad", "deconv", "NoiseTunnel", "Deconvolution"]


# Times


@pytest.fixture
def clock(monkeypatch):
    """clock(a=[1, 2], ...): runs by these names that take these seconds, round by round."""

    def runs(**seconds):
        left = {name: iter(values) for name, values in seconds.items()}
        by_run = {name: types.SimpleNamespace(name=name) for name in seconds}
        made = {name: lambda name=name: by_run[name] for name in seconds}
        monkeypatch.setattr(measure, "seconds", lambda run, repeats, device: next(left[run().name]))
        monkeypatch.setattr(measure, "repeats", lambda run, device: 1)
        return made

    return runs


def test_ratios_are_taken_round_by_round(clock):
    """The median of the ratios, not the ratio of the medians, which would be 1. Of three measurements of the
    base in a round the middle one counts."""
    runs = clock(base=[1, 1, 9, 10, 0, 11, 2, 2, 2], mine=[2, 30, 2])
    base, mine = measure.rows(measure.race(runs, 3, "cpu", lambda: None))
    assert (base["name"], base["ratio"], base["ms"], base["seconds"]) == ("base", 1, 2000, [1, 10, 2])
    assert (mine["ms"], mine["ratio"], mine["ratio_quartiles"]) == (2000, 2, [1.5, 2.5])
    assert mine["seconds"] == [2, 30, 2]


def test_every_round_has_everyone_in_another_order():
    rounds = ["".join(measure.order("abcde", number)) for number in range(4)]
    assert ["".join(sorted(each)) for each in rounds] == 4 * ["aaabcde"]
    assert [(each[0], each[3], each[6]) for each in rounds] == 4 * [("a", "a", "a")]
    assert len(set(rounds)) > 1


def test_who_fails_drops_out_with_a_reason_and_a_warning_becomes_a_note():
    def fails():
        raise RuntimeError("too large\n  at line 7")

    def warns():
        warnings.warn("mind\n the gap", stacklevel=1)

    steps = []
    runs = {"base": lambda: sum(range(1000)), "fails": fails, "warns": warns}
    times = measure.race(runs, 3, "cpu", lambda: steps.append(1))
    assert measure.failures(times) == [{"name": "fails", "reason": "too large"}]
    assert [row["note"] for row in measure.rows(times)] == [None, "mind the gap"]
    assert len(steps) == measure.steps(len(runs), 3)


def test_without_the_base_nothing_is_compared():
    steps = []
    times = measure.race({"base": lambda: 1 / 0, "other": lambda: 1}, 3, "cpu", lambda: steps.append(1))
    assert measure.rows(times) == []
    assert measure.failures(times) == [{"name": "base", "reason": "division by zero"}]
    assert len(steps) == measure.steps(2, 3)


@pytest.mark.parametrize(("takes", "calls"), [(0.001, 50), (0.02, 2), (3.0, 1)])
def test_short_calls_are_timed_together(monkeypatch, takes, calls):
    monkeypatch.setattr(measure, "seconds", lambda run, repeats, device: takes)
    assert measure.repeats(lambda: None, "cpu") == calls


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0, 4.0, 5.0, 9.0]])
def test_quartiles_are_numpys(values):
    expected = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double())
    assert measure.quartiles(values) == pytest.approx(expected.tolist())


# Memory and paths


def block():
    return torch.ones(2**24)  # 64 MiB


@pytest.mark.skipif(not memory.CLEAR.exists(), reason="reads /proc")
def test_memory_is_what_a_call_takes_at_most():
    kept = block()
    two = memory.resident(lambda: block() + block())
    one = memory.resident(block)
    assert one.growth == pytest.approx(2**26, rel=0.15)
    assert two.growth == pytest.approx(3 * 2**26, rel=0.15)
    assert one.before > kept.nbytes


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell")
def test_where_the_mark_cannot_be_reset_a_fresh_process_measures(monkeypatch, tmp_path):
    plan = bench.Plan(**{**TINY, "pixels": 96, "batch": 2})
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "nowhere" / "clear_refs")
    assert memory.resident(block) is None
    peak = memory.peak(block, plan, "efficientnet_lite0", "plain")
    assert 10e6 < peak.growth < 400e6
    assert peak.before > 50e6


def test_sparse_share_counts_the_layers_that_say():
    def trace(*said):
        ops = [types.SimpleNamespace(path=path) if path != "silent" else None for path in said]
        return types.SimpleNamespace(rows=[types.SimpleNamespace(op=op) for op in ops])

    assert paths.sparse_share(trace("sparse", "dense", None, "silent", "sparse", "sparse")) == 0.75
    assert paths.sparse_share(trace(None, "silent")) is None
    assert paths.sparse_share(None) is None


def test_the_trace_is_that_of_the_method():
    given = case("efficientnet_lite0", 32)
    rules = {row.rule for row in paths.trace_of(given, "deconv").rows if row.family == "relu6"}
    assert rules == {"deconv"}


# Selection and scaling


def test_every_way_to_select_finds_the_same_tau():
    s = selection.scores((3, 1000), "cpu")
    assert 0.4 < float((s == 0).float().mean()) < 0.6
    for name, tau in naive.TAUS.items():
        assert torch.equal(tau(s), percentile(s, naive.Q)), name


def test_selection_compares_with_ours():
    section = selection.selection(bench.Plan(rounds=2), shape=(2, 500))
    assert [row["name"] for row in section["rows"]] == [selection.OURS, *(f"torch.{n}" for n in naive.TAUS)]
    assert section["rows"][0]["ratio"] == 1
    assert (section["shape"], section["failed"]) == ([2, 500], [])


def test_slope_is_the_power():
    assert scaling.slope([1, 2, 4, 8], [3 * n**1.25 for n in (1, 2, 4, 8)]) == pytest.approx(1.25)
    assert scaling.slope([1], [3.0]) is None
    sizes = [(1, 32, {"a": 2.0}), (1, 64, {"a": 8.0}), (4, 64, {"a": 32.0, "b": 1.0}), (8, 64, {})]
    rows = [{"batch": batch, "pixels": pixels, "ms": ms} for batch, pixels, ms in sizes]
    assert scaling.power("a", rows) == pytest.approx(1)
    assert scaling.power("b", rows) is None


# The whole


def test_a_result_says_what_where_and_how():
    result = bench.run(bench.Plan(**TINY, threads=1))
    assert json.loads(json.dumps(result))["models"] == result["models"]
    assert {"torch", "cpu", "cores", "threads", "kernels", "date", "command"} <= set(result["environment"])
    assert (result["plan"]["rounds"], result["selection"], result["scaling"]) == (2, [], [])
    (section,) = result["models"]
    assert (section["model"], section["parameters"]) == ("efficientnet_lite0", 4_652_008)
    assert [(row["name"], row["group"]) for row in section["rows"]] == [("plain",) * 2, ("rectgrad",) * 2]
    base = section["rows"][0]
    for row in section["rows"]:
        ratios = [a / b for a, b in zip(row["seconds"], base["seconds"], strict=True)]
        assert row["ratio"] == pytest.approx(sum(ratios) / 2)
        for part in ("growth", "total"):
            against = row["memory"][part] / base["memory"][part]
            assert row["memory"][f"{part}_ratio"] == pytest.approx(against)


def test_what_is_finished_is_saved_at_once(tmp_path, monkeypatch):
    file, saved = tmp_path / "r" / "speed.json", []
    monkeypatch.setattr("rectgrad.bench.suite.comparison", lambda plan, name, watch: {"model": name})
    result = bench.run(
        bench.Plan(models=("resnet50", "vgg16")), file, show=lambda *_: saved.append(files.load_record(file))
    )
    assert [len(said.get("models", ())) for said in saved] == [0, 1, 2]
    assert saved[-1] == json.loads(json.dumps(result))


def test_settings_are_put_back():
    def said():
        return torch.get_num_threads(), torch.backends.cudnn.allow_tf32

    before = said()
    with contextlib.suppress(ZeroDivisionError), applied(bench.Plan(threads=2, tf32=not before[1])):
        assert said() == (2, not before[1])
        raise ZeroDivisionError
    assert said() == before == (1, before[1])


def test_it_needs_neither_typer_nor_rich_nor_captum():
    script = (
        "import sys\n"
        "for name in ('typer', 'rich', 'captum', 'matplotlib'): sys.modules[name] = None\n"
        "from rectgrad import bench\n"
        "plan = bench.Plan(pixels=32, rounds=1, methods=('rectgrad',), naive=False, captum=False)\n"
        "print([row['name'] for row in bench.run(plan)['models'][0]['rows']])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['plain', 'rectgrad']"


# The command

QUICK = ("--pixels", "32", "--rounds", "1", "--method", "rectgrad", "--no-captum")


def test_the_table_names_everyone(run, tmp_path):
    status, out, _ = run(*QUICK, "--json", "speed.json")
    assert status == 0
    assert out.splitlines()[-1] == "speed.json"
    rows = json.loads(Path("speed.json").read_text())["models"][0]["rows"]
    assert [row["name"] for row in rows] == ["plain", "rectgrad", "ours", *(f"torch.{n}" for n in naive.TAUS)]
    assert all(row["name"] in out for row in rows)
    assert "efficientnet_lite0  1 × 3 × 32 × 32, float32, cpu" in out
    assert max(map(len, out.splitlines())) <= 80
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]


def test_json_on_stdout_is_json_alone(run):
    status, out, _ = run(*QUICK, "--no-naive", "--json", "-")
    assert status == 0
    assert json.loads(out)["environment"]["command"].startswith("rectgrad bench --pixels 32")


def test_failures_and_remarks_are_printed_once(run, monkeypatch):
    def doomed(*_):
        raise RuntimeError("no [rule] for this. And more")

    monkeypatch.setattr(comparison.peers, "has_no_effect", lambda name, *_: name == "Saliency")
    monkeypatch.setattr("rectgrad.bench.contenders.naive", lambda *_: doomed)
    options = ("--pixels", "32", "--rounds", "1", "--method", "rectgrad", "--method", "saliency")
    status, out, _ = run(*options)
    assert status == 0
    assert "* Saliency: no change to this network's backward pass" in out
    told = " ".join(out.split())
    names = ", ".join(f"torch.{name}" for name in naive.TAUS)
    assert f"* {names}: no [rule] for this " in f"{told} "
    assert "And more" not in out


def test_selection_and_scaling_have_tables(run, monkeypatch):
    monkeypatch.setattr(selection.selection, "__defaults__", (measure.no_progress, (2, 100)))
    monkeypatch.setattr(scaling.scaling, "__defaults__", (measure.no_progress, (1, 2), (32, 48)))
    options = ("--no-naive", "--selection", "--scaling", "--json", "speed.json")
    status, out, _ = run(*QUICK, *options)
    assert status == 0
    assert "selection of tau  2 samples, 100 units each" in out
    assert "torch.quantile" in out
    assert "efficientnet_lite0 by batch" in out
    assert out.count("(1 is linear): plain ") == 2
    (said,) = json.loads(Path("speed.json").read_text())["scaling"]
    sizes = [[(row["batch"], row["pixels"]) for row in said[by]["rows"]] for by in ("batch", "pixels")]
    assert sizes == [[(1, 32), (2, 32)], [(1, 32), (1, 48)]]
    assert list(said["batch"]["slopes"]) == ["plain", "rectgrad"]
    assert said["pixels"]["rows"][0]["ratio"]["plain"] == 1


def test_a_stopped_run_keeps_what_was_finished(run, monkeypatch):
    def stop(plan, name, watch):
        if name == "resnet50":
            raise KeyboardInterrupt
        return {"model": name, "batch": 1, "pixels": 32, "rows": [], "failed": []}

    monkeypatch.setattr("rectgrad.bench.suite.comparison", stop)
    status, _, err = run("--model", "efficientnet_lite0", "--model", "resnet50", "--json", "speed.json")
    assert status == 130
    assert err == "rectgrad: interrupted; finished results are in speed.json\n"
    assert len(json.loads(Path("speed.json").read_text())["models"]) == 1


ERRORS = {
    "no such model": (["--model", "alexnet"], "unknown model 'alexnet'; bench models are efficientnet_lite0"),
    "no such method": (["--method", "scorecam"], "unknown method 'scorecam'; methods are rectgrad"),
    "too small": (["--model", "inception_v4", "--pixels", "64"], "at least 75 for inception_v4, not 64"),
    "no whole patches": (
        ["--model", "vit_b_16", "--pixels", "100"],
        "a multiple of 16 for vit_b_16, not 100",
    ),
    "no pictures": (["--batch", "0"], "batch must be at least 1, not 0"),
    "no rounds": (["--rounds", "0"], "rounds must be at least 1, not 0"),
    "no threads": (["--threads", "0"], "threads must be at least 1, not 0"),
    "bad dtype": (["--dtype", "int8"], "unknown dtype 'int8'; dtypes are float32"),
    "bad device": (["--device", "quantum"], "quantum"),
    "a folder": (["--json", "."], "--json must be the path of a file to write, or - for stdout, not '.'"),
    "under a file": (["--json", "taken/speed.json"], "for stdout, not 'taken/speed.json'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_is_one_line_and_status_2(run, tmp_path, name):
    arguments, words = ERRORS[name]
    (tmp_path / "taken").write_text("text")
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("rectgrad: ")
    assert words in err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_captum_must_be_installed_if_it_is_requested(run, monkeypatch):
    monkeypatch.setattr("rectgrad.bench.plan.captum_installed", lambda: False)
    assert not bench.Plan().with_captum
    status, _, err = run("--captum")
    assert status == 2
    assert "captum is not installed" in err
