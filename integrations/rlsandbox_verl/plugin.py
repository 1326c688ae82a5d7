"""Loaded by ``import verl`` (entry-point group ``verl.plugins``): the loop under its name, numbers in the
log.

verl tells nobody when a plugin cannot be loaded: a configuration should name the loop's class
(``_target_``) and the manager's, which fail loudly.
"""

from __future__ import annotations

from . import hooks, loop, versions

versions.require()
hooks.track()

__all__ = ["loop"]
