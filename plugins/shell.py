"""What runs by itself the next time a shell, a login, a program or the clock starts.

Start-up files of shells, PATH directories (a shim named ``git`` or ``ls``), the dynamic loader's
configuration, crontabs and at jobs, PAM, sudo, service units, and the variables that do the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlsandbox.hooks import Inspector, Resetter, Residue, fact_fields, hookimpl

from ._common import how, undo, within, words

STARTUP = words(
    """
    /etc/profile /etc/profile.d /etc/bash.bashrc /etc/bashrc /etc/environment /etc/zsh /etc/zshenv
    /etc/zshrc /etc/inputrc /etc/skel /etc/security /etc/login.defs /etc/fish /etc/bash_completion.d
    /etc/csh.cshrc /etc/csh.login /etc/rc.local /etc/shells
    """
)
HOME_STARTUP = words(
    """
    .bashrc .bash_profile .bash_login .bash_logout .bash_aliases .profile .zshrc .zshenv .zprofile .zlogin
    .zlogout .kshrc .mkshrc .cshrc .tcshrc .login .inputrc .shinit .pam_environment .xprofile .xsessionrc
    .vimrc .exrc .nanorc .screenrc .tmux.conf .gdbinit .lesskey .dircolors .hushlogin .bash_history
    .sh_history .zsh_history .ash_history
    """
)
LOADER = (
    "/etc/ld.so.preload",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/ld.so.cache",
    "/etc/ld-musl-x86_64.path",
)
CRON = words(
    """
    /etc/crontab /etc/cron.d /etc/cron.hourly /etc/cron.daily /etc/cron.weekly /etc/cron.monthly
    /etc/anacrontab /var/spool/cron /var/spool/at /var/spool/anacron /etc/at.allow /etc/at.deny
    """
)
RIGHTS = words(
    """
    /etc/sudoers /etc/sudoers.d /etc/pam.d /etc/passwd /etc/group /etc/shadow /etc/gshadow /etc/subuid
    /etc/subgid /etc/doas.conf /etc/polkit-1
    """
)
UNITS = words("/etc/init.d /etc/rc.d /etc/systemd /lib/systemd /usr/lib/systemd /etc/inittab /etc/xinetd.d")
PATH_DIRS = words(
    """
    /usr/local/sbin /usr/local/bin /usr/sbin /usr/bin /sbin /bin /opt/bin /usr/games /usr/local/games
    /snap/bin
    """
)
HOME_PATH_ENDS = ("/bin", "/.local/bin", "/.cargo/bin", "/go/bin", "/.npm-global/bin")
VARIABLES = words("ENV BASH_ENV PATH PROMPT_COMMAND SHELLOPTS BASHOPTS IFS PS4 ZDOTDIR")


@hookimpl
def rlsandbox_reset(resetter: Resetter) -> None:
    undo(resetter, lambda path: _word(path) is not None)


@hookimpl
def rlsandbox_verify(inspector: Inspector) -> Iterator[Residue]:
    for change in inspector.changed("/"):
        kind = _word(change.name)
        if kind is not None:
            yield Residue(kind[0], change.name, f"{kind[1]}: {how(change)}")
    before = set(inspector.baseline_facts("env"))
    for line in inspector.facts("env"):
        name = fact_fields(line)[0].partition("=")[0]
        if line not in before and (name in VARIABLES or name.startswith(("LD_", "BASH_FUNC_"))):
            yield Residue("shell", name, "is in the environment that commands start from")


def _word(path: str) -> tuple[str, str] | None:
    """Kind and word for a path that something runs or reads by itself."""
    directory, _, name = path.rpartition("/")
    if within(path, *LOADER):
        return "loader", "the dynamic loader reads it"
    if within(path, *CRON):
        return "schedule", "runs by the clock"
    if within(path, *RIGHTS):
        return "rights", "says who may do what"
    if within(path, *UNITS) or "/.config/systemd/" in path or "/.config/autostart/" in path:
        return "service", "starts by itself"
    if (
        within(path, *STARTUP)
        or name in HOME_STARTUP
        or "/.config/fish/" in path
        or name.startswith(".bashrc.")
    ):
        return "shell", "shells read it at start"
    if directory in PATH_DIRS or directory.endswith(HOME_PATH_ENDS):
        return "path", "commands are looked up there"
    return None
