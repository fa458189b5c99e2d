"""The training loop: the same for a seed, resumable to the last bit, and it learns."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

import rectgrad
from rectgrad import cli, data, training
from rectgrad.data import digest_of, shapes
from rectgrad.training import Plan

FEW = shapes.generate(40, 0)
DATA = digest_of(FEW)
PLAN = Plan(batch=20)  # two steps per epoch


def weights(run: training.Run) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.module.state_dict().items()}


def assert_same(a: training.Run, b: training.Run) -> None:
    assert a.losses == b.losses
    assert all(torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values(), strict=True))


def test_a_seed_decides_everything() -> None:
    torch.manual_seed(5)
    plan = replace(PLAN, epochs=2, seed=1)
    first = training.train(FEW, plan)
    drawn = torch.rand(1)
    torch.manual_seed(6)
    assert_same(first, training.train(FEW, plan))
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))  # the caller's own random numbers are left alone
    assert training.train(FEW, replace(plan, seed=2)).losses != first.losses


@pytest.mark.parametrize("stopped_after", [1, 2, 3])
def test_interrupted_training_resumes_with_the_same_result(stopped_after: int, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    training.train(FEW, replace(PLAN, epochs=stopped_after), checkpoint=path)
    seen: list[int] = []
    whole = replace(PLAN, epochs=3)
    run = training.train(FEW, whole, checkpoint=path, progress=lambda n, _: counting(n, seen))
    assert seen == [3 - stopped_after]  # a finished epoch is not run again
    assert_same(run, training.train(FEW, whole))


def counting(n: int, seen: list[int]):
    seen.append(n)
    return nullcontext(lambda: None)


def test_a_checkpoint_of_another_plan_or_a_damaged_one_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    training.train(FEW, Plan(epochs=1, seed=3), checkpoint=path)
    assert training.load_checkpoint(path, Plan(epochs=1), DATA) is None
    assert training.load_checkpoint(path, Plan(epochs=1, seed=3), DATA) is not None
    path.write_bytes(path.read_bytes()[:-100])
    assert training.load_checkpoint(path, Plan(epochs=1, seed=3), DATA) is None
    assert training.load_checkpoint(tmp_path / "nothing", Plan(), DATA) is None


@pytest.mark.parametrize(
    "metadata",
    [
        {"plan": "3", "losses": "[]"},
        {"plan": "{}", "losses": "{}"},
        {"plan": "{}", "losses": '["x"]'},
        {"plan": "{}", "losses": "null"},
        {"plan": "[" * 100_000, "losses": "[]"},
        {"plan": "{}", "losses": "[0.1]"},  # right, but without tensors
    ],
    ids=["a number", "an object", "words", "none", "many brackets", "no tensors"],
)
def test_a_file_that_claims_to_be_a_checkpoint_is_not_used(tmp_path: Path, metadata) -> None:
    tensors = {"module.x": torch.zeros(2)}
    safetensors.torch.save_file(tensors, tmp_path / "w", {"data": DATA} | metadata)
    assert training.load_checkpoint(tmp_path / "w", Plan(), DATA) is None


def test_a_checkpoint_of_other_pictures_is_not_used(tmp_path: Path) -> None:
    path, other, plan = tmp_path / "net.safetensors", shapes.generate(40, 9), replace(PLAN, epochs=1)
    training.train(other, plan, checkpoint=path)
    assert_same(training.train(FEW, plan, checkpoint=path), training.train(FEW, plan))


def test_first_losses_are_those_of_plain_adam() -> None:
    """Against the loop written out, with torch's own optimiser on the data in their order."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = training.CifarCNN()
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-3)
    x, y = training.scaled(FEW.pixels), torch.from_numpy(FEW.labels)
    total = 0.0
    for rows in (slice(0, 20), slice(20, 40)):
        loss = torch.nn.functional.cross_entropy(module(x[rows]), y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        total += loss.item() / 2
    assert training.train(FEW, replace(PLAN, epochs=1)).losses[0] == pytest.approx(total, rel=1e-4)


def test_it_learns() -> None:
    run = training.train(FEW, Plan(epochs=25, batch=10))
    assert training.accuracy(run.module, FEW) > 0.9
    assert not run.module.training


TINY = FEW.rows(slice(0, 20))
SMALL = {arch: replace(training.PLANS[arch], epochs=2, batch=10) for arch in ("resnet", "vit")}


@pytest.mark.parametrize("arch", SMALL)
def test_every_architecture_resumes_with_the_same_result(arch: str, tmp_path: Path) -> None:
    """Also the augmentation and the learning rate: the second epoch is that of an uninterrupted run."""
    path, plan, seen = tmp_path / "net.safetensors", SMALL[arch], []

    def stopping(epochs: int, what: str):
        return nullcontext(lambda: (_ for _ in ()).throw(KeyboardInterrupt))

    with pytest.raises(KeyboardInterrupt):
        training.train(TINY, plan, checkpoint=path, progress=stopping)
    torch.manual_seed(5)
    run = training.train(TINY, plan, checkpoint=path, progress=lambda n, _: counting(n, seen))
    assert seen == [1]
    assert_same(run, training.train(TINY, plan))
    assert training.train(TINY, replace(plan, seed=1)).losses != run.losses


def test_a_one_cycle_rate_depends_on_the_number_of_epochs(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    few = replace(training.PLANS["vit"], arch="cnn", epochs=1)
    training.train(FEW, few, checkpoint=path)
    assert training.load_checkpoint(path, few, DATA) is not None
    assert training.load_checkpoint(path, replace(few, epochs=2), DATA) is None
    assert [training.one_cycle(share) for share in (0, 0.1, 0.2, 0.6, 1)] == pytest.approx(
        [0, 0.5, 1, 0.5, 0]
    )


def test_a_checkpoint_from_before_the_architectures_is_used(tmp_path: Path) -> None:
    path, old = tmp_path / "net.safetensors", ("epochs", "batch", "rate", "seed", "device")
    training.train(FEW, Plan(epochs=1), checkpoint=path)
    with safetensors.safe_open(path, "pt") as content:
        metadata = content.metadata()
    plan = {key: value for key, value in json.loads(metadata["plan"]).items() if key in old}
    safetensors.torch.save_file(
        safetensors.torch.load_file(path), path, metadata | {"plan": json.dumps(plan)}
    )
    assert training.load_checkpoint(path, Plan(epochs=1), DATA) is not None
    assert training.load_checkpoint(path, replace(Plan(epochs=1), arch="vit"), DATA) is None


def test_without_weight_decay_the_optimiser_is_adam() -> None:
    run = training.fresh(Plan())
    other = training.fresh(Plan()).module
    adam = torch.optim.Adam(other.parameters(), lr=1e-3)
    x, y = training.scaled(FEW.pixels[:20]), torch.from_numpy(FEW.labels[:20])
    for module, optimiser in ((run.module, run.optimiser), (other, adam)):
        for _ in range(3):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(module(x), y).backward()
            optimiser.step()
    assert all(torch.equal(a, b) for a, b in zip(run.module.parameters(), other.parameters(), strict=True))


def test_augmented_images_are_shifted_mirrored_and_partly_erased() -> None:
    x = training.scaled(FEW.pixels[:3])
    middle = torch.tensor([0.5, 0.5, 0.9, 0.5, 0.5])[:, None, None]  # no shift, not mirrored
    assert torch.equal(training.augmented(x, middle.expand(5, 3, 1), 0), x)
    random = middle.repeat(1, 3, 1)
    random[:, 1, 0] = torch.tensor([0.0, 0.99, 0.1, 0.5, 0.5])  # 4 pixels down, 4 to the left, mirrored
    found = training.augmented(x, random, 8)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert not found[:, :, 13:20, 13:20].any()
    assert (found[[0, 2]] == x[[0, 2]]).float().mean() > 0.9
    moved = torch.zeros_like(x[1])
    moved[:, 4:, 4:] = x[1].flip(2)[:, :-4, :-4]
    moved[:, 13:20, 13:20] = 0
    assert torch.equal(found[1], moved)


@pytest.mark.parametrize("arch", SMALL)
def test_other_architectures_are_small_and_learn(arch: str) -> None:
    run = training.train(TINY, replace(SMALL[arch], epochs=6, augment=False))
    assert run.losses[-1] < run.losses[0] - 0.3
    size = sum(value.numel() for value in run.module.state_dict().values())
    assert 2 * size < 4_600_000  # bytes as shipped, in half precision


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"batch": 0}, {"rate": 0.0}, {"arch": "mlp"}])
def test_a_plan_that_makes_no_sense(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Plan(**wrong)


def test_weights_of_the_command_load_as_a_model(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(data.DATASETS, "shapes", lambda: shapes.load(40, 20))
    out = tmp_path / "net.safetensors"
    command = [
        "rectgrad",
        "train",
        "--dataset",
        "shapes",
        "--epochs",
        "2",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert "test accuracy" in capsys.readouterr().out
    model = rectgrad.models.load("cifar10_cnn", weights=out)
    kept = safetensors.torch.load_file(out)
    assert torch.equal(model.module.conv1.weight, kept["conv1.weight"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.json", "net.safetensors"]
