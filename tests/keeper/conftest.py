"""Nodes of these tests, in folders of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from keeper.node import Node

StartNode = Callable[..., Node]


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[StartNode]:
    """`start_node(text, *args, **options)` writes the text to a script and starts a keeper for it."""
    with ExitStack() as stack:

        def start(text: str = "", *args: str, target: str = "script.py", **options: Any) -> Node:
            if text:
                (tmp_path / target).write_text(text)
            return stack.enter_context(Node(tmp_path, target, *args, **options))

        yield start
