"""What comes with tilestack beside its code: `recipes`, and the `results` that its figures come from.

In a checkout both lie at its root, where people look for them; a wheel carries them inside the package (see setup.py).
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """The folder of that name that came with the package; it may be missing where a package was put together by hand."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def checkout() -> Path | None:
    """The root of the checkout that this package is run from; None where it was installed from a wheel."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "docs").is_dir() else None
