"""Serves the page to plan in: a form, and the rows of a plan as they become known. On this machine only.

The server listens on the loopback address, and answers requests that were sent to that address by name or number: a
page of somebody else's cannot reach it under a name of its own. It runs one plan at a time; a new one ends the last.
`MODULE:FACTORY` is refused, because that would run code for whoever asks.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import logging
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from lowtide.errors import InvalidValueError, LowtideError
from lowtide.hardware.accelerators import load_table
from lowtide.html import KINDS as COLOURS
from lowtide.html import TEMPLATES, render
from lowtide.planning.page import code_for
from lowtide.planning.planner import plan
from lowtide.targets.job import ENGINES, OPTIMIZERS, TRAINERS
from lowtide.targets.target import is_factory, known_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lowtide.planning.result import Candidate, Plan

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_TEMPLATE = TEMPLATES / "planner.html"
_LONGEST_QUESTION = 10_000
"""Bytes of the largest request that is read."""

QUESTIONS = {
    "model": str,
    "tokens": str,
    "device": str,
    "budget": str,
    "headroom": str,
    "ranks": int,
    "engine": str,
    "lora": int,
    "base": str,
    "optimizer": str,
    "trainer": str,
    "batch_size": int,
}
"""What the page may ask: settings of `lowtide.plan`, with their types."""


class _Ended(BaseException):
    """Raised inside a plan that nobody waits for any more."""


def row_of(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate as the page shows it, which judges it again as its slider moves."""
    return {
        "policy": candidate.policy,
        "code": code_for(candidate),
        "device_bytes": candidate.device_bytes,
        "host_bytes": candidate.estimate.host_bytes,
        "seconds": candidate.estimate.seconds,
        "limit": candidate.limit,
    }


def answer_of(found: Plan) -> dict[str, Any]:
    """Return a plan as the page shows it."""
    return {
        "title": f"{found.summary.name}, {found.job.training}, {found.job.size}, {found.where}",
        "budget": found.budget,
        "host_budget": found.host_budget,
        "headroom": found.headroom,
        "rows": [row_of(candidate) for candidate in found.candidates],
        "timeline": found.timeline,
        "shown": found.shown.policy if found.shown else None,
        "recommended": [{"why": why, "policy": candidate.policy} for why, candidate in found.recommended],
        "problem": found.why_nothing_fits,
        "ways_out": [str(way) for way in found.ways_out],
        "notes": found.notes,
    }


LENGTHS = tuple(2**power for power in range(10, 21))
"""The lengths of the page's slider."""


def planner_page(plans: list[dict[str, Any]] | None = None, **chosen: Any) -> str:
    """Render the page. With `plans`, answers that were made before, it needs no server, and offers these alone.

    Its slider has the usual lengths, or those of the plans, and the chosen one.
    """
    lengths = {plan["tokens"] for plan in plans} if plans else {*LENGTHS, *filter(None, [chosen.get("tokens")])}
    return render(
        _TEMPLATE,
        plans=plans,
        lengths=sorted(lengths),
        chosen={name: value for name, value in chosen.items() if value is not None},
        models=list(known_models()),
        devices=[{"name": row.name, "memory": row.memory} for row in load_table()],
        engines=ENGINES,
        optimizers=OPTIMIZERS,
        trainers=TRAINERS,
        kinds=COLOURS,
    )


