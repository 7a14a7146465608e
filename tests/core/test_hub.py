"""Whether the hub is there is decided within two seconds, against real sockets; files, and what is wrong with them."""

from __future__ import annotations

import os
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, fields
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import get_session

from core import errors
from core.arguments import flag, parse_arguments
from core.errors import UserError
from core.hub import (
    NAMED,
    HubArguments,
    LoraArguments,
    TokenizerArguments,
    choose_length,
    fit,
    go_offline_if_unreachable,
    is_local,
    load_config,
    load_splits,
    loading,
    look_back,
    lora_flags,
    model_options,
)
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
        ("rows.jsonl", b'{"text": "a"}\n{"text": "\xe4"}\n', "rows.jsonl, line 2, byte 10: .*: this is not UTF-8"),
        ("rows.csv", b"text\na\n\xe4 b\n", "rows.csv, line 3, byte 0: .*: this is not UTF-8"),
    ],
)
def test_faulty_files_are_named_in_one_line(tmp_path, name, content, message):
    path: Path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as error:
        load_splits(hub_flags("--cache_dir", str(tmp_path / "cache")), {"train": str(path)})
    assert "\n" not in str(error.value)


def test_a_name_and_files_exclude_each_other(tmp_path):
    with pytest.raises(UserError, match=f"--dataset_name {NOT_HERE} and --train_file"):
        load_splits(hub_flags(dataset=NOT_HERE), {"train": "rows.jsonl"})


TEXT = "a b\nc\n\nd\n\ne"


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("by", "keep", "rows"),
    [
        ("paragraph", True, ["a b\nc", "d", "e"]),
        ("paragraph", False, ["a b c", "d", "e"]),
        ("line", True, ["a b\n", "c\n", "\n", "d\n", "\n", "e"]),
        ("line", False, ["a b", "c", "", "d", "", "e"]),
    ],
)
def test_text_files_are_read_by_paragraph_or_line(tmp_path, ending, by, keep, rows):
    path = tmp_path / "rows.txt"
    path.write_bytes(TEXT.replace("\n", ending).encode())
    for streaming in (False, True):
        how = {"sample_by": by, "keep_linebreaks": keep}
        args = hub_flags("--cache_dir", str(tmp_path / "cache"))
        found = load_splits(args, {"train": str(path)}, how, streaming)["train"]
        assert hasattr(found, "num_rows") is not streaming
        assert [row["text"] for row in found] == rows


def test_text_files_are_taken_only_where_rows_are_texts(tmp_path):
    (tmp_path / "rows.txt").write_text("a")
    with pytest.raises(UserError, match=r"must end in \.csv, \.json, \.jsonl, \.parquet$"):
        load_splits(hub_flags(), {"train": str(tmp_path / "rows.txt")})


@pytest.mark.parametrize("name", ["rows.txt", "rows.jsonl", "rows.csv"])
def test_a_stream_that_is_not_utf8_is_found_before_it_is_read(tmp_path, name):
    content = {"rows.txt": b"a\n\xe4", "rows.jsonl": b'{"text": "a"}\n{"text": "\xe4"}', "rows.csv": b"text\n\xe4"}
    (tmp_path / name).write_bytes(content[name])
    with pytest.raises(UserError, match=f"{name}, line 2, byte .*not UTF-8"):
        load_splits(hub_flags(), {"train": str(tmp_path / name)}, {"sample_by": "line", "keep_linebreaks": True}, True)


def test_a_folder_of_files_is_a_data_set(server, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for split, count in (("train", 4), ("validation", 2)):
        write_jsonl(folder / f"{split}.jsonl", pairs(count))
    for streaming in (False, True):
        args = hub_flags("--cache_dir", str(tmp_path / "cache"), dataset=str(folder))
        splits = load_splits(args, {}, streaming=streaming)
        assert {split: len(list(rows)) for split, rows in splits.items()} == {"train": 4, "validation": 2}
    assert Answer.asked == ()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["train.jsonl", "part/train.txt", "train.csv"])
