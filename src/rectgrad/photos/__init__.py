"""Photos from files, folders of them as streams, results written whole, Ray."""

from rectgrad.photos.reading import MAX_PIXELS, SUFFIXES, UnreadableImageError, read, to_rgb

__all__ = ["MAX_PIXELS", "SUFFIXES", "UnreadableImageError", "read", "to_rgb"]
