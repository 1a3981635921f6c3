"""House rules: names, files, import floors and what the prose promises."""

import ast
import dataclasses
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from laws.laws import (
    LAYOUT,
    check_bytes,
    check_conservation,
    check_in_place,
    check_own,
    check_refuses_to_send_nonsense,
    check_untouched,
    check_zeros,
)
from support.paths import ROOT

import gossamer
from gossamer.algorithms.compressors import Feedback
from gossamer.algorithms.recipes.catalog import NESTED, NOUNS, within
from gossamer.algorithms.recipes.recipe import resolve

SOURCES = sorted((ROOT / "src").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAY_IMPORT_TORCH_DISTRIBUTED = {"comm", "launcher", "train/session", "integrations", "train/sharding"}
LONGEST_FILE = 600  # lines
NO_GROUP = {"train/checkpoint/dcp.py"}  # reads and writes torch's file format in one process


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_package_the_changelog_the_citation_and_the_tag_have_one_version() -> None:
    """src/gossamer/version.py is the source; the tag of a release is v followed by it."""
    newest = re.search(r"^## (\S+)", read("CHANGELOG.md"), flags=re.MULTILINE)
    cited = re.search(r"^version: (\S+)$", read("CITATION.cff"), flags=re.MULTILINE)
    assert newest is not None
    assert cited is not None
    assert newest[1] == cited[1] == gossamer.__version__
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert [tag for tag in tags.stdout.split() if re.match(r"v\d", tag)] in ([], [f"v{gossamer.__version__}"])


def test_the_changelog_of_a_version_is_short_and_has_the_usual_sections() -> None:
    """Those of keepachangelog.com, at most 60 lines."""
    versions = re.split(r"^## ", read("CHANGELOG.md"), flags=re.MULTILINE)[1:]
    known = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for version in versions:
        assert set(re.findall(r"^### (.+)$", version, re.MULTILINE)) <= known
        assert len(version.splitlines()) <= 60


def test_public_names_are_documented() -> None:
    objects = {name: getattr(gossamer, name) for name in gossamer.__all__ if name != "__version__"}
    assert [name for name, value in objects.items() if not _own_doc(value)] == []


def _own_doc(value: object) -> str:
    """The docstring that was written, not the signature that a dataclass puts in its place."""
    doc = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    return "" if doc is None or doc.startswith(f"{getattr(value, '__name__', '')}(") else doc


def test_own_doc_sees_through_dataclasses() -> None:
    @dataclasses.dataclass(frozen=True)
    class Bare:
        size: int = 0

    assert Bare.__doc__
    assert not _own_doc(Bare)


def test_public_names_exist_once() -> None:
    assert len(set(gossamer.__all__)) == len(gossamer.__all__)
    assert all(hasattr(gossamer, name) for name in gossamer.__all__)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100


# -- files and names -------------------------------------------------------------------------------


def _long_files(root: Path, *folders: str) -> set[str]:
    files = [path for name in folders for path in (root / name).rglob("*") if path.suffix in {".py", ".cpp", ".hpp"}]
    assert files, "no sources found"
    return {str(path.relative_to(root)) for path in files if len(path.read_text().splitlines()) > LONGEST_FILE}


def test_no_file_is_long() -> None:
    assert _long_files(ROOT, "src", "tests", "benchmarks", "examples", "kernels-src") == set()


def test_a_long_file_is_seen(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("\n" * LONGEST_FILE)
    (tmp_path / "long.py").write_text("\n" * (LONGEST_FILE + 1))
    assert _long_files(tmp_path, ".") == {"long.py"}


def _classes_defined_twice(paths: Iterable[Path]) -> set[str]:
    found = Counter(
        node.name for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    )
    return {name for name, count in found.items() if count > 1}


def test_one_class_name_means_one_thing() -> None:
    assert _classes_defined_twice(SOURCES) == set()


def test_a_class_name_with_two_meanings_is_seen(tmp_path: Path) -> None:
    paths = [tmp_path / "one.py", tmp_path / "other.py"]
    for path, name in zip(paths, ("Once", "Also"), strict=True):
        path.write_text(f"class {name}: ...\nclass Exchange: ...")
    assert _classes_defined_twice(paths) == {"Exchange"}


# Tests that lie beside what they test, and are about several modules
MIRROR_NO_MODULE = {
    "federated/test_laws.py": "laws of every federated strategy, and calls that are not for federations",
    "federated/server/test_fault_seeds.py": "federations of every kind of rounds on bad networks",
    "base/kernels/triton/test_compiling.py": "all Triton kernels, compiled for GPUs that are not here",
    "train/parameter_server/test_faults.py": "servers and workers of every mode on bad networks",
    "train/parameter_server/test_laws.py": "laws of every mode of servers",
    "algorithms/strategies/test_golden.py": "trajectories of several strategies",
    "comm/rpc/test_crowd.py": "many endpoints at once",
    "comm/membership/test_many_members.py": "what a change costs with many members, and that all agree",
}


def _mirrors_nothing(tests: Path, package: Path) -> set[str]:
    """Tests at tests/FOLDER/test_MODULE[_SUBJECT].py for which no package/FOLDER/MODULE.py exists."""
    paths = [path.relative_to(tests) for path in tests.glob("*/**/test_*.py")]
    assert paths, "no tests found"
    mirrors = [path for path in paths if path.parts[0] not in {"engines", "frameworks", "scenarios", "laws", "support"}]
    return {str(path) for path in mirrors if not any((package / path.parent / each).exists() for each in _named(path))}


def _named(test: Path) -> Iterator[str]:
    """The modules and packages that a test's name may begin with."""
    parts = test.stem.split("_")[1:]
    for count in range(1, len(parts) + 1):
        name = "_".join(parts[:count])
        yield from (f"{name}.py", f"{name}/__init__.py")


def test_every_test_lies_where_its_module_lies() -> None:
    assert _mirrors_nothing(ROOT / "tests", ROOT / "src" / "gossamer") <= set(MIRROR_NO_MODULE)


def test_a_test_without_a_module_is_seen(tmp_path: Path) -> None:
    for name in ("tests/gossip/test_rules_kept.py", "tests/gossip/test_lost.py", "tests/scenarios/test_any.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "src" / "gossip").mkdir(parents=True)
    (tmp_path / "src" / "gossip" / "rules.py").touch()
    assert _mirrors_nothing(tmp_path / "tests", tmp_path / "src") == {"gossip/test_lost.py"}


# -- floors ----------------------------------------------------------------------------------------


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _talks_to_torch_distributed(source: str) -> bool:
    """`import torch.distributed...`, `from torch.distributed import ...`, `from torch import distributed`."""
    return "distributed" in source and any(f"{name}.".startswith("torch.distributed.") for name in _imports(source))


@pytest.mark.parametrize(
    ("source", "talks"),
    [
        ("import torch.distributed as dist", True),
        ("from torch import distributed", True),
        ("from torch.distributed.elastic import agent", True),
        ("def late():\n    import torch.distributed", True),
        ("import torch, torch.nn.parallel", False),
        ("from torch import nn  # torch.distributed", False),
    ],
)
def test_talking_to_torch_distributed_is_seen(source: str, talks: bool) -> None:
    assert _talks_to_torch_distributed(source) is talks


def test_torch_distributed_is_imported_in_few_places() -> None:
    package = ROOT / "src" / "gossamer"
    talking = {path for path in SOURCES if _talks_to_torch_distributed(path.read_text())}
    others = {path.relative_to(package) for path in talking} - {Path(name) for name in NO_GROUP}
    strangers = {path for path in others if not _places(path) & MAY_IMPORT_TORCH_DISTRIBUTED}
    assert strangers == set()


def _names(source: str, name: str) -> bool:
    """Whether code imports or reads this name; strings and comments do not count."""
    return name in source and any(
        name in (getattr(node, "id", ""), getattr(node, "attr", "")) or name in getattr(node, "name", "").split(".")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name | ast.Attribute | ast.alias)
    )


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from torch.distributed import Store, TCPStore as Own", True),
        ("import torch\ntorch.distributed.TCPStore('localhost', 1)", True),
        ("def of() -> TCPStore: ...", True),
        ('"""Such as torch.distributed.TCPStore."""', False),
        ("TCPStores = 2", False),
    ],
)
def test_a_name_in_code_is_seen(source: str, names: bool) -> None:
    assert _names(source, "TCPStore") is names


