"""The command line: ``rlsandbox COMMAND``.

Commands are loaded when they are called, so that ``--help`` and errors come at once. A command lives in a
module that has a ``click`` command (or group) named ``command``; :data:`COMMANDS` says where. What it returns
is the exit status: 0 fine; 1 something failed (rollouts, a gate, the place); 2 what was asked for is wrong;
130, 143 or 129 ended by SIGINT (Ctrl-C), SIGTERM or SIGHUP. An error is one line on stderr; ``--debug`` adds
the traceback.
"""

from __future__ import annotations

from collections.abc import Sequence

COMMANDS: dict[str, tuple[str, str]] = {
    "quickstart": (
        "rlsandbox.cli.quickstart",
        "See it work: a claim, a fix, a grade, a reset, then the demo.",
    ),
    "run": ("rlsandbox.cli.run", "Run tasks with a policy; table, plot, gate for CI."),
    "bench": ("rlsandbox.cli.bench", "Measure this machine: TTFC, resets, memory, as ratios."),
    "doctor": (
        "rlsandbox.cli.doctor",
        "What this machine offers, what is missing, how to get it.",
    ),
    "plan": ("rlsandbox.cli.plan", "Which image goes to which node; bring them there."),
    "simulate": ("rlsandbox.cli.simulate", "Try pool settings on a simulated cluster, in virtual time."),
    "ledger": ("rlsandbox.cli.ledger", "Show, report, reconcile and export runs."),
    "reap": ("rlsandbox.cli.reap", "Remove what dead runs have left behind."),
    "template": ("rlsandbox.cli.template", "What sandbox templates of a cluster must carry; rights."),
    "keeper": ("rlsandbox.cli.keeper", "Build the keeper program."),
    "config": ("rlsandbox.cli.config", "Show each setting and where it came from."),
}
"""Name to (module, one line). A module that is not there leaves its command out of the list."""


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit status."""
    from .signals import Stop, ended_by_signals

    stop = Stop()
    try:
        with ended_by_signals(stop, whole=argv is None):
            from .root import run_main

            status = run_main(argv)
        if stop.number is None:
            return status
        return stop.tell(argv)  # whatever the command has made of it: an error, a result
    except KeyboardInterrupt:
        return stop.tell(argv)
