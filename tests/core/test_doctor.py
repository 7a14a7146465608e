"""Whether this machine fits: the command as it is run, and each judgement on machines laid out as files."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from core import doctor
from core.cards import Finding, release
from core.errors import exit_with_one_line
from tests.conftest import REPOSITORY
from tests.core.test_cards import as_nobody, by_name, machine, write

SECRET = "hf_averysecretvalue"


def run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor in a new process that asks no hub."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PT_HPU_", "HF_", "OMP_"))}
    whole = {**inherited, "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, "-m", "core.doctor", *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=whole, timeout=60)


def install(site: Path, torch: str, bridge: str, loads: str = "") -> Path:
    """Files as of a torch and a bridge; importing the first writes a file, the second runs ``loads``."""
    number = torch.partition("+")[0]
    write(site / f"torch-{number}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {number}\n")
    write(site / "torch/__init__.py", f"open({str(site / 'imported')!r}, 'w').close()\n")
    write(site / "torch/version.py", f"from typing import Optional\n__version__: str = '{torch}'\ncuda = None\n")
    name = "Name: habana-torch-plugin"
    write(site / "habana_torch_plugin-1.dist-info/METADATA", f"Metadata-Version: 2.1\n{name}\nVersion: {bridge}\n")
    write(site / "habana_frameworks/torch/__init__.py")
    write(site / "habana_frameworks/torch/core.py", loads)
    return site


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.mark.processes
def test_the_command_examines_this_machine_and_tells_no_secret() -> None:
    done = run("--json", HF_TOKEN=SECRET, HF_ENDPOINT=f"https://me:{SECRET}@hub", MY_PASSWORD=SECRET)
    assert done.stderr == ""
    told = json.loads(done.stdout)
    assert done.returncode == (0 if told["fits"] else 1)
    assert list(told["findings"]) == ["versions", "devices", "environment", "machine", "hub"]
    findings = [finding for group in told["findings"].values() for finding in group]
    states = [finding["state"] for finding in findings]
    assert (told["problems"], told["notes"]) == (states.count("problem"), states.count("note"))
    assert set(states) <= {"ok", "note", "problem"}
    assert all((finding["state"] == "ok") == (finding["advice"] == "") and finding["value"] for finding in findings)
    values = {finding["name"]: finding["value"] for finding in findings}
    assert values["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert values["token"] == "yes"
    assert SECRET[3:] not in done.stdout


@pytest.mark.processes
def test_a_replaced_torch_is_found_without_importing_it(tmp_path: Path) -> None:
    """pip's metadata says 2.9.0, as those of the wheels do; the build is only in the package itself."""
    site = install(tmp_path, "2.9.0+cu128", "1.23.0.695", "raise ImportError('undefined symbol: _ZN3c10')")
    done = run(PYTHONPATH=str(site), OMP_NUM_THREADS="1")
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "problem  2.9.0+cu128: pip has replaced Habana's build; reinstall it from Habana's image" in lines["torch"]
    assert "problem  ImportError: undefined symbol: _ZN3c10; torch, bridge and system libraries" in lines["import"]
    assert "ok       OMP_NUM_THREADS=1" in lines["variables"]
    assert done.returncode == 1
    assert lines["problems:"].startswith("problems: ")
    columns = {
        line.index(state) for line in done.stdout.splitlines() for state in ("  ok  ", "  problem  ") if state in line
    }
    assert len(columns) == 1


def test_a_torch_of_no_gaudi_is_not_imported(tmp_path: Path) -> None:
    if any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd", "dxg")):
        pytest.skip("a GPU is here, which torch is asked for")
    site = install(tmp_path, "2.13.0+cpu", "1.24.0+simulator")
    assert "\n  torch " in run(PYTHONPATH=str(site)).stdout
    assert not (site / "imported").exists()


@pytest.mark.parametrize(("loads", "state"), [("", "ok"), ("import os\nos.abort()", "problem")], ids=["fine", "abort"])
def test_torch_and_bridge_are_imported_together(tmp_path: Path, monkeypatch, loads: str, state: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path, "2.9.0", "1.23.0", loads)))
    finding = doctor.loads()
    assert (finding.state, (tmp_path / "imported").exists()) == (state, True)
    assert finding.value == ("torch and the bridge load" if state == "ok" else "exit code -6")


