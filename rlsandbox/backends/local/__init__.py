"""Sandboxes on this machine: no daemon, as root or not."""

from .backend import Local

__all__ = ["Local"]
