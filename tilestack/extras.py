"""Optional packages by extra, and the command that brings them here: there is no package index to ask for `tilestack[…]`,
so a checkout installs itself with the extra, and an installed wheel gets the packages by name."""

import importlib.metadata
import re
from pathlib import Path

from tilestack.shipped import checkout


class MissingExtra(ModuleNotFoundError):
    """An optional package that is not installed; the message says what for and how to install it."""


def packages_of(extra: str) -> list[str]:
    """The requirements of an extra, as the metadata of the installed package has them."""
    listed = importlib.metadata.requires("tilestack") or []
    pairs = (line.partition(";") for line in listed)
    return [package.strip() for package, _, when in pairs if re.search(rf"extra == ['\"]{extra}['\"]", when)]


def install_command(extra: str) -> str:
    """What to type to have an extra."""
    if root := checkout():
        return f"pip install -e '{'.' if root == Path.cwd() else root}[{extra}]'"
    return "pip install " + " ".join(f"'{package}'" for package in packages_of(extra))