# ------------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("torch", "bridge", "state", "told"),
    [
        ("2.9.0+hpu.1.23.0.695", "1.23.0.695", "ok", "2.9.0+hpu"),
        ("2.10.0a0+git1234", "1.24.0.1007", "ok", ""),
        ("2.11.0a0", "1.24.1.17", "ok", ""),
        ("2.6.0", "1.21.3", "ok", ""),
        ("2.6.0+hpu", "1.23.0", "problem", "2.6.0+hpu, but bridge 1.23.0 is built for 2.9; reinstall"),
        ("2.10.0a0", "1.24.1", "problem", "built for 2.11"),
        ("2.9.0+cpu", "1.23.0", "problem", "pip has replaced"),
        ("2.9.0+cu128", "1.23.0", "problem", "pip has replaced"),
        (None, "1.23.0", "problem", "none; reinstall it from Habana's image"),
        ("2.12.0a0", "1.25.0", "note", "which one belongs to bridge 1.25.0 is not known"),
        ("2.11.0a0", "1.24.2.481", "note", "is not known"),
        ("2.11.0a0", "?", "note", "is not known"),
        ("2.13.0+cpu", "1.24.0+simulator", "ok", "2.13.0+cpu"),
        ("2.13.0+cpu", None, "ok", "2.13.0+cpu"),
        (None, None, "problem", "pip install -r requirements.txt"),
    ],
)
def test_torch_is_judged_by_the_bridge(torch: str | None, bridge: str | None, state: str, told: str) -> None:
    found = by_name(doctor.fit(torch, bridge, cards=0 if bridge is None else 8))
    assert found["torch"].state == state
    assert told in f"{found['torch'].value}; {found['torch'].advice}"
    assert found["bridge"].state == "ok"


def test_cards_without_a_bridge_are_a_problem() -> None:
    finding = by_name(doctor.fit("2.13.0", None, cards=8))["bridge"]
    assert (finding.state, "Habana's PyTorch image" in finding.advice) == ("problem", True)


def test_packages_are_judged_by_the_requirements() -> None:
    installed = {"accelerate": "1.15.0", "peft": "0.9.1", "numpy": "1.26"}
    text = "# none>=1\naccelerate>=1.12\npeft>=0.18\nrouge-score>=0.1.2\nnumpy>=1.26\n"
    found = doctor.packages(text, installed.get)
    assert [(f.name, f.state) for f in found] == [
        ("accelerate", "ok"), ("peft", "problem"), ("rouge-score", "problem"), ("numpy", "ok"),
    ]  # fmt: skip
    assert found[1].value == "0.9.1, needs 0.18 or newer"
    assert found[2].value == "none, needs 0.1.2 or newer"


def test_every_requirement_is_looked_at() -> None:
    lines = (REPOSITORY / "requirements-gaudi.txt").read_text(encoding="utf-8").splitlines()
    names = [line.partition(">=")[0] for line in lines if not line.startswith("#")]
    assert set(names) <= {finding.name for finding in doctor.versions(0)}


def test_versions_are_compared_by_their_numbers() -> None:
    assert release("2.10.0a0+git") == (2, 10, 0)
    assert release("1.21.0-ca59b5a") == (1, 21, 0)
    assert release("0.1.2") < release("0.10")
    assert release("unknown") == release("") == ()


# ------------------------------------------------------------------------------------------------- devices, environment


def test_a_machine_of_eight_cards_is_shown_and_a_machine_without_has_a_note(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "bridge_version", lambda: "1.23.0")
    found = doctor.devices(machine(tmp_path / "gaudi", held=1), {})
    assert [(f.name, f.state) for f in found if f.state != "ok"] == [("held", "note")]
    monkeypatch.setattr(doctor, "bridge_version", lambda: None)
    (finding,) = doctor.devices(tmp_path / "laptop", {})
    assert finding == Finding(
        "Gaudi", "note", "no Gaudi here: training runs on the CPU", "rehearse with python -m hpu_simulator"
    )


