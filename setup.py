"""Which directories are packages. All else is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

packages = find_packages(include=["rlsandbox", "rlsandbox.*"])
package_dir: dict[str, str] = {}

# Rooms that lie beside the library and are installed under a name of their own.
rooms = [("rlsandbox_plugins", Path("plugins"))]
rooms += [(path.name, path) for path in sorted(Path("integrations").glob("rlsandbox_*")) if path.is_dir()]
for name, path in rooms:
    package_dir[name] = str(path)
    packages += [name, *(f"{name}.{inner}" for inner in find_packages(str(path)))]

setup(packages=packages, package_dir=package_dir)
