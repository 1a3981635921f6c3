"""`gossamer join` and `gossamer invite`: where a link is read from, what is refused, and two machines that join."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import click
import pytest
from support.command_line import output_of, refusal

from gossamer.cli import join as module
from gossamer.cli.join import hide_argument, read_link
from gossamer.cli.main import gossamer
from gossamer.cli.options import CERTIFICATES
from gossamer.comm.elastic.coordinator_server import CoordinatorServer
from gossamer.comm.elastic.invited import redeem
from gossamer.comm.environment.run_token import make_token, read_token
from gossamer.comm.membership.invitations import JoinLink, Welcome, read_invitation
from gossamer.comm.membership.next_view import CoordinatorOptions
from gossamer.launcher.coordinator import RunCard

INVITATION = JoinLink(number=1, run="ab" * 8, secret=bytes(range(32)), addresses=(("127.0.0.1", 9),))
LINK = INVITATION.link()


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("pass")
    Path("link").write_text(f"{LINK[:60]}\n{LINK[60:]}\n")
    Path("link").chmod(0o600)
    make_token(Path("token"))
    Path("certificates").mkdir()
    for name in CERTIFICATES:
        Path("certificates", name).touch()


@pytest.fixture
def no_hiding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hide_argument", lambda text: None)  # of the process that runs the tests


@pytest.mark.usefixtures("no_hiding")
def test_a_link_is_read_from_an_argument_a_file_or_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_link(LINK) == INVITATION
    assert read_link("@link") == INVITATION
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{LINK}\nfurther lines belong to the script\n"))
    assert read_link("-") == INVITATION
    assert sys.stdin.readline().startswith("further")


def test_a_link_is_read_from_a_pipe_of_the_shell() -> None:
    reading, writing = os.pipe()
    os.write(writing, LINK.encode())
    os.close(writing)
    assert read_link(f"@/dev/fd/{reading}") == INVITATION
    os.close(reading)


def test_no_more_than_a_link_is_read_from_a_pipe() -> None:
    os.mkfifo("pipe")
    filling = subprocess.Popen(["/bin/sh", "-c", "head -c 1000000 /dev/zero > pipe"])
    with pytest.raises(click.BadParameter, match="the link cannot be read from pipe: pipe has more than 65536 bytes"):
        read_link("@pipe")
    filling.wait()


def test_a_file_that_others_can_read_is_refused() -> None:
    Path("link").chmod(0o640)
    with pytest.raises(click.BadParameter, match="chmod 600 link"):
        read_link("@link")


@pytest.mark.usefixtures("no_hiding")
@pytest.mark.parametrize("option", ["--lifetime=1h", "--uses=2", "--file=link"])
def test_revoking_refuses_options_of_a_new_link(tmp_path: Path, option: str) -> None:
    token = make_token(tmp_path / "of-the-run")
    told = refusal("invite", "127.0.0.1:1", "--token-file", str(token), "--revoke", "1", option)
    assert f"{option.partition('=')[0]} is of a new link" in told


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("@nothing", "train.py"), "cannot be read from nothing"),
        (("train.py",), "begins with 'gossamer:'"),
        ((LINK[:-1] + "x", "train.py"), "mistyped or cut off"),
        (("--workers", "2", LINK, "train.py"), "the link comes first"),
        ((LINK, "nothing.py"), "nothing.py does not exist"),
        ((LINK,), "Missing argument"),
        ((LINK, "--workers", "2:4", "train.py"), "has a range already"),
        ((LINK, "--join", "10.0.0.1:1", "train.py"), "leave it out"),
        ((LINK, "--token-file", "link", "train.py"), "leave it out"),
        ((LINK, "--listen", "10.0.0.1:1", "train.py"), "write --relay and --listen, or leave out both"),
        ((LINK, "--network", "1gbit", "train.py"), "leave it out"),
        ((LINK, "--servers", "1", "train.py"), "leave it out"),
        ((LINK, "--invite", "new", "train.py"), "leave it out"),
        ((LINK, "--nnodes", "2", "--rendezvous", "a:1", "train.py"), "leave it out"),
        ((LINK, "--dry-run", "train.py"), "leave it out"),
        ((LINK, "--relay", "train.py"), "write --relay and --listen, or leave out both"),
        ((LINK, "train.py"), "no address of this link can be reached: 127.0.0.1:9 (Connection refused)"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_starts(words: tuple[str, ...], hint: str) -> None:
    said = " ".join(refusal("join", *words).split())
    assert hint in said
    assert LINK not in said
    assert not Path("runs").exists()


def test_a_link_of_an_encrypted_run_asks_for_certificates() -> None:
    Path("link").write_text(JoinLink(**vars(INVITATION) | {"encrypted": True}).link())
    assert "--tls FOLDER" in refusal("join", "@link", "train.py")


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--invite", "link"), "--invite is for elastic runs"),
        (("--public-address", "10.0.0.1:1"), "--public-address is for elastic runs"),
        (("--invite-lifetime", "7d"), "--invite-lifetime is for elastic runs"),
        (("--invite-lifetime", "run"), "--invite-lifetime is for elastic runs"),
        (("--invite-uses", "1"), "--invite-uses is for elastic runs"),
        (("--relay",), "--relay is for elastic runs"),
        (("--workers", "2:4", "--relay", "--tls", "certificates"), "exclude each other"),
        (("--join", "10.0.0.1:1", "--token-file", "token", "--relay"), "write --relay and --listen"),
        (("--join", "10.0.0.1:1", "--token-file", "token", "--public-address", "10.0.0.2:1"), "links are made by"),
        (("--workers", "2:4", "--public-address", "0.0.0.0:1"), "Write its own address"),
        (("--workers", "2:4", "--invite-lifetime", "soon"), "such as 24h"),
        (("--workers", "2:4", "--invite-lifetime", "0h"), "such as 24h"),
        (("--workers", "2:4", "--invite-lifetime", f"{'9' * 11}h"), "at most 3650d"),
        (("--workers", "2:4", "--invite-uses", "0"), "x>=1"),
        (("--workers", "2:4", "--invite", "nowhere/link"), "no directory nowhere"),
    ],
)
def test_invalid_options_of_links_are_refused(options: tuple[str, ...], hint: str) -> None:
    assert hint in " ".join(refusal("run", *options, "train.py").split())


HIDES = """
import sys
from pathlib import Path
from gossamer.cli.join import hide_argument
hide_argument(sys.argv[1])
print(sys.argv[1:])
print(Path("/proc/self/cmdline").read_bytes().split(b"\\0")[2:])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="arguments can be overwritten on Linux only")
@pytest.mark.processes
@pytest.mark.new_programs
def test_a_link_disappears_from_the_list_of_processes() -> None:
    Path("hides.py").write_text(HIDES)
    done = subprocess.run([sys.executable, "hides.py", LINK, "train.py"], capture_output=True, text=True, check=True)
    assert LINK not in done.stdout
    assert done.stdout.splitlines() == ["['LINK', 'train.py']", str([b"x" * len(LINK), b"train.py", b""])]


