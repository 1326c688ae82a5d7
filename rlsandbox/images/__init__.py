"""Getting image content onto nodes before rollouts need it: what is there, what is missing, where to.

inventory.py   nodes, their disks and what they have (model.py: the data)
registry.py    which layers an image has, asked of its registry
plan.py      a plan as data
planner.py     which image goes to which node, in which order
hydrate.py     a plan carried out on a cluster
placement.py   a plan as a pool's ``rlsandbox_place``
"""

from .model import Demand, Image, Inventory, Layer, Node, demand_of
from .placement import PlannedPlacement
from .plan import Plan, Pull
from .planner import plan_images

__all__ = [
    "Demand",
    "Image",
    "Inventory",
    "Layer",
    "Node",
    "Plan",
    "PlannedPlacement",
    "Pull",
    "demand_of",
    "plan_images",
]
