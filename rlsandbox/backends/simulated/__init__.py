"""A cluster that exists only in virtual or real time: for tests, planning and trying out pool sizes."""

from .backend import Simulated
from .cluster import Faults, Place

__all__ = ["Faults", "Place", "Simulated"]
