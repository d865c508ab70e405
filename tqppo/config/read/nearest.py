"""Did you mean: the known names nearest to a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable


def distance(a: str, b: str) -> int:
    """Edits from a to b: insert, delete, replace, or swap two neighbours."""
    before, row = [], list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, last, row = row, before, [i]
        for j, y in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Known names within a third of the name's length, nearest first, then those that begin alike (`sorting`, `sort`).
    Case, and `-` against `_`, count nothing."""

    def plain(text: str) -> str:
        return text.lower().replace("-", "_")

    known = list(known)
    allowed = max(1, len(name) // 3)
    scored = [(distance(plain(name), plain(each)), each) for each in known if abs(len(each) - len(name)) <= allowed]
    close = [each for score, each in sorted(scored) if score <= allowed]
    alike = [each for each in known if min(len(each), len(name)) > 2 and _begin_alike(plain(each), plain(name))]
    return list(dict.fromkeys([*close, *sorted(alike, key=len, reverse=True)]))[:limit]


def _begin_alike(a: str, b: str) -> bool:
    return a.startswith(b) or b.startswith(a)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean "x"?`, or nothing."""
    close = nearest(name, known, limit=1)
    return f'did you mean "{close[0]}"?' if close else ""
