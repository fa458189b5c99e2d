"""Many networks, each trained on pictures with other pixels hidden: at once on a GPU, else one by one."""

from rectgrad.many.occlusion import Hidden, Occluded
from rectgrad.many.train import THREADS, at_once, steady, train

__all__ = ["THREADS", "Hidden", "Occluded", "at_once", "steady", "train"]
