"""Pages of the site that are generated from the sources, as Markdown: API, commands, errors by message."""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "gossamer"
PUBLIC: dict[str, list[str]] = json.loads((ROOT / "tests" / "public_api.json").read_text(encoding="utf-8"))
API = "reference/api"
TERMS = {  # page of each kind of term
    "strategy": "strategies",
    "compressor": "compressors",
    "topology": "topologies",
    "privacy": "federated-terms",
    "aggregator": "federated-terms",
    "secure": "federated-terms",
}
TITLES = {
    "strategies": "Strategies",
    "compressors": "Compressors",
    "topologies": "Topologies",
    "federated-terms": "Federated terms",
}
#: Base classes and names that `gossamer` exports next to the terms of recipes.
CORE = ("init", "World", "attach", "Session", "Recipe", "recipe", "register", "Shard")
FORMER = (
    "ask_to_stop",
    "merged",
    "reset",
    "stopping",
    "weight",
)  # names of Session; reference/api.md has their new ones
HOROVOD = "gossamer.horovod"
BASES = ("Strategy", "Compressor", "Codec", "Topology")

# -- API -------------------------------------------------------------------------------------------------------------


def generated() -> Iterator[tuple[str, str]]:
    """(path, Markdown) of the pages that the build writes."""
    from gossamer.algorithms.recipes.catalog import NOUNS  # imports torch, and only the build needs it

    terms = defaultdict(list)
    for name, noun in sorted(NOUNS.items(), key=lambda item: item[0].lower()):
        terms[TERMS[noun.kind]].append(name)
    others = [name for name in PUBLIC["gossamer"] if name not in {*CORE, *BASES, *NOUNS} and not is_module(name)]
    yield f"{API}/gossamer.md", module_page("gossamer", CORE, others, BASES)
    for page, names in terms.items():
        yield (
            f"{API}/{page}.md",
            f"# {TITLES[page]}\n\n" + "".join(entry("gossamer", name, bare=True) for name in names),
        )
    for module in modules():
        if module != "gossamer" and not module.startswith(HOROVOD):
            yield f"{API}/{module}.md", module_page(module, PUBLIC[module])
    yield f"{API}/{HOROVOD}.md", horovod_page()
    yield "reference/cli.md", commands_page()
    yield "reference/errors-by-message.md", messages_page()
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        yield ROOT_PAGES[name], root_page(name)


def is_module(name: str) -> bool:
    """Whether `gossamer.NAME` is a module or a package."""
    return any(f"{module}.".startswith(f"gossamer.{name}.") for module in modules())


def modules() -> list[str]:
    """The public modules; the file also lists the members of two classes."""
    return [name for name in PUBLIC if name.rpartition(".")[2].islower()]


def module_page(module: str, *groups: tuple[str, ...] | list[str]) -> str:
    names = [name for group in groups for name in group if not name.startswith("__")]
    head = f"# {module}\n\n{summary(module)}\n\n"
    return head + "".join(entry(module, name) for name in names)


def horovod_page() -> str:
    """The names of Horovod's API by module; Horovod's documentation describes them."""
    lines = [f"# {HOROVOD}", "", summary(HOROVOD), ""]
    for module in modules():
        if module.startswith(f"{HOROVOD}."):
            names = ", ".join(f"`{name}`" for name in PUBLIC[module])
            lines += [f"## {module}", "", summary(module), "", names, ""]
    return "\n".join(lines)


def summary(module: str) -> str:
    """The first paragraph of a module's docstring."""
    path = ROOT / "src" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0]


def entry(module: str, name: str, *, bare: bool = False) -> str:
    """A directive of mkdocstrings. bare: without methods, which only the library calls."""
    members = [member for member in PUBLIC.get(f"{module}.{name}", ()) if member not in FORMER]
    options = ""
    if bare:
        options = "        members: []\n"
    elif members:  # which users never construct
        options = f"        members: {json.dumps(members)}\n        merge_init_into_class: false\n"
    return f"::: {module}.{name}\n" + (f"    options:\n{options}" if options else "") + "\n"


