"""What pyproject.toml cannot say: a wheel carries the recipes and results of the checkout inside the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
CARRIED = {"recipes": "*.toml", "results": "**/*.json"}


class BuildWithData(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            return  # the checkout itself is there
        for name, pattern in CARRIED.items():
            for path in (ROOT / name).glob(pattern):
                target = Path(self.build_lib, "tilestack", path.relative_to(ROOT))
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)


setup(cmdclass={"build_py": BuildWithData})
