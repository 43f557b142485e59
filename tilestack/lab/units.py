"""Times, shares and ratios as tables, reports and terminals show them; a dash where there is none."""


def microseconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 1e4:
        return f"{value / 1e3:.3g} ms" if value < 1e6 else f"{value / 1e6:.3g} s"
    return f"{value:.0f} µs" if value >= 100 else f"{value:.1f} µs"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f}%"


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def digits(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