# -- command line ------------------------------------------------------------------------------------------------------


def commands_page() -> str:
    from gossamer.cli.main import gossamer

    head = "# Command line\n\nEvery command of `gossamer`, as `gossamer COMMAND --help` prints it.\n\n"
    return head + "".join(command_section(gossamer, click.Context(gossamer, info_name="gossamer")))


def command_section(command: click.Command, context: click.Context) -> Iterator[str]:
    """Usage, help and options of a command, then those of its subcommands."""
    if context.parent:
        yield f"{'##' if context.parent.parent is None else '###'} {context.command_path}\n\n"
    yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n\n{help_text(command)}\n\n"
    records = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
    if records:
        yield "| option | meaning |\n|---|---|\n"
        yield from (f"| {code(names)} | {escaped(text)} |\n" for names, text in records)
        yield "\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if found := command.get_command(context, name):
                yield from command_section(found, click.Context(found, info_name=name, parent=context))


def code(text: str) -> str:
    return f"`{text}`"


def help_text(command: click.Command) -> str:
    """The help of a command; paragraphs that click leaves as they are become blocks of code."""
    parts = cleandoc(command.help or "").split("\n\n")
    return "\n\n".join(
        "```text\n" + part.removeprefix("\b").strip("\n") + "\n```" if part.startswith("\b") else escaped(part)
        for part in parts
    )


# -- errors by message -------------------------------------------------------------------------------------------------

RAISING = re.compile(r"^(?!Assertion|Attribute|Key)\w*(?:Error|Lost|Shortage|NotFinite|OutOfRange|LeftWhileJoining)$")


AREAS = {  # of messages, by the path of the source below src/gossamer; the longest match counts
    "algorithms": "Recipes",
    "algorithms/compressors": "Compressors",
    "algorithms/strategies": "Strategies",
    "base": "Tensors and files",
    "cli": "Command line",
    "comm": "Connections and networks",
    "comm/elastic": "Elastic runs",
    "comm/environment": "Launch variables and rendezvous",
    "federated": "Federated learning",
    "federated/flower": "Flower",
    "horovod": "Horovod",
    "integrations": "Trainers of other libraries",
    "integrations/jax": "JAX",
    "keras": "Keras",
    "launcher": "Workers and servers of a run",
    "observe": "Records, traces and the watch page",
    "plan": "Estimates, advice and simulation",
    "tensorflow": "TensorFlow",
    "train": "Training",
    "train/checkpoint": "Checkpoints",
    "train/engine": "Gradients of a step",
    "train/moments": "Momentum and optimizer state",
    "train/parallel": "Remote modules and pipeline stages",
    "train/parameter_server": "Parameter servers",
    "train/session": "Session and training loop",
    "train/sharding": "Sharded models",
    "train/synchronizers": "Rounds of a strategy",
}
MOST_UNGROUPED = 25  # messages of a class without headings


def area(path: Path) -> str:
    """The area of a source file; "Other" if it is in none."""
    name = path.relative_to(SOURCE).with_suffix("").as_posix()
    found = [prefix for prefix in AREAS if f"{name}/".startswith(f"{prefix}/")]
    return AREAS[max(found, key=len)] if found else "Other"


