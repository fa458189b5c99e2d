"""Trains many networks on images with different hidden pixels: together on a GPU, one by one elsewhere."""

from rectgrad.many.occlusion import Hidden, Occluded
from rectgrad.many.train import THREADS, at_once, fixed_threads, train, train_runs

__all__ = ["THREADS", "Hidden", "Occluded", "at_once", "fixed_threads", "train", "train_runs"]
