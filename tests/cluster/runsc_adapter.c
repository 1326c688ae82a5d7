/* Lets containerd's runc shim drive the runsc (gVisor) that Debian 12 packages: BinaryName of the runtime handler "runsc".
 *
 * It is called as runc is, and calls runsc with the flags in PLACE/flags in front. What it adds:
 * - `runsc start` of a container hands its own stdout and stderr to the sentry, and the shim reads them until they end. So
 *   `create` leaves a keeper behind that holds the container's streams; `start` tells it to go on, it calls `runsc start`
 *   and then `runsc wait`. Its pid is what stands in the pid file: so the shim sees how the container ends.
 * - `kill` of a container that has ended says so in runc's words, else the deletion of a pod is tried for ever.
 * - `start` of a pod hides /proc/sys/net: this runsc takes any network namespace in which net.core.rmem_default is shown
 *   for the machine's own, and refuses.
 * - Capabilities newer than this runsc are taken out of the bundle's config; `update` has nothing to do.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define PLACE "/run/rlsandbox-cluster"
#define RUNSC "/usr/bin/runsc"
#define KIND "\"io.kubernetes.cri.container-type\""

static char *flags[64];
static int flag_count;

static void read_flags(void)
{
    static char text[4096];
    int fd = open(PLACE "/flags", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    text[size > 0 ? size : 0] = 0;
    for (char *word = strtok(text, " \n"); word && flag_count < 60; word = strtok(NULL, " \n"))
        flags[flag_count++] = word;
}

/* The command line of a call: runsc, our flags, `first` (global options of the caller), `then`. */
static char **call(char **first, int first_count, char **then, int then_count)
{
    char **words = calloc(flag_count + first_count + then_count + 2, sizeof *words);
    int n = 0;
    if (!words)
        exit(125);
    words[n++] = RUNSC;
    for (int i = 0; i < flag_count; i++)
        words[n++] = flags[i];
    for (int i = 0; i < first_count; i++)
        words[n++] = first[i];
    for (int i = 0; i < then_count; i++)
        words[n++] = then[i];
    return words;
}

static int ended(pid_t pid)
{
    int status;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return 125;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Call runsc and wait. With `said` what it writes (stdout, and stderr with `errors`) is kept there. */
static int run(char **words, char *said, size_t room, int errors)
{
    int ends[2] = {-1, -1};
    if (said && pipe2(ends, O_CLOEXEC))
        return 125;
    pid_t pid = fork();
    if (pid < 0)
        return 125;
    if (!pid) {
        if (said) {
            dup2(ends[1], 1);
            if (errors)
                dup2(ends[1], 2);
        }
        execv(RUNSC, words);
        _exit(127);
    }
    if (said) {
        close(ends[1]);
        size_t have = 0;
        char spill[512];
        for (;;) {
            size_t left = room - 1 - have;
            ssize_t n = left ? read(ends[0], said + have, left) : read(ends[0], spill, sizeof spill);
            if (n == 0 || (n < 0 && errno != EINTR))
                break;
            if (n > 0 && left)
                have += n;
        }
        said[have] = 0;
        close(ends[0]);
    }
    return ended(pid);
}

static void address(struct sockaddr_un *to, const char *id)
{
    memset(to, 0, sizeof *to);
    to->sun_family = AF_UNIX;
    snprintf(to->sun_path, sizeof to->sun_path, PLACE "/%.72s", id);
}

/* Tell a container's keeper to start it ('s') or to go ('q'); its answer, or -1 when there is none. */
static int tell(const char *id, char what)
{
    struct sockaddr_un to;
    address(&to, id);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (void *)&to, sizeof to) < 0 || write(fd, &what, 1) != 1) {
        close(fd);
        return -1;
    }
    unsigned char answer;
    ssize_t n;
    do
        n = read(fd, &answer, 1);
    while (n < 0 && errno == EINTR);
    close(fd);
    return n == 1 ? answer : 125;
}

static char *contents(const char *path)
{
    size_t room = 1 << 20, have = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    char *text = fd < 0 ? NULL : malloc(room + 1);
    if (!text)
        return NULL;
    ssize_t n;
    while (have < room && (n = read(fd, text + have, room - have)) > 0)
        have += n;
    close(fd);
    text[have] = 0;
    return text;
}

/* Does the JSON text say "key": "value"? containerd writes it; nobody else does. */
static int says(const char *text, const char *key, const char *value)
{
    size_t size = strlen(value);
    for (const char *at = text; (at = strstr(at, key));) {
        at += strlen(key);
        const char *next = at + strspn(at, " \n\t:");
        if (*next == '"' && !strncmp(next + 1, value, size) && next[size + 1] == '"')
            return 1;
    }
    return 0;
}

/* Blank an element of a JSON list, with one comma beside it. */
static void blank(char *text, char *element, size_t size)
{
    memset(element, ' ', size);
    char *next = element + size + strspn(element + size, " \n\t");
    if (*next == ',') {
        *next = ' ';
        return;
    }
    for (char *before = element; before > text && *before != '['; before--)
        if (*before == ',') {
            *before = ' ';
            return;
        }
}

static void drop_new_capabilities(const char *path)
{
    static const char *unknown[] = {"\"CAP_PERFMON\"", "\"CAP_BPF\"", "\"CAP_CHECKPOINT_RESTORE\"", NULL};
    char *text = contents(path);
    int changed = 0;
    if (!text)
        return;
    for (int i = 0; unknown[i]; i++)
        for (char *at = text; (at = strstr(at, unknown[i])); changed = 1)
            blank(text, at, strlen(unknown[i]));
    if (changed) {
        int fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);
        size_t size = strlen(text);
        if (fd < 0 || write(fd, text, size) != (ssize_t)size)
            perror("runsc-adapter: config");
        close(fd);
    }
    free(text);
}

