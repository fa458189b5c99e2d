"""The training loop: the same for a seed, resumable to the last bit, and it learns."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import safetensors.torch
import torch

import rectgrad
from rectgrad import cli, data, training
from rectgrad.data import digest_of, shapes
from rectgrad.training import Plan

FEW = shapes.generate(200, 0)
DATA = digest_of(FEW)


def weights(run: training.Run) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.module.state_dict().items()}


def assert_same(a: training.Run, b: training.Run) -> None:
    assert a.losses == b.losses
    assert all(torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values(), strict=True))


def test_a_seed_decides_everything() -> None:
    torch.manual_seed(5)
    first = training.train(FEW, Plan(epochs=2, seed=1))
    drawn = torch.rand(1)
    torch.manual_seed(6)
    assert_same(first, training.train(FEW, Plan(epochs=2, seed=1)))
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))  # the caller's own random numbers are left alone
    assert training.train(FEW, Plan(epochs=2, seed=2)).losses != first.losses


@pytest.mark.parametrize("stopped_after", [1, 2, 3])
def test_interrupted_training_resumes_with_the_same_result(stopped_after: int, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    training.train(FEW, Plan(epochs=stopped_after), checkpoint=path)
    seen: list[int] = []
    run = training.train(FEW, Plan(epochs=3), checkpoint=path, progress=lambda n, _: counting(n, seen))
    assert seen == [3 - stopped_after]  # a finished epoch is not run again
    assert_same(run, training.train(FEW, Plan(epochs=3)))


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


def test_a_checkpoint_of_other_pictures_is_not_used(tmp_path: Path) -> None:
    path, other = tmp_path / "net.safetensors", shapes.generate(200, 9)
    training.train(other, Plan(epochs=1), checkpoint=path)
    assert_same(training.train(FEW, Plan(epochs=1), checkpoint=path), training.train(FEW, Plan(epochs=1)))


def test_first_losses_are_those_of_plain_adam() -> None:
    """Against the loop written out, with torch's own optimiser on the data in their order."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = training.CifarCNN()
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-3)
    x, y = training.scaled(FEW.pixels), torch.from_numpy(FEW.labels)
    total = 0.0
    for rows in (slice(0, 100), slice(100, 200)):
        loss = torch.nn.functional.cross_entropy(module(x[rows]), y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        total += loss.item() / 2
    assert training.train(FEW, Plan(epochs=1)).losses[0] == pytest.approx(total, rel=1e-4)


def test_it_learns() -> None:
    run = training.train(FEW, Plan(epochs=25, batch=50))
    assert training.accuracy(run.module, FEW) > 0.9
    assert not run.module.training


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"batch": 0}, {"rate": 0.0}])
def test_a_plan_that_makes_no_sense(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Plan(**wrong)


def test_weights_of_the_command_load_as_a_model(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(data.DATASETS, "shapes", lambda: shapes.load(200, 50))
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
