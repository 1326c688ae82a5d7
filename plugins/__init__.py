"""The built-in plugins: reset policies, verification and failure classification, through the public hooks."""

BUILTIN: dict[str, object] = {}
