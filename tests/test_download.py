"""gossamer data get, against a real server on loopback: whole, broken off and resumed, wrong, hostile."""

import hashlib
import http.server
import io
import os
import signal
import tarfile
import threading
import time
import zipfile
from dataclasses import dataclass, field

import pytest
from typer.testing import CliRunner

from gossamer import cli
from gossamer.apps import data
from gossamer.apps.data import catalog, download
from gossamer.apps.data.catalog import Archive, Dataset
from gossamer.errors import GossamerError
from tests import datasets


@dataclass
class Site:
    """What the server has, and how it misbehaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True  # it knows what Range means
    breaks: list[int] = field(default_factory=list)  # after so many bytes of the next answers, the connection is cut
    errors: list[int] = field(default_factory=list)  # the next answers
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    during: object = None  # called in the middle of an answer
    url: str = ""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def log_message(self, *args):
        pass

    def do_GET(self):
        site, asked = self.site, self.headers.get("Range")
        site.asked.append((self.path, asked))
        content = site.files.get(self.path)
        if site.errors or content is None:
            self.send_error(site.errors.pop(0) if site.errors else 404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and site.ranges else 0
        if start and start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        cut = site.breaks.pop(0) if site.breaks else None
        body = content[start:] if cut is None else content[start : start + cut]
        self.wfile.write(body[: len(body) // 2])
        if site.during:
            site.during()
        self.wfile.write(body[len(body) // 2 :])
        if cut is not None:
            self.close_connection = True


@pytest.fixture
def site():
    made = Site()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"site": made}))
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


def tar(entries):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as made:
        for entry, content in entries:
            info = tarfile.TarInfo(entry) if isinstance(entry, str) else entry
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


GOOD = [("set/mark.bin", os.urandom(200_000)), ("set/readme", b"text")]


def offered(site, content=None, kind="tar", md5=None):
    content = tar(GOOD) if content is None else content
    site.files["/a/set.tar.gz"] = content
    archive = Archive(f"{site.url}/a/set.tar.gz", md5 or hashlib.md5(content).hexdigest(), kind)
    return Dataset("set", "A set", "small", "none", ("set/mark.bin",), (archive,), "no advice")


def got(dataset, folder, source=None):
    seen = []
    download.get(dataset, folder, source, lambda *row: seen.append(row), pause=0.01)
    assert (folder / "set" / "mark.bin").read_bytes() == GOOD[0][1]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing else is left
    return seen


def fails(message, dataset, folder, left=(), **more):
    with pytest.raises(GossamerError, match=message):
        download.get(dataset, folder, None, lambda *row: None, pause=0.01, **more)
    assert not folder.exists()
    work = folder.with_name(folder.name + ".download")
    found = sorted(path.name for path in work.iterdir()) if work.exists() else []
    assert found == sorted(left)


def test_a_whole_download(site, tmp_path):
    dataset = offered(site)
    seen = got(dataset, tmp_path / "deep" / "set")
    size = len(site.files["/a/set.tar.gz"])
    assert seen[0] == ("set.tar.gz", 0, size)
    assert seen[-1] == ("set.tar.gz", size, size)
    assert site.asked == [("/a/set.tar.gz", None)]


def test_broken_in_the_middle_it_goes_on_there(site, tmp_path):
    dataset = offered(site)
    site.breaks = [70_000, 50_000]
    got(dataset, tmp_path / "set")
    assert [asked for _, asked in site.asked] == [None, "bytes=70000-", "bytes=120000-"]


def test_the_next_command_goes_on_where_the_last_one_gave_up(site, tmp_path):
    dataset = offered(site)
    site.breaks = [70_000, 0, 0, 0, 0, 0]
    fails("broke off at byte 70000: .*give the same command again", dataset, tmp_path / "set", ["lock", "set.tar.gz.part"])
    site.breaks = []
    site.asked.clear()
    got(dataset, tmp_path / "set")
    assert site.asked == [("/a/set.tar.gz", "bytes=70000-")]


def test_a_server_that_ignores_ranges_sends_all_of_it_again(site, tmp_path):
    dataset = offered(site)
    site.breaks, site.ranges = [70_000], False
    got(dataset, tmp_path / "set")
    assert len(site.asked) == 2


def test_a_part_that_is_whole_already(site, tmp_path):
    dataset = offered(site)
    work = tmp_path / "set.download"
    work.mkdir()
    (work / "set.tar.gz.part").write_bytes(site.files["/a/set.tar.gz"])
    got(dataset, tmp_path / "set")
    assert len(site.asked) == 1


def test_a_part_longer_than_the_file_starts_again(site, tmp_path):
    dataset = offered(site)
    work = tmp_path / "set.download"
    work.mkdir()
    (work / "set.tar.gz.part").write_bytes(bytes(500_000))
    got(dataset, tmp_path / "set")


def test_a_busy_server_is_asked_again(site, tmp_path):
    dataset = offered(site)
    site.errors = [503, 500]
    got(dataset, tmp_path / "set")
    assert len(site.asked) == 3
    site.errors = [503] * 10
    fails("broke off at byte 0: the server says 503", dataset, tmp_path / "other", ["lock", "set.tar.gz.part"])


def test_a_wrong_checksum(site, tmp_path):
    dataset = offered(site, md5="0" * 32)
    fails(f"is not the official file: its .* bytes have MD5 .*, {'0' * 32} was expected", dataset, tmp_path / "set")


def test_a_truncated_file_that_the_server_calls_whole(site, tmp_path):
    whole = tar(GOOD)
    dataset = offered(site, whole[:-1000], md5=hashlib.md5(whole).hexdigest())
    fails("is not the official file", dataset, tmp_path / "set")
    fails("can't be unpacked", offered(site, whole[:-1000]), tmp_path / "set")  # were its checksum the official one


def test_a_missing_file(site, tmp_path):
    dataset = offered(site)
    site.files.clear()
    fails("the server says 404 Not Found; try another address with --from", dataset, tmp_path / "set")


def test_nobody_there(tmp_path, site):
    dataset = Dataset("set", "A set", "", "", ("x",), (Archive("http://127.0.0.1:9/x.tar", "0" * 32, "tar"),), "")
    fails("broke off at byte 0: .*refused", dataset, tmp_path / "set", ["lock", "x.tar.part"])
    with pytest.raises(GossamerError, match="is not an address to download from"):
        download.get(offered(site), tmp_path / "set", "file:///etc", lambda *row: None)


def link(name, target, kind):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "entries",
    [
        [*GOOD, ("../outside", b"x")],
        [*GOOD, ("set/../../outside", b"x")],
        [*GOOD, (link("set/way", "../..", tarfile.SYMTYPE), b""), ("set/way/outside", b"x")],
        [*GOOD, (link("set/way", "/etc/passwd", tarfile.SYMTYPE), b"")],
        [*GOOD, (link("set/way", "../../outside", tarfile.LNKTYPE), b"")],
        [*GOOD, (link("set/device", "", tarfile.CHRTYPE), b"")],
    ],
    ids=["parent", "winding", "symlink", "absolute symlink", "hard link", "device"],
)
def test_a_tar_entry_that_points_outside(site, tmp_path, entries):
    fails("is refused: ", offered(site, tar(entries)), tmp_path / "deep" / "set")
    assert list(tmp_path.rglob("*")) == [tmp_path / "deep"]


@pytest.mark.parametrize("name", ["../outside", "/outside", "set/../../outside", "..\\outside"])
def test_a_zip_entry_that_points_outside(site, tmp_path, name):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        made.writestr("set/mark.bin", b"x")
        made.writestr(name, b"x")
    fails("points outside of the folder", offered(site, buffer.getvalue(), "zip"), tmp_path / "deep" / "set")
    assert list(tmp_path.rglob("*")) == [tmp_path / "deep"]


def test_another_archive_is_not_it(site, tmp_path):
    fails(
        "holds no set/mark.bin: it is not A set",
        offered(site, tar([("other", b"x")])),
        tmp_path / "set",
        ["lock", "set.tar.gz"],
    )


def test_a_folder_that_is_there_is_left_alone(site, tmp_path):
    (tmp_path / "set").mkdir()
    got(offered(site), tmp_path / "set")  # an empty one is taken
    with pytest.raises(GossamerError, match="is there already and not empty"):
        download.get(offered(site), tmp_path / "set", None, lambda *row: None)
    assert (tmp_path / "set" / "set" / "mark.bin").exists()


def test_one_at_a_time(site, tmp_path):
    with download._locked(tmp_path / "set.download"), pytest.raises(GossamerError, match="another gossamer data get"):
        download.get(offered(site), tmp_path / "set", None, lambda *row: None)


def test_a_folder_that_cannot_be_made(site, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(GossamerError, match="can't be written"):
        download.get(offered(site), tmp_path / "file" / "set", None, lambda *row: None)


# --- The command -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.delenv(catalog.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "500")
    return tmp_path


def wikitext_zip(site, tmp_path):
    """A small WikiText-2 in the official archive's layout, under its name, with its own checksum in the catalog."""
    folder = tmp_path / "made"
    folder.mkdir()
    datasets.wikitext(folder, official=True)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for path in folder.iterdir():
            made.write(path, f"wikitext-2/{path.name}")
    content = buffer.getvalue()
    site.files["/mirror/wikitext-2-v1.zip"] = content
    official = catalog.WIKITEXT2.archives[0]
    small = Archive(official.url, hashlib.md5(content).hexdigest(), official.kind)
    object.__setattr__(catalog.WIKITEXT2, "archives", (small,))
    return official


