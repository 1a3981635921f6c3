"""Hooks of mkdocs: add generated pages and linked files, and rewrite links that leave docs/."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pages import ROOT, generated, linked_files, within_site


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()} | dict(generated())
    for path in pages.keys() - {file.src_uri for file in files}:
        files.append(File.generated(config, path, content=pages[path]))
    for name in linked_files(pages):
        files.append(File.generated(config, f"source/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return within_site(page.file.src_uri, markdown)
