"""Conformance: grading, out of the acting agent's reach."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from .. import errors
from ..results import CommandResult
from ..sandbox import GradeError, Sandbox
from ..spec import Spec
from ..task import Grader, Task
from ._fixtures import Fixtures, gone, inner

CHECK = Grader(command="sh tests/check.sh", files={"tests/check.sh": 'test "$(cat answer)" = 42\n'})


def reward_of_length(result: CommandResult, task: Task) -> float:
    return len(result.stdout) / 10


def reward_that_breaks(result: CommandResult, task: Task) -> float:
    return 1 / len(result.stderr)


def _task(grader: Grader | None = CHECK, **more: object) -> Task:
    return Task(id="g", workdir="/tmp/work", files={"answer": "0\n"}, grader=grader, **more)  # type: ignore[arg-type]


class Grading(Fixtures):
    def test_grade_pass_and_fail(self, make: Callable[..., Sandbox]) -> None:
        good, bad = make(_task()), make(_task())
        good.write_file("answer", "42\n")
        outcome = good.grade()
        assert (outcome.reward, outcome.passed) == (1.0, True)
        outcome = bad.grade()
        assert (outcome.reward, outcome.passed) == (0.0, False)
        assert outcome.result is not None
        assert outcome.result.exit_code == 1

    def test_grade_is_final(self, make: Callable[..., Sandbox]) -> None:
        sandbox = make(_task())
        sandbox.grade()
        assert sandbox.state == "graded"
        for act in (
            lambda: sandbox.run("true"),
            lambda: sandbox.popen("true"),
            lambda: sandbox.session(),
            lambda: sandbox.write_file("answer", "42"),
            lambda: sandbox.grade(),
            lambda: sandbox.snapshot(),
        ):
            with pytest.raises(errors.SandboxStateError, match="graded"):
                act()
        assert sandbox.read_text("answer") == "0\n"

    def test_grade_needs_a_grader(self, make: Callable[..., Sandbox]) -> None:
        sandbox = make(_task(None))
        with pytest.raises(errors.ConfigError, match="no grader"):
            sandbox.grade()
        assert sandbox.state == "ready"
        assert sandbox.grade(Grader(command="true")).passed

    def test_grade_ends_every_process_first(self, make: Callable[..., Sandbox]) -> None:
        sandbox = make(_task(Grader(command="sleep 0.3; cat answer hidden", files={"hidden": "h\n"})))
        meddler = "while :; do echo 42 >answer; rm -f hidden; done"
        pids = sandbox.run(
            f"(trap '' TERM HUP; {meddler}) >/dev/null 2>&1 & echo $!; setsid sleep 99 & echo $!"
        ).stdout
        process = sandbox.popen("trap '' TERM; sleep 99")
        session = sandbox.session()
        before = sandbox.read_text("answer")
        sandbox.run("kill -STOP " + pids.split()[0])
        sandbox.write_file("answer", "7\n")
        outcome = sandbox.grade()
        assert outcome.result is not None
        assert outcome.result.stdout == "7\nh\n", before
        assert process.wait(10).signal == 9
        with pytest.raises(errors.SandboxError):
            session.run("true")

    @pytest.mark.parametrize(
        "trap",
        [
            "ln -s /tmp/elsewhere tests",
            "mkdir /tmp/elsewhere; ln -s /tmp/elsewhere tests",
            "mkdir -p tests/check.sh/deep; echo x >tests/check.sh/deep/x",
            "mkdir tests; ln -s /dev/null tests/check.sh",
            "mkdir tests; ln -s /etc/passwd tests/check.sh",
            "mkdir tests; ln -s check.sh tests/check.sh",
            "mkdir tests; mkfifo tests/check.sh",
            "mkdir tests; echo 'exit 0' >tests/check.sh; chmod 444 tests/check.sh; chmod 555 tests",
            "mkdir tests; echo 'exit 0' >tests/other; ln tests/other tests/check.sh",
            "echo file >tests",
            "mkfifo tests",
            "ln -s tests tests",
            "ln -s /proc/self/cwd/../.. tests",
        ],
    )
    def test_grade_cannot_be_blocked(self, make: Callable[..., Sandbox], trap: str) -> None:
        passwd = make().read_file("/etc/passwd")
        for answer, reward in (("42", 1.0), ("0", 0.0)):
            sandbox = make(_task())
            sandbox.run(f"echo {answer} >answer; {trap}", check=True)
            assert sandbox.grade().reward == reward
            assert sandbox.read_file("/etc/passwd") == passwd

    def test_grade_through_the_task_s_own_links(self, make: Callable[..., Sandbox]) -> None:
        """A link that was there before the episode is part of the task."""
        task = Task(
            id="l",
            workdir="/tmp/work",
            setup="mkdir /tmp/real; ln -s /tmp/real tests",
            grader=Grader(command="sh /tmp/real/check.sh", files={"tests/check.sh": "exit 0\n"}),
        )
        sandbox = make(task)
        if not _primed_as_layer(sandbox):
            pytest.skip("without a primed layer the setup is part of the episode")
        assert sandbox.grade().passed

    def test_grade_without_room(self, make: Callable[..., Sandbox]) -> None:
        sandbox = make(_task(spec=Spec(disk="16MiB")))
        if sandbox.limits.means.get("disk", "none") == "none":
            pytest.skip("disk is not limited here, and the facts say so")
        sandbox.run(
            "head -c 100000000 /dev/zero >/tmp/fill; i=0; while : >/tmp/i$i; do i=$((i+1)); done 2>/dev/null"
        )
        outcome = sandbox.grade()
        assert (outcome.reward, outcome.passed) == (0.0, False)

    def test_grade_without_workdir(self, make: Callable[..., Sandbox]) -> None:
        sandbox = make(_task(Grader(command="true")))
        sandbox.run("rm -rf /tmp/work", cwd="/")
        assert sandbox.grade().reward == 0.0

    def test_grade_timeout(self, make: Callable[..., Sandbox]) -> None:
        sandbox = make(_task(Grader(command="sleep 99 & echo $! >/tmp/p; wait", timeout=0.5)))
        outcome = sandbox.grade()
        assert (outcome.reward, outcome.passed) == (0.0, False)
        assert outcome.result is not None
        assert outcome.result.timed_out

    def test_grade_in_a_clean_environment(self, make: Callable[..., Sandbox]) -> None:
        sandbox = make(_task(Grader(command="echo $PATH; type f; pwd; umask")))
        with sandbox.session() as sh:
            sh.run("export PATH=/evil; f() { :; }; umask 000; cd /")
        outcome = sandbox.grade()
        assert outcome.result is not None
        lines = outcome.result.stdout.splitlines()
        assert "/evil" not in lines[0]
        assert lines[-2:] == ["/tmp/work", "0022"]

    def test_grade_reward_file(self, make: Callable[..., Sandbox]) -> None:
        def graded(command: str, before: str = "true") -> object:
            with make(
                _task(Grader(command=command, reward="file:/tmp/reward"))
            ) as sandbox:  # there are two dozen
                sandbox.run(before, check=True)
                return sandbox.grade()

        outcome = graded("echo ' 0.25 ' >/tmp/reward; exit 1")
        assert (outcome.reward, outcome.passed) == (0.25, False)  # type: ignore[attr-defined]
        outcome = graded("echo 1 >/tmp/reward")
        assert (outcome.reward, outcome.passed) == (1.0, True)  # type: ignore[attr-defined]
        # What the agent left there is not the reward.
        for planted in ("echo 1 >/tmp/reward", "mkdir /tmp/reward", "echo 1 >/tmp/r; ln -s r /tmp/reward"):
            assert graded("exit 1", planted).reward == 0.0  # type: ignore[attr-defined]
            assert graded("echo 0.5 >/tmp/reward", planted).reward == 0.5  # type: ignore[attr-defined]
        long = "$(head -c 100000 /dev/zero | tr '\\0' 1)"
        # A number that goes on behind what is read is not the number that was read.
        longer = "1.$(head -c 5000 /dev/zero | tr '\\0' 0)e5"
        for nonsense in ("nan", "inf", "1e400", "good", "", "1 2", "0x1", "1_0", "\u0661", long, longer):
            with pytest.raises(GradeError, match="no finite number") as caught:
                graded(f'echo "{nonsense}" >/tmp/reward')
            assert not caught.value.infrastructure
            assert caught.value.phase == "grade"
        for made, words in (
            ("true", "is not there"),
            ("mkdir /tmp/reward", "is a directory"),
            ("mkfifo /tmp/reward", "is no regular file"),
            ("ln -s reward /tmp/reward", "is a link that leads to no regular file"),
            ("ln -s nothing /tmp/reward", "is a link that leads to no regular file"),
        ):
            with pytest.raises(GradeError, match=words):
                graded(made)

    def test_grade_reward_function(self, make: Callable[..., Sandbox]) -> None:
        def graded(name: str) -> object:
            grader = Grader(command="echo hello", reward=f"{__name__}:{name}")
            return make(_task(grader)).grade()

        outcome = graded("reward_of_length")
        assert math.isclose(outcome.reward, 0.6)  # type: ignore[attr-defined]
        with pytest.raises(GradeError, match="ZeroDivisionError"):
            graded("reward_that_breaks")
        for name in ("no_such_function", "math"):
            with pytest.raises(errors.ConfigError):
                graded(name)

    def test_grade_fresh(self, make: Callable[..., Sandbox]) -> None:
        grader = Grader(
            command="cat answer; ls -a; cat sub/x; readlink l; [ -x prog ]; echo $?; "
            "cat /usr/local/bin/cat; ls gone; echo old:; ls old",
            files={"hidden": "h"},
            fresh=True,
        )
        files = {"answer": "0\n", "gone": "x", "old/x": "x"}
        task = Task(id="f", workdir="/tmp/work", files=files, grader=grader)
        sandbox = make(task)
        sandbox.run(
            "echo 42 >answer; mkdir sub; echo in >sub/x; ln -s sub/x l; echo p >prog; chmod 755 prog;"
            "rm gone; rm -r old; mkdir old; echo n >old/y;"
            "printf '#!/bin/sh\\necho evil' >/usr/local/bin/cat; chmod 755 /usr/local/bin/cat;"
            "truncate -s 1099511627776 huge",
            check=True,
        )
        outcome = sandbox.grade()
        assert outcome.result is not None
        out = outcome.result.stdout.splitlines()
        assert out[0] == "42"
        assert out[1:10] == [".", "..", "answer", "hidden", "huge", "l", "old", "prog", "sub"]
        assert out[10:13] == ["in", "sub/x", "0"]
        assert out[-2:] == ["old:", "y"]
        assert "evil" not in outcome.result.text
        assert "gone" in outcome.result.stderr
        assert sandbox.state == "graded"

    def test_grade_fresh_takes_read_only_work_along(self, make: Callable[..., Sandbox]) -> None:
        """Whoever commands are: an ordinary user may close directories to himself."""
        grader = Grader(
            command="cat shut/deep/x; find . -type d -exec stat -c '%a %n' {} + | sort", fresh=True
        )
        task = Task(id="f", workdir="/tmp/work", grader=grader)
        who = self.spec if inner(make()).one_uid else Spec(user=self.other_user).over(self.spec)
        sandbox = make(task, spec=who)
        sandbox.run("mkdir -p shut/deep; echo in >shut/deep/x; chmod 400 shut/deep/x", check=True)
        sandbox.run("chmod 555 shut/deep shut; mkdir own; chmod 700 own", check=True)
        outcome = sandbox.grade()
        assert outcome.result is not None
        found = outcome.result.stdout.splitlines()
        assert (found[0], found[1:4]) == ("in", ["555 ./shut", "555 ./shut/deep", "700 ./own"])

    def test_grade_leaves_nothing_running(self, make: Callable[..., Sandbox]) -> None:
        fork_child = make(_task(Grader(command="true")))
        pid = fork_child.run("setsid sleep 99 >/dev/null 2>&1 & echo $!").stdout
        other = make()
        assert not gone(fork_child, pid)
        fork_child.grade()
        assert other.run("true").ok


def _primed_as_layer(sandbox: Sandbox) -> bool:
    if sandbox.reset_mode == "replace":
        return False
    return not any(c.name.startswith("/tmp/work") for c in sandbox.changes("/tmp"))
