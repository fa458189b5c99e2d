"""rectgrad inside other libraries: `rectgrad.interop.captum`, `rectgrad.interop.quantus`."""
