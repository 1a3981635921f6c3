"""Hooks of mkdocs: add generated pages and linked files, rewrite links that leave docs/, and name links by titles."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pages import ROOT, generated, linked_files, title, with_titles, within_site

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
    return with_titles(page.file.src_uri, within_site(page.file.src_uri, markdown), titles)