def test_torch_is_asked_for_a_gpu_where_its_driver_is(tmp_path: Path) -> None:
    import torch

    write(tmp_path / "dev/nvidiactl")
    found = by_name(doctor.devices(tmp_path, {}))
    assert (found["GPU"].state == "ok") == torch.cuda.is_available()
    assert ("runs on the GPU" in found["Gaudi"].value) == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("name", "value", "state"),
    [
        ("PT_HPU_LAZY_MODE", "0", "ok"),
        ("PT_HPU_LAZY_MODE", "2", "problem"),
        ("LOWER_LIST", "ops.txt", "problem"),
        ("FP32_LIST", "ops.txt", "problem"),
        ("PT_RECIPE_CACHE_PATH", "/tmp/cache", "note"),
        ("PT_CACHE_FOLDER_DELETE", "1", "note"),
        ("PT_HPU_RECIPE_CACHE_CONFIG", ",false,1024,false", "ok"),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "/tmp/cache,True,1024", "ok"),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "/tmp/cache", "problem"),
        ("PT_HPU_RECIPE_CACHE_CONFIG", "/tmp/cache,false,1G", "problem"),
        ("PT_HPU_METRICS_DUMP_TRIGGERS", "process_exit", "ok"),
        ("PT_HPU_METRICS_DUMP_TRIGGERS", "process_exit,metric_change", "problem"),
        ("PT_HPU_METRICS_FILE", "./metrics.json", "ok"),
        ("PT_HPU_METRICS_FILE", "metrics.json", "problem"),
        ("PT_HPU_AUTOCAST_FP32_OPS_LIST", __file__, "ok"),
        ("PT_HPU_AUTOCAST_FP32_OPS_LIST", "/nowhere/ops.txt", "problem"),
        ("OMP_NUM_THREADS", "4", "ok"),
        ("OMP_NUM_THREADS", "4,2", "ok"),
        ("OMP_NUM_THREADS", "64", "note"),
        ("OMP_NUM_THREADS", "0", "note"),
        ("OMP_NUM_THREADS", "", "note"),
        ("OMP_NUM_THREADS", "all", "note"),
        ("PATH", "/bin", "ok"),
    ],
)
def test_variables_that_stop_a_run_or_do_nothing_are_named(name: str, value: str, state: str) -> None:
    (finding,) = doctor.environment({name: value}, cores=8)
    assert finding.state == state
    assert finding.name == (name if state != "ok" else "variables")


# -------------------------------------------------------------------------------------------------------------- machine

MEMINFO = "MemTotal:       33554432 kB\nMemFree:         1048576 kB\nMemAvailable:   16777216 kB\n"


@pytest.mark.parametrize(
    ("files", "state", "told"),
    [
        ({}, "ok", "16.0 GiB available of 32.0"),
        ({"sys/fs/cgroup/memory.max": "max"}, "ok", "16.0 GiB available of 32.0"),
        ({"sys/fs/cgroup/memory.max": "8589934592"}, "ok", "this container's limit is 8.0"),
        ({"sys/fs/cgroup/job/memory.max": "2147483648"}, "note", "this container's limit is 2.0"),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "4294967296"}, "ok", "this container's limit is 4.0"),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, "ok", "of 32.0"),
        ({"proc/meminfo": MEMINFO.replace("16777216", "2097152")}, "note", "2.0 GiB available of 32.0"),
    ],
)
def test_memory_is_the_machines_or_what_a_container_leaves(tmp_path: Path, files, state: str, told: str) -> None:
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/job/step\n", **files}.items():
        write(tmp_path / name, text)
    (finding,) = doctor.memory(tmp_path)
    assert finding.state == state
    assert finding.value.endswith(told)


