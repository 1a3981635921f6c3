"""Hooks of mkdocs: add generated pages and linked files, rewrite links, and reject resources of other servers."""

from __future__ import annotations

from measured_at import with_age
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pages import ROOT, external, generated, linked_files, title, with_titles, within_site

titles: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()} | dict(generated())
    for path in pages.keys() - {file.src_uri for file in files}:
        files.append(File.generated(config, path, content=pages[path]))
    for name in linked_files(pages):
        files.append(File.generated(config, f"source/{name}", abs_src_path=str(ROOT / name)))
    titles.update((path, title(text)) for path, text in pages.items())
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    path = page.file.src_uri
    return with_titles(path, within_site(path, with_age(path, markdown)), titles)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    if found := external(output):
        raise PluginError(
            f"{page.file.src_uri} loads {', '.join(found)}; the site must work offline. Copy the file to docs/."
        )
    return output
