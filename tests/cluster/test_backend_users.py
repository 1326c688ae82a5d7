"""``image_user=True`` on real pods: commands are those of the USER that an image in a real registry names."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import rlsandbox as rls
from rlsandbox import errors
from tests.cluster import images
from tests.cluster.cluster import Cluster
from tests.cluster.kube import Kube, pods

pytest.importorskip("kubernetes", reason="needs the extra: pip install 'rlsandbox-pool[kubernetes]'")
from rlsandbox.backends.kubernetes import Kubernetes


def push_with_user(registry: images.Registry, layout: images.Layout, name: str, user: str) -> str:
    """The same image under another name, whose config names *user*."""
    made = images.Layout(layout.path, f"{images.HOST}/{name}:1")
    registry.push(made)
    manifest = json.loads(made.manifest())
    config = json.loads(made.blob(manifest["config"]["digest"]).read_bytes())
    config["config"]["User"] = user
    raw = json.dumps(config).encode()
    manifest["config"] |= {"digest": registry.blob(name, raw), "size": len(raw)}
    registry.manifest(name, "1", json.dumps(manifest).encode())
    return made.name


@pytest.mark.parametrize(
    ("level", "mode", "user", "seen"),
    [
        ("privileged", "overlay", "nobody", "65534 65534"),
        ("baseline", "userns", "1000:1000", "1000 1000"),
        ("baseline", "manifest", "1000", "1000"),
        ("restricted", "replace", "1000", "1000"),
    ],
)
def test_commands_are_the_images_users(
    cluster: Cluster, make_namespace: Callable[..., str], level: str, mode: str, user: str, seen: str
) -> None:
    namespace, door = make_namespace(level), cluster.port("registry")
    layout = next(one for one in images.standard() if one.name == images.TEST)
    with images.Registry(door) as registry:
        image = push_with_user(registry, layout, f"user/{mode}", user)
    backend = Kubernetes(
        kubeconfig=str(cluster.kubeconfig("admin", "api")), namespace=namespace, mode=mode, image_user=True,
        mirrors={images.HOST: f"http://127.0.0.1:{door}"},
    )  # fmt: skip
    with rls.Pool(size=1, backend=backend, spec=rls.Spec(image=image, network="host")) as pool:
        with pool.claim(rls.Task(id="t"), timeout=100) as sandbox:
            assert sandbox.reset_mode == mode
            assert sandbox.run("echo $(id -u) $(id -g)").stdout.strip().startswith(seen)
        if mode != "replace":
            root = rls.Task(id="root", spec=rls.Spec(user="0"))
            if mode == "manifest":
                with pytest.raises(errors.ConfigError, match="mode manifest needs"):
                    pool.claim(root, timeout=100)
                return
            with pool.claim(root, timeout=100) as sandbox:
                assert sandbox.run("id -u").stdout == "0\n"


def test_an_image_that_cannot_be_read_ends_its_rollouts_at_once(
    cluster: Cluster, make_namespace: Callable[..., str], kube: Kube
) -> None:
    namespace = make_namespace("privileged")
    mirror = f"http://127.0.0.1:{cluster.port('registry')}"
    backend = Kubernetes(
        kubeconfig=str(cluster.kubeconfig("admin", "api")), namespace=namespace, image_user=True,
        mirrors={images.HOST: mirror},
    )  # fmt: skip
    spec = rls.Spec(image=f"{images.HOST}/none:1")
    with (
        rls.Pool(size=1, backend=backend, spec=spec) as pool,
        pytest.raises(errors.SandboxError, match="has none of that name") as caught,
        pool.claim(rls.Task(id="t"), timeout=60),
    ):
        pass
    assert caught.value.kind == "image_not_found"
    assert not kube.items(pods(namespace))