def test_cores_are_those_that_affinity_and_quota_leave(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    assert doctor.cores_of(tmp_path) == len(allowed)
    write(tmp_path / "sys/fs/cgroup/cpu.max", "max 100000")
    assert doctor.cores_of(tmp_path) == len(allowed)
    write(tmp_path / "sys/fs/cgroup/cpu.max", "50000 100000")
    assert doctor.cores_of(tmp_path) == 1
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert doctor.cores_of(tmp_path / "none") == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.processes
def test_a_small_dev_shm_and_a_small_disk_have_a_note(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", tmp_path / "dev/shm"], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no right to mount a small file system")
    try:
        (shm,) = doctor.memory(tmp_path)
        disk = doctor.room("here", tmp_path / "dev/shm/not/yet/there")
    finally:
        subprocess.run(["umount", tmp_path / "dev/shm"], check=True)
    assert (shm.name, shm.state, shm.value) == ("/dev/shm", "note", "0.06 GiB")
    assert (disk.name, disk.state, disk.value) == ("disk, here", "note", f"0.1 GiB free in {tmp_path / 'dev/shm'}")


def test_a_folder_that_is_not_written_to_has_a_note(tmp_path: Path) -> None:
    assert "write" not in doctor.room("here", tmp_path).value
    tmp_path.chmod(0o500)
    with as_nobody():
        finding = doctor.room("here", tmp_path)
    assert (finding.state, finding.value.endswith(", which this user may not write to")) == ("note", True)


def test_limits_of_the_system_are_judged() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        found = by_name(doctor.limits(several=False, cores=3))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found["open files"] == Finding("open files", "note", "1024", "ulimit -n 65536")
    assert found["locked memory"].state == "ok"
    assert found["CPU cores"].value == f"3 usable of {os.cpu_count()}"
    unlimited = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
    assert by_name(doctor.limits(several=True, cores=3))["locked memory"].state == ("ok" if unlimited else "note")


def test_missing_programs_are_named_with_what_needs_them() -> None:
    found = by_name(doctor.tools({"clang++": "/usr/bin/clang++", "ssh": "/usr/bin/ssh"}.get))
    assert found["compiler"] == Finding("compiler", "ok", "/usr/bin/clang++")
    assert (found["ninja"].state, found["git"].state) == ("note", "note")
    assert "simulator" in found["ninja"].advice
    assert (found["several machines"].state, found["several machines"].value) == ("note", "no mpirun, pdsh")
    found = by_name(doctor.tools(lambda name: f"/usr/bin/{name}"))
    assert {finding.state for name, finding in found.items() if name != "Python.h"} == {"ok"}
    assert shutil.which("git") is None or by_name(doctor.tools(shutil.which))["git"].value == shutil.which("git")


# ------------------------------------------------------------------------------------------------------------------ hub


@pytest.fixture
def server() -> Iterator[str]:
    """A hub that answers HEAD with the code that the path names."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            code = self.path.rpartition("/")[2]
            self.send_response(int(code) if code.isdigit() else 200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    served = HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    thread.join()
    served.server_close()


@pytest.fixture(autouse=True)
def without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("path", "why"), [("", ""), ("/404", ""), ("/503", "HTTP 503"), ("/407", "HTTP 407")])
def test_a_hub_that_answers_is_there_whatever_it_thinks_of_the_page(server: str, path: str, why: str) -> None:
    assert doctor.answer(server + path) == why


def test_a_proxy_is_used_and_told(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server)
    assert doctor.hub({"HF_ENDPOINT": "http://hub.invalid"})[0].value == "hub.invalid (there is a proxy): answers"


def test_a_hub_that_is_too_slow_is_given_up_and_a_password_is_not_shown() -> None:
    """It sends a byte now and then, which no timeout of a connection notices, and would be done after some seconds."""
    done = threading.Event()

    def drip() -> None:
        connection, _ = slow.accept()
        with connection, suppress(OSError):
            for byte in b"HTTP/1.1 200 OK\r\n\r\n":
                connection.send(bytes([byte]))
                if done.wait(0.25):
                    return

    with socket.create_server(("127.0.0.1", 0)) as slow:
        host = f"127.0.0.1:{slow.getsockname()[1]}"
        thread = threading.Thread(target=drip)
        thread.start()
        finding = doctor.hub({"HF_ENDPOINT": f"http://user:{SECRET}@{host}"})[0]
        done.set()
        thread.join()
    assert (finding.state, finding.value) == ("note", f"{host}: no answer within {doctor.SECONDS} s")
    refused = doctor.hub({"HF_ENDPOINT": f"http://user:{SECRET}@{host}"})[0]
    assert (refused.state, refused.value) == ("note", f"{host}: [Errno 111] Connection refused")
    nowhere = doctor.hub({"HF_ENDPOINT": f"http://user:{SECRET}@localhost:99999"})[0]
    assert SECRET not in nowhere.value + nowhere.advice


@pytest.mark.parametrize("url", ["hub", "ftp://hub", "https://", "https:// hub", "https://[::1"])
def test_an_endpoint_that_is_no_address_is_told(url: str) -> None:
    finding = doctor.hub({"HF_ENDPOINT": url})[0]
    assert finding.state != "ok"
    assert finding.advice


@pytest.mark.parametrize("where", ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "XDG_CACHE_HOME", "HOME", None])
def test_whether_a_token_is_stored_is_told_and_nothing_of_it(tmp_path: Path, monkeypatch, where: str | None) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = {"HF_HOME": "", "XDG_CACHE_HOME": "huggingface", "HOME": ".cache/huggingface", "HF_TOKEN_PATH": ""}
    if where in folder:
        write(tmp_path / folder[where] / "token", f"{SECRET}\n")
    value = {"HF_TOKEN": SECRET, "HF_TOKEN_PATH": str(tmp_path / "token")}.get(where, str(tmp_path))
    hub, token = doctor.hub({"HF_HUB_OFFLINE": "true", **({where: value} if where else {})})
    assert token.value == ("yes" if where else "no")
    assert (hub.state, hub.value) == ("ok", "switched off by the environment: only what is in the cache")


def test_findings_are_aligned_with_their_advice() -> None:
    groups = {"one": [Finding("a", "ok", "1")], "two": [Finding("long name", "problem", "bad", "mend it")]}
    assert doctor.shown(groups).splitlines() == [
        "one",
        "  a          ok       1",
        "two",
        "  long name  problem  bad; mend it",
    ]


# ---------------------------------------------------------------------------------------------------- where it runs


def test_a_reader_that_goes_wants_no_more_and_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process each, with a real pipe and a real full file; an exit flushes what is still in the buffer."""
    monkeypatch.setattr(doctor, "examine", lambda: {"one": [Finding("a", "ok", "1")]})
    gone, pipe = os.pipe()
    os.close(gone)
    for target, code, said in ((pipe, 0, ""), (os.open("/dev/full", os.O_WRONLY), 2, "error: .*No space left.*\n")):
        heard, errors = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.dup2(target, 1)
                os.dup2(errors, 2)
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
                with pytest.raises(SystemExit) as ended:
                    exit_with_one_line(lambda: doctor.main([]))
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(ended.value.code)
            finally:
                os._exit(99)
        os.close(target)
        os.close(errors)
        with open(heard) as file:
            assert re.fullmatch(said, file.read())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


def test_a_working_folder_that_was_removed_has_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    finding = doctor.room("here", Path())
    assert finding == Finding("disk, here", "note", "the working folder was removed", "cd to one that is there")


@pytest.mark.parametrize(("folder", "state"), [("absent", "note"), ("", "ok"), (None, "ok")])
def test_a_folder_for_temporary_files_that_is_not_there_has_a_note(tmp_path, monkeypatch, folder, state) -> None:
    for name in ("versions", "devices", "environment", "memory", "limits", "tools", "hub"):
        monkeypatch.setattr(doctor, name, lambda *_: [])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Namespace(free=2**40))
    monkeypatch.delenv("TMPDIR", raising=False)
    if folder is not None:
        monkeypatch.setenv("TMPDIR", str(tmp_path / folder))
    finding = by_name(doctor.examine()["machine"])["disk, temporary"]
    assert (finding.state, f"{tmp_path}/absent, which is no folder" in finding.value) == (state, state == "note")
