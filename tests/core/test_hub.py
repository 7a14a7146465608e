"""Whether the hub is there is decided within two seconds, against real sockets; files, and what is wrong with them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import get_session

from core import errors
from core.arguments import parse_arguments
from core.errors import UserError
from core.hub import HubArguments, go_offline_if_unreachable, is_local, load_splits, loading, model_options
from tests.conftest import pairs, write_jsonl

# What goes wrong in the probe's thread must not be printed between the run's lines.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
NOT_HERE = "nobody/no-such-model"


class Answer(BaseHTTPRequestHandler):
    status = 200
    asked: tuple[str, ...] = ()

    def do_HEAD(self) -> None:
        Answer.asked += (self.path,)
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may use the network; what the code under test switches is put back afterwards."""
    monkeypatch.setattr(errors, "_warned", set())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "HF_EVALUATE_OFFLINE"):
        monkeypatch.setenv(name, "0")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    get_session()  # its import is not what is measured
    Answer.asked = ()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Answer) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{running.server_port}")
        yield running
        running.shutdown()
        thread.join()


def decide(*names: str | None) -> tuple[bool, float]:
    start = time.perf_counter()
    return go_offline_if_unreachable(*names), time.perf_counter() - start


def assert_offline(caplog: pytest.LogCaptureFixture) -> None:
    assert constants.HF_HUB_OFFLINE is True
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["HF_EVALUATE_OFFLINE"] == "1"
    assert len(caplog.messages) == 1
    assert constants.ENDPOINT in caplog.messages[0]


@pytest.mark.parametrize("status", [200, 404, 503])
def test_any_answer_keeps_the_network(server, monkeypatch, caplog, status):
    monkeypatch.setattr(Answer, "status", status)
    reachable, seconds = decide(NOT_HERE)
    assert reachable
    assert Answer.asked == ("/",)
    assert seconds < 1
    assert constants.HF_HUB_OFFLINE is False
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    assert not caplog.messages


def test_a_refused_connection_goes_offline_at_once(monkeypatch, caplog):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else takes the port
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        reachable, seconds = decide(None, NOT_HERE)
        assert not reachable
        assert seconds < 1.5
        assert_offline(caplog)
        assert decide(NOT_HERE)[0] is False  # and it is not looked for again
    assert len(caplog.messages) == 1


def test_a_hub_that_never_answers_takes_two_seconds(monkeypatch, caplog):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # the system accepts; nobody reads
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        reachable, seconds = decide(NOT_HERE)
        assert not reachable
        assert seconds < 2
        assert_offline(caplog)


def test_a_name_server_that_drops_packets_takes_two_seconds(monkeypatch, caplog):
    released = threading.Event()

    def look_up(*_: object, **__: object) -> list:
        released.wait(10)
        raise socket.gaierror("no answer")

    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    reachable, seconds = decide(NOT_HERE)
    released.set()
    assert not reachable
    assert seconds < 2
    assert_offline(caplog)


@pytest.mark.parametrize("endpoint", ["not an address", "http://host:port", ""])
def test_an_endpoint_that_is_none_goes_offline(monkeypatch, caplog, endpoint):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    assert decide(NOT_HERE)[0] is False
    assert_offline(caplog)


def test_local_names_never_probe(server, tmp_path, caplog):
    assert decide(None, str(tmp_path))[0] is True
    assert decide()[0] is True
    assert Answer.asked == ()
    assert decide(str(tmp_path), NOT_HERE)[0] is True  # one that is not local is enough
    assert Answer.asked == ("/",)


def test_offline_by_the_user_never_probes(server, monkeypatch, caplog):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert decide(NOT_HERE)[0] is False
    assert Answer.asked == ()
    assert not caplog.messages  # the user knows


@pytest.mark.parametrize("name", [NOT_HERE, "a" * 5000, "nul\0character"])
def test_names_that_are_no_paths_are_not_local(name):
    assert not is_local(name)


# ------------------------------------------------------------------------------------------------------ models and data


def hub_flags(*argv: str, dataset: str | None = None):
    args = parse_arguments(["--do_eval", *argv], HubArguments, description="test")
    args.dataset_name, args.dataset_config_name = dataset, None
    return args


def test_what_goes_wrong_while_loading_is_one_line():
    with (
        pytest.raises(UserError, match=r"^--model_name_or_path x cannot be loaded: first$") as error,
        loading("--model_name_or_path x"),
    ):
        raise OSError("first\nsecond")
    assert isinstance(error.value.__cause__, OSError)
    with pytest.raises(UserError, match=r"cannot be loaded: the cause$"), loading("x"):
        raise ValueError("outer") from KeyboardInterrupt("the cause")
    with pytest.raises(UserError, match=r"cannot be loaded: KeyError$"), loading("x"):
        raise KeyError
    with pytest.raises(UserError, match=r"^mine$"), loading("x"):
        raise UserError("mine")
    with loading("x"):
        pass


def test_a_failure_without_the_hub_says_so(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(UserError, match=r"gone; the hub was not reachable"), loading("x", NOT_HERE):
            raise OSError("gone")
        with pytest.raises(UserError, match=r"gone$"), loading("x", None):
            raise OSError("gone")


def test_an_uncached_data_set_without_the_hub_is_one_line(monkeypatch, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        start = time.perf_counter()
        with pytest.raises(UserError, match=f"--dataset_name {NOT_HERE} cannot be loaded.*not in the cache"):
            load_splits(hub_flags("--cache_dir", str(tmp_path), dataset=NOT_HERE), {"train": None})
        assert time.perf_counter() - start < 15  # the libraries' own retries would take longer


def test_model_options():
    assert model_options(hub_flags()) == {
        "cache_dir": None,
        "revision": "main",
        "token": None,
        "trust_remote_code": False,
    }
    argv = ["--cache_dir", "c", "--model_revision", "r", "--token", "t", "--trust_remote_code"]
    given = {"cache_dir": "c", "revision": "r", "token": "t", "trust_remote_code": True}
    assert model_options(hub_flags(*argv)) == given


def test_one_file_per_split(server, tmp_path):
    files = {
        split: str(write_jsonl(tmp_path / f"{split}.jsonl", pairs(n, n))) for split, n in [("train", 5), ("test", 3)]
    }
    (tmp_path / "table.csv").write_text("text,summary\na b,a\n")
    files["validation"] = str(tmp_path / "table.csv")
    splits = load_splits(hub_flags("--cache_dir", str(tmp_path / "cache")), {**files, "extra": None})
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 5, "test": 3, "validation": 1}
    assert list(splits["train"]) == pairs(5, 5)
    assert Answer.asked == ()  # files need no hub


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", None, "--train_file: .*rows.jsonl does not exist"),
        ("rows.jsonl", "", "is empty"),
        ("rows.txt", "a", "must end in .csv, .json, .jsonl, .parquet"),
        ("rows.jsonl", '{"text": "a"}\n{"text', "--train_file: .*rows.jsonl cannot be loaded"),
        ("rows.parquet", "no parquet", "cannot be loaded"),
    ],
)
def test_faulty_files_are_named_in_one_line(tmp_path, name, content, message):
    path: Path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message) as error:
        load_splits(hub_flags("--cache_dir", str(tmp_path / "cache")), {"train": str(path)})
    assert "\n" not in str(error.value)


def test_a_name_and_files_exclude_each_other(tmp_path):
    with pytest.raises(UserError, match=f"--dataset_name {NOT_HERE} and --train_file"):
        load_splits(hub_flags(dataset=NOT_HERE), {"train": "rows.jsonl"})
