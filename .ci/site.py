"""What the site has beyond docs/: README as its first page, other pages of the root, and files of the repository that pages link to.

Pages are written so that their links work in a checkout. Here a link that leaves docs/ gets a page of its own in the site.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}
ROLE = re.compile(r":(?:func|mod|class|meth):`~?([^`]*)`")
BLOCK = re.compile(r"(^```.*?^```$)", re.S | re.M)  # code holds no links


def on_config(config):
    """Pages that the navigation does not name yet stand at its end."""
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    others = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name not in named)
    if others:
        config.nav.append({"More": others})
    decisions = sorted(f"decisions/{path.name}" for path in (ROOT / "docs" / "decisions").glob("*.md"))
    config.nav.append({"Decisions": decisions})
    return config


def on_files(files, config):
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, content=_links((ROOT / name).read_text(), "", uri)))
    texts = [(ROOT / name, "") for name in PAGES] + [(path, path.parent) for path in (ROOT / "docs").rglob("*.md")]
    linked = {
        _in_repository(link[2], Path(base).relative_to(ROOT).as_posix() if base else "")
        for path, base in texts
        for part in BLOCK.split(path.read_text())[::2]
        for link in LINK.finditer(part)
    }
    for target in sorted(target for target in linked if target and _is_source(target)):
        files.append(File.generated(config, f"source/{target}.md", content=_source(target)))
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri in PAGES.values() or page.file.src_uri.startswith("source/"):
        return markdown
    return _links(markdown, posixpath.join("docs", posixpath.dirname(page.file.src_uri)), page.file.src_uri)


def on_page_content(html, page, config, files):
    """Sphinx's roles in docstrings are names."""
    return ROLE.sub(r"<code>\1</code>", html)


def _in_repository(link, base):
    """A link's target as a path in the repository; None if it goes elsewhere."""
    if not link or re.match(r"[a-z]+:", link):
        return None
    return posixpath.normpath(posixpath.join(base, link))


def _is_source(target):
    return not target.startswith("docs/") and target not in PAGES and (ROOT / target).is_file()


def _links(markdown, base, uri):
    """Those that leave docs/ lead into the site."""

    def moved(link):
        target = _in_repository(link[2], base)
        if target is None:
            return link[0]
        inside = PAGES.get(target) or (f"source/{target}.md" if _is_source(target) else target.removeprefix("docs/"))
        return f"{link[1]}{posixpath.relpath(inside, posixpath.dirname(uri) or '.')}{link[3] or ''}{link[4]}"

    return "".join(part if k % 2 else LINK.sub(moved, part) for k, part in enumerate(BLOCK.split(markdown)))


def _source(target):
    text = (ROOT / target).read_text()
    fence = "`" * max(4, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    language = LANGUAGES.get(Path(target).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {target}\n\n{fence}{language}\n{text}\n{fence}\n"