static void keep(int door, char *id, char **globals, int global_count)
{
    struct sockaddr_un own;
    char what, said[512];
    int peer;
    unsigned char answer = 0;
    address(&own, id);
    for (;;) {
        peer = accept4(door, NULL, NULL, SOCK_CLOEXEC);
        if (peer >= 0 && read(peer, &what, 1) == 1)
            break;
        if (peer < 0 && errno != EINTR)
            _exit(125);
        close(peer);
    }
    if (what != 's') {
        unlink(own.sun_path);
        (void)!write(peer, &answer, 1);
        _exit(137);
    }
    char *start[] = {"start", id}, *delete[] = {"delete", "--force", id}, *wait_for[] = {"wait", id};
    answer = run(call(globals, global_count, start, 2), NULL, 0, 0);
    if (answer)
        run(call(globals, global_count, delete, 3), NULL, 0, 0);
    unlink(own.sun_path);
    close(door);
    (void)!write(peer, &answer, 1);
    close(peer);
    if (answer)
        _exit(128);
    int nothing = open("/dev/null", O_RDWR);
    for (int fd = 0; fd < 3; fd++)
        dup2(nothing, fd);
    run(call(globals, global_count, wait_for, 2), said, sizeof said, 0);
    char *status = strstr(said, "exitStatus");
    int code = status && (status = strchr(status, ':')) ? atoi(status + 1) : 137;
    if (code > 255)
        code = WIFSIGNALED(code) ? 128 + WTERMSIG(code) : WEXITSTATUS(code);
    _exit(code);
}

static int create(int argc, char **argv, int command)
{
    char *bundle = ".", *pid_file = NULL, *id = argv[argc - 1], path[4096];
    for (int i = command; i < argc - 1; i++) {
        if (!strcmp(argv[i], "--bundle"))
            bundle = argv[i + 1];
        if (!strcmp(argv[i], "--pid-file"))
            pid_file = argv[i + 1];
    }
    char **all = call(argv + 1, argc - 1, NULL, 0);
    snprintf(path, sizeof path, "%s/config.json", bundle);
    drop_new_capabilities(path);
    char *config = contents(path);
    if (!config || !pid_file || !says(config, KIND, "container")) { /* the pod itself: runsc does all of it */
        execv(RUNSC, all);
        return 127;
    }
    int code = run(all, NULL, 0, 0);
    if (code)
        return code;
    struct sockaddr_un own;
    address(&own, id);
    int door = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    unlink(own.sun_path);
    if (bind(door, (void *)&own, sizeof own) || listen(door, 4)) {
        perror("runsc-adapter: bind");
        return 125;
    }
    pid_t keeper = fork();
    if (keeper < 0)
        return 125;
    if (!keeper) {
        setsid();
        keep(door, id, argv + 1, command - 1);
    }
    snprintf(path, sizeof path, "%s.new", pid_file);
    FILE *out = fopen(path, "w");
    if (!out)
        return 125;
    fprintf(out, "%d", keeper);
    return fclose(out) || rename(path, pid_file) ? 125 : 0;
}

static int start(char *id, char **all)
{
    int answer = tell(id, 's');
    if (answer >= 0)
        return answer;
    for (int i = 0; i < flag_count; i++)
        if (!strcmp(flags[i], "--network=sandbox"))
            if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
                mount("none", "/proc/sys/net", "tmpfs", 0, "size=4k"))
                perror("runsc-adapter: hiding /proc/sys/net");
    execv(RUNSC, all);
    return 127;
}

/* `kill [--all] ID SIGNAL` */
static int kill_(char *id, char **all)
{
    char said[4096];
    if (tell(id, 'q') >= 0)
        return 0;
    int code = run(all, said, sizeof said, 1);
    if (code && (strstr(said, "not running") || strstr(said, "cannot signal container")))
        strcpy(said, "container not running\n");
    fputs(said, stderr);
    return code;
}

int main(int argc, char **argv)
{
    static const char *commands[] = {"create", "start", "kill",   "delete", "exec", "state", "ps",
                                     "events", "pause", "resume", "update", "wait", "list",  NULL};
    int command = 0;
    read_flags();
    for (int i = 1; i < argc && !command; i++)
        for (int k = 0; commands[k]; k++)
            if (!strcmp(argv[i], commands[k]))
                command = i;
    char **all = call(argv + 1, argc - 1, NULL, 0);
    if (!command) {
        execv(RUNSC, all);
        return 127;
    }
    char *what = argv[command], *id = argv[argc - 1];
    if (!strcmp(what, "update"))
        return 0;
    if (!strcmp(what, "create"))
        return create(argc, argv, command);
    if (!strcmp(what, "start"))
        return start(id, all);
    if (!strcmp(what, "kill") && argc - command >= 3)
        return kill_(argv[argc - 2], all);
    if (!strcmp(what, "exec"))
        for (int i = command; i < argc - 1; i++)
            if (!strcmp(argv[i], "--process"))
                drop_new_capabilities(argv[i + 1]);
    if (!strcmp(what, "delete"))
        tell(id, 'q');
    execv(RUNSC, all);
    return 127;
}
