"""The documentation holds: what it shows runs, its links lead somewhere, its translations show the same code."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_page import REPOSITORY, blocks, first_missing, run_console

PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
ENGLISH = [page for page in PAGES if "zh" not in (page.parent.name, page.suffixes[0].strip(".").partition("-")[0])]
TRANSLATED = [page for page in PAGES if page not in ENGLISH]
RUNNING = [page for page in ENGLISH if any(block.runs for block in blocks(page.read_text(encoding="utf-8")))]

LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)|(?:src|href)=\"(?P<attribute>[^\"]+)\"")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
WEB = ("http://", "https://", "mailto:")

name_of = lambda page: str(page.relative_to(REPOSITORY))


@pytest.fixture(scope="session")
def run_page():
    """Runs a page in a process that has imported PyTorch and the kernels and done nothing else; answers what went wrong."""
    environment = {name: value for name, value in os.environ.items() if name != "TILESTACK_BACKEND"}
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("run_page.py"))],
        env=environment | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},  # the same everywhere
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(page):
        print(page, file=server.stdin, flush=True)
        return json.loads(server.stdout.readline())

    with server:
        yield run


@pytest.mark.parametrize("page", RUNNING, ids=name_of)
def test_what_a_page_shows_happens(page, run_page):
    succeeded, printed = run_page(page)
    assert succeeded, printed
    assert f"blocks of {page.name} ran as shown" in printed


def test_a_page_that_fails_says_so(run_page, tmp_path):
    (tmp_path / "page.md").write_text("```python run\nprint('here')\nprint(torch)\n```\n")
    succeeded, printed = run_page(tmp_path / "page.md")
    assert not succeeded
    assert printed.startswith("here")
    assert "NameError: name 'torch' is not defined" in printed


def test_the_guide_to_a_first_kernel_runs_from_the_kernel_to_the_bug():
    about = [block.about for block in blocks((REPOSITORY / "docs" / "first-kernel.md").read_text(encoding="utf-8"))]
    assert "python file=my_kernels.py" in about
    assert about.count("python run") >= 2
    assert about.count("console") >= 3


def test_a_page_that_lies_is_caught():
    (lie,) = blocks("```console\n$ printf 'one\\ntwo\\n'\ntwo\none\n```\n")
    with pytest.raises(AssertionError, match="did not print\none\nbut\none\ntwo"):
        run_console(lie, Path("page.md"))
    (failing,) = blocks("```console\n$ false\n```\n")
    with pytest.raises(AssertionError, match="exit code 1"):
        run_console(failing, Path("page.md"))


def test_exit_codes_can_be_shown_and_output_left_out():
    (shown,) = blocks("```console\n$ false\n$ echo $?\n1\n$ printf 'a 1\\nb\\nc   2\\n'\na …\n…\nc 2\n```\n")
    run_console(shown, Path("page.md"))
    assert first_missing("c …", "a 1\nb\n") == "c …"


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors_of(page: Path) -> set[str]:
    """What a heading is called in an address, as GitHub does it."""
    headings = HEADING.findall(
        re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    broken = []
    for link in LINK.finditer(without_code(page.read_text(encoding="utf-8"))):
        target = link["target"] or link["attribute"]
        if target.startswith(WEB):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors_of(there)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", TRANSLATED, ids=name_of)
def test_a_translation_shows_the_same_code_tables_and_headings(page):
    original = page.parent.parent / page.name if page.parent.name == "zh" else REPOSITORY / "README.md"
    ours, theirs = (p.read_text(encoding="utf-8") for p in (page, original))
    code = lambda text: [(block.about, block.text) for block in blocks(text)]
    assert code(ours) == code(theirs)
    tables = lambda text: re.findall(r"^<!-- table: .* -->$", text, re.MULTILINE)
    assert tables(ours) == tables(theirs)
    levels = lambda text: re.findall(r"^(#+) ", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)  # fmt: skip
    assert levels(ours) == levels(theirs)


@pytest.mark.parametrize("page", TRANSLATED, ids=name_of)
def test_a_translation_marks_its_links_to_english_pages(page):
    unmarked = []
    for words, target in re.findall(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        path = target.partition("#")[0]
        if target.startswith(WEB) or not path.endswith(".md"):
            continue
        english = (page.parent / path).resolve() in ENGLISH
        if english and "英文" not in words and words != "English":
            unmarked.append(target)
    assert not unmarked


def test_both_indexes_list_the_same_pages():
    listed = lambda folder: {
        Path(target).name
        for target in re.findall(r"\]\(([^)\s]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
        if Path(target).name not in ("README.md", "CONTRIBUTING.md")
    }
    assert listed(REPOSITORY / "docs/zh") == listed(REPOSITORY / "docs")


def test_every_page_is_in_the_index():
    index = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [p.relative_to(REPOSITORY / "docs").as_posix() for p in PAGES if p.is_relative_to(REPOSITORY / "docs")]
    assert [p for p in pages if p != "README.md" and not p.startswith("notes/") and f"]({p})" not in index] == []
