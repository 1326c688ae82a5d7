"""Layers out and in as tar streams, and hostile streams."""

from __future__ import annotations

import errno
import io
import random
import struct
import tarfile
import time
from pathlib import Path

import pytest
from rawclient import Hub, Keeper, KeeperError
from test_layers import give, seal, stand_on
from test_outside import changes

from rlsandbox.keeper.wire import WINDOW, Op, Tag, Type
from tests.support.keepers import keeper_of


def export(keeper: Keeper, **options: object) -> bytes:
    return keeper.call(Op.EXPORT, *((Tag[k.upper()], v) for k, v in options.items()))[1]


def bring(keeper: Keeper, name: str, data: bytes) -> int:
    ch = keeper.request(Op.IMPORT, (Tag.LAYER, name))
    room = WINDOW
    while data:
        while not room:
            kind, flags, stream, payload = keeper.next(ch)
            if kind != Type.CREDIT:
                keeper.waiting.setdefault(ch, []).insert(0, (kind, flags, stream, payload))
                data = b""
                break
            room += struct.unpack("<I", payload)[0]
        piece, data = data[: min(room, 32000)], data[min(room, 32000) :]
        room -= len(piece)
        keeper.send(Type.DATA, ch, piece)
    keeper.send(Type.EOF, ch)
    return int(keeper.reply(ch)[0][Tag.BYTES])


STATE = """cd /; find tmp etc usr/new opt var -printf '%p|%y|%m|%U|%G|%s|%T@|%l\\n' 2>/dev/null | grep -v '|d|.*|.*|.*|.*|.*|' | sort
find tmp etc usr/new opt var -type d -printf '%p|%m|%U|%G|%T@\\n' 2>/dev/null | sort; find tmp -type f | sort | xargs cksum; stat -c '%h %i' /tmp/h1 /tmp/h2 | uniq | wc -l"""

DIRT = """
umask 022; cd /tmp; echo plain > a; head -c 3000000 /dev/urandom > big; truncate -s 20M sparse; echo x | dd of=sparse bs=1 seek=10000000 conv=notrunc 2>/dev/null
mkdir -p d/e/f; echo deep > d/e/f/g; chmod 4711 d/e/f/g; ln -s ../a d/link; ln a h1; ln a h2; mkfifo fifo
echo odd > "$(printf 'na me\\n\\tx')"; long=$(printf 'L%.0s' $(seq 200)); mkdir -p $long/$long; echo long > $long/$long/$long; ln -s $long/$long/$long to-long
echo trap > .wh.literal; touch -d '1969-01-01 00:00:00.5 UTC' old; touch -d '2100-01-01' new
rm /etc/group; rm -r /var/tmp; mkdir /var/tmp; echo v > /var/tmp/v; mkdir -p /usr/new; echo u > /usr/new/u; chmod 700 /usr/new; mkdir -p /opt/x
touch -d '2001-02-03' d /tmp
"""


def test_there_and_back(hub: Hub) -> None:
    keeper = hub.create()
    r = keeper.sh(DIRT)
    assert r.code == 0, r.stderr
    if "ids=one" not in keeper.welcome[Tag.FACT]:
        keeper.sh("chown 12:34 /tmp/a /tmp/d; chown -h 5:6 /tmp/to-long")
    before, listed = keeper.sh(STATE).stdout, changes(keeper)
    data = export(keeper)
    names = tarfile.open(fileobj=io.BytesIO(data)).getnames()
    assert "tmp/a" in names and "etc/.wh.group" in names and "var/tmp/.wh..wh..opq" in names and "usr/new/u" in names
    keeper.reset()
    assert bring(keeper, "back", data) > 3_000_000
    assert keeper.sh("ls /tmp/a").code != 0
    stand_on(keeper, "back")
    assert keeper.sh(STATE).stdout == before
    assert keeper.sh("ls /etc/group").code != 0 and keeper.read("/tmp/.wh.literal") == b"trap\n"
    assert keeper.sh("stat -c %b /tmp/sparse").stdout.strip() < b"9"
    other = hub.create(name="other")
    give(hub, "back", "other")
    stand_on(other, "back")
    assert other.sh(STATE).stdout == before and changes(other) == []
    third = hub.create(name="third")
    bring(third, "again", export(other, layer="back"))
    stand_on(third, "again")
    assert third.sh(STATE).stdout == before
    assert listed


