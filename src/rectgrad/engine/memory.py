"""When memory was not enough: torch says so in several ways."""

from __future__ import annotations

import torch


def out_of_memory(error: Exception) -> bool:
    known = isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError))
    return known or any(words in str(error).lower() for words in _NO_MEMORY)


_NO_MEMORY = ("out of memory", "allocate memory", "not enough memory", "insufficient memory")
