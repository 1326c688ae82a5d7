"""What is told when the machine does not let a sandbox be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsandbox.backends.local import advice

SAID = {
    "user namespace": "cannot make a user namespace (unprivileged ones may be switched off here): No space left on device",
    "refused": "cannot make a user namespace: Operation not permitted",
    "map": "cannot write uid_map of the sandboxes' user namespace: Operation not permitted",
    "mount": "mount an overlay for / (2 lower directories): Operation not permitted",
    "pivot": "pivot_root into the view: Permission denied",
}


@pytest.fixture
def switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine's switches, all of them open, and no container around it."""
    for name, forbids, allows in advice.SWITCHES:
        path = tmp_path / name.replace(".", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(allows + "\n")
        assert forbids != allows
    monkeypatch.setattr(advice.closed_switches, "__defaults__", (str(tmp_path),))
    monkeypatch.setattr(advice, "container", lambda: "")
    return tmp_path


@pytest.mark.parametrize("name", [name for name, _, _ in advice.SWITCHES])
def test_the_switch_that_forbids_is_named(switches: Path, name: str) -> None:
    _, forbids, allows = next(switch for switch in advice.SWITCHES if switch[0] == name)
    (switches / name.replace(".", "/")).write_text(forbids + "\n")
    for said in (SAID["user namespace"], SAID["refused"], SAID["map"]):
        assert f"sysctl -w {name}={allows} " in advice.advice(said)


def test_a_user_whose_namespace_has_no_rights_is_told_the_switch(
    switches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AppArmor allows the namespace and forbids what is done in it."""
    (switches / "kernel/apparmor_restrict_unprivileged_userns").write_text("1\n")
    monkeypatch.setattr(advice.os, "geteuid", lambda: 1000)
    assert "kernel.apparmor_restrict_unprivileged_userns=0" in advice.advice(SAID["mount"])
    monkeypatch.setattr(advice.os, "geteuid", lambda: 0)
    assert "--cap-add SYS_ADMIN" in advice.advice(SAID["mount"])


@pytest.mark.parametrize(
    ("kind", "said", "flags"),
    [
        ("docker", "refused", ["seccomp=unconfined", "apparmor=unconfined"]),
        ("docker", "mount", ["--cap-add SYS_ADMIN", "seccomp=unconfined", "systempaths=unconfined"]),
        ("podman", "pivot", ["--cap-add SYS_ADMIN", "unmask=ALL"]),
        ("pod", "refused", ["hostUsers: false", "SYS_ADMIN"]),
        ("pod", "mount", ["hostUsers: false", "SYS_ADMIN"]),
        ("", "refused", ["run as root"]),
    ],
)
def test_containers_are_told_their_flags(
    switches: Path, monkeypatch: pytest.MonkeyPatch, kind: str, said: str, flags: list[str]
) -> None:
    monkeypatch.setattr(advice, "container", lambda: kind)
    told = advice.advice(SAID[said])
    for flag in flags:
        assert flag in told


def test_a_disk_that_cannot_map_ids_is_told(switches: Path) -> None:
    said = "map the ids of /nfs/cache/layers/x/root (its filesystem may not allow it): Invalid argument"
    assert "RLSANDBOX_CACHE" in advice.advice(said)


def test_other_failures_get_no_wrong_advice(switches: Path) -> None:
    for said in (
        "make sandbox m1: File exists",
        "open /data/image/root: No such file or directory",
        "mount a tmpfs for the upper layer (size=10): No space left on device",
        "read a base directory: an absolute path is wanted: Invalid argument",
    ):
        assert advice.advice(said) == ""


def test_which_container_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    there: set[str] = set()
    monkeypatch.setattr(advice.os.path, "exists", lambda path: path in there)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("container", raising=False)
    assert advice.container() == ""
    monkeypatch.setenv("container", "enroot")
    assert advice.container() == "enroot"
    there.add("/.dockerenv")
    assert advice.container() == "docker"
    there.add("/run/.containerenv")
    assert advice.container() == "podman"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert advice.container() == "pod"
