"""The engine: one recorder of forward passes, one backward walk, and a bridge to autograd."""
