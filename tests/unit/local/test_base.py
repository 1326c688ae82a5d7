"""The host's base shows what is on its list and nothing that is a secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlsandbox.backends.local import base, fitting, limits
from rlsandbox.backends.local.roots import exposed
from rlsandbox.errors import ConfigError, ProvisionError
from rlsandbox.spec import Spec


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A small machine with secrets where people put them."""
    root = tmp_path / "machine"
    files = {
        "etc/passwd": "root:HASH:0:0:root:/root:/bin/bash\ndaemon:x:1:1::/:/bin/false\nalice:x:1001:1001::/home/alice:/bin/sh\n",
        "etc/group": "root:x:0:\nshadow:x:42:\nadm:x:4:alice,daemon\nalice:x:1001:\n",
        "etc/shadow": "root:$6$SECRET:::::::\n",
        "etc/ssl/certs/ca.pem": "certificate",
        "etc/ssl/private/key.pem": "SECRET",
        "etc/ssh/ssh_host_rsa_key": "SECRET",
        "etc/pip.conf": "index-url = https://user:SECRET@pypi.corp/",
        "etc/apt/sources.list": "deb https://user:SECRET@mirror.corp/debian stable main\n",
        "etc/apt/apt.conf.d/10plain": "APT::Clean 1;\n",
        "etc/apt/auth.conf": "machine x login y password SECRET\n",
        "etc/apt/auth.conf.d/corp.conf": "machine x login y password SECRET\n",
        "etc/profile.d/token.sh": "export HF_TOKEN=SECRET\n",
        "etc/profile.d/team.sh": "export API_KEY='SECRET'\n",
        "etc/profile.d/lang.sh": "export LANG=C\n",
        "etc/maven/settings.xml": "<server><password>SECRET</password></server>",
        "etc/maven/m2.conf": "main is launcher\n",
        "etc/security/opasswd": "SECRET",
        "etc/security/limits.conf": "# none\n",
        "etc/skel/.bashrc": "alias ll='ls -l'\n",
        "etc/skel/.netrc": "machine x password SECRET",
        "etc/hosts": "10.0.0.1 internal-SECRET.corp\n",
        "etc/resolv.conf": "nameserver 10.0.0.53\n",
        "etc/kubernetes/admin.conf": "SECRET",
        "etc/alternatives/editor": "x",
        "var/lib/dpkg/status": "Package: x\n",
        "home/alice/secret": "SECRET",
        "root/.ssh/id_rsa": "SECRET",
        "usr/bin/tool": "x",
        "opt/vendor/license": "SECRET",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("etc/shadow", "etc/ssl/private/key.pem", "etc/security/opasswd"):
        (root / name).chmod(0o600)
    (root / "bin").symlink_to("usr/bin")
    (root / "lib").mkdir()
    return root


def made(machine: Path, tmp_path: Path, network: str = "none") -> tuple[Path, list[tuple[str, str]]]:
    items, overlays = base.plan(network, str(machine))
    out = tmp_path / "base"
    out.mkdir()
    base.make(items, out, owners=os.geteuid() == 0)
    return out, overlays


def test_no_secret_is_in_it(machine: Path, tmp_path: Path) -> None:
    root, overlays = made(machine, tmp_path)
    for top, _, files in os.walk(root):
        for name in files:
            path = Path(top, name)
            if not path.is_symlink():
                assert "SECRET" not in path.read_text(), path
    assert overlays == [
        ("/usr", f"{machine}/usr"),
        ("/lib", f"{machine}/lib"),
        ("/var/lib/dpkg", f"{machine}/var/lib/dpkg"),
    ]
    kept = (
        "etc/ssl/certs/ca.pem",
        "etc/apt/apt.conf.d/10plain",
        "etc/profile.d/lang.sh",
        "etc/maven/m2.conf",
    )
    for name in (*kept, "etc/security/limits.conf", "root/.bashrc", "home/user/.bashrc", "etc/skel/.bashrc"):
        assert (root / name).is_file(), name
    assert os.readlink(root / "bin") == "usr/bin"
    assert os.listdir(root / "home") == ["user"]
    assert os.listdir(root / "opt") == []


def test_accounts_are_the_systems_own_and_locked(machine: Path, tmp_path: Path) -> None:
    root, _ = made(machine, tmp_path)
    passwd = (root / "etc/passwd").read_text()
    assert "alice" not in passwd
    assert "HASH" not in passwd
    assert [line.split(":")[0] for line in passwd.splitlines()] == ["root", "daemon", "nobody", "user"]
    assert "adm:x:4:daemon\n" in (root / "etc/group").read_text()
    shadow = (root / "etc/shadow").read_text()
    assert all(line.split(":")[1] == "*" for line in shadow.splitlines())
    assert (root / "etc/shadow").stat().st_mode & 0o007 == 0


def test_the_network_decides_what_names_there_are(machine: Path, tmp_path: Path) -> None:
    root, _ = made(machine, tmp_path)
    assert (root / "etc/resolv.conf").read_text() == ""
    assert "internal" not in (root / "etc/hosts").read_text()
    (tmp_path / "host").mkdir()
    root, _ = made(machine, tmp_path / "host", "host")
    assert (root / "etc/resolv.conf").read_text() == "nameserver 10.0.0.53\n"
    assert "internal" in (root / "etc/hosts").read_text()


def test_the_digest_tells_every_change(machine: Path) -> None:
    first = base.digest(*base.plan("none", str(machine)))
    assert first == base.digest(*base.plan("none", str(machine)))
    (machine / "etc/profile.d/lang.sh").write_text("export LANG=D\n")
    second = base.digest(*base.plan("none", str(machine)))
    (machine / "etc/alternatives/pager").symlink_to("/usr/bin/less")
    third = base.digest(*base.plan("none", str(machine)))
    assert len({first, second, third}) == 3


def test_an_image_gets_what_every_root_needs_and_no_link_leads_it_astray(tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "etc").mkdir(parents=True)
    (image / "proc").symlink_to("/etc")
    (image / "dev").symlink_to("../../etc")
    (image / "etc/resolv.conf").symlink_to("/run/outside")
    (image / "etc/passwd").write_text("own\n")
    (image / "tmp").symlink_to("var/tmp")
    (image / "home").symlink_to("/data/home")
    (image / "root").mkdir(mode=0o700)
    points = [("/root/.pyenv", "d"), ("/home/x/file", "f"), ("/etc/shown", "d")]
    items, targets = fitting.plan([str(image)], points, "none", whole=True)
    by_path = {item.path: item for item in items}
    for name in ("proc", "sys", "dev", "tmp"):
        assert by_path[name].kind == "d", "a real directory above the image's link"
    assert by_path["tmp"].mode == 0o1777
    assert by_path["etc/resolv.conf"].kind == "f"
    assert "etc/passwd" not in by_path
    assert "root/.pyenv" in by_path
    assert by_path["root"].mode == 0o711, "others may pass to what was exposed below"
    assert targets == {
        "/root/.pyenv": "/root/.pyenv",
        "/home/x/file": "/data/home/x/file",
        "/etc/shown": "/etc/shown",
    }
    out = tmp_path / "out"
    out.mkdir()
    base.make(items, out, owners=os.geteuid() == 0)
    assert (out / "data/home/x/file").is_file()


@pytest.mark.parametrize(
    ("workdir", "made"),
    [
        ("/srv/app/", "srv/app"),
        ("/there/x", "real/x"),
        ("/nowhere/x", "gone/x"),
        ("/real", None),
        ("/file", None),  # what cannot be made is for the command to say
        ("/file/x", None),
        ("/loop/x", None),
        ("/" + "n" * 256, None),
        ("/long" * 1000, None),
    ],
)
def test_an_images_workdir_is_made_where_it_has_none(tmp_path: Path, workdir: str, made: str | None) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "there").symlink_to("/real")
    (tmp_path / "nowhere").symlink_to("/gone")
    (tmp_path / "loop").symlink_to("loop")
    plain, _ = fitting.plan([str(tmp_path)], [], "none", whole=True)
    items, _ = fitting.plan([str(tmp_path)], [], "none", whole=True, workdir=workdir)
    new = {item.path: (item.kind, item.mode) for item in items if item not in plain}
    assert new.get(made or "") == (("d", 0o755) if made else None)
    assert bool(new) == (made is not None)


