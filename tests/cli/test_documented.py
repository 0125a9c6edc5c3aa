"""README and docs name flags, commands and settings: those of ours are there, and what is named exists."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from evertrain.cli.flags import run_parser
from evertrain.cli.main import COMMANDS
from evertrain.decide import ladder
from evertrain.model.config import Config

HOME = Path(__file__).parent.parent.parent
PAGES = {page.name: page.read_text() for page in (HOME / "README.md", *sorted((HOME / "docs").glob("*.md")))}
WHOLE = "\n".join(PAGES.values())


def test_every_command_is_told() -> None:
    assert [name for name in COMMANDS if f"evertrain {name}" not in WHOLE] == []


def test_every_flag_of_our_own_is_told_beside_those_of_torchrun() -> None:
    own = next(group for group in run_parser()._action_groups if group.title == "evertrain's own")
    flags = [action.option_strings[0] for action in own._group_actions]
    assert "--detach" in flags
    assert [flag for flag in flags if not re.search(rf"`{flag}\b", PAGES["torchrun.md"])] == []


def test_every_setting_that_is_named_exists() -> None:
    topics = {
        field.name: field.default.__struct_fields__
        for field in msgspec.structs.fields(Config)
        if isinstance(field.default, msgspec.Struct)
    }
    named = re.findall(rf"`({'|'.join(topics)})\.(\w+)`", WHOLE)
    unknown = [(topic, key) for topic, key in named if key not in topics[topic]]
    # functions of decide/ladder.py are named in the same way
    assert len(named) > 20 and [one for one in unknown if one[0] != "ladder" or not hasattr(ladder, one[1])] == []


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\(docs/(\w+\.md)", PAGES["README.md"]))
    assert PAGES.keys() - linked == {"README.md"}


def test_links_between_pages_lead_somewhere() -> None:
    for name, text in PAGES.items():
        folder = HOME if name == "README.md" else HOME / "docs"
        for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", text)):
            page = (folder / target if target else folder / name).resolve()
            assert page.exists(), f"{name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}, name
