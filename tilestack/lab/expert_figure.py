"""The figure of a mixture of experts: tokens, the same tokens sorted by expert, and the tiles of the grouped product."""

from tilestack.lab.drawing import Drawing

EXPERTS = "abcd"  # by the colours they are drawn in
CHOICES = ["ca", "bc", "ac", "cb", "ac", "ca"]  # of each token; nobody chooses the last expert
TILE = 4  # rows


def sorted_by_expert() -> Drawing:
    draw = Drawing(
        880, 420, "Tokens sorted by expert",
        "Six tokens choose two of four experts each; their twelve rows are sorted by expert, multiplied by each expert's own weight in tiles that do not cross experts, and added up again by token.",
    )  # fmt: skip
    draw.text(24, 30, "Every expert's tokens side by side: one grouped product, no padding, none dropped", "title", anchor="start")  # fmt: skip
    rows = [(expert, token) for expert in EXPERTS for token, chosen in enumerate(CHOICES) if expert in chosen]
    top, row, left, middle, right = 96, 22, 60, 300, 560

    draw.text(left, 70, "tokens, K = 2 choices each", "body", anchor="start")
    for token, chosen in enumerate(CHOICES):
        y = top + 2 * row * token
        draw.text(left - 12, y + 20, f"t{token}", "code", "muted", anchor="end")
        for place, expert in enumerate(chosen):
            draw.rect(left, y + row * place, 92, row - 2, expert, radius=2.5)
            draw.text(left + 46, y + row * place + 10, f"expert {EXPERTS.index(expert)}", "small")

    draw.text(middle, 70, "rows sorted by expert", "body", anchor="start")
    for place, (expert, token) in enumerate(rows):
        slot = 2 * token + CHOICES[token].index(expert)
        draw.line((left + 96, top + row * slot + 10), (middle - 4, top + row * place + 10), ink=expert, width=1)
        draw.rect(middle, top + row * place, 92, row - 2, expert, radius=2.5)
        draw.text(middle + 46, top + row * place + 10, f"t{token}", "small")
    end = 0
    for number, expert in enumerate(EXPERTS):
        end += sum(expert in chosen for chosen in CHOICES)
        shift = 0 if number < 3 else 18
        draw.text(middle + 104, top + row * end - 2 + shift, f"← offsets[{number}] = {end}", "code", expert, anchor="start")  # fmt: skip

    draw.text(right, 70, "tiles, each with its expert's weight", "body", anchor="start")
    start, tile = 0, 0
    for number, expert in enumerate(EXPERTS):
        count = sum(expert in chosen for chosen in CHOICES)
        for first in range(0, count, TILE):
            y, used = top + row * (start + first), min(TILE, count - first)
            draw.rect(right, y, 190, row * used - 2, expert, radius=4)
            draw.text(right + 95, y + row * used / 2 - 1, f"tile {tile}: weight[{number}]", "small")
            tile += 1
        start += count
    draw.text(right + 204, top + row * 5, "half empty", "small", "muted", anchor="start")
    draw.text(right + 204, top + row * 11, "half empty", "small", "muted", anchor="start")
    draw.text(
        24, 384, "An expert without tokens has no tile. No size is known to the host:", "small", "muted", anchor="start"
    )
    draw.text(
        24,
        402,
        "as many programs start as could be needed, and those left over return.",
        "small",
        "muted",
        anchor="start",
    )
    return draw
