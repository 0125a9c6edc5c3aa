"""What does `--mesh pp=2,dp=2,tp=1` say, and does it fit the number of ranks?"""

from __future__ import annotations

from math import prod

from evertrain.model.errors import UsageError


def check(text: str, world_size: int) -> str:
    """The mesh as it was given, or an error in one line."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not (equals and name.isidentifier() and size.isdigit() and int(size) > 0):
            raise UsageError(f"--mesh {text}: {part!r} is not NAME=SIZE, as in pp=2,dp=2,tp=1")
        if name in sizes:
            raise UsageError(f"--mesh {text}: {name} is named twice")
        sizes[name] = int(size)
    if prod(sizes.values()) != world_size:
        product = " x ".join(str(size) for size in sizes.values())
        raise UsageError(f"--mesh {text}: {product} = {prod(sizes.values())} ranks, but there are {world_size}")
    return ",".join(f"{name}={size}" for name, size in sizes.items())
