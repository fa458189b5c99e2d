"""The methods that tests over all of them run, what they need of a network, and options that make the slow
ones quick and let something pass the layers of a small network."""

import rectgrad
from rectgrad.methods.perturbation import Perturbation

EVERY = [name for name, method in rectgrad.METHODS.items() if method.ready]  # without further options
POSITIONS = ("gradcam", "guided_gradcam", "rectgrad_gated")  # these need an activation with positions
ANY_NETWORK = [name for name in EVERY if name not in POSITIONS]
HIDING = [name for name in EVERY if isinstance(rectgrad.METHODS[name], Perturbation)]
# On any network: those that run the backward pass, and those that run the model.
BACKWARD = [name for name in ANY_NETWORK if name not in HIDING and name != "random"]
RUNNING = [*BACKWARD, *HIDING]
QUICK = {
    "smoothgrad": {"samples": 2},
    "integrated_gradients": {"steps": 2},
    "expected_gradients": {"samples": 2},
    "rise": {"masks": 9},
    "occlusion": {"window": 5, "stride": 4},  # by default, a hundred windows and more
    "rectgrad_gated": {"q": 80},
}
WITHOUT_POSITIONS = ("attention", "library_attention", "folded")  # the networks without a class layer


def possible(method: str, network: str) -> bool:
    return method not in POSITIONS or network not in WITHOUT_POSITIONS
