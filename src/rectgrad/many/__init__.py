"""Many networks, each trained on pictures with other pixels hidden: at once on a GPU, else one by one."""

from rectgrad.many.occlusion import Hidden, Occluded
from rectgrad.many.train import at_once, train

__all__ = ["Hidden", "Occluded", "at_once", "train"]
