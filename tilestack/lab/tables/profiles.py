"""Tables of where the time of training steps and of decoding goes, from what `tilestack profile --save` keeps."""

from collections.abc import Sequence
from pathlib import Path

from tilestack.lab.bench import kept_profiles
from tilestack.lab.bench.kept_profiles import Kept
from tilestack.lab.bench.peers import is_peer
from tilestack.lab.results import machine_name, path_of
from tilestack.lab.stale import SERVING, TRAINING, is_current
from tilestack.lab.tables.markdown import OLD, commits_in_words, daggers, markdown, not_measured
from tilestack.lab.units import percent

LEAST = 0.01  # of a profile's time, below which a kernel has no line of its own
KINDS = (TRAINING, SERVING)


def profiles(folder: Path, slug: str, kind: str) -> str:
    """The profiles of a kind side by side: a line for each of our kernels and for all of each library's."""
    path = path_of(slug, kept_profiles.NAME, folder)
    found = [each for each in kept_profiles.load(path)["profiles"] if each["op"] == kind] if path.exists() else []
    if not found:
        return not_measured(f"tilestack profile {kind} --save", machine=slug)
    cases = dict.fromkeys(each["case"] for each in found)
    is_old = lambda each: not is_peer(each["backend"]) and not is_current(each)
    names = zip(names_of(found), found, strict=True)
    header = ["ms", *(name + (f" {OLD}" if is_old(each) else "") for name, each in names)]
    lines = [
        [name, *(f"{each:.2f}" if each else "–" for each in row)]
        for name, row in kept_profiles.side_by_side(found, LEAST).items()
    ]
    lines.append(["**all kernels**", *(f"**{each['total_ms']:.2f}**" for each in found)])
    if all(each["on_gpu"] for each in found):
        lines.append(["any kernel ran", *(f"{each['busy_ms']:.2f}" for each in found)])
        lines.append(["of the time by the clock", *(percent(each["busy_ms"] / each["wall_ms"]) for each in found)])
    machine = kept_profiles.load(path)["machine"]
    commits = commits_in_words(each["commit"] for each in found)
    about = f"{next(iter(cases))}; " if len(cases) == 1 else ""
    stamp = f"_{about}{machine_name(machine)}, {commits}, {max(each['date'] for each in found)[:10]}, with the profiler on._"
    stale = daggers((each["commit"], each["case"]) for each in found if is_old(each))
    return f"{markdown(header, lines)}\n\n{stamp}{stale}"


def names_of(found: Sequence[Kept]) -> list[str]:
    """What tells each profile from the others; of one alone, or where nothing else does, its backend."""
    telling = [name for name in kept_profiles.IDENTITY if len({each[name] for each in found}) > 1] or ["backend"]
    return [", ".join(each[name] for name in telling) for each in found]
