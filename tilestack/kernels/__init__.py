"""How operators run fast. Importing this package registers every kernel; the registry does so when first asked.

Each file that can be imported adds its implementations. What a file needs and lacks (Triton itself, or a part of it
that another version has moved) is the reason why its backend cannot run, and concerns no other.
"""

import importlib
import pkgutil

from tilestack.contract import registry
from tilestack.tuning import preferences

for module in pkgutil.walk_packages(__path__, f"{__name__}."):
    try:
        importlib.import_module(module.name)
    except (ImportError, AttributeError) as missing:
        registry.not_loaded[module.name] = f"{type(missing).__name__}: {missing}"

preferences.install()
