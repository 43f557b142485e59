"""The figures of the documentation, drawn by code: `make docs` writes them to docs/figures, a test compares them.

Each function draws one picture. Those that show what is measured or what exists take it from the repository, and say
so plainly when there is nothing yet.
"""

import math
from collections.abc import Callable
from pathlib import Path

from tilestack.lab.drawing import Drawing
from tilestack.lab.expert_figure import sorted_by_expert
from tilestack.lab.measured import Result, results_under

PROGRAMS = "abcd"


def vector_add_blocks() -> Drawing:
    draw = Drawing(
        860, 318, "A vector in blocks",
        "Three programs each add one block of eight elements of x and y; the last block masks two elements past the end.",
    )  # fmt: skip
    n, block, cell, left = 22, 8, 30, 84
    draw.text(24, 30, "add(x, y): one program per block", "title", anchor="start")
    for line, (name, y) in enumerate((("x", 104), ("y", 150), ("out", 226))):
        draw.text(left - 14, y + 14, name, "code", anchor="end")
        draw.grid(left, y, 1, 24, cell, 30, lambda _, i: PROGRAMS[i // block] if i < n else "masked")
        for i in range(n):
            draw.text(left + cell * i + 14, y + 14, str(i) if line != 2 else "+", "small", "muted" if line != 2 else "ink")  # fmt: skip
    for program in range(3):
        start = left + program * block * cell
        offsets = f"{program * block} … {program * block + block - 1}"
        draw.bracket(start, start + block * cell - 2, 84, f"program {program}: offsets {offsets}", PROGRAMS[program])
        middle = start + block * cell / 2 - 1
        draw.arrow((middle, 186), (middle, 220), ink=PROGRAMS[program])
    draw.text(left + 4 * cell + 14, 203, "load, add and store in registers", "small", "muted", anchor="start")
    tail = left + n * cell
    draw.bracket(tail, tail + 2 * cell - 2, 270, "masked: past n = 22,", "muted", below=True)
    draw.text(tail + cell - 1, 299, "not loaded, not stored", "small", "muted")
    draw.text(left, 282, "BLOCK = 8 here; real blocks are thousands of elements.", "small", "muted", anchor="start")
    return draw


def row_tiles() -> Drawing:
    draw = Drawing(
        900, 356, "Rows in tiles",
        "Short rows share a program, longer rows have one program each, and rows too long for registers are walked in chunks, twice.",
    )  # fmt: skip
    draw.text(24, 30, "Rows, and the programs that own them", "title", anchor="start")

    draw.text(24, 66, "Short rows share a program", "body", anchor="start")
    draw.grid(24, 84, 6, 9, 25, 26, lambda r, c: PROGRAMS[r // 2] if c < 7 else "masked")
    for program in range(3):
        draw.line((256, 86 + 52 * program), (256, 132 + 52 * program), ink=PROGRAMS[program], width=3)
    draw.bracket(24, 24 + 7 * 25 - 2, 254, "columns", below=True)
    draw.text(24 + 8 * 25, 266, "masked", "small", "muted")
    draw.text(24, 300, "A tile is ROWS × COLS; COLS is the", "small", "muted", anchor="start")
    draw.text(24, 317, "row rounded up to a power of two.", "small", "muted", anchor="start")

    draw.text(310, 66, "A row in registers", "body", anchor="start")
    for row in range(3):
        y = 88 + 52 * row
        draw.rect(310, y, 220, 36, PROGRAMS[row], radius=4)
        draw.text(420, y + 18, f"program {row}", "small")
    draw.bracket(310, 530, 254, "one row", below=True)
    draw.text(310, 300, "One read and one write of memory:", "small", "muted", anchor="start")
    draw.text(310, 317, "reductions never leave the registers.", "small", "muted", anchor="start")

    draw.text(588, 66, "A long row, walked in chunks", "body", anchor="start")
    for y, label, kind in ((108, "1  statistics, merged chunk by chunk", "a"), (194, "2  read again and write", "b")):
        draw.text(588, y - 14, label, "small", kind, anchor="start")
        for chunk in range(4):
            across = 64 if chunk < 3 else 30
            if chunk == 3:
                draw.rect(588 + 70 * chunk, y, 64, 34, "masked", radius=4)
            draw.rect(588 + 70 * chunk, y, across, 34, kind, radius=4)
            draw.text(588 + 70 * chunk + across / 2, y + 17, str(chunk), "small")
        draw.arrow((588, y + 44), (866, y + 44), ink=kind)
    draw.bracket(588, 588 + 240, 254, "columns", below=True)
    draw.text(588, 300, "Memory is read twice, unless the row", "small", "muted", anchor="start")
    draw.text(588, 317, "still lies in the L2 cache.", "small", "muted", anchor="start")
    return draw


def matmul_tiles() -> Drawing:
    draw = Drawing(
        860, 476, "A matrix product in tiles",
        "Program (m, n) owns one tile of C and walks along K, adding a tile of A times a tile of B at each step.",
    )  # fmt: skip
    draw.text(24, 30, "C = A @ B: one program per tile of C, K in steps", "title", anchor="start")
    tile, step = 52, 34
    a_x, c_x, b_y, c_y = 84, 330, 76, 258
    row, column, now = 1, 2, 2
    draw.grid(a_x, c_y, 3, 6, step, tile, lambda r, k: ("a" if k == now else "plain") if r == row else "masked")
    draw.grid(c_x, b_y, 4, 4, tile, step, lambda k, c: ("b" if k == now else "plain") if c == column else "masked")
    draw.grid(c_x, c_y, 3, 4, tile, tile, lambda r, c: "c" if (r, c) == (row, column) else "plain")
    draw.text(a_x + 3 * step, c_y - 18, "A  [M, K]", "code")
    draw.text(c_x - 14, b_y + 2 * step, "B  [K, N]", "code", anchor="end")
    draw.text(c_x + 2 * tile, c_y + 3 * tile + 18, "C  [M, N]", "code")
    draw.text(c_x + column * tile + 25, c_y + row * tile + 25, "(1, 2)", "code")
    middle = c_y + row * tile + 25
    draw.arrow((a_x + 8, middle), (a_x + 6 * step - 12, middle), ink="a")
    across = c_x + column * tile + 25
    draw.arrow((across, b_y + 8), (across, b_y + 4 * step - 12), ink="b")
    draw.bracket(a_x + now * step, a_x + now * step + step - 2, c_y + 3 * tile + 4, "BLOCK_K", "a", below=True)
    draw.line((a_x - 8, c_y + row * tile), (a_x - 14, c_y + row * tile), (a_x - 14, c_y + row * tile + tile - 2), (a_x - 8, c_y + row * tile + tile - 2), ink="c", width=1.25)  # fmt: skip
    draw.text(a_x - 28, middle, "BLOCK_M", "small", "c", turned=True)
    draw.bracket(c_x + column * tile, c_x + column * tile + tile - 2, b_y - 8, "BLOCK_N", "c")

    words = 590
    draw.text(words, 110, "program (m, n) = (1, 2)", "body", "c", anchor="start")
    for index, line in enumerate(
        ("total = zeros(BLOCK_M, BLOCK_N)", "for each step along K:", "    a = tile of A  →", "    b = tile of B  ↓", "    total += a @ b", "store total to C")
    ):  # fmt: skip
        indent = len(line) - len(line.lstrip())
        draw.text(words + 7 * indent, 142 + 22 * index, line.strip(), "code", anchor="start")
    draw.text(words, 306, "Each tile of A is read once per column", "small", "muted", anchor="start")
    draw.text(words, 323, "of tiles of C, each tile of B once per", "small", "muted", anchor="start")
    draw.text(words, 340, "row: larger tiles, less traffic.", "small", "muted", anchor="start")
    draw.text(words, 372, "The running total lives in registers and", "small", "muted", anchor="start")
    draw.text(words, 389, "is rounded to the output's type once.", "small", "muted", anchor="start")
    return draw


def norm_backward_partials() -> Drawing:
    draw = Drawing(
        900, 396, "The backward of a norm without atomics",
        "Programs stride over the rows, each keeps its share of dweight in registers and writes it to its own line of a buffer; a second kernel sums the lines.",
    )  # fmt: skip
    draw.text(24, 30, "Gradient of a norm's weight, the same bits in every run", "title", anchor="start")
    cell = 24
    draw.text(24, 66, "x and grad  [rows, columns]", "body", anchor="start")
    draw.grid(58, 86, 9, 8, cell, 26, lambda r, c: PROGRAMS[r % 3])
    for row in range(9):
        draw.text(50, 86 + 26 * row + 12, str(row), "small", "muted", anchor="end")
    draw.text(154, 340, "program p takes rows p, p + P, p + 2P, …", "small", "muted")
    draw.text(154, 357, "and writes dx row by row", "small", "muted")

    draw.text(376, 66, "partial  [P, columns]", "body", anchor="start")
    for program in range(3):
        y = 108 + 78 * program
        ink = PROGRAMS[program]
        draw.grid(376, y + 6, 1, 8, cell, 26, lambda r, c: ink)
        draw.text(376, y - 8, f"program {program}: Σ grad · x̂", "small", ink, anchor="start")
        for row in range(program, 9, 3):
            draw.line((252, 86 + 26 * row + 12), (330, y + 18), ink=ink, width=1)
        draw.arrow((330, y + 18), (368, y + 18), ink=ink)
    draw.text(472, 340, "each line is written once,", "small", "muted")
    draw.text(472, 357, "by the program that owns it", "small", "muted")

    draw.text(682, 66, "dweight  [columns]", "body", anchor="start")
    for program in range(3):
        draw.line((572, 126 + 78 * program), (640, 204), ink=PROGRAMS[program], width=1)
    draw.arrow((640, 204), (674, 204), ink="d")
    draw.grid(682, 192, 1, 8, cell, 26, lambda r, c: "d")
    draw.text(682, 178, "second kernel: sum down the lines", "small", "d", anchor="start")
    draw.text(778, 340, "a fixed order of additions:", "small", "muted")
    draw.text(778, 357, "no atomics, no surprises", "small", "muted")
    return draw


def roofline(results: list[Result]) -> Drawing:
    """The roofline: with the roofs of the last measured GPU, or with names only while there are none."""
    draw = Drawing(
        820, 440, "The roofline",
        "Arithmetic intensity against attainable rate: a slope given by memory bandwidth meets ceilings given by matmul rates.",
    )  # fmt: skip
    gpus = [result for result in results if result.slug != "cpu" and result.bandwidth and result.rates]
    measured = max(gpus, key=lambda result: result.machine.get("date", "")) if gpus else None
    bandwidth = (measured.bandwidth if measured else None) or 1.0
    rates = dict(measured.rates) if measured else {"matmul": 300.0}
    left, right, top, bottom = 92, 780, 70, 368
    x_low, x_high = -1.0, 4.0
    y_high = math.ceil(math.log10(max(rates.values())) * 2) / 2 + 0.15
    y_low = math.log10(bandwidth) + x_low - 0.1

    def at(intensity: float, rate: float) -> tuple[float, float]:
        across = (math.log10(intensity) - x_low) / (x_high - x_low)
        up = (math.log10(rate) - y_low) / (y_high - y_low)
        return left + across * (right - left), bottom - up * (bottom - top)

    title = f"Roofs measured on {measured.machine.get('gpu', measured.slug)}" if measured else "The roofline, schematically"  # fmt: skip
    draw.text(24, 30, title, "title", anchor="start")
    best = max(rates.values())
    corner = at(best / bandwidth, best)
    start, end = at(10**x_low, bandwidth * 10**x_low), at(10**x_high, best)
    shape = " ".join(f"{x:.1f},{y:.1f}" for x, y in (start, corner, end, (right, bottom), (left, bottom)))
    draw.add("polygon", points=shape, class_="area")
    draw.line((left, top - 6), (left, bottom), (right, bottom), ink="muted", width=1)
    draw.line(start, corner, ink="a", width=2.5)
    slope = f"copy bandwidth {bandwidth:.2f} TB/s" if measured else "bandwidth: bytes per second, measured by a copy"
    along = lambda x: start[1] + (corner[1] - start[1]) * (x - start[0]) / (corner[0] - start[0])
    middle = left + 0.45 * (right - left)
    draw.text(middle - 14, along(middle) - 6, slope, "small", "a", anchor="end")
    labels: dict[float, list[str]] = {}  # by height; ceilings too close for two lines of text share one
    for name, rate in sorted(rates.items(), key=lambda pair: -pair[1]):
        first = at(rate / bandwidth, rate)
        draw.line(first, at(10**x_high, rate), ink="c", width=2.5 if rate == best else 1.5)
        height = next((y for y in labels if abs(y - first[1]) < 18), first[1])
        labels.setdefault(height, []).append(f"{name} {rate:.0f}")
    for height, names in labels.items():
        label = ", ".join(names) + " TFLOP/s" if measured else "matmul rate of the dtype"
        draw.text(right, height - 11, label, "small", "c", anchor="end")
    draw.line(corner, (corner[0], bottom), ink="muted", width=1, dashed=True)
    ridge = f"ridge: {best / bandwidth:.0f} flops a byte" if measured else "ridge"
    draw.text(corner[0] + 8, (corner[1] + bottom) / 2, ridge, "small", "muted", anchor="start")
    for name, intensity in (("norms, softmax, activations", 1.2), ("matmul, attention", 2300)):
        x, _ = at(intensity, 1)
        draw.text(x, bottom - 14, name, "small", "ink")
    if measured:
        for power in range(int(x_low), int(x_high) + 1):
            x, _ = at(10**power, 1)
            draw.text(x, bottom + 16, f"{10**power:g}", "small", "muted")
        for power in range(math.ceil(y_low), math.floor(y_high) + 1):
            _, y = at(1, 10**power)
            draw.text(left - 8, y, f"{10**power:g}", "small", "muted", anchor="end")
    draw.text((left + right) / 2, bottom + 42, "flops per byte moved (log)", "small", "muted")
    draw.text(34, (top + bottom) / 2, "TFLOP/s (log)", "small", "muted", turned=True)
    draw.text(left + 18, top + 6, "no kernel lives up here", "small", "muted", anchor="start")
    return draw


WALL = [  # the layers from the top; a brick rests on those below it
    [("cli", "the tilestack command", 1.0)],
    [("lab", "doctor · verify · bench · report", 0.56), ("learn", "exercises are backends", 0.44)],
    [("engine", "paged cache, scheduler, graphs", 0.56), ("server", "OpenAI-compatible HTTP", 0.44)],
    [("parallel", "on torch.distributed", 0.44), ("train", "pretrain · SFT · DPO · GRPO", 0.56)],
    [("quant", "formats", 0.24), ("models", "one decoder, many families", 0.46), ("data", "tokens, packing", 0.30)],
    [("nn", "drop-in modules", 0.56), ("optim", "AdamW · Muon · 8-bit", 0.44)],
    [("tuning", "launch tables per GPU", 0.34), ("kernels", "Triton, forward and backward, one file per family", 0.66)],
    [("ops", "what each operator is: definition, cost, cases, and the registry of backends", 1.0)],
]  # fmt: skip


def the_stack(package: Path) -> Drawing:
    """The packages as a wall of tiles; one that is not in the tree yet is only outlined."""
    brick, gap, width, left, top = 50, 6, 744, 92, 62
    draw = Drawing(
        860, top + len(WALL) * (brick + gap) + 46, "The stack",
        "The packages of tilestack from ops at the bottom to cli at the top; each imports only from below.",
    )  # fmt: skip
    draw.text(24, 30, "tilestack, tile by tile", "title", anchor="start")
    kinds = "dcccaabb"
    for level, (bricks, kind) in enumerate(zip(WALL, kinds, strict=True)):
        x, y = float(left), top + level * (brick + gap)
        for name, purpose, share in bricks:
            there = (package / name / "__init__.py").exists()
            across = share * (width + gap) - gap
            draw.rect(x, y, across, brick, kind if there else "masked", radius=6)
            draw.text(x + across / 2, y + 17, name, "code", "ink" if there else "muted")
            draw.text(x + across / 2, y + 35, purpose, "small", "muted")
            x += across + gap
    bottom = top + len(WALL) * (brick + gap) - gap
    draw.arrow((62, top + 4), (62, bottom - 2), ink="muted")
    draw.text(40, (top + bottom) / 2, "imports only from below", "small", "muted", turned=True)
    planned = [name for bricks in WALL for name, _, _ in bricks if not (package / name / "__init__.py").exists()]
    note = "Every operator below is a definition in PyTorch, proved and measured kernels, and a choice at run time."
    draw.text(left, bottom + 22, note if not planned else "Outlined packages are still to come.", "small", "muted", anchor="start")  # fmt: skip
    return draw


def proof() -> Drawing:
    draw = Drawing(
        900, 404, "How a kernel is proved",
        "The definition in float64 is the oracle; a kernel's error may be at most twice the definition's own error in the same dtype plus one unit in the last place.",
    )  # fmt: skip
    draw.text(24, 30, "Right means: as close to the truth as the definition, within a factor of two", "title", anchor="start")  # fmt: skip
    draw.box(24, 126, 136, 62, "plain", "one case", "inputs and gradients")
    lanes = [
        (66, "d", "definition, float64", "the oracle", "truth"),
        (132, "b", "definition, bfloat16", "plain PyTorch, same dtype", "error e"),
        (198, "a", "kernel, bfloat16", "buffers poisoned with NaN", "error k"),
    ]
    for y, kind, name, detail, gives in lanes:
        draw.arrow((160, 157), (190, 157), (190, y + 25), (222, y + 25))
        draw.box(230, y, 220, 50, kind, name, detail)
        draw.arrow((450, y + 25), (508, y + 25), ink=kind)
        draw.text(518, y + 25, gives, "body", kind, anchor="start")
    draw.box(
        640, 108, 236, 98, "good", "k  ≤  2 e + 1 ulp", "every output, every gradient,", "every case, dtype and backend"
    )
    draw.line((578, 157), (594, 157), ink="good")
    draw.line((586, 91), (594, 91), (594, 223), (586, 223), ink="good")
    draw.arrow((594, 157), (632, 157), ink="good")

    y, zero, one = 312, 70, 250
    allowed = zero + 2 * one + 60
    draw.rect(zero, y - 18, allowed - zero, 36, "good", radius=2)
    draw.rect(allowed, y - 18, 850 - allowed, 36, "bad", radius=2)
    draw.arrow((zero, y), (866, y), ink="muted")
    for x, label, ink in ((zero, "truth", "d"), (zero + one, "e", "b"), (zero + 2 * one, "2 e", "muted"), (allowed, "2 e + 1 ulp", "good")):  # fmt: skip
        draw.line((x, y - 24), (x, y + 24), ink=ink, width=2)
        draw.text(x, y + 38, label, "body", ink)
    draw.add("circle", cx=zero + 1.3 * one, cy=y, r=7, class_="a", stroke_width=2)
    draw.text(zero + 1.3 * one, y - 34, "a kernel that passes", "small", "a")
    draw.add("circle", cx=780, cy=y, r=7, class_="bad", stroke_width=2)
    draw.text(780, y - 34, "one that fails", "small", "bad")
    draw.text(
        24, 382, "distance from the float64 result; no tolerance is typed by hand", "small", "muted", anchor="start"
    )
    return draw


def figures(root: Path) -> dict[str, str]:
    """Every figure by file name, for a checkout: its measured roofs and the packages it has."""
    results = results_under(root / "results")
    drawn: dict[str, Callable[[], Drawing]] = {
        "vector_add_blocks": vector_add_blocks,
        "row_tiles": row_tiles,
        "matmul_tiles": matmul_tiles,
        "norm_backward_partials": norm_backward_partials,
        "roofline": lambda: roofline(results),
        "the_stack": lambda: the_stack(root / "tilestack"),
        "proof": proof,
        "sorted_by_expert": sorted_by_expert,
    }
    return {f"{name}.svg": draw().svg() for name, draw in drawn.items()}


def stale_figures(root: Path) -> list[Path]:
    """The files under docs/figures that are missing or are not what the code draws."""
    folder = root / "docs" / "figures"
    return [
        folder / name
        for name, svg in figures(root).items()
        if not (folder / name).exists() or (folder / name).read_text(encoding="utf-8") != svg
    ]


def update_figures(root: Path) -> list[Path]:
    """Write docs/figures; returns the files that changed."""
    changed, drawn = stale_figures(root), figures(root)
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawn[path.name], encoding="utf-8")
    return changed
