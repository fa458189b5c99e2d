"""Where memory is not enough, fewer samples at a time; the same maps."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import rectgrad
from rectgrad.kernels.device import out_of_memory


class Small(nn.Module):
    """Runs out of memory with more than `most` samples."""

    def __init__(self, most: int, error: Exception | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 4)
        )
        self.most, self.error = most, error or torch.OutOfMemoryError("CUDA out of memory")

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise self.error
        return self.body(x)


X = torch.randn(11, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", ["rectgrad", "saliency", "integrated_gradients", "deeplift"])
def test_the_chunk_is_halved_and_the_call_completes(method):
    net = Small(most=3).eval()
    with pytest.warns(UserWarning, match=r"for 11 samples at once, so 3 were .* pass batch_size=3"):
        found = rectgrad.attribute(net, X, method, target=1)
    net.most = 1000
    assert torch.allclose(found, rectgrad.attribute(net, X, method, target=1), atol=1e-6)


def test_targets_of_each_sample_are_cut_along():
    net = Small(most=2).eval()
    target = torch.arange(11) % 4
    with pytest.warns(UserWarning, match="2 were"):
        found = rectgrad.attribute(net, X, "saliency", target=target)
    net.most = 1000
    assert torch.allclose(found, rectgrad.attribute(net, X, "saliency", target=target), atol=1e-6)


def test_one_sample_that_does_not_fit_is_an_error():
    with pytest.raises(torch.OutOfMemoryError):
        rectgrad.attribute(Small(most=0).eval(), X, "saliency", target=1)


def test_other_errors_are_not_retried():
    net = Small(1, RuntimeError("an illegal memory access was encountered")).eval()
    with pytest.raises(RuntimeError, match="illegal"):
        rectgrad.attribute(net, X, "saliency", target=1)
    assert not out_of_memory(net.error)


SCARCE = r"""
import re, resource, torch, warnings, rectgrad
from torch import nn

head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4)
net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), *head).eval()
x = torch.randn(64, 3, 112, 112, generator=torch.Generator().manual_seed(0))
first = rectgrad.attribute(net, x[:2], "rectgrad", target=1)
used = int(re.search(r"VmSize:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20,) * 2)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    maps = rectgrad.attribute(net, x, "rectgrad", target=1)
assert any("not enough memory for 64 samples" in str(w.message) for w in said), said
assert torch.allclose(maps[:2], first, atol=1e-6)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space the Linux way")
def test_memory_that_runs_out_in_earnest():
    done = subprocess.run([sys.executable, "-c", SCARCE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
