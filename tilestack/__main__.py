"""`python -m tilestack`, which works from a checkout with nothing installed but the core dependencies."""

from tilestack.cli import main

main()
