"""Tests of the terminal chat, with piped input and on a pseudo terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from mlcbuild_format.fields import Json
from mlcbuild_runtime import Engine
from mlcbuild_runtime.chat.chat_model import AnswerPart
from mlcbuild_runtime.chat.local_model import BASE_TOKENS, LocalModel
from mlcbuild_runtime.chat.server_model import ServerModel
from mlcbuild_runtime.executor import loading

from . import parrot, shared
from .test_reasoning import TEMPLATE
from .test_server import with_template

PROGRAM = "import sys; from mlcbuild_runtime.chat import chat; sys.exit(chat(sys.argv[1]))"


def talk(bundle: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """Runs a chat with a bundle whose standard input is a pipe with these lines, and returns the ended
    process."""
    stdin = "".join(f"{line}\n" for line in lines)
    return shared.run("-m", "mlcbuild_runtime.chat", str(bundle), stdin=stdin)


def piped(bundle: Path) -> subprocess.Popen[bytes]:
    """Starts a chat with a bundle as a child process whose standard input, output and error are pipes."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PROGRAM, str(bundle)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=shared.environment())


def test_a_conversation_by_pipe(tiny_bundle: Path) -> None:
    result = talk(
        tiny_bundle, "/set temperature=0", "What is 2 + 3?", "/reset", "", "What is 2 + 3?", "/exit", "never"
    )
    assert result.returncode == 0, result
    lines = result.stdout.splitlines()
    assert lines[0] == "temperature = 0"
    assert lines[2] == "the conversation is forgotten"
    assert lines[1] == lines[3] != ""
    assert len(lines) == 4
    assert result.stderr == ""


def test_a_name_that_is_no_single_bundle_is_a_sentence(tiny_bundle: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).symlink_to(tiny_bundle)
    refused = shared.run("-m", "mlcbuild_runtime.chat", str(tmp_path))
    message = f"mlcbuild-chat: {tmp_path}: has 2 bundles: name one of them, such as {tmp_path / 'one'}\n"
    assert (refused.returncode, refused.stderr) == (1, message)
    for module in ("mlcbuild_runtime.chat", "mlcbuild_runtime"):
        refused = shared.run("-m", module, "hf://team/model")
        assert refused.returncode == 1
        assert (
            "hf:/team/model: is an address, from which only the program `mlcbuild` fetches" in refused.stderr
        )
        assert refused.stderr.count("\n") == 1


def text(parts: Iterable[AnswerPart]) -> str:
    return "".join(part.text for part in parts)


def test_a_model_without_chat_template_continues_text(toy_copy: Path) -> None:
    with_template(toy_copy, None)
    message: Json = {"role": "user", "content": "once"}
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 9}
    with Engine(toy_copy) as engine:
        expected = engine.completions.create(prompt="once", **settings).choices[0].text
        more = engine.completions.create(prompt=f"once\n{expected}\nmore", **settings).choices[0].text
    with LocalModel(toy_copy) as model:
        assert "it continues your text" in model.greeting
        assert text(model.answer([message], settings)) == expected
        listed: list[Json] = [
            message,
            {"role": "assistant", "content": expected},
            {"role": "user", "content": "more"},
        ]
        assert text(model.answer(listed, settings)) == more
        assert text(model.answer([message], {"ignore_eos": True}))
        assert 0 < model.speed.answer_tokens <= BASE_TOKENS, "a base model may never end by itself"