def test_all_layers_in_one(hub: Hub) -> None:
    keeper = hub.create()
    for i in range(3):
        keeper.sh(f"echo {i} > /tmp/f{i}; echo {i} > /tmp/same; rm -f /tmp/f{i - 2}")
        seal(keeper, f"s{i}")
    keeper.sh("echo live > /tmp/live; rm /etc/group")
    data = export(keeper, flags=1)
    other = hub.create(name="other")
    bring(other, "all", data)
    stand_on(other, "all")
    assert other.sh("cd /tmp; echo *; cat same; ls /etc/group").stdout == b"f1 f2 live same\n2\n"


def test_on_top_of_what_it_stands_on(hub: Hub) -> None:
    keeper = hub.create()
    keeper.write("/tmp/primed", b"1")
    seal(keeper, "primed")
    keeper.write("/tmp/work", b"2")
    data = export(keeper)
    stand_on(keeper, "primed")
    bring(keeper, "work", data)
    stand_on(keeper, "work")
    assert keeper.sh("ls /tmp").stdout == b"primed\nwork\n"


def test_a_sealed_layer_is_sent_whatever_becomes_of_the_episode_and_of_its_name(hub: Hub) -> None:
    keeper, other = hub.create((Tag.UPPER_BYTES, 64 << 20)), hub.create(name="other")
    keeper.spawn("sleep", "31.4159")
    own_mounts = Path(f"/proc/{keeper_of('sleep 31.4159')}/mountinfo")
    content = random.Random(1).randbytes(8 << 20)
    keeper.write("/tmp/big", content)
    keeper.write("/usr/x", b"usr")
    seal(keeper, "sealed", kill=True)
    whole = export(keeper, layer="sealed", flags=1)
    for flags in (0, 1):  # itself, and with what is below
        if flags:
            bring(keeper, "sealed", whole)
        keeper.write("/tmp/live", content)
        channel = keeper.request(Op.EXPORT, (Tag.LAYER, "sealed"), (Tag.FLAGS, flags))
        first = keeper.next(channel)  # it is under way, and waits for us
        live = keeper.request(Op.EXPORT)
        begun = keeper.next(live)
        keeper.reset()
        keeper.call(Op.DROP_LAYER, (Tag.LAYER, "sealed"))
        keeper.write("/tmp/big", b"another")
        seal(keeper, f"another{flags}", kill=True)
        keeper.reset()
        keeper.waiting.setdefault(channel, []).insert(0, first)
        data = keeper.reply(channel)[1]
        assert tarfile.open(fileobj=io.BytesIO(data)).extractfile("tmp/big").read() == content  # type: ignore[union-attr]
        bring(other, f"sent{flags}", data)
        stand_on(other, f"sent{flags}")
        assert (other.read("/tmp/big"), other.read("/usr/x")) == (content, b"usr")
        with pytest.raises(KeeperError) as caught:  # what the episode had written is the episode's
            keeper.waiting.setdefault(live, []).insert(0, begun)
            keeper.reply(live)
        assert caught.value.errno == errno.ECANCELED
        with pytest.raises(KeeperError):
            export(keeper, layer="sealed")
    for name in ("another0", "another1"):
        keeper.call(Op.DROP_LAYER, (Tag.LAYER, name))
    deadline = time.monotonic() + 30  # it goes when nobody reads it any more
    while "/k/s/" in own_mounts.read_text():
        assert time.monotonic() < deadline, own_mounts.read_text()
        time.sleep(0.02)


