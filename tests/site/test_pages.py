"""The built site in a browser: nothing is loaded from elsewhere, every page fits a telephone, and the search finds what it should."""

import functools
import os
import re
import shutil
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from tests.commands import ROOT

SITE = ROOT / "site"
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
LOADS = re.compile(
    r'<(?:script|img|iframe|source)[^>]+src="([^"]+)"|<link[^>]+rel="(?:stylesheet|preload|icon|preconnect)"[^>]*href="([^"]+)"'
)
# As for the report: without a browser there is nothing to test with, and in CI that is a failure.
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER) and not os.environ.get("CI"), reason="no chromium and chromedriver"
)


def test_pages_name_nothing_from_elsewhere():
    """Links may lead anywhere; what a page loads comes with it."""
    pages = sorted(SITE.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        for address in (src or href for src, href in LOADS.findall(page.read_text())):
            assert not re.match(r"(https?:)?//", address), f"{page}: {address}"
    for style in SITE.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", style.read_text()), style


@pytest.fixture(scope="module")
def address():
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def browser(tmp_path):
    """A new one each time: a page remembers which colours were chosen."""
    options = Options()
    options.binary_location = CHROMIUM or ""
    flags = (
        "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update"
    )
    for flag in [*flags.split(), f"--user-data-dir={tmp_path / 'profile'}"]:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@needs_browser
def test_each_page_fits_a_telephone_and_loads_nothing_from_elsewhere(browser, address):
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for page in sorted(SITE.rglob("index.html")):
        where = page.parent.relative_to(SITE).as_posix()
        if where.startswith("source/"):
            continue
        browser.get(f"{address}/{where}/")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390, where
        loaded = browser.execute_script("return performance.getEntriesByType('resource').map(r => r.name)")
        assert all(name.startswith(address) for name in loaded), where


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_are_those_of_the_machine(browser, address, scheme):
    wanted = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
    browser.get(f"{address}/?{scheme}")
    shown = ""
    for _ in range(100):
        shown = browser.execute_script(
            "return document.body.dataset.mdColorScheme + getComputedStyle(document.body).backgroundColor"
        )
        if shown.startswith("slate") == (scheme == "dark"):
            break
        time.sleep(0.1)
    lightness = sum(map(int, re.findall(r"\d+", shown)[:3])) / 3
    assert (lightness > 200) == (scheme == "light"), shown


@needs_browser
def test_the_search_finds_a_page(browser, address):
    browser.get(f"{address}/?q=quasi-global+momentum")
    found = []
    for _ in range(100):
        found = browser.execute_script("return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)")
        if found:
            break
        time.sleep(0.1)
    assert any("/methods/" in link for link in found), found
