"""What methods need of a network, for tests over all of them."""

import rectgrad

POSITIONS = ("gradcam", "guided_gradcam")  # an activation with positions
ANY_NETWORK = [name for name in rectgrad.METHODS if name not in POSITIONS]
WITHOUT_POSITIONS = ("attention", "library_attention", "folded")  # the networks without a class layer


def possible(method: str, network: str) -> bool:
    return method in ANY_NETWORK or network not in WITHOUT_POSITIONS
