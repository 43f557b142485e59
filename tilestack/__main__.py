"""The command `tilestack`, and `python -m tilestack`, which works from a checkout with nothing installed but the core
dependencies. Ctrl-C while the imports run ends the program, without a traceback of where they were."""

import signal


def main() -> None:
    if (usual := signal.getsignal(signal.SIGINT)) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tilestack.cli import main as run

    signal.signal(signal.SIGINT, usual)
    run()


if __name__ == "__main__":
    main()
