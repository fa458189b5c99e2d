"""The error of a photo that cannot be read."""


class UnreadableImageError(ValueError):
    """A file cannot be read as an image. The message names the file and the reason."""
