/* Numbers of the keeper's protocol (docs/protocol.md). A test compares them with rlsandbox/keeper/wire.py. */
#ifndef RLS_PROTOCOL_H
#define RLS_PROTOCOL_H

enum {
    RLS_VERSION = 1,
    RLS_MAX_FRAME = 32768,   /* of what follows the length */
    RLS_HEADER = 16,         /* length included */
    RLS_MAX_PAYLOAD = RLS_MAX_FRAME - (RLS_HEADER - 4),
    RLS_MAX_MESSAGE = 16 << 20,
    RLS_WINDOW = 256 << 10,
};

enum rls_type {
    T_HELLO = 0x01, T_WELCOME = 0x02, T_PING = 0x03, T_PONG = 0x04,
    T_REQ = 0x10, T_REPLY = 0x11, T_FAIL = 0x12,
    T_STARTED = 0x20, T_DATA = 0x21, T_EOF = 0x22, T_CREDIT = 0x23, T_EXIT = 0x24, T_SIGNAL = 0x25, T_CANCEL = 0x26,
    T_EVENT = 0x30,
};

enum rls_flag { F_MORE = 1, F_TAIL = 2 };

enum rls_stream { S_STDIN = 0, S_STDOUT = 1, S_STDERR = 2, S_CONTROL_IN = 3, S_CONTROL_OUT = 4 };

enum rls_op {
    OP_SPAWN = 1, OP_READ = 2, OP_WRITE = 3, OP_LIST = 4, OP_STAT = 5, OP_REMOVE = 6,
    OP_RESET = 10, OP_INSPECT = 11, OP_CHANGES = 12, OP_SEAL = 13, OP_DROP_LAYER = 14, OP_PAUSE = 15, OP_RESUME = 16,
    OP_OUTSIDE_READ = 17, OP_OUTSIDE_REMOVE = 18, OP_KILL_ALL = 19, OP_EXPORT = 20, OP_IMPORT = 21,
    OP_HUB_CREATE = 40, OP_HUB_DISPOSE = 41, OP_HUB_LIST = 42, OP_HUB_PROBE = 43, OP_HUB_GIVE_LAYER = 44,
    OP_HUB_DROP_LAYER = 45, OP_HUB_LAYERS = 46, OP_HUB_SWEEP = 47,
};

enum rls_tag {
    TAG_OP = 1, TAG_VERSION = 2, TAG_TOKEN = 3, TAG_HASH = 4, TAG_MODE = 5, TAG_MEMBER = 6, TAG_FACT = 7, TAG_ERRNO = 8,
    TAG_WHAT = 9, TAG_TEXT = 10, TAG_PID = 11, TAG_STATUS = 12, TAG_FLAGS = 13, TAG_DURATION_NS = 14,
    TAG_STDOUT_SIZE = 15, TAG_STDERR_SIZE = 16, TAG_KIND = 17,
    TAG_ARG = 20, TAG_ENV = 21, TAG_CWD = 22, TAG_USER = 23, TAG_SCRIPT = 24, TAG_STDIN = 25, TAG_CONTROL = 26,
    TAG_OUTPUT_LIMIT = 27, TAG_TIMEOUT_MS = 28, TAG_UMASK = 29, TAG_MERGE = 30, TAG_RLIMIT = 31,
    TAG_PATH = 40, TAG_OFFSET = 41, TAG_LENGTH = 42, TAG_FILE_MODE = 43, TAG_SIZE = 44, TAG_LAYER = 45, TAG_COUNT = 46,
    TAG_BYTES = 47, TAG_LIMIT = 48,
    TAG_ROOT = 60, TAG_OVERLAY = 61, TAG_BIND = 62, TAG_UPPER = 63, TAG_UPPER_BYTES = 64, TAG_UPPER_INODES = 65,
    TAG_MEMORY_BYTES = 66, TAG_CPU_MILLI = 67, TAG_PIDS = 68, TAG_NOFILE = 69, TAG_NETWORK = 70, TAG_HOSTNAME = 71,
    TAG_ISOLATION = 72,
};

enum rls_exit_flag { X_TIMED_OUT = 1, X_OOM = 2, X_CANCELLED = 4 };

/* FLAGS of requests */
enum rls_read_flag { R_LINK = 1, R_SPARSE = 2 };
enum rls_write_flag { W_APPEND = 1, W_PARENTS = 2, W_EXCLUSIVE = 4, W_DIRECTORY = 8, W_LINK = 16 };
enum rls_remove_flag { D_TREE = 1 };
enum rls_file_flag { AS_KEEPER = 256 }; /* READ, WRITE, LIST, STAT, REMOVE: not as a command would */
enum rls_outside_flag { O_BASELINE = 1 };
enum rls_seal_flag { SEAL_KILL = 1 };
enum rls_export_flag { EXPORT_ALL = 1 };
enum rls_changes_flag { C_CUT = 1 }; /* of the reply */

#endif
