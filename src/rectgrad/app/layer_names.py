"""Readable names for layers."""

from __future__ import annotations

import re

_ACRONYMS = {"relu": "ReLU", "relu6": "ReLU6", "gelu": "GELU", "silu": "SiLU", "bn": "BN", "conv": "conv"}


def readable(name: str) -> str:
    """ "_blocks.15._relu1" becomes "blocks 15, ReLU 1"; names that are already readable do not change."""
    parts = [part for part in (_words(part) for part in name.split(".")) if part]
    joined: list[str] = []
    for part in parts:
        if part.isdigit() and joined:
            joined[-1] += f" {part}"
        else:
            joined.append(part)
    return ", ".join(joined) or name


def _words(part: str) -> str:
    words = re.findall(r"relu6|[A-Za-z]+|\d+", part.replace("_", " "), flags=re.IGNORECASE)
    return " ".join(_ACRONYMS.get(word.lower(), word) for word in words)