class Run:
    """One plan in a thread, with what is known of it so far."""

    def __init__(self, asked: dict[str, Any], make_plan: Callable[..., Plan] = plan) -> None:
        self._lock = threading.Lock()
        self._state: dict[str, Any] = {"what": "building the model", "done": 0, "total": 1, "finished": False}
        self._rows: list[dict[str, Any]] = []
        self._ended = threading.Event()
        self._asked = asked
        self._make_plan = make_plan
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let the plan end at its next step."""
        self._ended.set()

    def state(self, after: int) -> dict[str, Any]:
        """Return how far the plan is, and its rows from number `after` on."""
        with self._lock:
            return {**self._state, "rows": self._rows[after:]}

    def _run(self) -> None:
        try:
            found = self._make_plan(suggest=True, progress=self._progress, on_candidate=self._add, **self._asked)
            self._update(finished=True, plan=answer_of(found))
        except LowtideError as error:
            self._update(finished=True, error=str(error))
        except _Ended:
            self._update(finished=True, error="ended: a new plan was asked for")
        except Exception as error:  # (whatever it was, the page must not wait for it)
            logger.debug("the plan of the page failed", exc_info=error)
            self._update(
                finished=True, error=f"the plan failed: {type(error).__name__}: {error} (lowtide -v shows where)"
            )

    def _progress(self, what: str, done: int, total: int) -> None:
        if self._ended.is_set():
            raise _Ended
        self._update(what=what, done=done, total=total)

    def _add(self, candidate: Candidate) -> None:
        with self._lock:
            self._rows.append(row_of(candidate))

    def _update(self, **news: Any) -> None:
        with self._lock:
            self._state |= news


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PlannerServer

    def do_GET(self) -> None:
        if not self._is_from_here():
            return
        url = urlsplit(self.path)
        if url.path == "/":
            self._send(self.server.page.encode(), "text/html; charset=utf-8")
        elif url.path == "/plan" and self.server.run is not None:
            after = parse_qs(url.query).get("after", ["0"])[0]
            self._send_json(self.server.run.state(int(after) if after.isdigit() else 0))
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        if not self._is_from_here():
            return
        if self.path != "/plan" or self.headers.get("Content-Type") != "application/json":
            self.send_error(400)  # a form of another page cannot send JSON
            return
        try:
            length = min(int(self.headers.get("Content-Length", 0)), _LONGEST_QUESTION)
            self.server.ask(read_question(json.loads(self.rfile.read(length))))
        except (ValueError, InvalidValueError) as error:
            self._send_json({"error": str(error)}, 400)
            return
        self._send_json({"asked": True})

    def _is_from_here(self) -> bool:
        name = self.headers.get("Host", "").rpartition(":")[0]
        if name not in (_HOST, "localhost"):
            self.send_error(403)
            return False
        return True

    def _send_json(self, data: dict[str, Any], status: int = 200) -> None:
        self._send(json.dumps(data).encode(), "application/json", status)

    def _send(self, content: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the page was closed
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing: the terminal shows where the page is."""


class PlannerServer(http.server.ThreadingHTTPServer):
    """The server of the page; `make_plan` answers its questions."""

    daemon_threads = True

    def __init__(self, port: int = 0, make_plan: Callable[..., Plan] = plan, **chosen: Any) -> None:
        super().__init__((_HOST, port), _Handler)
        self.page = planner_page(**chosen)
        self.run: Run | None = None
        self._make_plan = make_plan

    @property
    def address(self) -> str:
        return f"http://{_HOST}:{self.server_port}/"

    def ask(self, asked: dict[str, Any]) -> None:
        """Begin a plan; the last one ends."""
        if self.run is not None:
            self.run.end()
        self.run = Run(asked, self._make_plan)


def read_question(data: Any) -> dict[str, Any]:
    """Return the settings of a question, without those that were left empty. Refuse all that the page does not ask."""
    if not isinstance(data, dict):
        raise InvalidValueError("a question is an object of settings")
    asked: dict[str, Any] = {}
    for name, value in data.items():
        if name not in QUESTIONS:
            raise InvalidValueError(f"{name!r} is not a setting of this page")
        if value in (None, ""):
            continue
        try:
            asked[name] = QUESTIONS[name](value)
        except (TypeError, ValueError) as error:
            raise InvalidValueError(f"{name}: cannot read {value!r}") from error
    if not asked.get("model"):
        raise InvalidValueError("name a model")
    if is_factory(asked["model"]):
        raise InvalidValueError(f"{asked['model']} is code of yours: plan it on the command line")
    return asked


@contextlib.contextmanager
def serving(server: PlannerServer) -> Iterator[str]:
    """Serve in a thread inside, and end with the last plan."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.address
    finally:
        if server.run is not None:
            server.run.end()
        server.shutdown()
        server.server_close()
