"""The catalogue: every key that the code asks for is there, and none twice."""

import ast
import re
from pathlib import Path

import heterolab
from heterolab.lab.messages import catalogue, text

PACKAGE = Path(heterolab.__file__).parent
KEY = re.compile(r"^(check|predict|reveal|show|recording|report|0\d)\.[\w.]+$")


def keys_in_code() -> set[str]:
    return {
        node.value
        for path in (PACKAGE / "lab").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and KEY.match(node.value)
    }


def test_every_key_in_the_code_is_in_the_catalogue() -> None:
    known = catalogue()
    missing = {key for key in keys_in_code() if key not in known}
    # some keys are put together from a beginning and an end
    assert not {key for key in missing if not any(k.startswith(key) for k in known)}


def test_sentences_are_short() -> None:
    """Plain English for readers whose first language it is not: at most 20 words a sentence."""
    for key, message in catalogue().items():
        for sentence in re.split(r"(?<=[.!?:;]) ", message):
            words = [w for w in sentence.split() if re.search(r"\w", w)]
            assert len(words) <= 20, f"{key}: {sentence}"


def test_an_unknown_language_falls_back_to_english(monkeypatch) -> None:
    monkeypatch.setenv("HETEROLAB_LANG", "xx")
    assert text("check.pass") == "pass"
