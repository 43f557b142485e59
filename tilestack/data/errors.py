"""What is wrong with data, said in one line for the person who has to mend it."""

import importlib
from types import ModuleType

from tilestack.extras import MissingExtra, install_command


class DataError(ValueError):
    """A file, record, template or tokenizer that cannot be used; the message says which, where and why."""


def needs(module: str, purpose: str, extra: str = "data") -> ModuleType:
    """Import an optional package, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        raise MissingExtra(f"{purpose} needs {package}: {install_command(extra)}") from missing
