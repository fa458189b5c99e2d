"""Without a GPU, Triton's kernels are run by its interpreter. It must know before anything imports Triton, as
torch's optimisers do."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
