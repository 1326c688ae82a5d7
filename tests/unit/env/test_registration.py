"""Registration, each case in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_does_not_import_gymnasium() -> None:
    assert python("import sys, rlsandbox, rlsandbox.env; print('gymnasium' in sys.modules)") == "False"


def test_sandbox_v0_is_registered_whichever_is_imported_first() -> None:
    show = "print(gymnasium.spec('Sandbox-v0').vector_entry_point)"
    for order in ("rlsandbox, gymnasium", "gymnasium, rlsandbox"):
        assert python(f"import {order}; {show}") == "rlsandbox.env.vector:SandboxVectorEnv"
    assert python("import gymnasium; print(gymnasium.make('rlsandbox:Sandbox-v0').spec.id)") == "Sandbox-v0"


def test_nothing_is_left_of_the_watch() -> None:
    code = (
        "import sys, rlsandbox, gymnasium, importlib.resources;"
        "rlsandbox.env.register_with_gymnasium();"
        "print([type(f).__name__ for f in sys.meta_path if 'Watch' in type(f).__name__],"
        "type(gymnasium.__loader__).__name__, type(gymnasium.__spec__.loader).__name__,"
        "importlib.resources.files('gymnasium').joinpath('envs').is_dir())"
    )
    assert python(code) == "[] SourceFileLoader SourceFileLoader True"


def test_an_import_of_gymnasium_that_fails_can_be_tried_again() -> None:
    code = (
        "import sys, rlsandbox\n"
        "sys.modules['numpy'] = None\n"
        "try:\n    import gymnasium\n    print('strange')\nexcept ImportError:\n    pass\n"
        "del sys.modules['numpy']\n"
        "for name in [n for n in sys.modules if n.startswith('gymnasium')]:\n    del sys.modules[name]\n"
        "import gymnasium\n"
        "print(gymnasium.spec('Sandbox-v0').id)"
    )
    assert python(code) == "Sandbox-v0"