def test_a_point_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("a file")
    with pytest.raises(ProvisionError, match="something of another kind"):
        fitting.plan([str(tmp_path)], [("/etc", "d")], "none", whole=False)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ProvisionError, match="too many links"):
        fitting.plan([str(tmp_path)], [("/loop/x", "d")], "none", whole=False)


def test_nothing_to_fit_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "opt").mkdir(mode=0o755)
    assert fitting.plan([str(tmp_path)], [("/opt", "d")], "none", whole=False) == ([], {"/opt": "/opt"})


def test_exposing(tmp_path: Path) -> None:
    (tmp_path / "data/inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("data")
    inner, outer, link = str(tmp_path / "data/inner"), str(tmp_path / "data"), str(tmp_path / "link")
    assert exposed((inner, outer + "/", link)) == [(outer, outer), (link, outer)]
    for path, message in {
        str(tmp_path / "missing"): "does not exist",
        "/": "every sandbox has its own",
        "/etc": "every sandbox has its own",
        "/proc/self": "cannot be exposed",
        str(tmp_path / "a=b"): "cannot be exposed",
    }.items():
        with pytest.raises(ConfigError, match=message):
            exposed((path,))
    import sys

    for place in (sys.prefix, sys.base_prefix):
        if not place.startswith("/usr"):
            assert any(
                place == target or place.startswith(target + "/") for target, _ in exposed(("python",))
            )


def test_limits_leave_room_for_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "machine_memory", lambda: 1 << 30)
    assert limits.of(Spec()).memory == 1 << 29
    assert limits.of(Spec()).disk == 1 << 28, "a full disk comes before the memory limit"
    given = limits.of(Spec(memory="100MiB", disk="1GiB", cpu=1.5, pids=7))
    assert (given.memory, given.disk, given.cpu_milli, given.pids) == (100 << 20, 1 << 30, 1500, 7)
    assert limits.of(Spec(disk=1)).inodes >= 4096


