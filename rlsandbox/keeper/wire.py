"""Numbers of the keeper's protocol (docs/protocol.md). A test compares them with ``src/protocol.h``."""

from __future__ import annotations

from enum import IntEnum, IntFlag

VERSION = 1
MAX_FRAME = 32768
MAX_MESSAGE = 16 << 20
WINDOW = 256 << 10
HEADER = 16  # length included


class Type(IntEnum):
    HELLO = 0x01
    WELCOME = 0x02
    PING = 0x03
    PONG = 0x04
    REQ = 0x10
    REPLY = 0x11
    FAIL = 0x12
    STARTED = 0x20
    DATA = 0x21
    EOF = 0x22
    CREDIT = 0x23
    EXIT = 0x24
    SIGNAL = 0x25
    CANCEL = 0x26
    EVENT = 0x30


class Flag(IntFlag):
    MORE = 1
    TAIL = 2


class Op(IntEnum):
    SPAWN = 1
    READ = 2
    WRITE = 3
    LIST = 4
    STAT = 5
    REMOVE = 6
    RESET = 10
    INSPECT = 11
    CHANGES = 12
    SEAL = 13
    DROP_LAYER = 14
    PAUSE = 15
    RESUME = 16
    OUTSIDE_READ = 17
    OUTSIDE_REMOVE = 18
    KILL_ALL = 19
    EXPORT = 20
    IMPORT = 21
    HUB_CREATE = 40
    HUB_DISPOSE = 41
    HUB_LIST = 42
    HUB_PROBE = 43
    HUB_GIVE_LAYER = 44
    HUB_DROP_LAYER = 45
    HUB_LAYERS = 46
    HUB_SWEEP = 47


class Tag(IntEnum):
    # s: string, u32 and u64: integers, *: may repeat
    OP = 1  # u32
    VERSION = 2  # u32
    TOKEN = 3  # s
    HASH = 4  # s
    MODE = 5  # s
    MEMBER = 6  # s *
    FACT = 7  # s * name=value
    ERRNO = 8  # u32
    WHAT = 9  # s
    TEXT = 10  # s
    PID = 11  # u32
    STATUS = 12  # u32
    FLAGS = 13  # u32
    DURATION_NS = 14  # u64
    STDOUT_SIZE = 15  # u64
    STDERR_SIZE = 16  # u64
    KIND = 17  # s
    ARG = 20  # s *
    ENV = 21  # s *
    CWD = 22  # s
    USER = 23  # s
    SCRIPT = 24  # s
    STDIN = 25  # u32
    CONTROL = 26  # u32
    OUTPUT_LIMIT = 27  # u64
    TIMEOUT_MS = 28  # u64
    UMASK = 29  # u32
    MERGE = 30  # u32
    RLIMIT = 31  # s * name=number or name=unlimited
    PATH = 40  # s
    OFFSET = 41  # u64
    LENGTH = 42  # u64
    FILE_MODE = 43  # u32
    SIZE = 44  # u64
    LAYER = 45  # s *
    COUNT = 46  # u64
    BYTES = 47  # u64
    LIMIT = 48  # u64
    ROOT = 60  # s *
    OVERLAY = 61  # s * target=lower[:lower...]
    BIND = 62  # s * target=source
    UPPER = 63  # s
    UPPER_BYTES = 64  # u64
    UPPER_INODES = 65  # u64
    MEMORY_BYTES = 66  # u64
    CPU_MILLI = 67  # u32
    PIDS = 68  # u32
    NOFILE = 69  # u32
    NETWORK = 70  # s
    HOSTNAME = 71  # s
    ISOLATION = 72  # s


class ExitFlag(IntFlag):
    TIMED_OUT = 1
    OOM = 2
    CANCELLED = 4
