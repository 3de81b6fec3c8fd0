"""How far a bench is, in the terminal and in a browser; what it will cost, and what it has cost."""

import http.client
import json
import re
import socket
import threading
import urllib.request
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from gossamer.dbench import bench, costs, watch, work
from gossamer.dbench import spec as specs
from gossamer.dbench.store import FILE, Store
from tests.commands import inside
from tests.models import task
from tests.test_report import driver, needs_browser  # noqa: F401  (a fixture)

RAW = {
    "name": "watched <b>",
    "replicas": [4],
    "methods": ["centralized", "ring"],
    "seeds": [0],
    "backend": "tape",
    "task": {"name": "toy", "epochs": 3, "batch": 8},
    "profile": {"every": 5},
}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Two of four runs are finished, and what was seen meanwhile."""
    folder = tmp_path_factory.mktemp("watched")
    seen, bench_ended = [], threading.Event()

    def look():
        while not bench_ended.is_set():
            if (folder / FILE).exists():
                seen.append(watch.status(folder))

    looker = threading.Thread(target=look)
    looker.start()
    bench(specs.build(RAW), folder, task=task(), quiet=True)
    bench_ended.set()
    looker.join()
    assert any(one["run"] == "ring, n=4, seed 0" and 0 < one["step"] <= one["steps"] for now in seen for one in now["at_work"])
    assert [now["finished"] for now in seen] == sorted(now["finished"] for now in seen)
    before = Store(folder / FILE)
    shapes, metric = before.meta("task"), before.meta("metric")
    grown = specs.build(RAW | {"seeds": [0, 1]})
    Store.create(folder / FILE, grown, (metric["name"], metric["higher_is_better"]), shapes).close()
    return folder


def at_work(out):
    run = Store(out / FILE).find(specs.Cell("ring", 4, 1)).id
    return work.reporting(out, run)


def printed(now):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(watch.shown(now))
    return console.export_text()


def test_in_the_terminal(out):
    with at_work(out) as report:
        report(30, 60, 0.5, 0.25)
        now = watch.status(out)
        text = printed(now)
    assert re.search(r"watched <b>: 2 of 4 runs are finished; about \d+ s left", text)
    assert re.search(r"ring, n=4, seed 1 +30/60 +0.5 +0.25 +.*pid \d+", text)
    took = [run.seconds for run in Store(out / FILE).runs() if run.seconds]
    assert now["seconds_left"] == pytest.approx(1.5 * sum(took) / 2)
    assert [len(curve) for curve in now["curves"].values()] == [3, 3]
    assert printed(watch.status(out)) == "watched <b>: 2 of 4 runs are finished\n"  # none is at work


def test_a_page_is_for_this_machine_alone(out):
    with watch.server(out) as server:
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"127.0.0.1:{server.server_port}"
            with urllib.request.urlopen(f"http://{address}/status.json") as answer:
                assert json.load(answer)["total"] == 4
            for host, path, code in (("evil.example", "/", 403), ("localhost", "/", 200), ("127.0.0.1", "/etc/passwd", 404)):
                connection = http.client.HTTPConnection(address)
                connection.request("GET", path, headers={"Host": f"{host}:{server.server_port}"})
                assert connection.getresponse().status == code
                connection.close()
        finally:
            server.shutdown()
            thread.join()


@needs_browser
def test_in_a_browser(out, driver):  # noqa: F811
    with watch.server(out) as server, at_work(out) as report:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            report(30, 60, 0.5, 0.25)
            driver.get(f"http://127.0.0.1:{server.server_port}/")
            wait = WebDriverWait(driver, 30)
            wait.until(lambda page: page.find_element(By.TAG_NAME, "html").get_attribute("data-ready") == "yes")
            assert driver.find_element(By.TAG_NAME, "h1").text == driver.title == "watched <b>"
            assert "2 of 4 runs are finished; about" in driver.find_element(By.ID, "head").text
            assert "ring, n=4, seed 1 30/60" in driver.find_element(By.ID, "work").text
            lines = driver.find_elements(By.TAG_NAME, "polyline")
            assert [len(line.get_attribute("points").split()) for line in lines] == [3, 3]
            report(60, 60, 0.4, 0.25)
            wait.until(lambda page: "60/60" in page.find_element(By.ID, "work").text)  # it looks again by itself
            assert [entry for entry in driver.get_log("browser") if "favicon" not in entry["message"]] == []
        finally:
            server.shutdown()
            thread.join()


def test_what_it_has_cost(out):
    assert re.fullmatch(r"Processor hours: \S+ \(centralized \S+, ring \S+\)", costs.spent(Store(out / FILE)))
    assert all(run.processor_seconds > 0 for run in Store(out / FILE).runs() if run.status == "done")


@pytest.mark.parametrize(("samples", "steps"), [(4, 1), (8, 2), (16, 4)])
def test_a_dry_run_of_short_epochs_uses_one_thread(samples, steps):
    """The samples of each replica are four batches, or less."""
    threads = set()
    toy = task()

    def loss(*arguments):
        threads.add(torch.get_num_threads())
        return toy.loss(*arguments)

    few = replace(toy, train=tuple(part[: 4 * samples] for part in toy.train), loss=loss)
    spec = specs.build(RAW | {"methods": ["ring"], "task": {"name": "toy", "epochs": 1, "batch": 4}})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (cost,) = costs.estimate(spec, few)
    finally:
        torch.set_num_threads(before)
    assert threads == {1}
    assert cost.seconds > steps * cost.step > 0


def test_a_port_that_can_not_be_used_is_one_line(out):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for wrong, why in ((port, "Address already in use"), (70000, "port must be 0-65535")):
            done = inside("watch", out, "--browser", "--port", wrong)
            assert done.returncode == 2
            assert re.fullmatch(rf"gossamer: --port {wrong} can't be used: .*{why}.*; 0 takes any that is free\n", done.stderr)


def test_what_it_will_cost(tmp_path):
    changes = ["replicas=[4, 8]", "methods=['ring']", "seeds=[0, 1]", "backend='loop'", "task.epochs=2"]
    done = inside("bench", "quickstart", *changes, "--dry-run", "--jobs", 2, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert re.search(r"ring +4 +2 +\S+ +\S+ *\n +ring +8 +2 ", done.stdout)
    assert re.search(r"about \S+ processor hours; \S+ hours with 2 cells at a time", done.stdout)
    assert not (tmp_path / "out").exists()
    spec = specs.load("quickstart", changes)
    (few, _) = costs.estimate(spec, task())
    (more, _) = costs.estimate(spec.model_copy(update={"seeds": tuple(range(40))}), task())
    assert few.cells == 2
    assert more.cells == 40
    assert more.seconds > few.seconds