def test_a_system_without_proc_keeps_working(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(sys, "argv", ["gossamer", "join", LINK])
    hide_argument(LINK)
    assert sys.argv == ["gossamer", "join", "LINK"]


TRAIN = """
import os, sys, torch
import gossamer
torch.set_num_threads(1)
world = gossamer.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
session = gossamer.attach(model, optimizer)
settled = 0
while settled < 2:
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if world.size == 3:
        settled += 1
        open(f"stage-{os.getpid()}", "w").close()
print("ended", session.steps, repr(session.recipe), sum(p.double().sum().item() for p in model.parameters()).hex())
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `gossamer` commands, which do not outlive the test."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gossamer", *words]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start_one
    for each in started:
        if each.poll() is None:
            each.kill()
        each.communicate()


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


@pytest.mark.processes
def test_two_machines_join_by_one_link_and_all_end_with_the_same_parameters(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    """The recipe of the first command applies, and neither the link nor the token is in a log or process list."""
    Path("train.py").write_text(TRAIN)
    options = ("--invite", "first.link", "--invite-uses", "2", "--recipe", "TopK(0.5)", "--logs", "logs")
    first = start("run", "--workers", "1:3:1", *options, "train.py")
    wait_until(Path("first.link").exists, first)
    assert Path("first.link").stat().st_mode & 0o777 == 0o600
    link = Path("first.link").read_text().strip()
    joined = [
        start("join", "@first.link", "--logs", "second", "train.py"),
        start("join", link, "--logs", "third", "train.py"),
    ]
    wait_until(lambda: len(list(Path().glob("stage-*"))) == 3, first)
    listed = [Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in joined]
    outputs = [each.communicate(timeout=150)[0] for each in (first, *joined)]
    assert [each.returncode for each in (first, *joined)] == [0, 0, 0], outputs
    ends = [re.findall(r"ended (.*)", output) for output in outputs]
    assert [len(each) for each in ends] == [1, 1, 1], outputs
    assert len({each[0] for each in ends}) == 1, outputs
    assert "TopK" in ends[0][0]
    secret = read_invitation(link).secret
    shown = "\n".join(outputs).encode() + b"\n".join(listed)
    logged = b"".join(path.read_bytes() for name in ("logs", "second", "third") for path in Path(name).rglob("*.*"))
    for kept in (shown, logged):
        assert link.encode() not in kept
        assert secret not in kept
        assert secret.hex().encode() not in kept
    assert not Path("first.link").exists()  # of a run that is over


def test_links_of_a_running_run_are_made_used_up_and_revoked() -> None:
    token = Path("token")
    server = CoordinatorServer(
        CoordinatorOptions(least=1, most=3, initial=1),
        token=read_token(token),
        address="127.0.0.1",
        journal=None,
        note=print,
        welcome=Welcome(token=token.read_bytes(), addresses=()),
    )
    Path("logs").mkdir()
    RunCard(server.address, token.resolve()).write(Path("logs"))
    with closing(server):
        code, printed = output_of(gossamer, "invite", "logs", "--lifetime", "7d")
        assert (code, read_invitation(printed).number) == (0, 1)
        code, printed = output_of(gossamer, "invite", "logs", "--uses", "1", "--file", "new.link")
        assert "the link of invitation 2 is in new.link" in printed
        assert redeem(read_link("@new.link"))[1].token == token.read_bytes()
        assert "used 1 of 1 times" in refusal("join", "@new.link", "train.py")
        assert "stay in the run" in output_of(gossamer, "invite", "logs", "--revoke", "2")[1]
        assert "was revoked" in refusal("join", "@new.link", "train.py")
        assert "no invitation 3" in refusal("invite", "logs", "--revoke", "3")
