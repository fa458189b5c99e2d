"""Op families and aliases as data, composite calls, and the index arithmetic of windows."""

from rectgrad.ops.table import (
    BY_HAND,
    FAMILIES,
    LINEAR_CALLS,
    OF_ONE,
    RECTIFIERS,
    REFINED,
    ROUTING,
    SIGN_KEEPING,
    Spec,
    Table,
    refine,
)

__all__ = [
    "BY_HAND",
    "FAMILIES",
    "LINEAR_CALLS",
    "OF_ONE",
    "RECTIFIERS",
    "REFINED",
    "ROUTING",
    "SIGN_KEEPING",
    "Spec",
    "Table",
    "refine",
]
