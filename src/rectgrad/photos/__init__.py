"""Reading photos, streaming folders of them, writing files atomically, and running on Ray."""

from rectgrad.photos.reading import MAX_PIXELS, SUFFIXES, UnreadableImageError, read, to_rgb, upright_rgb

__all__ = ["MAX_PIXELS", "SUFFIXES", "UnreadableImageError", "read", "to_rgb", "upright_rgb"]
