"""Adapters for other libraries: `rectgrad.interop.captum` and `rectgrad.interop.quantus`."""
