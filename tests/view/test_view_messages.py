"""Every message that the view asks for is in the catalogue, and none is there for nobody."""

import re
from pathlib import Path

import heterolab
from heterolab.lab.messages import catalogue

VIEW = Path(heterolab.__file__).parent / "view"
MINE = (
    "lane",
    "kind",
    "cause",
    "timeline",
    "compare",
    "explain",
    "whatif",
    "describe",
    "figure",
    "diagnosis",
    "chart",
    "panel",
    "html",
)


def used():
    """Ids in the sources, and the beginnings of those that are put together."""
    sources = "".join(path.read_text(encoding="utf-8") for path in VIEW.glob("*.py"))
    ids = set(re.findall(rf"""["']((?:{"|".join(MINE)})\.[a-z0-9_]+)["']""", sources))
    stems = set(re.findall(rf'f["\']((?:{"|".join(MINE)})\.[a-z0-9_]*)\{{', sources))
    return ids, stems


def test_messages_and_sources_agree():
    ids, stems = used()
    known = {key for key in catalogue() if key.partition(".")[0] in MINE}
    assert not ids - known
    unused = {key for key in known - ids if not any(key.startswith(stem) for stem in stems)}
    assert not unused
