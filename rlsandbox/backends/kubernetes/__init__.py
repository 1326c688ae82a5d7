"""Sandboxes as pods of a cluster, by the agent-sandbox CRDs or, without them, as plain pods."""

from .backend import Kubernetes

__all__ = ["Kubernetes"]
