"""Prose of this project: the text of pages, docstrings, comments and messages, and the words that it avoids."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Headless relatives and questions as clauses; a few read well, many have to be decoded.
RELATIVES = re.compile(r"\b(?:what|who|whom|whose|whatever|whoever)\b", re.IGNORECASE)
BANNED = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "nobody, somebody, whoever": r"\b(?:nobody|somebody|whoever|whomever|no one)\b",
        "is none": r"\b(?:is|are|was|were|be|been) none\b(?! of)",
        "to be had": r"\bto be had\b",
        "anew, foretell, amid, likewise, thereby": r"\b(?:anew|foret(?:ell|ells|old|elling)|amid|likewise|thereby)\b",
        "beside": r"\bbeside\b",
        "wish": r"\bwish(?:es|ed)?\b",
        "hear": r"\b(?:hears?|heard)\b",
        "say, tell": r"\b(?:says?|said|tells?|told)\b",
        "owe": r"\bow(?:e|es|ed)\b",
        "go on": r"\b(?:go|goes|went) on\b",
        "stand": r"\b(?:stands|stood)\b",
        "lie": r"\b(?:lies|lay)\b",
        "take part": r"\bt(?:ake|akes|ook|aken) part\b",
        "talk": r"\btalk(?:s|ed|ing)?\b",
        "put out": r"\bput out\b",
        "there is not": r"\b(?:is|are) not there\b",
    }.items()
}
MAY_BE_CODE = re.compile(r"^[\w./\-:{}=*%<>()\[\],\"']*$")  # a literal without a space is no prose


def words(text: str) -> int:
    return len(re.findall(r"[A-Za-z][A-Za-z'-]*", text))


def of_markdown(text: str) -> str:
    """A page without code, link targets and comments."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", " code ", re.sub(r"\]\([^)]*\)", "]", text))


def of_python(source: str) -> str:
    """Docstrings, comments and string literals of several words."""
    return "\n".join(text for _, text in lines_of_python(source))


def lines_of_python(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#! ")
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        text = _formatted(node) if isinstance(node, ast.JoinedStr) else getattr(node, "value", None)
        if isinstance(text, str) and id(node) not in parts and len(text.split()) >= 3 and not MAY_BE_CODE.match(text):
            yield from ((node.lineno + n, _plain(line)) for n, line in enumerate(text.splitlines()))


def _formatted(node: ast.JoinedStr) -> str:
    """An f-string as one text, so that words between two values are read in their sentence."""
    return "".join(part.value if isinstance(part, ast.Constant) else " `value` " for part in node.values)


def _plain(line: str) -> str:
    return "" if line.lstrip().startswith((">>>", "... ")) else re.sub(r"`[^`]*`", " code ", line)


def prose(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return of_markdown(text) if path.suffix == ".md" else of_python(text)


def banned(text: str) -> Counter[str]:
    return Counter({name: len(found) for name, pattern in BANNED.items() if (found := pattern.findall(text))})


def relatives_per_thousand(text: str) -> float:
    return 1000 * len(RELATIVES.findall(text)) / max(1, words(text))


def report(paths: list[Path]) -> str:
    """Words and counts of each file, the worst first; `python -m support.prose PATHS` in tests prints it."""
    rows = []
    for path in paths:
        text = prose(path)
        rows.append((sum(banned(text).values()) + len(RELATIVES.findall(text)), words(text), path))
    lines = [f"{bad:5} of {total:6} words  {path}" for bad, total, path in sorted(rows, reverse=True) if bad]
    return "\n".join(lines)


def findings(path: Path) -> Iterator[str]:
    """Each line with an avoided word, as path:line: word: text."""
    source = path.read_text(encoding="utf-8")
    lines = enumerate(of_lines(source), 1) if path.suffix == ".md" else lines_of_python(source)
    for number, line in lines:
        for name, pattern in {**BANNED, "what, who": RELATIVES}.items():
            if pattern.search(line):
                yield f"{path}:{number}: {name}: {line.strip()[:160]}"


def of_lines(source: str) -> list[str]:
    inside, kept = False, []
    for line in source.splitlines():
        inside ^= line.startswith("```")
        kept.append("" if inside else re.sub(r"`[^`]*`", " code ", re.sub(r"\]\([^)]*\)", "]", line)))
    return kept


def files_below(*places: Path) -> list[Path]:
    every = [place if place.is_file() else [*place.rglob("*.py"), *place.rglob("*.md")] for place in places]
    return sorted({path for found in every for path in ([found] if isinstance(found, Path) else found)})


if __name__ == "__main__":
    import sys

    chosen = files_below(*map(Path, sys.argv[1:]))
    print("\n".join(line for path in chosen for line in findings(path)))
    text = "\n".join(map(prose, chosen))
    print(report(chosen))
    print(f"{words(text)} words, {relatives_per_thousand(text):.1f} relatives per 1,000, banned: {dict(banned(text))}")