def messages_page() -> str:
    """A list of messages for each class of errors, from the calls that make them in the sources; long lists by area."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(SOURCE.rglob("*.py")):
        for kind, message in raised(ast.parse(path.read_text(encoding="utf-8"))):
            found[kind].setdefault(message, area(path))
    lines = [
        "# Errors by message",
        "",
        "Search this page for a few words of your error. Every message contains the cause and the line to write; `...` "
        "is a value. [Troubleshooting](troubleshooting.md) has frequent problems by symptom.",
        "",
    ]
    for kind, messages in sorted(found.items()):
        lines += [f"## {kind}", ""]
        areas = sorted(set(messages.values())) if len(messages) > MOST_UNGROUPED else [""]
        for each in areas:
            lines += [f"### {each}", ""] if each else []
            texts = sorted(text for text, place in messages.items() if each in ("", place))
            lines += [*(f"- {escaped(text)}" for text in texts), ""]
    return "\n".join(lines)


def raised(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(class, message) of `Class("...")` and of `require(condition, "...")`, with texts that are constants."""
    constants = {
        name.id: literal(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for name in node.targets
        if isinstance(name, ast.Name)
    }

    def message(node: ast.expr) -> str:
        match node:
            case ast.Name(id=name) | ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="format")):
                return re.sub(r"{[^}]*}", "...", constants.get(name, ""))
            case _:
                return literal(node)

    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=kind), args=[first, *_]) if RAISING.match(kind):
                text = message(first)
            case ast.Call(func=ast.Name(id="require"), args=[_, second]):
                kind, text = "ValueError", message(second)
            case _:
                continue
        if len(text.split()) >= 4:
            yield kind, text


def literal(node: ast.expr) -> str:
    """The text of a literal, with `...` in place of values; "" of anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(literal(value) or "..." for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return literal(left) + (literal(right) or "...") if literal(left) else ""
        case _:
            return ""


def escaped(text: str) -> str:
    """Text without Markdown or HTML, also in a cell of a table."""
    text = re.sub(r"([*_`\[\]\\])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")


# -- links that leave docs/ --------------------------------------------------------------------------------------------

LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")
ROOT_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "README.md",
    "SECURITY.md": "security-policy.md",
}


def root_page(name: str) -> str:
    """A page of the repository's root, with its links as a page of docs/ writes them."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r"\]\((?!\w+:|#)", "](../", text).replace("](../docs/", "](")


def leaves_docs(page: str, link: str) -> bool:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link)).startswith("..")


def target(page: str, link: str) -> str | None:
    """The path in the site of a link that leaves docs/: of a page, or of a copy; None if the site has neither."""
    name = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    if name in ROOT_PAGES:
        return ROOT_PAGES[name]
    return f"source/{name}" if (ROOT / name).is_file() and not name.endswith(".md") else None


def within_site(page: str, markdown: str) -> str:
    """The Markdown of a page with links that leave docs/ rewritten, or replaced by their text."""

    def rewritten(link: re.Match[str]) -> str:
        text, path, anchor = link.groups()
        if not leaves_docs(page, path):
            return link[0]
        found = target(page, path)
        where = posixpath.relpath(found, posixpath.dirname(page) or ".") if found else ""
        return f"[{text}]({where}{anchor or ''})" if found else text

    return LINK.sub(rewritten, markdown)


def linked_files(pages: dict[str, str]) -> set[str]:
    """Files of the repository, such as examples, that these pages link to; the site has copies of them."""
    links = ((page, link[1]) for page, text in pages.items() for link in LINK.findall(text))
    found = {target(page, path) for page, path in links if leaves_docs(page, path)}
    return {name.removeprefix("source/") for name in found if name and name.startswith("source/")}


PATH_AS_TEXT = re.compile(r"\[[\w./-]+\.md\]\(([\w./-]+\.md)(#[^)\s]*)?\)")


def with_titles(page: str, markdown: str, titles: dict[str, str]) -> str:
    """The Markdown of a page in which links with a path as their text have the title of their target instead."""

    def titled(link: re.Match[str]) -> str:
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[1]))
        return f"[{titles[name]}]({link[1]}{link[2] or ''})" if name in titles else link[0]

    return PATH_AS_TEXT.sub(titled, markdown)


def title(markdown: str) -> str:
    """The first heading of a page."""
    return markdown.partition("\n")[0].removeprefix("# ")


EXTERNAL = re.compile(r'<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)="((?:https?:)?//[^"]+)"')


def external(html: str) -> list[str]:
    """Scripts, images, fonts and styles of a page that a browser would load from elsewhere. Links do not count."""
    return EXTERNAL.findall(html)