def test_a_file_of_a_folder_that_is_not_utf8_is_named(tmp_path, name, streaming):
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(
        {".jsonl": b'{"text": "a"}\n{"text": "\xe4"}', ".txt": b"a\n\xe4", ".csv": b"text\n\xe4"}[path.suffix]
    )
    args = hub_flags("--cache_dir", str(tmp_path / "cache"), dataset=str(tmp_path / "mine"))
    with pytest.raises(UserError, match=f"{name}, line 2, byte .*not UTF-8") as error:
        load_splits(args, {}, {"sample_by": "line", "keep_linebreaks": True}, streaming)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------------- model and tokens


def model_flags(**names):
    nothing = dict.fromkeys(("model_name_or_path", "config_name", "model_type", "tokenizer_name"))
    options = {"cache_dir": None, "model_revision": "main", "token": None, "trust_remote_code": False}
    return Namespace(**nothing | options | names)


def test_the_configuration_that_is_named(tiny_gpt2, tiny_bert):
    assert load_config(model_flags()) is None
    assert load_config(model_flags(model_name_or_path=str(tiny_gpt2))).n_embd == 16
    both = load_config(model_flags(model_name_or_path=str(tiny_gpt2), config_name=str(tiny_bert)))
    assert both.model_type == "bert"
    assert load_config(model_flags(model_type="gpt2", tokenizer_name="x")).n_embd == 768
    assert load_config(model_flags(model_name_or_path=str(tiny_gpt2), model_type="gpt2")).n_embd == 16
    with pytest.raises(UserError, match="--model_type says nothing of the tokenizer: name one with --tokenizer_name"):
        load_config(model_flags(model_type="gpt2"))
    with pytest.raises(UserError, match=r"--model_type: there is no 'gpt3' \(did you mean '") as error:
        load_config(model_flags(model_type="gpt3"))
    assert len(str(error.value)) < 100


def test_a_recipe_without_tokenizers_needs_none(tiny_bert):
    args = model_flags()
    del args.tokenizer_name
    assert load_config(args) is None
    args.model_type = "vit"
    assert load_config(args).model_type == "vit"
    args.model_name_or_path = str(tiny_bert)
    assert load_config(args).model_type == "bert"
    args.model_name_or_path, args.model_type = None, "vitt"
    with pytest.raises(UserError, match=r"--model_type: there is no 'vitt' \(did you mean 'vit'\?\)"):
        load_config(args)


def test_what_is_of_tokens_is_a_group_of_its_own():
    """A recipe without texts must not promise to cut them."""
    groups = [{flag.name: flag for flag in fields(group)} for group in (HubArguments, TokenizerArguments)]
    assert not groups[0].keys() & groups[1].keys()
    assert not [name for name, flag in groups[0].items() if "token" in flag.metadata["help"] and name != "token"]
    for names in (["--tokenizer_name", "x"], ["--overwrite_cache"], ["--preprocessing_num_workers", "2"]):
        with pytest.raises(UserError, match=names[0]):
            parse_arguments(["--do_eval", *names], HubArguments, description="test")
        parse_arguments(["--do_eval", *names], HubArguments, TokenizerArguments, description="test")


@pytest.mark.parametrize(
    "name",
    [
        *("model_name_or_path", "model_type", "config_name", "dataset_name", "train_file", "validation_file"),
        *("test_file", "train_dir", "validation_dir", "test_dir"),
    ],
)
def test_what_names_a_model_or_data_takes_the_place_of_what_is_built_in(name, tmp_path):
    """Whether or not the recipe has the flag: one without folders is asked for them, too."""

    @dataclass
    class Folders:
        train_dir: str | None = flag(None, "a folder")
        validation_dir: str | None = flag(None, "a folder")
        test_dir: str | None = flag(None, "a folder")
        model_name_or_path: str | None = flag(None, "a model")
        model_type: str | None = flag(None, "its type")

    (tmp_path / "built_in.json").write_text('{"args": {"seed": 7}}')
    given = {"built_in": (tmp_path / "built_in.json", NAMED), "description": "test"}
    assert parse_arguments(["--do_eval"], HubArguments, **given).seed == 7
    assert parse_arguments(["--do_eval"], Folders, HubArguments, **given).seed == 7
    assert parse_arguments(["--do_eval", f"--{name}", "x"], Folders, HubArguments, **given).seed == 42


