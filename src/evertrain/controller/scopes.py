"""Who may do what? Whoever has the job's token may do everything but change its code; that takes a token of its own.

Agents and everybody who looks at a job have the one; code is what runs with the user's rights on every node, so the
other one stays with who started the job. What is refused is written down.
"""

from __future__ import annotations

import hmac
import logging
from pathlib import Path
from typing import Literal

from aiohttp import web

from evertrain.controller.conductor import Conductor
from evertrain.model.change_records import Audited
from evertrain.model.spec import ControllerSpec

_log = logging.getLogger(__name__)

AUTHOR = "X-Evertrain-Author"
_MOST_AUTHOR, _MOST_DETAIL = 100, 300

CODE_TOKEN = web.AppKey("code_token", str)
"""May do everything; empty: nobody may change the code."""

Act = Literal["upload", "update", "rollback", "restart"]


def code_token(spec: ControllerSpec) -> str:
    """The token that may change the code; empty where there is none, and then nobody may."""
    if not spec.code_token_file:
        return ""
    try:
        return Path(spec.code_token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        _log.error("nobody can change the code: %s: %s", spec.code_token_file, error)
        return ""


def admits(request: web.Request, token: str) -> bool:
    """Whether it comes with one of the tokens."""
    # both are always looked at, each in the same time wherever they differ
    is_ordinary, is_for_code = _has(request, token), may_change_code(request)
    return is_ordinary or is_for_code


def may_change_code(request: web.Request) -> bool:
    return _has(request, request.app[CODE_TOKEN])


def _has(request: web.Request, token: str) -> bool:
    given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode()) and bool(token)


def author(request: web.Request) -> str:
    """As they call themselves; whoever has a token can say anything, so it is shortened to what can be printed."""
    return printable(request.headers.get(AUTHOR, ""), _MOST_AUTHOR)


def printable(text: str, most: int) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text.strip()[:most])


def audit(
    conductor: Conductor,
    request: web.Request,
    act: Act,
    outcome: Literal["done", "refused"],
    detail: str,
    by: str | None = None,
) -> None:
    """Write down who has tried what; `by`: who, where the request says so itself."""
    conductor.audit(
        Audited(
            time=0.0,  # the conductor knows
            act=act,
            author=author(request) if by is None else printable(by, _MOST_AUTHOR),
            address=request.remote or "",
            outcome=outcome,
            detail=printable(detail, _MOST_DETAIL),
        )
    )


def refused(
    conductor: Conductor, request: web.Request, spec: ControllerSpec, act: Act, by: str | None = None
) -> web.Response:
    """What a request to change the code is told that comes with the ordinary token."""
    audit(conductor, request, act, "refused", "with a token that may not change the code", by)
    # where it lies is no secret, and what a user needs next
    where = f"{spec.run_dir}/code-token"
    line = f"this token may not change the code; the one that may lies in {where}, where the job was started"
    return web.json_response({"error": line, "token_file": where}, status=403)