def test_reasoning_is_no_part_of_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a bundle in this process and a server of it tell reasoning from the answer, also where the
    answer is bound to a form and where it ends early."""
    monkeypatch.setitem(loading.LOADERS, "numpy", "tests.runtime.parrot:load")
    parrot.write(tmp_path / "bundle", TEMPLATE)
    message: Json = {"role": "user", "content": parrot.say("<think>\nHm.\n</think>\n\nFour.")}
    settings: dict[str, Json] = {"temperature": 0}
    with (
        LocalModel(tmp_path / "bundle") as bundle,
        parrot.serving(tmp_path / "bundle") as server,
        ServerModel.connect(server.url) as remote,
    ):
        for model in (bundle, remote):
            parts = list(model.answer([message], settings))
            assert text(part for part in parts if part.is_reasoning) == "Hm."
            assert text(part for part in parts if not part.is_reasoning) == "Four."
            bound = list(model.answer([message], {**settings, "guided_regex": "Fo[a-z]+[.]"}))
            assert text(part for part in bound if not part.is_reasoning) == "Four."
            cut = list(model.answer([message], {**settings, "max_tokens": 9}))
            assert {part.is_reasoning for part in cut if part.text} == {True}


def test_commands(toy_bundle: Path) -> None:
    result = talk(
        toy_bundle,
        *("/stats", "/set max_tokens=3", "hi", "/stats", "/help", "/nonsense", "/set", "/set temperature 9"),
        *(
            "/set colour=red",
            "/set stream=true",
            "/set stop=x",
            "/set seed=",
            "/set system=Be kind",
            "/set system=",
        ),
    )
    assert result.returncode == 0, result
    text = result.stdout
    assert text.startswith("no answer yet\nmax_tokens = 3\n")
    assert re.search(r"prompt 6 tokens, first token after [\d.]+ s; answer 3 tokens; 3 tokens answered", text)
    assert "/reset             forget the conversation" in text
    assert "unknown command /nonsense; /help lists them" in text
    assert "usage: /set name value" in text
    assert "temperature must be a number from 0 to 2; found 9" in text
    assert "unknown field 'colour'" in text
    assert "stream cannot be set here" in text
    assert 'stop = "x"\nseed = null\nsystem message set\nsystem message removed\n' in text


def test_settings_count(toy_bundle: Path) -> None:
    ask = ("hi", "/reset")
    result = talk(
        toy_bundle,
        *("/set max_tokens=9", *ask),
        *("/set system=Be kind", *ask, "/set system=", *ask),
        *("/set temperature=2", "/set seed=1", *ask, *ask, "/set seed=2", *ask),
    )
    said = result.stdout.split("the conversation is forgotten\n")
    plain, kind, again, first, second, third = (
        text.removesuffix("\n").rpartition("\n")[2] for text in said[:6]
    )
    assert plain == again != kind
    assert first == second != third
    assert plain not in (first, third)


def test_a_message_that_cannot_be_answered(toy_bundle: Path) -> None:
    result = talk(toy_bundle, "x" * 300, "/set max_tokens=1", "hi")
    assert result.returncode == 1
    assert re.fullmatch(r"the prompt has 304 tokens, but the context has 256, .*\n", result.stderr)
    assert len(result.stdout.splitlines()) == 2


def test_a_bundle_that_cannot_be_loaded(tmp_path: Path) -> None:
    result = talk(tmp_path)
    assert result.returncode == 1
    assert (
        result.stderr == f"mlcbuild-chat: {tmp_path}: there is no bundle.json in it, so it is not a bundle\n"
    )


def test_a_reader_that_leaves_is_no_fault(toy_bundle: Path) -> None:
    with piped(toy_bundle) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stdin.write(b"hi\nhi\n")
        process.stdin.close()
        assert process.wait(shared.WAIT) == 1
        assert process.stderr.read() == b""


class Terminal:
    """A child process on a new pseudo terminal."""

    def __init__(self, *command: str) -> None:
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], list(command), shared.environment())
        self.unread = ""

    def send(self, text: str) -> None:
        os.write(self.file, text.encode())

    def wait_for(self, text: str) -> str:
        """Reads the terminal until `text` appears. Returns the output before it, and drops both."""
        end = time.monotonic() + shared.WAIT
        while text not in self.unread:
            assert time.monotonic() < end, self.unread
            if select.select([self.file], [], [], 0.1)[0]:
                self.unread += os.read(self.file, 4096).decode(errors="replace")
        before, _, self.unread = self.unread.partition(text)
        return before

    def wait_for_some(self) -> None:
        """Reads the terminal until something other than line breaks was printed."""
        end = time.monotonic() + shared.WAIT
        while not self.unread.strip():
            assert time.monotonic() < end, self.unread
            self.unread += os.read(self.file, 4096).decode(errors="replace")

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_control_c_interrupts_an_answer_and_not_the_program(toy_bundle: Path) -> None:
    """Checks that Ctrl-C interrupts an answer and not the program. The model is slowed down so that there is
    time to interrupt it."""
    slow = (
        "import sys, time\nfrom mlcbuild_runtime import chat\n"
        "from mlcbuild_runtime.devices import cpu\nforward = cpu.CpuExecutor.step\n"
        "def slowly(self, *given):\n    time.sleep(0.1)\n    return forward(self, *given)\n"
        "cpu.CpuExecutor.step = slowly\nsys.exit(chat.chat(sys.argv[1]))"
    )
    terminal = Terminal(sys.executable, "-c", slow, str(toy_bundle))
    terminal.wait_for("toy-q0f32-host: /help lists the commands")
    terminal.wait_for("> ")
    terminal.send("hi\n")
    terminal.wait_for("hi")
    terminal.wait_for_some()
    terminal.send("\x03")
    terminal.wait_for("(interrupted)")
    terminal.wait_for("> ")
    terminal.send("\x03")
    terminal.wait_for("> ")
    terminal.send("/set max_tokens=1\n")
    terminal.wait_for("max_tokens = 1")
    terminal.wait_for("> ")
    terminal.send("\x04")
    assert terminal.exit_code() == 0


def test_a_signal_ends_a_piped_chat(toy_bundle: Path) -> None:
    with piped(toy_bundle) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(b"/set max_tokens=1\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"max_tokens = 1\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(shared.WAIT) == 130
        assert process.stderr.read() == b""


def test_a_message_of_several_lines(toy_bundle: Path) -> None:
    """Checks how messages of several lines are joined, by the number of tokens in the prompt: every byte is a
    token."""
    result = talk(
        toy_bundle,
        *("/set max_tokens=1", "a\\", "b", "/stats", "/reset", '"""', " a", "", "/b", '"""', "/stats"),
        *("/reset", "abc", "/stats", "/reset", "ab\\"),
    )
    assert result.returncode == 0, result
    sizes = [int(size) for size in re.findall(r"prompt (\d+) tokens", result.stdout)]
    assert sizes == [sizes[2], sizes[2] + 2, sizes[2]], "a|b, a||/b, abc"
    assert result.stdout.splitlines()[-1] != "the conversation is forgotten", "the end of the input ends it"


def test_metrics_regen_and_save(toy_bundle: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    result = talk(
        toy_bundle,
        *("/regen", "/set max_tokens=4", "/set temperature=0", "/set system=Be kind", "one", "/regen"),
        *("two", "/save", f"/save {saved}", f"/save {saved}", f"/save {tmp_path}/no/where", "/metrics"),
    )
    assert result.returncode == 0, result
    lines = result.stdout.splitlines()
    assert lines[0] == "there is no message to answer again"
    first, again, second = lines[4:7]
    assert first == again != ""
    assert lines[7:11] == [
        "usage: /save FILE",
        f"{saved}: 4 messages",
        f"{saved} cannot be written: File exists",
        f"{tmp_path}/no/where cannot be written: No such file or directory",
    ]
    assert json.loads(saved.read_text()) == {
        "model": "toy-q0f32-host",
        "max_tokens": 4,
        "temperature": 0,
        "messages": [
            {"role": "system", "content": "Be kind"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": second},
        ],
    }
    metrics = dict(line.rsplit("  ", 1) for line in lines[11:])
    assert {name.strip(): value for name, value in metrics.items()}["answer tokens"] == "12"


def test_an_answer_that_fails_again_leaves_the_conversation(toy_bundle: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    long = "/set system=" + "x" * 300
    result = talk(toy_bundle, "/set max_tokens=1", "one", long, "/regen", "/set system=", f"/save {saved}")
    assert result.returncode == 1
    assert "but the context has 256" in result.stderr
    assert json.loads(saved.read_text())["messages"][0]["content"] == "one"
    assert f"{saved}: 2 messages" in result.stdout


def test_several_lines_on_a_terminal(toy_bundle: Path) -> None:
    terminal = Terminal(sys.executable, "-c", PROGRAM, str(toy_bundle))
    terminal.wait_for("> ")
    for line, prompt in (("/set max_tokens=1", "> "), ('"""', "... "), ("never sent", "... ")):
        terminal.send(f"{line}\n")
        terminal.wait_for(prompt)
    # Readline writes the prompt, then waits: a signal between the two is seen with the next key only.
    time.sleep(0.3)
    terminal.send("\x03")
    terminal.wait_for("> ")
    terminal.send("/stats\n")
    assert "no answer yet" in terminal.wait_for("> ")
    terminal.send("hi\\\n")
    terminal.wait_for("... ")
    terminal.send("you\n")
    terminal.wait_for("> ")
    terminal.send("/stats\n")
    assert "answer 1 tokens" in terminal.wait_for("> ")
    terminal.send("\x04")
    assert terminal.exit_code() == 0


@pytest.mark.parametrize("text", [b"\xff\xfe\n"])
def test_input_that_is_no_text(toy_bundle: Path, text: bytes) -> None:
    command = [sys.executable, "-c", PROGRAM, str(toy_bundle)]
    extra = {"PYTHONUTF8": "1"}
    result = subprocess.run(
        command, input=text + b"/stats\n", capture_output=True, env=shared.environment(extra), check=False
    )
    assert b"Traceback" not in result.stderr
    assert result.stdout.endswith(b"answered in all\n") or b"no answer yet" in result.stdout
