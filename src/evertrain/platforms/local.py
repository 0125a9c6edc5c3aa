"""What brings nodes where nothing does? The user: `Local` for nodes played on one machine, `ByHand` for several."""

from __future__ import annotations


class Local:
    """All nodes are this machine; it has no more of them."""

    problem = ""

    def request(self, nodes: int, because: str) -> str:
        return f"there are no more nodes than the {'one' if nodes == 1 else 'ones'} that `run` began with ({because})"

    def close(self) -> None:
        pass


class ByHand:
    """Somebody has to run the command."""

    problem = ""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def request(self, nodes: int, because: str) -> str:
        others = "another machine" if nodes == 1 else f"{nodes} other machines"
        return f"run the same command on {others}: it joins at {self._endpoint} ({because})"

    def close(self) -> None:
        pass