@pytest.fixture
def small_wikitext(site, tmp_path):
    official = wikitext_zip(site, tmp_path)
    yield
    object.__setattr__(catalog.WIKITEXT2, "archives", (official,))


@pytest.mark.parametrize("address", ["/mirror", "/mirror/", "/mirror/wikitext-2-v1.zip"])
def test_get_then_load(site, home, small_wikitext, address):
    run = CliRunner()
    done = run.invoke(cli.app, ["data", "get", "wikitext2", "--from", site.url + address])
    assert done.exit_code == 0, done.output
    assert f"WikiText-2 is in {home}/gossamer/wikitext2" in done.output
    corpus = data.wikitext2(counts={"train": 20, "valid": 13, "test": 10})
    assert len(corpus.train) == 20
    again = run.invoke(cli.app, ["data", "get", "wikitext2"])
    assert "is there already" in again.output
    listed = run.invoke(cli.app, ["data"]).output
    assert f"found: {home}/gossamer/wikitext2" in listed
    elsewhere = run.invoke(cli.app, ["data", "get", "wikitext2", "--to", str(home / "here"), "--from", site.url + address])
    assert f"task.data = '{home}/here'" in elsewhere.output
    assert (home / "here" / "wikitext-2" / "wiki.train.tokens").exists()


