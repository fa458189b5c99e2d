"""The methods that tests over all of them run, and options that make the slow ones quick."""

import rectgrad
from rectgrad.methods.perturbation import Perturbation

EVERY = [name for name, method in rectgrad.METHODS.items() if method.ready]  # without further options
HIDING = [name for name in EVERY if isinstance(rectgrad.METHODS[name], Perturbation)]
BACKWARD = [name for name in EVERY if name not in HIDING and name != "random"]  # they run the backward pass
RUNNING = [*BACKWARD, *HIDING]  # they run the model
QUICK = {
    "smoothgrad": {"samples": 2},
    "integrated_gradients": {"steps": 2},
    "expected_gradients": {"samples": 2},
    "rise": {"masks": 9},
}