def test_one_module_creates_torchs_stores() -> None:
    """Any other would fail with a build of torch that has no libuv."""
    assert [path.name for path in SOURCES if _names(path.read_text(), "TCPStore")] == ["tcp_store.py"]


def _places(path: Path) -> set[str]:
    """The module at `path` and the packages around it."""
    return {str(path.with_suffix("")), *map(str, path.parents)}


# -- prose -----------------------------------------------------------------------------------------


def _make_targets(text: str) -> set[str]:
    return set(re.findall(r"\bmake ([a-z][a-z-]+)", text))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/design.md"])
def test_commands_in_the_prose_are_in_the_makefile(name: str) -> None:
    declared = set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.MULTILINE))
    commands = "\n".join(re.findall(r"`[^`\n]+`|^    .*$", read(name), flags=re.MULTILINE))
    assert _make_targets(commands)
    assert _make_targets(commands) <= declared


def _missing_modules(page: str) -> set[str]:
    """Modules, packages and files that a page names by their path below src/gossamer, and that do not exist."""
    package = ROOT / "src" / "gossamer"
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+)/?`", page))
    inside = {path for path in named if (package / path.split("/")[0]).is_dir()}
    return {path for path in inside if not (package / path).is_dir() and not (package / f"{path}.py").exists()}


@pytest.mark.parametrize("name", ["docs/design.md", "docs/reference/glossary.md", "docs/reference/tools.md"])
def test_modules_in_the_prose_exist(name: str) -> None:
    assert _missing_modules(read(name)) == set()


def test_a_missing_module_in_the_prose_is_seen() -> None:
    assert _missing_modules("`base/ops`, `comm/mesh/`, `base/nowhere`, `next/to`") == {"base/nowhere"}


def _recipe_terms(page: str) -> list[str]:
    """Terms in the rows of a page's tables."""
    rows = re.findall(r"^\| (`.*) \|$", page, flags=re.MULTILINE)
    return [term for row in rows for term in re.findall(r"`([A-Z]\w+\([^`]*\))`", row)]


