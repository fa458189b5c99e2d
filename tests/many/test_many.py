"""Many networks at once: each learns what it would learn alone. The kernels run in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rectgrad import many, training
from rectgrad.data import digest_of, scaled, shapes
from rectgrad.many import networks
from rectgrad.many.networks import Networks, packed, unpacked
from rectgrad.models import CifarCNN

pytest.importorskip("triton", reason="the kernels are Triton's")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMAGES = shapes.generate(6, 0)
MEAN = torch.tensor([0.1, -0.2, 0.05])
HIDDEN = [many.Hidden(0, 0, 300), many.Hidden(1, 102, 1024), many.Hidden(1, 0, 512, True)]


def occluded(hidden=HIDDEN) -> many.Occluded:
    torch.manual_seed(0)
    ranks = torch.rand(2, len(IMAGES), 1024).argsort(2).to(torch.int16)
    return many.Occluded(IMAGES, ranks, hidden, MEAN, DEVICE)


def modules(count: int) -> list[CifarCNN]:
    return [training.fresh(training.Plan(seed=seed)).module for seed in range(count)]


def test_what_a_network_sees_pixel_by_pixel():
    data = occluded()
    x = scaled(IMAGES.pixels)
    for i, (ranking, low, high, alone) in enumerate(HIDDEN):
        found = data.inputs(i, 1, 3).cpu()
        for k in range(3):
            rank = data.ranks[ranking, 1 + k].cpu().reshape(32, 32)
            gone = (rank >= low) & (rank < high)
            for colour in range(3):
                kept = torch.ones(32, 32) if alone else x[1 + k, colour]
                expected = torch.where(gone, -1.0 if alone else MEAN[colour], kept)
                assert torch.equal(found[k, colour], expected)


def test_the_kernel_gathers_what_the_first_convolution_sees():
    data = occluded()
    out = torch.full((3, 2 * 1024, 32), 9.0, device=DEVICE)
    data.pixels(2, 2, out)
    for i in range(3):
        columns = F.unfold(data.inputs(i, 2, 2).contiguous(), 3, padding=1)  # colours, taps
        expected = columns.reshape(2, 3, 9, 1024).permute(0, 3, 2, 1).reshape(2048, 27)
        assert torch.equal(out[i, :, :27], expected)
        assert not out[i, :, 27:].any()


def test_weights_there_and_back():
    (module,) = modules(1)
    state, again = module.state_dict(), unpacked(packed(module))
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], value) for name, value in state.items())


def test_networks_learn_together_what_they_learn_alone(monkeypatch):
    """In float64, where rounding cannot grow: losses of two steps, then weights and Adam's state."""
    # The interpreter is slow for each program: fewer and larger ones. The next test has those of a GPU.
    monkeypatch.setattr(networks, "ADAM_BLOCK", 1 << 16)
    monkeypatch.setattr(networks, "BLOCK", 1024)
    monkeypatch.setattr(networks, "PARTS", dict.fromkeys(networks.PARTS, 2))
    monkeypatch.setattr(networks, "BLOCKS", dict.fromkeys(networks.BLOCKS, 512))
    data, plain = occluded(HIDDEN[1:]), modules(2)
    together = Networks(plain, DEVICE, torch.float64)
    optimisers = [torch.optim.Adam(m.double().to(DEVICE).parameters(), lr=1e-3) for m in plain]
    for step in range(2):
        losses = together.learn(data, 2 * step, 2)
        for i, (module, optimiser) in enumerate(zip(plain, optimisers, strict=True)):
            x, y = data.inputs(i, 2 * step, 2).double().contiguous(), data.labels[2 * step : 2 * step + 2]
            loss = F.cross_entropy(module(x), y)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            assert losses[i].item() == pytest.approx(loss.item(), abs=1e-9)
    for ours, module, optimiser in zip(together.states(), plain, optimisers, strict=True):
        for name, value in module.named_parameters():
            state = optimiser.state[value]
            theirs = (value.detach(), state["exp_avg"], state["exp_avg_sq"])
            for a, b in zip(ours, theirs, strict=True):
                assert (a[name] - b.cpu()).abs().max() < 1e-7


def test_a_run_of_many_resumes_as_if_it_had_been_trained_alone(monkeypatch, tmp_path):
    """Weights, losses and Adam's state go through a checkpoint; the next epoch is that of the one loop."""
    monkeypatch.setattr(networks, "ADAM_BLOCK", 1 << 16)
    images, path = IMAGES.rows(slice(0, 3)), tmp_path / "net.safetensors"
    plan = training.Plan(epochs=1, batch=2, seed=5, device=DEVICE)  # the second batch is smaller
    (run,) = many.train_runs(images, [5], plan, torch.float32)
    assert run.losses == pytest.approx(training.train(images, plan).losses, rel=1e-5)
    training.save(run, plan, digest_of(images), path)
    longer = replace(plan, epochs=2)
    resumed, usual = training.train(images, longer, checkpoint=path), training.train(images, longer)
    assert resumed.losses[0] == run.losses[0]  # the first epoch was not trained again
    assert resumed.losses == pytest.approx(usual.losses, rel=1e-4)
    for a, b in zip(resumed.module.parameters(), usual.module.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-3  # a step of Adam where the gradient is almost 0
        assert (a - b).abs().mean() < 1e-5


# bfloat16 only on GPUs: torch's own bfloat16 products crash on some CPUs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16][: 1 + torch.cuda.is_available()])
def test_narrow_numbers_follow_the_wide_ones(dtype, monkeypatch):
    monkeypatch.setattr(networks, "ADAM_BLOCK", 1 << 16)
    data = occluded(HIDDEN[:1])
    wide, narrow = (Networks(modules(1), DEVICE, each) for each in (torch.float64, dtype))
    near = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    assert torch.allclose(wide.logits(data, 0, 2).float(), narrow.logits(data, 0, 2), atol=near)


def test_alone_is_the_usual_training():
    """On a CPU: the accuracy of a network trained by the one loop on the occluded pictures."""
    torch.manual_seed(0)
    images, plan = shapes.generate(40, 0), training.Plan(epochs=2, batch=20, seed=3)
    ranks = torch.rand(1, 40, 1024).argsort(2).to(torch.int16)
    data = many.Occluded(images, ranks, [many.Hidden(0, 0, 100)], MEAN, "cpu")
    (found,) = many.train(data, data, [3], plan)
    run = training.fresh(plan)
    x = data.inputs(0, 0, 40).contiguous()
    with many.fixed_threads():  # sums round as they are split among threads
        for _ in range(2):
            training.one_epoch(run, x, data.labels, plan)
        right = training.logits(run.module.eval(), x).argmax(1) == data.labels
    assert found == float(right.float().mean())
