"""Times, shares, ratios and bytes as tables, reports and terminals show them; a dash where there is none."""


def microseconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 1e4:
        return f"{digits(value / 1e3)} ms" if value < 1e6 else f"{digits(value / 1e6)} s"
    return f"{value:.0f} µs" if value >= 100 else f"{value:.1f} µs"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f}%"


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def digits(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def in_bytes(size: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{digits(size / factor)} {unit}"
    return f"{size:.0f} B"
