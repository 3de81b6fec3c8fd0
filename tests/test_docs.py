"""Pages in a checkout: no dead link, to a file or to a heading."""

import re
from pathlib import Path

import pytest

from tests.commands import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")])
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.M | re.S)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+(?:\([^()\s]*\))?)\)")


def anchors(page: Path) -> set[str]:
    """As GitHub and the site make them: small letters, no punctuation, - for each space."""
    headings = re.findall(r"^#+ +(.*?)\s*$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    text = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in text}


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue  # elsewhere: there is no network here
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page):
    assert not dead_links(page)


def test_a_dead_link_is_seen(tmp_path):
    (tmp_path / "there.md").write_text("# A heading: with `code`, and more\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](gone.md) [c](there.md#a-heading-with-code-and-more) [d](there.md#gone) [e](#here) `[f](code.md)`\n"
        "![g](gone.svg) [h](https://example.org)\n# Here\n"
    )
    assert dead_links(page) == ["gone.md", "there.md#gone", "gone.svg"]


def test_the_site_has_each_page_of_the_docs():
    """The navigation names pages that are here; .ci/site.py adds those that it does not name."""
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    made = {"index.md", "changelog.md", "contributing.md", "security.md"}
    assert len(named) == len(set(named))
    assert all((ROOT / "docs" / page).exists() for page in named if page not in made)
