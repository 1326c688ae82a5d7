"""Any number of keepers behind one socket, for nodes whose pods run nothing (KWOK): ``keeper connect DIR`` reaches them.

Each session is a keeper of its own that outlives its transports, as the real one's. Commands end at once with status 0
and print nothing; an episode is always clean. Run as a program: ``many_keepers.py DIR``; it says "listening".
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rlsandbox.keeper.frames import Decoder, Fields, encode, encode_data, encode_fields, encode_message
from rlsandbox.keeper.records import HEAD, Kind, record
from rlsandbox.keeper.wire import VERSION, Op, Tag, Type
from tests.support.fake_keeper import CLEAN

FACTS = ["ids=range", "workdir=/", "uid=0", "proc=own"]


class Session:
    def __init__(self) -> None:
        self.episode, self.got = 1, 0
        self.base, self.kept = 0, bytearray()
        self.writer: asyncio.StreamWriter | None = None
        self._decoder = Decoder()

    def say(self, data: bytes) -> None:
        self.kept += data
        if self.writer is not None:
            self.send(data)

    def send(self, data: bytes) -> None:
        assert self.writer is not None
        for at in range(0, len(data), 32768):
            self.writer.write(record(Kind.BYTES, data[at : at + 32768], self.got))

    def confirmed(self, to: int) -> None:
        if to > self.base:
            del self.kept[: to - self.base]
            self.base = to

    def bytes(self, payload: bytes) -> None:
        self.got += len(payload)
        for type_, _, _, channel, data in self._decoder.feed(payload):
            if type_ == Type.HELLO:
                said = {"version": VERSION, "hash": "many", "mode": "overlay", "member": "m", "fact": FACTS}
                self.say(encode_message(Type.WELCOME, 0, encode_fields(said)))
            elif type_ == Type.PING:
                self.say(encode(Type.PONG, 0, data))
            elif type_ == Type.REQ:
                self.request(channel, Fields.decode(data))

    def request(self, channel: int, fields: Fields) -> None:
        op = fields.int(Tag.OP)
        if op == Op.SPAWN:
            self.say(encode_message(Type.STARTED, channel, encode_fields({"pid": 7})))
            end = dict.fromkeys(("status", "flags", "duration_ns", "stdout_size", "stderr_size"), 0)
            self.say(encode_message(Type.EXIT, channel, encode_fields(end)))
            return
        if op == Op.INSPECT:
            text = CLEAN.replace("layer\tprimed-1\n", "").format(episode=self.episode)
            self.say(b"".join(encode_data(channel, 1, memoryview(text.encode()))))
        elif op == Op.RESET:
            self.episode += 1
        self.say(encode_message(Type.REPLY, channel, b""))


SESSIONS: dict[str, Session] = {}


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    session: Session | None = None
    try:
        while True:
            length, kind, confirmed = HEAD.unpack(await reader.readexactly(HEAD.size))
            payload = await reader.readexactly(length)
            if kind == Kind.ATTACH:
                fields = Fields.decode(payload)
                session = SESSIONS.setdefault(fields.text(Tag.KIND), Session())
                session.confirmed(fields.int(Tag.OFFSET))
                session.writer = writer
                said = {
                    "version": VERSION, "hash": "many", "mode": "overlay", "offset": session.got, "fact": FACTS,
                }  # fmt: skip
                writer.write(record(Kind.ATTACHED, encode_fields(said), 0))
                session.send(bytes(session.kept))
                continue
            if session is None or kind == Kind.LEAVE:
                return
            session.confirmed(confirmed)
            if kind == Kind.BYTES:
                session.bytes(payload)
            elif kind == Kind.PING:
                writer.write(record(Kind.PONG, payload, session.got))
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    finally:
        if session is not None and session.writer is writer:
            session.writer = None
        writer.close()


async def main(place: Path) -> None:
    (place / "s").mkdir(exist_ok=True)
    server = await asyncio.start_unix_server(serve, place / "s" / "keeper", backlog=4096)
    print("listening", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