def test_recipes_in_the_list_are_real() -> None:
    terms = _recipe_terms(read("docs/reference/recipes.md"))
    assert {term.split("(")[0] for term in terms} == set(NOUNS)
    for term in terms:
        noun = NOUNS[term.split("(")[0]]
        beside = "Gossip() + " if noun.kind == "topology" else ""
        text = re.sub(r"\b[XY]\b", "Int8()", term)
        resolve(within(text, noun) if noun.kind in NESTED else beside + text)


def contributed() -> dict[str, Any]:
    code = re.search(r"```python\n(.*?)```", read("CONTRIBUTING.md"), flags=re.DOTALL)
    assert code is not None
    namespace: dict[str, Any] = {"__name__": "contributed"}
    exec(code[1], namespace)
    return namespace


def test_the_compressor_in_contributing_obeys_the_laws() -> None:
    names = contributed()
    rota = names["RoundRobin"](every=4)
    check_own(rota, 4)
    check_conservation(Feedback(rota), 3)
    check_zeros(rota, 3)
    check_untouched(Feedback(rota))
    check_in_place(Feedback(rota), 3)
    check_refuses_to_send_nonsense(rota)
    check_bytes(rota, 4, lambda world: 2 * (world - 1) * 4 * -(-LAYOUT.numel // 4) / world)
    assert eval(repr(rota), names) == rota


def _off_the_map(package: Path) -> set[str]:
    """Modules and packages that the docstring of the package around them does not name."""
    missing = set()
    for init in package.glob("*/**/__init__.py"):
        named = set(re.findall(r"\w+", ast.get_docstring(ast.parse(init.read_text())) or ""))
        inside = {path.parent.name for path in init.parent.glob("*/__init__.py")}
        inside |= {path.stem for path in init.parent.glob("*.py") if not path.stem.startswith("__")}
        missing |= {str((init.parent / name).relative_to(package)) for name in inside - named}
    return missing


def test_every_module_is_on_the_map_of_its_package() -> None:
    assert _off_the_map(ROOT / "src" / "gossamer") == set()


def test_a_module_off_the_map_is_seen(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    for name in ("known", "unknown"):
        (tmp_path / "room" / f"{name}.py").touch()
    (tmp_path / "room" / "__init__.py").write_text('"""A room.\n\nknown  what is known\n"""')
    assert _off_the_map(tmp_path) == {"room/unknown"}
