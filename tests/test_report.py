"""The report in a real browser: drawn from the store, nothing fetched, no errors, and it fits a phone."""

import io
import json
import os
import shutil
import sqlite3
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select
from torch.nn.functional import cross_entropy

from gossamer.apps import data
from gossamer.data.partitions import digest, load
from gossamer.data.sampling import sampler
from gossamer.data.tasks import Metric, Task
from gossamer.dbench import analysis, bench, compare
from gossamer.dbench import partition as partitions
from gossamer.dbench import spec as specs
from gossamer.dbench.report import write
from gossamer.dbench.store import FILE, Store
from tests.models import Cnn, task

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
FIGURES = {"epochs", "connections", "scale", "bytes", "models", "dispersion", "ranks", "early", "tensors", "degree"}
# Without a browser there is nothing to test with; CI installs one, and there a missing browser is a failure.
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER) and not os.environ.get("CI"), reason="no chromium and chromedriver on this machine"
)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    raw = {
        "name": "a <b> & </script>",
        "replicas": [4, 8],
        "methods": ["centralized", "ring", "complete", "ada", {"name": "wild", "graph": "ring", "lr": 1e9}],
        "seeds": [0, 1],
        "backend": "tape",
        "task": {"name": "digits/mlp", "epochs": 5, "batch": 16},
        "optimizer": {"lr": 0.3},
        "profile": {"every": 3},
        "target": {"value": 0.5},
    }
    out = tmp_path_factory.mktemp("report")
    bench(specs.build(raw), out, jobs=1, quiet=True)
    write(out)
    return out


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """One browser for all pages: its start takes longer than a test."""
    options = Options()
    options.binary_location = CHROMIUM or ""
    flags = "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
    for flag in [*flags.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield started
    started.quit()


@pytest.fixture
def browser(driver):
    driver.get("about:blank")
    for kind in ("browser", "performance"):
        driver.get_log(kind)  # of the test before
    return driver


def open_page(driver, output, width=1200, scheme="light"):
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(f"file://{output / 'report.html'}")
    assert driver.find_element(By.TAG_NAME, "html").get_attribute("data-ready") == "yes"


def plotted(driver, figure):
    """What plotly holds for a figure: {name: (x, y)}."""
    script = "return document.getElementById(arguments[0]).data.map(t => [t.name || t.type, t.x, t.y, t.z])"
    return {name: (x, y, z) for name, x, y, z in driver.execute_script(script, figure)}


@needs_browser
def test_the_page_draws_everything_and_fetches_nothing(browser, output):
    open_page(browser, output)
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    page = f"file://{output / 'report.html'}"
    fetched = [s["request"]["url"] for s in sent if s["documentURL"] == page]  # the browser's own start page is not ours
    assert page in fetched
    assert {url.partition(":")[0] for url in fetched} <= {"file", "data", "blob"}, fetched
    drawn = {
        p.get_attribute("id")
        for p in browser.find_elements(By.CSS_SELECTOR, ".plot")
        if p.find_elements(By.CSS_SELECTOR, ".main-svg")
    }
    assert drawn == FIGURES
    for figure in FIGURES - {"tensors"}:
        shapes = browser.execute_script(
            "return document.getElementById(arguments[0]).querySelectorAll('.trace path').length", figure
        )
        assert shapes > 0, figure
    assert browser.title == "DBench: a <b> & </script>"
    assert len(browser.find_elements(By.CSS_SELECTOR, ".row svg")) == 3
    assert "2 diverged" in browser.find_element(By.TAG_NAME, "table").text
    assert "4 of 20 runs diverged" in browser.find_element(By.TAG_NAME, "ul").text


@needs_browser
def test_plotted_points_are_those_of_the_store(browser, output):
    open_page(browser, output)
    runs = analysis.load(Store(output / FILE))
    for method in ("centralized", "ring", "ada"):
        cell = analysis.select(runs, method, 8)
        expected = [sum(r.epochs[e].value for r in cell) / len(cell) for e in range(5)]
        x, y, _ = plotted(browser, "epochs")[method]
        assert x == [1, 2, 3, 4, 5]
        assert y == pytest.approx(expected, rel=1e-4)
        assert sorted(plotted(browser, "connections")[method][1]) == pytest.approx(sorted(r.value for r in cell), rel=1e-4)
    curve = analysis.dispersion_over_time(runs, "ring", 8, "gini")
    x, y, _ = plotted(browser, "dispersion")["ring"]
    assert x == curve.steps.tolist()
    assert y == pytest.approx(curve.mean.tolist(), rel=1e-4)
    assert "centralized" not in plotted(browser, "ranks")
    finals = {(f.method, f.replicas): f for f in analysis.finals(runs)}
    x, y, _ = plotted(browser, "scale")["complete"]
    assert y == pytest.approx([finals["complete", n].value.mean for n in (4, 8)], rel=1e-4)
    assert "wild" not in plotted(browser, "connections")


@needs_browser
def test_selectors_change_what_is_drawn(browser, output):
    open_page(browser, output)
    before = plotted(browser, "tensors")["heatmap"][2]
    section = browser.find_element(By.ID, "tensors").find_element(By.XPATH, "..")
    choices = [Select(box) for box in section.find_elements(By.TAG_NAME, "select")]
    assert [o.text for o in choices[0].options] == ["ring", "complete", "ada", "wild"]
    choices[0].select_by_visible_text("complete")
    after = plotted(browser, "tensors")["heatmap"][2]
    assert after != before
    choices[1].select_by_visible_text("4")
    assert plotted(browser, "tensors")["heatmap"][2] != after
    runs = analysis.load(Store(output / FILE))
    section = browser.find_element(By.ID, "epochs").find_element(By.XPATH, "..")
    Select(section.find_element(By.TAG_NAME, "select")).select_by_visible_text("4")
    cell = analysis.select(runs, "ring", 4)
    expected = [sum(r.epochs[e].value for r in cell) / 2 for e in range(5)]
    assert plotted(browser, "epochs")["ring"][1] == pytest.approx(expected, rel=1e-4)


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(browser, output, scheme):
    open_page(browser, output, width=360, scheme=scheme)
    wide, page = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert (wide, page) == (360, 360)
    colours = browser.execute_script("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
    light = sum(map(int, colours[1].removeprefix("rgb(").removesuffix(")").split(","))) > 380
    assert light == (scheme == "light")


def test_the_page_is_safe_text(output):
    text = (output / "report.html").read_text()
    assert "a &lt;b&gt; &amp; &lt;/script&gt;" in text
    assert text.count("@@") <= text.count("@@", text.index("<script>"))
    assert (output / "report.html").stat().st_size < 12e6


def test_lower_is_better_everywhere(tmp_path):
    """A perplexity: the table's best, the sentences, the axes and the comparison of two outputs know the direction."""
    score = Metric("perplexity", lambda model, x, y: cross_entropy(model(x), y, reduction="none"), False, "exp")
    own = replace(task(Cnn), metric=score)
    raw = {
        "name": "lower",
        "replicas": [4],
        "methods": ["centralized", "complete", {"name": "slow", "graph": "ring", "lr": 0.001}],
        "seeds": [0, 1],
        "backend": "tape",
        "task": {"name": "toy", "epochs": 2, "batch": 8},
        "optimizer": {"lr": 0.05},
        "target": {"value": 5.0},
    }
    for name in ("a", "b"):
        bench(specs.build(raw), tmp_path / name, task=own, quiet=True)
    page = write(tmp_path / "a").read_text()
    values = {m: [r.value for r in Store(tmp_path / "a" / FILE).runs() if r.method == m] for m in ("complete", "slow")}
    assert max(values["complete"]) < min(values["slow"])
    table = page[page.index("<table>") : page.index("</table>")]
    assert "<strong>" not in table  # two seeds, which tell nothing apart
    assert "lower is better. Its BatchNorm statistics are estimated anew on training data." in page
    assert "Worse than centralized at n=4, seed by seed: slow (+" in page
    assert "(slow) to" in page[page.index("At n=4 the averaged model") :][:200]
    figure = next(f for f in json.loads(page.split("const figures = ")[1].split(";\n")[0]) if f["id"] == "epochs")
    assert figure["variants"][0]["layout"]["yaxis"]["type"] == "log"
    assert figure["variants"][0]["layout"]["yaxis"]["title"]["text"] == "perplexity (lower is better)"
    target = page[page.index("To reach perplexity 5 at n=4") :][:200]
    assert "slow never" in target
    with sqlite3.connect(tmp_path / "b" / FILE) as db:  # as if B had come out better
        db.execute("UPDATE runs SET value = value - 0.5 - seed * 0.01")
    console = Console(width=200, file=io.StringIO())
    console.print(compare.table(Store(tmp_path / "a" / FILE), Store(tmp_path / "b" / FILE)))
    assert console.file.getvalue().count("differs: B is better") == 3


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    """The same data under three partitions."""
    made = {}
    for partition in ("dirichlet:alpha=0.3", "shards", "reshuffled"):
        raw = {
            "name": partition,
            "replicas": [4, 11],
            "methods": ["ring"],
            "seeds": [3, 4],
            "backend": "tape",
            "task": {"name": "digits/mlp", "epochs": 1, "batch": 16, "partition": partition},
        }
        made[partition] = tmp_path_factory.mktemp("divided")
        bench(specs.build(raw), made[partition], jobs=1, quiet=True)
        write(made[partition])
    return made


def counted(partition, n):
    """Samples of each label on each replica, one by one."""
    train, _ = data.digits()
    table = [[0] * n for _ in range(10)]
    for i, shard in enumerate(sampler(partition, train, n, 16, 3).shards):
        for sample in shard.tolist():
            table[int(train[1][sample])][i] += 1
    return table


@pytest.mark.parametrize("partition", ["dirichlet:alpha=0.3", "shards"])
def test_the_split_is_counted_and_kept_in_the_store(divided, partition):
    store = Store(divided[partition] / FILE)
    kept = partitions.kept(store)
    assert (kept.name, kept.seed, kept.distinct, kept.labels) == (partition, 3, 10, [str(k) for k in range(10)])
    for n in (4, 11):
        assert kept.counts[n] == counted(partition, n)
        assert kept.kinds[n] == [sum(row[i] > 0 for row in kept.counts[n]) for i in range(n)]
        assert sum(map(sum, kept.counts[n])) == 1437
    sizes = [sum(row[i] for row in kept.counts[11]) for i in range(11)]
    text = (divided[partition] / "report.html").read_text()
    assert f"at n=11, seed 3, a replica holds {min(sizes)} to {max(sizes)} samples (mean 131)" in text


def test_a_split_is_saved_with_its_hash_and_gives_the_same_run_again(divided, tmp_path):
    out = divided["dirichlet:alpha=0.3"]
    kept = partitions.kept(Store(out / FILE))
    files = {(n, seed): out / partitions.file_name(n, seed) for n in (4, 11) for seed in (3, 4)}
    assert all(path.exists() for path in files.values())
    assert digest(load(files[11, 3], 1437, 11)) == kept.digests[11]
    assert f"Its hash is {kept.digests[11]}; the file is split-n11-seed3.safetensors." in (out / "report.html").read_text()
    raw = {
        "name": "again",
        "replicas": [11],
        "methods": ["ring"],
        "seeds": [3],
        "backend": "tape",
        "task": {"name": "digits/mlp", "epochs": 1, "batch": 16, "partition": f"file:path={files[11, 3]}"},
    }
    bench(specs.build(raw), tmp_path, jobs=1, quiet=True)
    (again,) = Store(tmp_path / FILE).runs()
    (before,) = [run for run in Store(out / FILE).runs() if (run.replicas, run.seed) == (11, 3)]
    assert again.value == before.value
    assert partitions.kept(Store(tmp_path / FILE)).digests[11] == kept.digests[11]


def test_many_labels_are_put_together():
    task = Task(
        "many", lambda: torch.nn.Linear(1, 1), (torch.zeros(1200, 1), torch.arange(1200) % 250), (torch.zeros(1, 1),) * 2
    )
    raw = {"name": "x", "replicas": [5], "methods": ["ring"], "task": {"name": "digits/mlp", "epochs": 1, "batch": 1, "partition": "shards"}}  # fmt: skip
    made = partitions.split(specs.build(raw), task)
    assert len(made.labels) == len(made.counts[5]) == 84
    assert (made.labels[0], made.labels[-1], made.distinct) == ("0–2", "249", 250)
    assert sum(map(sum, made.counts[5])) == 1200
    assert max(made.kinds[5]) <= 240
    unlabelled = Task("none", lambda: torch.nn.Linear(1, 1), (torch.zeros(1200, 1),), (torch.zeros(1, 1),))
    assert partitions.split(specs.build(raw), unlabelled) is None


def test_without_a_split_there_is_nothing_to_draw(divided):
    assert partitions.kept(Store(divided["reshuffled"] / FILE)) is None
    text = (divided["reshuffled"] / "report.html").read_text()
    assert "split for good" not in text
    assert '"id":"partition"' not in text


@needs_browser
def test_the_split_is_drawn(browser, divided):
    open_page(browser, divided["dirichlet:alpha=0.3"])
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    table = counted("dirichlet:alpha=0.3", 11)
    sizes = [sum(row[i] for row in table) for i in range(11)]
    x, y, z = plotted(browser, "partition")["heatmap"]
    assert (x, y) == (list(range(11)), [str(k) for k in range(10)])
    assert any(v is None for row in z for v in row)
    for row, counts in zip(z, table, strict=True):
        assert [v or 0 for v in row] == pytest.approx([c / size for c, size in zip(counts, sizes, strict=True)], rel=1e-4)
    section = browser.find_element(By.ID, "partition").find_element(By.XPATH, "..")
    choices = [Select(box) for box in section.find_elements(By.TAG_NAME, "select")]
    choices[0].select_by_visible_text("4")
    choices[1].select_by_visible_text("samples")
    assert [[v or 0 for v in row] for row in plotted(browser, "partition")["heatmap"][2]] == counted("dirichlet:alpha=0.3", 4)