def test_a_pool_that_can_never_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "machine_memory", lambda: 8 << 30)
    limits.check_size(4, Spec(memory="2GiB"))
    limits.check_size(8192, Spec())
    with pytest.raises(
        ConfigError, match=r"5 sandboxes with 2048 MiB each needs 10240 MiB; this machine has 8192"
    ):
        limits.check_size(5, Spec(memory="2GiB"))
    with pytest.raises(ConfigError) as caught:
        limits.check_size(5, Spec(memory="2GiB"))
    assert caught.value.hint == 'size=4 or memory="1638MiB"'
    with pytest.raises(ConfigError) as caught:
        limits.check_size(9000, Spec())
    assert caught.value.hint == "size=8192"


def test_the_limit_of_the_own_group_counts(tmp_path: Path) -> None:
    """As a batch system or a container sets it, in either version, on the group itself or above it."""
    from rlsandbox.backends.local import cgroups

    mount = tmp_path / "cgroup"
    (mount / "job/step").mkdir(parents=True)
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    for kind, controllers, file in (
        ("cgroup2", "", "memory.max"),
        ("cgroup", "memory", "memory.limit_in_bytes"),
    ):
        (proc / "mountinfo").write_text(f"30 1 0:26 / {mount} rw shared:9 - {kind} cgroup rw,{controllers}\n")
        (proc / "cgroup").write_text(f"0:{controllers}:/job/step\n")
        (mount / "job/step" / file).write_text("max\n")
        assert cgroups.memory_limit(str(tmp_path / "proc")) is None
        (mount / "job" / file).write_text("4096\n")
        assert cgroups.memory_limit(str(tmp_path / "proc")) == 4096
        (mount / "job/step" / file).write_text("8192\n")
        assert cgroups.memory_limit(str(tmp_path / "proc")) == 4096
    # A container's mount shows its own part only.
    (proc / "mountinfo").write_text(f"30 1 0:26 /docker/abc {mount} rw - cgroup2 cgroup rw\n")
    (proc / "cgroup").write_text("0::/docker/abc\n")
    (mount / "memory.max").write_text("77\n")
    assert cgroups.memory_limit(str(tmp_path / "proc")) == 77