def test_every_kind_of_model_looks_back_alone_or_is_refused():
    from transformers import AutoConfig

    for kind, name in (("bert", "is_decoder"), ("xlm", "causal"), ("flaubert", "causal")):
        config = AutoConfig.for_model(kind)
        assert not getattr(config, name)
        look_back(config)
        assert getattr(config, name)
    with pytest.raises(UserError, match="xlnet sees the tokens that it would have to foretell; take another model"):
        look_back(AutoConfig.for_model("xlnet"))


def test_a_tokenizer_alone_is_refused():
    with pytest.raises(UserError, match="--tokenizer_name needs a model or configuration; without them a tokenizer is"):
        load_config(model_flags(tokenizer_name="x"))


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="is a LoRA adapter, no whole model; name its run's folder"):
        load_config(model_flags(model_name_or_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], []),
        (["--lora_rank", "4"], []),
        (["--lora_alpha", "8"], ["lora_alpha"]),
        (["--lora_dropout", "0", "--lora_target_modules", "q_proj"], ["lora_dropout", "lora_target_modules"]),
    ],
)
def test_what_is_said_of_adapters_beside_their_rank(argv, names):
    assert lora_flags(parse_arguments(["--do_eval", *argv], LoraArguments, description="test")) == names


@pytest.mark.parametrize(
    ("positions", "limit", "asked", "length"),
    [
        (64, 48, None, 48),
        (64, 10**30, None, 64),
        (2048, 10**30, None, 1024),
        (2048, 2048, None, 2048),
        (None, 10**30, None, 1024),
        (64, 48, 20, 20),
        (64, 48, 50, 48),
        (64, 10**30, 100, 100),
        (8192, 4096, None, 4096),
    ],
)
def test_the_length_of_a_row(positions, limit, asked, length, caplog):
    from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2Config(vocab_size=5, n_positions=positions or 1, n_embd=4, n_layer=1, n_head=1)
    bloom = BloomConfig(vocab_size=5, hidden_size=4, n_layer=1, n_head=1)
    model = GPT2LMHeadModel(gpt2) if positions else BloomForCausalLM(bloom)
    assert choose_length(model, Namespace(model_max_length=limit), asked) == length
    assert ("50 tokens a row: the tokenizer's limit is 48, which is used" in caplog.messages) is (asked == 50)


def test_a_row_of_one_token_has_nothing_to_foretell():
    with pytest.raises(UserError, match="a row of one token has nothing to foretell; give at least 2"):
        choose_length(Namespace(base_model=None, config=None), Namespace(model_max_length=48), 1)


def test_positions_that_begin_after_the_paddings_row(tmp_path, tiny_bert):
    from transformers import AutoTokenizer, RobertaConfig, RobertaForMaskedLM

    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = RobertaConfig(vocab_size=27, **sizes, max_position_embeddings=14, pad_token_id=1)
    model, tokenizer = RobertaForMaskedLM(config), AutoTokenizer.from_pretrained(tiny_bert)
    assert choose_length(model, tokenizer, None) == 12
    fit(model, tokenizer, 12)
    with pytest.raises(UserError, match="the model has 12 positions, the longest row may have 13 tokens"):
        fit(model, tokenizer, 13)


def test_embeddings_grow_with_the_tokenizer_and_it_pads_with_its_end(tiny_gpt2, tiny_bert, capsys):
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=4, n_layer=1, n_head=1))
    tokenizer = AutoTokenizer.from_pretrained(tiny_gpt2)
    assert tokenizer.pad_token is None
    fit(model, tokenizer, 8)
    assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == len(tokenizer) == 27
    assert tokenizer.pad_token == tokenizer.eos_token
    grown = "the tokenizer has 27 tokens, the model had 20: the others' embeddings are new, untrained"
    assert grown in capsys.readouterr().out
    fit(model, tokenizer, 8)
    assert not capsys.readouterr().out  # nothing is new now
    own = AutoTokenizer.from_pretrained(tiny_bert)
    fit(model, own, 8)
    assert own.pad_token == "<pad>"
    own.pad_token = own.eos_token = None
    with pytest.raises(UserError, match="the tokenizer has no padding token; name one that has, with --tokenizer_name"):
        fit(model, own, 8)