def made(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def member(name: str, type: bytes = tarfile.REGTYPE, link: str = "", **more: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = type, link, 0o755
    for key, value in more.items():
        setattr(info, key, value)
    return info


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_other_peoples_tars(keeper: Keeper, form: int) -> None:
    long = "tmp/" + "/".join(["d" * 40] * 3) + "/file"
    very = "tmp/" + "/".join(["e" * 90] * 6) + "/file"
    members = [(member("./tmp/x"), b"1"), (member(long), b"2"), (member("/tmp//./y"), b"3")]
    if form != tarfile.USTAR_FORMAT:
        members += [(member(very), b"4"), (member("tmp/to", tarfile.SYMTYPE, "z" * 150), b"")]
    bring(keeper, "made", made(*members, form=form))
    stand_on(keeper, "made")
    assert keeper.sh(f"cat /tmp/x /{long} /tmp/y").stdout == b"123"
    if form != tarfile.USTAR_FORMAT:
        assert keeper.sh(f"cat /{very}; readlink /tmp/to").stdout == b"4" + b"z" * 150 + b"\n"


HOSTILE = {
    "up": [(member("../../etc/x"), b"x")],
    "up inside": [(member("tmp/../../x"), b"x")],
    "through a link": [(member("tmp/l", tarfile.SYMTYPE, "/"), b""), (member("tmp/l/etc/x"), b"x")],
    "link out": [(member("tmp/h", tarfile.LNKTYPE, "../../etc/passwd"), b"")],
    "hard link to a link": [(member("tmp/l", tarfile.SYMTYPE, "/etc/passwd"), b""), (member("tmp/h", tarfile.LNKTYPE, "tmp/l"), b"")],
    "hard link to nothing": [(member("tmp/h", tarfile.LNKTYPE, "tmp/none"), b"")],
    "device": [(member("tmp/null", tarfile.CHRTYPE, devmajor=1, devminor=3), b"")],
    "block device": [(member("tmp/disk", tarfile.BLKTYPE, devmajor=254), b"")],
    "file as directory": [(member("tmp/f"), b"x"), (member("tmp/f/g"), b"x")],
    "whiteout of nothing": [(member("tmp/.wh."), b"")],
    "whiteout of all": [(member("tmp/.wh..."), b"")],
    "the top is a file": [(member("usr"), b"x")],
    "name too long": [(member("tmp/" + "n" * 300), b"x")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_streams_are_refused(keeper: Keeper, name: str) -> None:
    before = keeper.sh("cat /etc/passwd; ls /etc /tmp /").stdout
    with pytest.raises(KeeperError, match=r"import a layer|layer"):
        bring(keeper, "bad", made(*HOSTILE[name]))
    with pytest.raises(KeeperError):
        stand_on(keeper, "bad")
    assert keeper.sh("cat /etc/passwd; ls /etc /tmp /").stdout == before
    bring(keeper, "bad", made((member("tmp/good"), b"x")))


def test_the_overlays_own_attributes_are_not_taken(keeper: Keeper) -> None:
    info = member("etc", tarfile.DIRTYPE, pax_headers={"SCHILY.xattr.user.overlay.opaque": "y", "SCHILY.xattr.user.fine": "1"})
    bring(keeper, "x", made((info, b"")))
    stand_on(keeper, "x")
    assert keeper.sh("ls /etc/passwd").code == 0


def test_broken_streams(keeper: Keeper) -> None:
    rng = random.Random(3)
    good = made(*[(member(f"tmp/{'n' * rng.randrange(1, 250)}{i}"), rng.randbytes(rng.randrange(2000))) for i in range(8)])
    refused = 0
    for i in range(60):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(0, len(data) // 512) * 512 + rng.randrange(300)] = rng.randrange(256)
        try:
            bring(keeper, f"b{i}", bytes(data[: rng.randrange(len(data)) if i % 3 == 0 else len(data)]))
        except KeeperError:
            refused += 1
    assert refused > 20
    assert keeper.sh("echo alive").stdout == b"alive\n"