def test_ctrl_c_keeps_what_came(site, home, small_wikitext, no_gc):
    url = site.url + "/mirror"
    part = home / "gossamer" / "wikitext2.download" / "wikitext-2-v1.zip.part"
    half = len(site.files["/mirror/wikitext-2-v1.zip"]) // 2

    def interrupt():  # once half of it is on the disk
        while not part.exists() or part.stat().st_size < half:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)

    site.during = interrupt
    done = CliRunner().invoke(cli.app, ["data", "get", "wikitext2", "--from", url])
    assert done.exit_code == 130
    assert "what came is kept" in done.output
    assert part.stat().st_size == half
    site.during = None
    assert CliRunner().invoke(cli.app, ["data", "get", "wikitext2", "--from", url]).exit_code == 0
    assert site.asked[-1][1] == f"bytes={half}-"


def test_the_list_says_what_is_where(home):
    done = CliRunner().invoke(cli.app, ["data"])
    assert done.exit_code == 0
    for dataset in catalog.ALL:
        assert dataset.name in done.output
    assert "gossamer data get cifar10" in done.output
    assert "register at image-net.org" in done.output


def test_names_that_cannot_be_got(home):
    for name, message in (("cifar", "there is no data set 'cifar'; known are digits, "), ("imagenet", "no free download")):
        with pytest.raises(GossamerError, match=message):
            CliRunner().invoke(cli.app, ["data", "get", name], catch_exceptions=False)
    assert not (home / "gossamer").exists()


def test_every_official_address_is_complete():
    for dataset in catalog.ALL:
        for archive in dataset.archives:
            assert archive.kind in ("tar", "zip", "file")
            assert len(bytes.fromhex(archive.md5)) == 16
            assert archive.url.startswith("http")
        assert dataset.marks or not dataset.archives


def test_fashion_mnist_from_its_four_files(site, home):
    folder = home / "made"
    folder.mkdir()
    datasets.fashion(folder)
    archives = []
    for archive in catalog.FASHION_MNIST.archives:
        content = (folder / archive.name).read_bytes()
        site.files[f"/{archive.name}"] = content
        archives.append(Archive(archive.url, hashlib.md5(content).hexdigest(), archive.kind))
    small = Dataset("fashion-mnist", "F", "", "", catalog.FASHION_MNIST.marks, tuple(archives), "")
    site.breaks = [2000, 100]
    made = download.get(small, home / "set", site.url, lambda *row: None, pause=0.01)
    assert len(data.fashion_mnist(made, counts=(20, 10))[0][1]) == 20
