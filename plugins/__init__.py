"""The built-in plugins: reset policies, verification and failure classification, through the public hooks.

``Pool(block=["git"])`` switches one off by its name here.
"""

from . import classify, core, credentials, git, network, processes, python, shell, tmp, workdir

BUILTIN: dict[str, object] = {
    "core": core,
    "processes": processes,
    "workdir": workdir,
    "tmp": tmp,
    "git": git,
    "network": network,
    "credentials": credentials,
    "shell": shell,
    "python": python,
    "classify": classify,
}
