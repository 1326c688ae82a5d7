"""Fixtures of the cluster's tests."""

from tests.cluster.fixtures import any_kubeconfig, cluster, faults, kube, make_namespace, namespace

__all__ = ["any_kubeconfig", "cluster", "faults", "kube", "make_namespace", "namespace"]
