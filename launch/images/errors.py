"""What goes wrong with an image although the request was right: a build, a smoke test, a push that fails."""

from __future__ import annotations


class ImageError(Exception):
    """Something about one image failed; the message is whole: what, why, and what to do."""
